"""`--enable-deterministic-inference`: a request's answer has the same bits alone, in any batch, and whatever of it was computed before.

That kernels do so is shown in test_pieces.py; here is what a backend and a server make of it.
"""

from __future__ import annotations

import asyncio
import random
import sys
import unittest
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mellum
import numpy as np
import pytest
import torch
from chaos import Chaos, our_tracebacks
from chaos.client import Outcome
from chaos.judge import Case, Judge, Names
from chaos.oracle import Answer, Oracle
from chaos.questions import Question
from chaos.report import Report
from conftest import assert_sound, drafts, flush, generate_all, importing_kits
from forked import ForkedServer
from gpu_servers import CHECKED, serving
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_pat import compat, plugin
from sglang_pat.backend import executors
from sglang_pat.backend.errors import UnsupportedError
from sglang_pat.backend.extends import planned
from sglang_pat.backend.extends.planned import rounds
from sglang_pat.backend.start import support
from sglang_pat.backend.step import Step
from sglang_pat.backend.tensors import lengths
from sglang_pat.demo import workload
from sglang_pat.demo.server import Server
from sglang_pat.demo.tiny_model import VOCAB
from sglang_pat.radix_bridge import hooks

ON_GPU = torch.cuda.is_available()

with importing_kits():
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.test.kits.attention_unittest.attention_methods import dense_attention as dense

plugin.register()

DEVICE: dict[str, Any] = {"device": "cuda" if ON_GPU else "cpu", "head_dim": 64 if ON_GPU else dense.DEFAULT_HEAD_DIM}
BASE = next(case for case in dense.make_dense_cases("pat") if case.name == "mha_decode_page_boundary")
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "40"}
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


def mixed_batch(heads: int = 4, kv_heads: int = 2, window: int | None = None) -> Any:
    """The last two requests decode, others are extended. Fixtures of a window have the same numbers."""
    case = replace(
        BASE, name="mixed", num_heads=heads, num_kv_heads=kv_heads, page_size=1, prefix_lens=CACHED, extend_lens=ADDED, forward_mode=ForwardMode.MIXED,
        sliding_window_size=window and window - 1,
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
        make_room_for_few(fixture)
        assert torch.equal(dense.run_dense_fixture_eager(fixture), out)
        assert len(prefill.extend._rounds) > 5
        prefill.begin = lambda batch, check: _begin_whole(prefill, batch)
        assert torch.equal(dense.run_dense_fixture_eager(fixture), out)
        assert prefill._decoding is None


@pytest.mark.usefixtures("backend_in_pieces")
@pytest.mark.parametrize("window", [30, 64, 200])
def test_an_extend_has_the_same_bits_where_windows_have_a_pool_of_their_own(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What no window sees is freed there. The pool is laid out as the other one here; what is read of it is looked up."""
    with torch.no_grad():
        out = dense.run_dense_fixture_eager(mixed_batch(window=window))
        fixture = mixed_batch(window=window)
        pools = fixture.runner.req_to_token_pool, fixture.runner.token_to_kv_pool
        mapping = torch.zeros(len(pools[1].get_key_buffer(0)), dtype=torch.int64, device=out.device)
        for row, (cached, added) in enumerate(zip(CACHED, ADDED, strict=True)):
            seen = pools[0].req_to_token[row, max(0, cached + 1 - window) : cached + added].long()
            mapping[seen] = seen
        monkeypatch.setattr(compat.pool, "has_window_pool", lambda pool: True)
        monkeypatch.setattr(compat.pool, "in_window_pool", lambda pool, layer: True)
        monkeypatch.setattr(compat.pool, "window_mapping", lambda pool: mapping)
        fixture.backend.step = Step(fixture.runner, fixture.backend.groups)
        for kept in (pools[1].get_key_buffer(0), pools[1].get_value_buffer(0)):
            kept[mapping == 0] = torch.nan
        monkeypatch.setattr(planned, "WINDOW_TABLE_SLOTS", 1)  # a row at a time
        prefill = fixture.backend.prefill
        assert torch.equal(dense.run_dense_fixture_eager(fixture), out)
        assert prefill._decoding is not None
        make_room_for_few(fixture)
        prefill.begin = lambda batch, check: _begin_whole(prefill, batch)
        assert torch.equal(dense.run_dense_fixture_eager(fixture), out)
        assert prefill._decoding is None and len(prefill.extend._rounds) > 5
        mapping[mapping > 0] = mapping[mapping > 0].roll(1)
        assert not torch.equal(dense.run_dense_fixture_eager(fixture), out), "another request's slots are found out"


def make_room_for_few(fixture: Any) -> None:
    """Parts of 20 tokens: extends then need several rounds."""
    most = max(-(-length // 64) for length in map(sum, zip(CACHED, ADDED, strict=True)))
    for group in fixture.backend.groups.single:
        group.executor.max_slots = min(group.executor.max_slots, 20 * most)


def _begin_whole(prefill: Any, batch: Any) -> None:
    prefill._decoding = None
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
    with pytest.raises(UnsupportedError, match="for MLA models like DeepSeek"):
        support._check_deterministic(runner, "DeepSeek")


PIECES = (sys.executable, str(Path(__file__).parent / "in_pieces.py"))


@pytest.mark.server
@pytest.mark.parametrize("drafted", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_windows_of_a_server_on_a_cpu(drafted: bool, model: Path, tmp_path: Path) -> None:
    """In a pool of their own where SGLang makes one there, in chunks and pages, through retractions and evictions: greedy answers are those of
    `torch_native`. Their bits are not compared, as SGLang's operators depend on the batch."""
    windowed = mellum.write(tmp_path / "model", model, 100)
    prompts = [
        *workload.nested_prompts(2, 2, 3, unrelated=2),
        *(workload.prose(f"short {i}", 350 + 16 * i) for i in range(3)),
    ]
    flags = ["--dtype", "float32", "--max-running-requests", "48", "--max-total-tokens"]
    small = ["3000", "--page-size", "16", "--chunked-prefill-size", "64", "--schedule-conservativeness", "0.1"]
    if drafted:
        small = ["4000", *drafts("STANDALONE", 2, 1, 3), "--speculative-draft-model-path", str(model)]
    with ForkedServer(
        windowed, "torch_native", tmp_path / "reference.log", [*flags, "40000", "--disable-hybrid-swa-memory"]
    ) as server:
        server.wait()
        expected = generate_all(server, prompts, tokens=40)
    assert len(set(map(tuple, expected))) > len(prompts) / 2, "answers that depend on prompts"
    environment = {**CHECKED, **RETRACTING}
    with ForkedServer(windowed, "pat", tmp_path / "log", [*flags, *small], environment, PIECES) as server:
        server.wait()
        # Again with what the cache has kept of it.
        for _ in range(2):
            assert generate_all(server, prompts, tokens=40) == expected
        counters = assert_sound(server)
        assert 0 < counters["kv_bytes"] < counters["kv_bytes_unpacked"]
        log = server.log.read_text()
        assert "requests are cut into pieces of 64 tokens" in log
        assert ("SWAKVPool" in log) == (not compat.arguments.has_one_pool())


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
        RETRACTING,
    ),
    "windows": ("pat", ["--page-size", "16", "--enable-mixed-chunk", "--chunked-prefill-size", "512"], CHECKED),
    "windows, drafts": ("pat", drafts("STANDALONE", 3, 1, 4), {}),
    "windows, small pool": (
        "pat", ["--max-total-tokens", "24000", "--schedule-conservativeness", "0.1", "--chunked-prefill-size", "2048"], RETRACTING,
    ),
}  # fmt: skip
"""Backend, flags and environment of each."""
WINDOWS = {"windows": 100, "windows, drafts": 400, "windows, small pool": 400}
"""Tokens of the window of the models of some, whose KV is in a pool of its own: within a piece, and over two or three."""


@pytest.fixture(scope="module", params=SERVERS)
def server(
    request: pytest.FixtureRequest, gpu_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    name = request.param
    if name == "two GPUs" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    flags = [*FLAGS, *(["--speculative-draft-model-path", str(gpu_model)] if "drafts" in name else [])]
    folder, model = tmp_path_factory.mktemp("server"), gpu_model
    if name in WINDOWS:
        model = mellum.write(folder / "model", gpu_model, WINDOWS[name], head_dim=64)
    with serving(model, {name: SERVERS[name]}, flags, folder) as started:
        assert ("SWAKVPool" in started[name].log.read_text()) == (name in WINDOWS)
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
def test_answers_do_not_depend_on_the_batch(server: Server, seed: int | None, request: pytest.FixtureRequest) -> None:
    """Prompts of up to 3,600 tokens, so that some have four pieces; a third share one, a third two, and the rest nothing."""
    if seed is not None and "drafts" in request.node.callspec.params["server"]:
        pytest.skip("SGLang draws by where a verify step begins, which drafts decide (docs/rollouts.md)")
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
            lost = compat.release() == "0.5.17" and len(answer[1]) < len(answer[0])
            assert answer[1] == alone[i][1] or lost, f"prompt {i} in a batch of {size}"
    counters = assert_sound(server)
    assert counters["kv_bytes"] < counters["kv_bytes_unpacked"], "nothing was packed"


class Known(Oracle):
    """Has one answer."""

    def __init__(self, known: Answer) -> None:
        self.close, self._known = 0.0, known

    async def answer(self, question: Question, tokens: int = 0) -> Answer:
        return self._known


@pytest.mark.parametrize("kind", ["seeded", "greedy"])
@pytest.mark.parametrize(
    ("ids", "logprob", "found"),
    [
        ([5, 6], -0.25, "compared"),
        ([5, 7], -0.25, ""),
        ([5], -0.25, ""),
        ([5, 6], -0.25 - 2**-54, ""),
        ([5, 6], None, ""),
    ],
)
def test_an_exact_chaos_finds_a_bit(ids: list[int], logprob: float | None, found: str, kind: str) -> None:
    known = Answer([5, 6], "", 2, [], [(-0.5, 5), (-0.25, 6)], [])
    chosen = [(-0.5, ids[0], None), (logprob, ids[-1], None)][: len(ids) if logprob is not None else 1]
    outcome = Outcome(200, [ids], [""], {"output_token_logprobs": chosen}, "length")
    report = Report(0)

    async def judged() -> None:
        judge = Judge(Known(known), Names(), report)
        judge.submit(Case(Question.make(kind, "/generate", {}), outcome, 2))
        working = asyncio.create_task(judge.work())
        await judge.finish()
        working.cancel()

    asyncio.run(judged())
    assert +report.compared == ({kind: 1} if found else {})
    assert len(report.problems) == (not found)


CHAOS_SECONDS, CHAOS_SEED = 15, 7
EXACT = [
    "requests", "disconnects", "aborts", "samples", "stops", "logprobs", "sessions", "flushes", "pauses", "namespaces", "priorities",
]  # fmt: skip
"""What a chaos does whose answers shall be the same bits."""
SAMPLING = ["sampling", "seeds"]
"""And if there are no drafts."""
TINY_POOL = ["--max-total-tokens", "8000", "--schedule-conservativeness", "0.1"]


def run_chaos(tried: Server, reference: Server, features: list[str], seconds: float = CHAOS_SECONDS) -> Report:
    """The report of one in which every answer, greedy and seeded, had to be the one that the reference gives to the same request alone."""
    # Branches of 400 tokens have whole pieces.
    chaos = Chaos(
        tried.url, reference.url, CHAOS_SEED, seconds, features=features, prompts=16, branch=400, close=0.0, patience=60
    )
    report = asyncio.run(chaos.run())
    print(report)
    assert not report.problems, report
    assert not our_tracebacks(tried.log.read_text())
    counters = assert_sound(tried)
    assert counters["kv_tokens"] < counters["kv_tokens_unpacked"], "nothing was packed"
    assert "Retract" in tried.log.read_text() or report.compared["retracted"] > 0
    return report


@pytest.mark.gpu
@pytest.mark.server
@pytest.mark.parametrize("kind", ["plain", "windows", "drafts"])
def test_chaos_changes_no_answer(kind: str, gpu_model: Path, tmp_path: Path) -> None:
    """A server with a tiny pool, which retracts, aborts and pauses, beside another that has one request at a time: the promise is also that of two servers.
    With drafts all requests are greedy."""
    flags = [*FLAGS, "--context-length", "2048", "--chunked-prefill-size", "512", "--enable-priority-scheduling"]
    model = gpu_model
    if kind == "windows":
        model = mellum.write(tmp_path / "model", gpu_model, 300, head_dim=64)
    if kind == "drafts":
        flags += [*drafts("STANDALONE", 3, 1, 4), "--speculative-draft-model-path", str(gpu_model)]
    cases = {"tried": ("pat", TINY_POOL, CHECKED | RETRACTING), "reference": ("pat", [], {})}
    with serving(model, cases, flags, tmp_path) as servers:
        sampling = [] if kind == "drafts" else SAMPLING
        report = run_chaos(servers["tried"], servers["reference"], EXACT + sampling)
        for compared in ("greedy", "partial", "logprobs", *(["seeded"] if sampling else [])):
            assert report.compared[compared] > 1, (compared, report)


@pytest.mark.gpu
@pytest.mark.server
@pytest.mark.parametrize("mode", ["single", "prefix", "radix_cache", "p_vs_d"])
def test_sglangs_own(
    server: Server, mode: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "small pool" in request.node.callspec.params["server"] and compat.release() == "0.5.17":
        pytest.skip("SGLang 0.5.17 loses log-probabilities of requests that it retracts")
    with importing_kits():
        from sglang.test import test_deterministic as own
    # It takes tokens of larger vocabularies.
    randint = random.randint
    monkeypatch.setattr(own.random, "randint", lambda low, high: randint(low, min(high, VOCAB - 1)))
    # Of a prompt's tokens SGLang names the last one of a vocabulary 0, and of an answer's not.
    same = own.TokenIdsAndLogprobs.compare

    def as_a_prompt(answer: Any) -> Any:
        return replace(answer, token_ids=[0 if token == VOCAB - 1 else token for token in answer.token_ids])

    monkeypatch.setattr(own.TokenIdsAndLogprobs, "compare", lambda answer, prompt: same(as_a_prompt(answer), prompt))
    host, port = server.url.removeprefix("http://").split(":")
    # Log-probabilities of a prompt's tokens are those of a temperature of 1 or 0.
    arguments = own.BenchArgs(host=host, port=int(port), test_mode=mode, n_trials=10)
    if mode == "prefix":
        arguments.return_logprob = True
        arguments.temperature = 0.0 if "drafts" in request.node.callspec.params["server"] else 0.5  # as above
    found = own.test_deterministic(arguments)
    assert found and set(np.array(found).tolist()) == {1}
