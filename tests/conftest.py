from __future__ import annotations

import collections
import contextlib
import functools
import os
import random
import shutil
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest

# OpenMP's threads spin at barriers, in their own time and that of others: two tests at once on two cores took 54 s in place of 4. Read when torch is
# imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Containers often set it. Every server would then compile the sources of SGLang and torch again, for a minute.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

import emulated
import torch

from sglang_pat.demo import tiny_model
from sglang_pat.demo.server import Server

T = TypeVar("T")

os.environ.setdefault("HF_HUB_OFFLINE", "1")

UNPINNED = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "unpinned"), os.environ.get("PYTHONPATH", "")])}
"""Environment of servers that would pin memory on a CPU (tests/unpinned)."""


UNLOADABLE = "sglang.srt.layers.attention.dual_chunk_flashattention_backend"
"""The kits import it for a method of attention that is not tested here; it needs CUDA's libraries."""


@contextlib.contextmanager
def importing_kits() -> Iterator[None]:
    """Lets SGLang's test kits be imported where no GPU shall be seen: `sglang.test.test_utils` reads the first digit of this, and UNLOADABLE is left out."""
    left_out = not torch.cuda.is_available() and UNLOADABLE not in sys.modules
    if left_out:
        sys.modules[UNLOADABLE] = mock.MagicMock()
    with mock.patch.dict(os.environ):
        if not os.environ.get("CUDA_VISIBLE_DEVICES", "0"):
            del os.environ["CUDA_VISIBLE_DEVICES"]
        yield
    if left_out:
        del sys.modules[UNLOADABLE]
    from sglang_pat.backend.start import layers

    if not hasattr(layers.count, "__wrapped__"):
        layers.count = _by_the_pool(layers.count)


def _by_the_pool(count: Callable[[Any], collections.Counter[Any]]) -> Callable[[Any], collections.Counter[Any]]:
    """`layers.count` for the kits, whose runners have no model, or an empty one: layers of their pool's shape, with and without the runner's window."""
    from sglang.srt.runtime_context import get_parallel

    from sglang_pat import compat
    from sglang_pat.backend.start.layers import SpecReader, window
    from sglang_pat.packing import AttentionSpec

    @functools.wraps(count)
    def counted(runner: Any) -> collections.Counter[Any]:
        if compat.model.attention_layers(runner) or compat.pool.layers_with_kv(runner.token_to_kv_pool) is not None:
            return count(runner)
        reader, (pool, *_) = SpecReader(runner), compat.pool.kv_pools(runner.token_to_kv_pool)
        heads = runner.model_config.num_attention_heads // get_parallel().attn_tp_size
        latent = compat.pool.latent_dims(pool)
        shape = (heads, 1, *latent) if latent else (heads, pool.head_num, pool.head_dim, pool.v_head_dim)
        seen = (0, window(runner.sliding_window_size, reader.context))
        specs = (AttentionSpec(*shape, reader.form, one, latent=reader.latent) for one in seen)
        return collections.Counter(dict.fromkeys(specs, pool.layer_num))

    return counted


LONGEST = (
    "emulator", "server", "pieces", "cuda_build", "cuda_kernel", "speculation", "batch_replicas", "kits", "page_kernel", "batch", "native",
    "windows", "docs", "jit", "chaos", "fp8_kv", "estimate", "cpu_kernel", "cache_attack", "executors", "low_bit_server", "latent_kernel",
    "low_bit_prefill",
)  # fmt: skip
"""Test files that take long, the longest first, judged by what they compile and start; `make test-all` ends with each file's seconds."""


def pytest_configure(config: pytest.Config) -> None:
    # The processes of pytest-xdist, which have a `workerinput`, inherit this one's environment.
    if not hasattr(config, "workerinput") and emulated.FOLDER not in os.environ:
        folder = tempfile.mkdtemp(prefix="pat-emulated-")
        os.environ[emulated.FOLDER] = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # pytest-xdist hands files out in this order: long ones first, so that its processes end together.
    place = {f"test_{name}": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Seconds per file, where there are several."""
    seconds: collections.Counter[str] = collections.Counter()
    for report in (one for reports in terminalreporter.stats.values() for one in reports):
        if isinstance(report, pytest.TestReport):
            seconds[Path(report.fspath).stem] += report.duration
    if len(seconds) > 1:
        terminalreporter.section("seconds per file")
        terminalreporter.line(", ".join(f"{name} {value:.0f}" for name, value in seconds.most_common()))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Qwen3-shaped model."""
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny-qwen3")


@pytest.fixture(scope="session")
def gpu_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a head dimension that the CUDA kernels have."""
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny-qwen3-64", head_dim=64)


def selected(request: pytest.FixtureRequest, parameter: str) -> list[str]:
    """Values of a parameter among the tests of the module that will run."""
    items = [item for item in request.session.items if item.path == request.node.path and hasattr(item, "callspec")]
    return [
        item.callspec.params[parameter]
        for item in items
        if parameter in item.callspec.params and not item.get_closest_marker("skip")
    ]


def assert_sound(server: Server) -> dict[str, Any]:
    """No failure of planning, no disagreement with the cache, nothing left behind; returns the counters."""
    deadline = time.monotonic() + 30
    while (counters := server.counters())["bound"] and time.monotonic() < deadline:
        time.sleep(0.5)
    assert (counters["fallbacks"], counters["faults"], counters["bound"]) == (0, 0, 0), server.tail()
    assert counters["unpacked_because"] == ""
    return counters


NGRAMS = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "6"]
"""Flags of speculative decoding without a draft model."""


def drafts(algorithm: str, steps: int, topk: int, tokens: int) -> list[str]:
    """Flags of speculative decoding with one: so many steps, branches, and tokens that are verified."""
    return [
        "--speculative-algorithm", algorithm, "--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(topk),
        "--speculative-num-draft-tokens", str(tokens),
    ]  # fmt: skip


TOKENS = 24
"""Of an answer, where a test does not say."""


def generate(server: Server, prompt: str, tokens: int = TOKENS, **parameters: Any) -> list[int]:
    """Greedy output ids."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    return server.post("/generate", {"text": prompt, "sampling_params": sampling, **parameters})["output_ids"]


def generate_all(server: Server, prompts: list[str], concurrency: int = 24, tokens: int = TOKENS) -> list[list[int]]:
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda prompt: generate(server, prompt, tokens), prompts))


def assert_siblings_share(server: Server, replicas: int = 1) -> None:
    """Of six requests that arrive together one computes their prefix, on each replica, and their answers are those of one after the other."""
    numbers = random.Random(server.url)
    prefix = numbers.choices(range(40, 120), k=500)
    asked = [prefix + numbers.choices(range(40, 120), k=20) for _ in range(6)]
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    before = server.counters()["deferred"]
    together = server.post("/generate", {"input_ids": asked, "sampling_params": sampling})
    assert server.counters()["deferred"] > before
    found = [one["meta_info"] for one in together]
    assert sum(one["prompt_tokens"] - one["cached_tokens"] for one in found) <= replicas * 500 + 6 * 20
    alone = [server.post("/generate", {"input_ids": prompt, "sampling_params": sampling}) for prompt in asked]
    assert [one["output_ids"] for one in together] == [one["output_ids"] for one in alone]


def wait_for_router(url: str, log: Path) -> None:
    """Block until a router has found its servers; fail with the end of its log after 5 minutes."""
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{url}/readiness", timeout=10).close()
            return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"the router is not ready: {log.read_text()[-3000:]}")


def flush(server: Server) -> None:
    """Empty the cache, which SGLang refuses while it still has a request that was answered just now."""
    for _ in range(100):
        with contextlib.suppress(urllib.error.HTTPError):
            server.post("/flush_cache")
            return
        time.sleep(0.1)
    raise AssertionError("the cache was not flushed in 10 s")


def amid_aborts(server: Server, send: Callable[[int, str], Any], answer: Callable[[], T]) -> T:
    """What `answer` gives while 24 requests, sent by `send` with a number and a request id, are aborted beside it."""

    def disturb(number: int) -> None:
        rid = f"disturbance-{number}"
        with ThreadPoolExecutor(1) as pool:
            sent = pool.submit(send, number, rid)
            time.sleep(random.Random(number).uniform(0.05, 1.0))
            server.post("/abort_request", {"rid": rid})
            sent.result()

    with ThreadPoolExecutor(8) as pool:
        disturbances = [pool.submit(disturb, number) for number in range(24)]
        result = answer()
        for disturbance in disturbances:
            disturbance.result()
    return result
