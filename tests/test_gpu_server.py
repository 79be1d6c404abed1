"""Real servers on a GPU beside SGLang's Triton backend on the same weights, in float16.

Greedy answers must be the same up to near-ties (near_ties.py).
"""

from __future__ import annotations

import random
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from conftest import amid_aborts, assert_sound, flush
from gpu_servers import CHECKED, COMMON, POOL, WITHOUT_PREFILL_GRAPHS, cached, serving
from near_ties import Answer, assert_agree, generate, generate_all

from sglang_pat import compat
from sglang_pat.demo import workload
from sglang_pat.demo.server import Server

pytestmark = [pytest.mark.gpu, pytest.mark.server]

SERVERS: dict[str, tuple[str, list[str], dict[str, str]]] = {
    "reference": ("triton", [POOL, "60000"], {}),
    "graphs": ("pat", [POOL, "60000"], {}),
    "no graphs": (
        "triton",
        ["--decode-attention-backend", "pat", POOL, "60000", "--disable-cuda-graph", "--disable-overlap-schedule",
         "--enable-mixed-chunk", "--chunked-prefill-size", "64", "--page-size", "16"],
        CHECKED,
    ),
    "small pool": (
        "pat",
        [POOL, "3000", "--schedule-conservativeness", "0.1", "--prefill-attention-backend", "triton"],
        {**CHECKED, "SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "40"},
    ),
}  # fmt: skip
"""Backend, flags and environment of each."""


@pytest.fixture(scope="module")
def servers(gpu_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    logs = tmp_path_factory.mktemp("logs")
    with serving(gpu_model, SERVERS, WITHOUT_PREFILL_GRAPHS, logs) as started:
        yield started


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return workload.nested_prompts(2, 3, 12, unrelated=12)


@pytest.fixture(scope="module")
def expected(servers: dict[str, Server], prompts: list[str]) -> list[Answer]:
    return generate_all(servers["reference"], prompts)


@pytest.mark.parametrize("name", ["graphs", "no graphs"])
def test_answers_are_those_of_triton(
    servers: dict[str, Server], prompts: list[str], expected: list[Answer], name: str
) -> None:
    assert_agree(generate_all(servers[name], prompts), expected)
    counters = assert_sound(servers[name])
    assert counters["kv_bytes"] < 0.7 * counters["kv_bytes_unpacked"]


def test_every_batch_size_has_its_graph(servers: dict[str, Server], prompts: list[str], expected: list[Answer]) -> None:
    """Sizes between two captured ones are padded."""
    for size in (1, 2, 3, 5, 11, 23, 41):
        assert_agree(generate_all(servers["graphs"], prompts[:size], size), expected[:size])
    assert_sound(servers["graphs"])


def test_joins_aborts_and_flushes(servers: dict[str, Server], prompts: list[str], expected: list[Answer]) -> None:
    server = servers["graphs"]

    answers = amid_aborts(
        server,
        lambda i, rid: generate(server, prompts[i % len(prompts)] + "!", rid, 400),
        lambda: generate_all(server, prompts, concurrency=16),
    )
    assert_agree(answers, expected)
    assert_sound(server)
    assert "flushed" in str(server.post("/flush_cache")).lower()
    assert_agree(generate_all(server, prompts), expected)


def test_evictions_and_retractions(servers: dict[str, Server], prompts: list[str], expected: list[Answer]) -> None:
    order = list(range(len(prompts))) * 3
    random.Random(0).shuffle(order)
    server = servers["small pool"]
    assert_agree(generate_all(server, [prompts[i] for i in order], 32), [expected[i] for i in order])
    assert_sound(server)
    assert re.search(r"#retracted_reqs: [1-9]", server.log.read_text())


FEATURES: dict[str, list[str]] = {
    "prefill graphs": [POOL, "60000"],
    "memory saver": [POOL, "60000", "--disable-prefill-cuda-graph", "--enable-memory-saver"],
}
"""What only a GPU has (backend/start/features.py)."""


@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str, gpu_model: Path, prompts: list[str], expected: list[Answer], tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Server(gpu_model, "pat", log, [*COMMON, *FEATURES[name]], CHECKED, on_cpu=False) as server:
        server.wait()
        for _ in range(2):
            assert_agree(generate_all(server, prompts, 16), expected)
            if name == "memory saver":
                for path in ("/release_memory_occupation", "/resume_memory_occupation"):
                    server.post(path, {"tags": ["kv_cache"]})
        counters = assert_sound(server)
    assert counters["kv_bytes"] < 0.8 * counters["kv_bytes_unpacked"]
    if name == "prefill graphs":
        assert re.search(r"Prefill batch.*cuda graph: True", log.read_text())


UNIFIED = {"SGLANG_ENABLE_UNIFIED_RADIX_TREE": "1"}
"""On 0.5.17 plain models have another cache on the host."""

TIERS: dict[str, tuple[list[str], dict[str, str]]] = {
    "write_through": (["--hicache-write-policy", "write_through"], {}),
    "write_through_selective": (
        ["--hicache-write-policy", "write_through_selective", "--page-size", "64", "--hicache-io-backend", "direct"],
        {**UNIFIED, "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"},
    ),
    "write_back": (["--hicache-write-policy", "write_back", "--page-size", "64"], UNIFIED),
    "files": (
        ["--page-size", "64", "--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete"],
        UNIFIED,
    ),
}  # fmt: skip
"""Flags and environment of servers whose KV goes to the host, and from there to files."""


def test_a_cache_with_tiers(gpu_model: Path, prompts: list[str], expected: list[Answer], tmp_path: Path) -> None:
    """With each write policy, pages of 1 and 64, and both cores of 0.5.23: what was evicted comes back while siblings decode, and all are packed."""
    flags = [*WITHOUT_PREFILL_GRAPHS, POOL, "3000", "--enable-hierarchical-cache", "--hicache-ratio", "4"]
    with ExitStack() as stack:
        servers = {}
        for name, (more, environment) in TIERS.items():
            files = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path / name)}
            server = Server(
                gpu_model, "pat", tmp_path / f"{name}.log", [*flags, *more], {**CHECKED, **environment, **files}, on_cpu=False
            )  # fmt: skip
            servers[name] = stack.enter_context(server)
        for server in servers.values():
            server.wait()
        for name, server in servers.items():
            for _ in range(2):
                assert_agree(generate_all(server, prompts, 16), expected)
            assert cached(server, prompts)["host"] > 0, name
            if name == "files":
                flush(server)
                assert cached(server, prompts)["storage"] > 0
                assert_agree(generate_all(server, prompts, 16), expected)
            counters = assert_sound(server)
            assert 0 < counters["kv_bytes"] < 0.8 * counters["kv_bytes_unpacked"], name
            stays_plain = compat.release() == "0.5.17" and UNIFIED.keys().isdisjoint(TIERS[name][1])
            assert f"impl={'HiRadixCache' if stays_plain else 'UnifiedRadixCache'}" in server.log.read_text(), name


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "flags",
    [["--tp-size", "2"], ["--pp-size", "2"], ["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"]],
    ids=" ".join,
)
def test_parallelism(
    flags: list[str], gpu_model: Path, prompts: list[str], expected: list[Answer], tmp_path: Path
) -> None:
    with Server(gpu_model, "pat", tmp_path / "log", [*COMMON, POOL, "60000", *flags], CHECKED, on_cpu=False) as server:
        server.wait()
        assert_agree(generate_all(server, prompts), expected)
        counters = assert_sound(server)
    assert counters["kv_bytes"] < 0.9 * counters["kv_bytes_unpacked"]


MIXED: dict[str, list[str]] = {
    "small chunks": ["--chunked-prefill-size", "64", "--disable-prefill-cuda-graph"],
    "prefill graphs": ["--chunked-prefill-size", "512"],
    "no overlap": ["--chunked-prefill-size", "128", "--disable-prefill-cuda-graph", "--disable-overlap-schedule", "--page-size", "16"],
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_mixed_chunks(name: str, gpu_model: Path, prompts: list[str], expected: list[Answer], tmp_path: Path) -> None:
    """Their decoding requests are packed, and the others prefilled, in graphs and in none."""
    log = tmp_path / "log"
    flags = [*COMMON, POOL, "60000", "--enable-mixed-chunk", *MIXED[name]]
    with Server(gpu_model, "pat", log, flags, CHECKED, on_cpu=False) as server:
        server.wait()
        for size in (5, 48):
            assert_agree(generate_all(server, prompts, size, logprobs=False), expected)
        counters = assert_sound(server)
    assert counters["mixed_steps"] > 5
    assert counters["kv_bytes"] < 0.8 * counters["kv_bytes_unpacked"]


def test_short_turns_on_one_document_are_prefilled_together(servers: dict[str, Server]) -> None:
    """They come at once, and go into one extend; a second time, other turns."""
    document = workload.prose("document", 2000)
    sampling = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
    for again in range(2):
        turns = [document + workload.prose(f"turn {again} {i}", 3 + i) for i in range(12)]
        expected = []
        for name in ("reference", "graphs"):
            generate(servers[name], document)
            if name == "reference":
                expected = generate_all(servers[name], turns, 1)
                continue
            results = servers[name].post("/generate", {
                "text": turns, "return_logprob": True, "top_logprobs_num": 2, "sampling_params": sampling,
            })  # fmt: skip
            answers = [
                Answer(result["output_ids"], [[(p, token) for p, token, _ in step] for step in result["meta_info"]["output_top_logprobs"]])
                for result in results
            ]  # fmt: skip
            assert_agree(answers, expected, least=0.04)
    assert assert_sound(servers["graphs"])["extends_shared"] > 0


def test_memory_is_reported_at_start(servers: dict[str, Server]) -> None:
    held = re.search(r"sglang-pat: .*?(\d+) MiB", servers["graphs"].log.read_text())
    assert held is not None and 0 < int(held[1]) <= 256


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
def test_no_access_out_of_bounds(gpu_model: Path, prompts: list[str], tmp_path: Path) -> None:
    """Our kernels in a server under memcheck."""
    command = (
        "compute-sanitizer", "--tool", "memcheck", "--target-processes", "all", "--kernel-name", "kns=pat",
        sys.executable, "-m", "sglang.launch_server",
    )  # fmt: skip
    flags = [*WITHOUT_PREFILL_GRAPHS, POOL, "60000", "--disable-cuda-graph", "--prefill-attention-backend", "triton"]
    with Server(gpu_model, "pat", tmp_path / "memcheck.log", flags, command=command, on_cpu=False) as server:
        server.wait()
        generate_all(server, prompts[:40], 20)
        assert_sound(server)
        log = server.log.read_text()
    assert "COMPUTE-SANITIZER" in log
    assert "Invalid __" not in log and "out of bounds" not in log
