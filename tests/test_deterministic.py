"""`--enable-deterministic-inference`: a request's answer has the same bits alone, in any batch, and whatever of it was computed before.

That kernels do so is shown in test_pieces.py; here is what a backend and a server make of it.
"""

from __future__ import annotations

import random
import unittest
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import assert_sound, drafts, flush, importing_kits
from gpu_servers import CHECKED, serving
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_pat import compat, plugin
from sglang_pat.backend import executors
from sglang_pat.backend.extends.planned import rounds
from sglang_pat.backend.start import support
from sglang_pat.backend.tensors import lengths
from sglang_pat.demo import workload
from sglang_pat.demo.server import Server
from sglang_pat.radix_bridge import hooks

ON_GPU = torch.cuda.is_available()

with importing_kits():
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.test.kits.attention_unittest.attention_methods import dense_attention as dense

plugin.register()

DEVICE: dict[str, Any] = {"device": "cuda" if ON_GPU else "cpu", "head_dim": 64 if ON_GPU else dense.DEFAULT_HEAD_DIM}
BASE = next(case for case in dense.make_dense_cases("pat") if case.name == "mha_decode_page_boundary")
CACHED, ADDED = (300, 40, 0, 290, 129), (70, 130, 65, 1, 1)
"""Tokens of each request. Pieces have 64, so most requests have several."""


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 90)), max_size=6),
    st.sampled_from([0, 16, 64]),
    st.integers(25, 200),
)
@settings(max_examples=200, deadline=None)
def test_rounds_have_every_new_token_once_and_room_for_its_parts(
    tokens: list[tuple[int, int]], piece: int, slots: int
) -> None:
    cached, added = [pair[0] for pair in tokens], [pair[1] for pair in tokens]
    seen = lengths(cached, added).tolist()
    found = rounds(cached, added, piece, slots)
    assert [token for one in found for token in range(one.tokens.start, one.tokens.stop)] == list(range(len(seen)))
    for one in found:
        assert lengths(one.cached, one.added).tolist() == seen[one.tokens]
        assert not piece or sum(-(-length // piece) for length in seen[one.tokens]) <= slots
    assert len(found) == 1 or piece


@pytest.fixture
def backend_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends that are made from now on are for deterministic inference, in short pieces."""
    monkeypatch.setattr(compat.arguments, "is_deterministic", lambda server_args: True)
    monkeypatch.setattr(executors, "LEAST_PIECE", 64)


def mixed_batch(heads: int = 4, kv_heads: int = 2) -> Any:
    """The last two requests decode, others are extended."""
    case = replace(
        BASE, name="mixed", num_heads=heads, num_kv_heads=kv_heads, page_size=1, prefix_lens=CACHED, extend_lens=ADDED, forward_mode=ForwardMode.MIXED,
    )  # fmt: skip
    fixture = dense.build_dense_attention_fixture(unittest.TestCase(), case, max_context_len=512, **DEVICE)
    fixture.forward_batch.rids = hooks.Rids(["a"] * len(CACHED), torch.arange(len(CACHED)), mixed=True)
    return fixture


@pytest.mark.usefixtures("backend_in_pieces")
def test_an_extend_in_rounds_has_the_bits_of_decode_steps() -> None:
    with torch.no_grad():
        fixture = mixed_batch()
        prefill = fixture.backend.prefill
        out = dense.run_dense_fixture_eager(fixture)
        torch.testing.assert_close(
            out, dense.expected_dense_fixture_output(fixture), atol=dense.DENSE_ATOL, rtol=dense.DENSE_RTOL
        )
        assert prefill._decoding is not None and len(prefill.extend._rounds) == 1
        # The same tokens by other steps: in several rounds; and those that decoded as new tokens of an extend.
        most = max(-(-length // 64) for length in map(sum, zip(CACHED, ADDED, strict=True)))
        for group in fixture.backend.groups.single:
            group.executor.max_slots = min(group.executor.max_slots, 20 * most)
        assert torch.equal(dense.run_dense_fixture_eager(fixture), out)
        assert len(prefill.extend._rounds) > 5
        prefill.begin = lambda batch, check: _begin_whole(prefill, batch)
        assert torch.equal(dense.run_dense_fixture_eager(fixture), out)
        assert prefill._decoding is None


def _begin_whole(prefill: Any, batch: Any) -> None:
    prefill.forget()
    prefill._planned = prefill.extend.begin(batch, None)


@pytest.mark.usefixtures("backend_in_pieces")
def test_a_prefill_that_is_not_cut_alike_is_found_out() -> None:
    """Pieces of another length are what any other attention is."""
    with torch.no_grad():
        fixture = mixed_batch()
        out = dense.run_dense_fixture_eager(fixture)
        executors.LEAST_PIECE = 192
        assert not torch.equal(dense.run_dense_fixture_eager(mixed_batch()), out)


def test_latents_are_refused() -> None:
    runner: Any = SimpleNamespace(use_mla_backend=True)
    with pytest.raises(support.UnsupportedError, match="for MLA models like DeepSeek"):
        support._check_deterministic(runner, "DeepSeek")


# Servers on a GPU.

FLAGS = [
    "--dtype", "bfloat16", "--mem-fraction-static", "0.2", "--max-running-requests", "48", "--enable-deterministic-inference",
]  # fmt: skip
SERVERS: dict[str, tuple[str, list[str], dict[str, str]]] = {
    "plain": ("pat", [], {}),
    "mixed": ("pat", ["--enable-mixed-chunk", "--chunked-prefill-size", "512", "--page-size", "16"], CHECKED),
    "fp8": ("pat", ["--kv-cache-dtype", "fp8_e4m3"], {}),
    "drafts": ("pat", drafts("STANDALONE", 3, 1, 4), {}),
    "two GPUs": ("pat", ["--tp-size", "2"], {}),
    "small pool": (
        "pat", ["--max-total-tokens", "24000", "--schedule-conservativeness", "0.1"],
        {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "40"},
    ),
}  # fmt: skip
"""Backend, flags and environment of each."""


@pytest.fixture(scope="module", params=SERVERS)
def server(
    request: pytest.FixtureRequest, gpu_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    name = request.param
    if name == "two GPUs" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    flags = [*FLAGS, *(["--speculative-draft-model-path", str(gpu_model)] if name == "drafts" else [])]
    with serving(gpu_model, {name: SERVERS[name]}, flags, tmp_path_factory.mktemp("logs")) as started:
        yield started[name]


def ask(server: Server, prompt: str, seed: int | None) -> tuple[list[int], list[float]]:
    """Tokens of an answer, greedy or sampled with a seed, and their log-probabilities."""
    parameters: dict[str, Any] = {"max_new_tokens": 48, "ignore_eos": True, "temperature": 0}
    if seed is not None:
        parameters |= {"temperature": 0.8, "sampling_seed": seed}
    found = server.post("/generate", {"text": prompt, "sampling_params": parameters, "return_logprob": True})
    return found["output_ids"], [logprob for logprob, *_ in found["meta_info"]["output_token_logprobs"]]


@pytest.mark.gpu
@pytest.mark.server
@pytest.mark.parametrize("seed", [None, 7])
def test_answers_do_not_depend_on_the_batch(server: Server, seed: int | None) -> None:
    """Prompts of up to 3,600 tokens, so that some have four pieces; a third share one, a third two, and the rest nothing."""
    systems = [workload.prose(f"system {i}", 900 + 1_300 * i) for i in range(2)]
    prompts = [(systems[i % 3] if i % 3 < 2 else "") + workload.prose(f"question {i}", 60 + 45 * i) for i in range(24)]
    alone = [ask(server, prompt, seed) for prompt in prompts]
    generator = random.Random(0)
    for size in (2, 5, 11, 24, 24):
        if generator.random() < 0.5:
            flush(server)
        chosen = generator.sample(range(len(prompts)), size)
        with ThreadPoolExecutor(size) as pool:
            found = list(pool.map(lambda i: ask(server, prompts[i], seed), chosen))
        for i, answer in zip(chosen, found, strict=True):
            assert answer[0] == alone[i][0], f"prompt {i} in a batch of {size}"
            # SGLang 0.5.17 loses a step's log-probabilities of some requests that it retracted.
            assert answer[1] == alone[i][1] or len(answer[1]) < len(answer[0]), f"prompt {i} in a batch of {size}"
    counters = assert_sound(server)
    assert counters["kv_bytes"] < counters["kv_bytes_unpacked"], "nothing was packed"


@pytest.mark.gpu
@pytest.mark.server
@pytest.mark.parametrize("mode", ["single", "prefix", "radix_cache", "p_vs_d"])
def test_sglangs_own(
    server: Server, mode: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.node.callspec.params["server"] == "small pool" and compat.release() == "0.5.17":
        pytest.skip("SGLang 0.5.17 loses log-probabilities of requests that it retracts")
    with importing_kits():
        from sglang.test import test_deterministic as own
    # It takes tokens of larger vocabularies.
    randint = random.randint
    monkeypatch.setattr(own.random, "randint", lambda low, high: randint(low, min(high, 511)))
    host, port = server.url.removeprefix("http://").split(":")
    # Log-probabilities of a prompt's tokens are those of a temperature of 1 or 0.
    arguments = own.BenchArgs(host=host, port=int(port), test_mode=mode, n_trials=10)
    if mode == "prefix":
        arguments.return_logprob, arguments.temperature = True, 0.5
    found = own.test_deterministic(arguments)
    assert found and set(np.array(found).tolist()) == {1}
