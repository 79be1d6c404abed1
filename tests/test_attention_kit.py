"""SGLang's own tests of attention backends (`sglang.test.kits.attention_unittest`), against `pat`.

They build a backend from a model runner without a model, and compare it with attention written out in PyTorch.
"""

from __future__ import annotations

import gc
import unittest
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from conftest import importing_kits

from sglang_pat import compat, plugin
from sglang_pat.backend import attention
from sglang_pat.backend.extends import planned as extend
from sglang_pat.backend.step import Step
from sglang_pat.radix_bridge import hooks
from sglang_pat.radix_bridge.events import ROOT, NodeInserted, RequestBound
from sglang_pat.radix_bridge.observer import apply

ON_GPU = torch.cuda.is_available()

with importing_kits():
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.test.kits.attention_unittest.attention_methods import dense_attention as dense
    from sglang.test.kits.attention_unittest.runner_modes import cuda_graph_decode_runner, split_op_runner

plugin.register()
dense._SWA_DECODE_EXTEND_WINDOW |= {"pat"}
"""The kits want to be told: `sliding_window_size` is how far back a query sees, as with FA3 and FlashInfer."""

DEVICE: dict[str, Any] = {"device": "cuda" if ON_GPU else "cpu", "head_dim": 64 if ON_GPU else dense.DEFAULT_HEAD_DIM}
CASES = {case.name: case for case in dense.make_dense_cases("pat")}
WINDOWED = {
    case.name: case
    for make in (dense.make_swa_no_prefix_input_config_cases, dense.make_swa_prefix_input_config_cases)
    for case in make("pat")
} | {
    f"{name}_window_{window}": replace(CASES[name], sliding_window_size=window)
    for name in ("mha_decode_page_boundary", "gqa_decode_page_boundary")
    for window in (3, 15, 400)
}
"""The kits' own are prefills."""
BY_CPU_PRICES = pytest.mark.skipif(ON_GPU, reason="what pays is another thing by a GPU's prices")
LAYOUTS = ["contiguous", "shuffled_pages", "interleaved_pages", "non_monotonic_extend"]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    """The pools are written in place."""
    with torch.no_grad():
        yield


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", WINDOWED)
def test_windows(name: str, layout: str) -> None:
    dense.run_dense_attention_case(unittest.TestCase(), WINDOWED[name], loc_layout=layout, **DEVICE)


def named(decode: bool) -> list[str]:
    return [name for name, case in CASES.items() if case.forward_mode.is_decode() == decode]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_eager(name: str, layout: str) -> None:
    stock = compat.stock.prefill_backend(False, torch.float16, scaled=False) if ON_GPU else ""
    if (
        stock == "fa3"
        and layout == "non_monotonic_extend"
        and CASES[name].page_size > 1
        and name in named(decode=False)
    ):
        pytest.skip("FA3, which prefills, reads whole pages, and SGLang's allocators give no others")
    dense.run_dense_attention_case(unittest.TestCase(), CASES[name], loc_layout=layout, **DEVICE)


@pytest.mark.parametrize("name", named(decode=True))
def test_cuda_graph(name: str) -> None:
    """What a backend does for a graph, with a padded batch; on a CPU too, as the kit records none."""
    cuda_graph_decode_runner.run_dense_cuda_graph_decode_case(unittest.TestCase(), CASES[name], **DEVICE)


@pytest.mark.gpu  # where SGLang has the operator that splits a graph
@pytest.mark.parametrize("breakable", [False, True])
@pytest.mark.parametrize("name", named(decode=False))
def test_split_op(name: str, breakable: bool) -> None:
    split_op_runner.run_dense_split_op_extend_case(unittest.TestCase(), CASES[name], breakable=breakable, **DEVICE)


@pytest.mark.parametrize("name", CASES)
def test_beside_a_prefill_backend(name: str) -> None:
    """`--decode-attention-backend pat`."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    fixture = dense.build_dense_attention_fixture(unittest.TestCase(), CASES[name], **DEVICE)
    prefill = ATTENTION_BACKENDS["triton" if ON_GPU else "torch_native"](fixture.runner)
    hybrid = HybridAttnBackend(fixture.runner, decode_backend=fixture.backend, prefill_backend=prefill)
    dense.replace_backend(fixture, hybrid)
    assert_right(fixture)


SHARED = 300
"""Tokens of a prefix that requests of a batch share."""


def shared_batch(
    heads: int,
    kv_heads: int,
    lengths: tuple[int, ...],
    added: tuple[int, ...] = (),
    members: tuple[int, int] = (0, 1),
    **more: Any,
) -> Any:
    """A batch in which two requests, `members`, have one prefix in the cache, and all have ids. It decodes, or extends by `added` tokens."""
    case = replace(
        CASES["mha_decode_page_boundary"], name="shared", num_heads=heads, num_kv_heads=kv_heads, page_size=1, prefix_lens=lengths,
        extend_lens=added, forward_mode=ForwardMode.MIXED if added else ForwardMode.DECODE, **more,
    )  # fmt: skip
    fixture = dense.build_dense_attention_fixture(unittest.TestCase(), case, max_context_len=512, **DEVICE)
    table = fixture.runner.req_to_token_pool.req_to_token
    first, second = members
    fixture.prefix_hidden[second][:SHARED] = fixture.prefix_hidden[first][:SHARED]
    # Nobody may read what the second one's prefix had for itself.
    keys, values = fixture.runner.token_to_kv_pool.get_kv_buffer(0)
    keys[table[second, :SHARED].long()] = values[table[second, :SHARED].long()] = torch.nan
    table[second, :SHARED] = table[first, :SHARED]
    rows = torch.arange(len(lengths))
    # Ids come from clients, who may choose the same.
    mixed = fixture.forward_batch.forward_mode.is_mixed()
    fixture.forward_batch.rids = hooks.Rids(["same"] * len(lengths), rows, mixed=mixed)
    requests = compat.requests.numbers(fixture.runner.req_to_token_pool, rows).tolist()
    observer = fixture.backend.observer
    apply(observer.scheduler, NodeInserted(1, ROOT, SHARED, bytes(16)))
    for member in members:
        apply(observer.scheduler, RequestBound(requests[member], 1, fixture.case.seq_lens[member] if not added else 0))
    return fixture


def assert_right(fixture: Any) -> None:
    torch.testing.assert_close(
        dense.run_dense_fixture_eager(fixture), dense.expected_dense_fixture_output(fixture),
        atol=dense.DENSE_ATOL, rtol=dense.DENSE_RTOL,
    )  # fmt: skip


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (7, 1)])
def test_shared_rows_are_packed(heads: int, kv_heads: int) -> None:
    fixture = shared_batch(heads, kv_heads, (310, 347, 33))
    assert_right(fixture)
    counters = fixture.backend.reporter.counters()
    assert counters["kv_tokens_unpacked"] - counters["kv_tokens"] == SHARED
    assert (counters["fallbacks"], counters["faults"], counters["bound"]) == (0, 0, 2)


LENGTHS, ADDED = (40, 0, 90, 310, 347, 33), (20, 33, 2, 1, 1, 1)
"""Of a mixed step: its last three requests decode, and the first two of these share a prefix."""


STOCK = ["fa3", "flashinfer", "triton"] if ON_GPU else ["torch_native"]


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("front", [*STOCK, "pat"])
def test_decoding_requests_of_a_mixed_step_are_packed(front: str, padding: int) -> None:
    """The others are prefilled by a stock backend, as on GPUs, or by an extend's plan, as on CPUs. DP attention pads tokens."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    fixture = shared_batch(4, 2, LENGTHS, ADDED, members=(3, 4))
    own = front == "pat"
    if own and ON_GPU:
        pytest.skip("no extend of a GPU's is this long")
    if not own:
        fixture.backend.prefill.inner, fixture.backend.prefill.extend = ATTENTION_BACKENDS[front](fixture.runner), None
    batch = fixture.forward_batch
    batch.out_cache_loc = torch.cat([batch.out_cache_loc, batch.out_cache_loc.new_zeros(padding)])
    fixture.input_hidden = torch.cat(
        [fixture.input_hidden, fixture.input_hidden.new_zeros(padding, fixture.input_hidden.shape[1])]
    )
    out = dense.run_dense_fixture_eager(fixture)
    fixture.input_hidden = fixture.input_hidden[: sum(ADDED)]
    torch.testing.assert_close(
        out[: sum(ADDED)], dense.expected_dense_fixture_output(fixture), atol=dense.DENSE_ATOL, rtol=dense.DENSE_RTOL
    )
    counters = fixture.backend.reporter.counters()
    assert (counters["steps"], counters["plans"], counters["fallbacks"]) == (1, 1, 0)
    assert counters["kv_tokens_unpacked"] - counters["kv_tokens"] == SHARED
    assert counters["kv_tokens_unpacked"] == sum(LENGTHS[3:]) + 3
    assert counters["extends"] == own


@BY_CPU_PRICES
@pytest.mark.parametrize(
    ("added", "members", "planned"),
    [((70, 12, 3, 3, 1), (2, 3), 3), ((2, 12, 9, 4), (2, 3), 4), ((3, 3, 70, 1), (0, 1), 0), ((20, 20, 2), (0, 1), 0)],
    ids=["behind a long one", "all", "not in front of a long one", "as many as fill a tile"],
)
@pytest.mark.parametrize("front", STOCK)
def test_short_extends_are_planned_where_they_share(
    front: str, added: tuple[int, ...], members: tuple[int, int], planned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, by this device's executor: those at the end of a batch, where the plan costs less than a stock backend, however much of each
    request's KV that finds in the cache."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    lengths = tuple(SHARED + 8 * i + 1 for i in range(len(added)))
    for shares, reuse in ((True, 1), (False, 1), (True, 3)):
        monkeypatch.setattr(extend, "STOCK_REUSE", reuse)
        fixture = shared_batch(4, 2, lengths, added, members)
        prefill = fixture.backend.prefill
        prefill.inner = ATTENTION_BACKENDS[front](fixture.runner)
        prefill.extend._everything = False
        if not shares:
            fixture.backend.observer.on_reset()
        assert_right(fixture)
        counters = fixture.backend.reporter.counters()
        assert counters["extends"] == counters["extends_shared"] == (planned > 0 and shares and reuse == 1)
        assert prefill._planned is None or len(prefill._planned.second.seq_lens) == planned
        assert counters["steps"] == (added[-1] == 1)


@pytest.mark.parametrize("everything", [True, pytest.param(False, marks=BY_CPU_PRICES)])
def test_an_extend_whose_plan_fails_its_check_shares_nothing(everything: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it is then a stock backend's."""
    monkeypatch.setattr(extend, "STOCK_REUSE", 1)
    fixture = shared_batch(4, 2, tuple(SHARED + 8 * i + 1 for i in range(4)), (2, 12, 9, 4), members=(2, 3))
    fixture.backend.config = msgspec.structs.replace(fixture.backend.config, verify=True)
    fixture.backend.prefill.extend._everything = everything
    for right in (True, False):
        if not right:
            monkeypatch.setattr(attention, "check_plan", lambda *arguments, **named: 1 / 0)
        before = fixture.backend.reporter.counters()
        assert_right(fixture)
        counters = fixture.backend.reporter.counters()
        new = [counters[name] - before[name] for name in ("extends", "extends_shared")]
        assert new == ([1, 1] if right else [int(everything), 0])


@BY_CPU_PRICES
def test_short_extends_are_left_to_a_stock_backend_if_their_table_of_windows_were_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is made outside of the memory that SGLang reserves."""
    monkeypatch.setattr(extend, "STOCK_REUSE", 1)
    for limit, planned in ((0, False), (1 << 30, True)):
        fixture = shared_batch(4, 2, tuple(SHARED + 8 * i + 1 for i in range(4)), (2, 12, 9, 4), members=(2, 3))
        fixture.backend.prefill.extend._everything = False
        with monkeypatch.context() as patch:
            patch.setattr(extend, "WINDOW_TABLE_SLOTS", limit)
            patch.setattr(compat.pool, "has_window_pool", lambda _: True)
            patch.setattr(compat.pool, "window_mapping", lambda _: torch.arange(1 << 16))
            fixture.backend.init_forward_metadata(fixture.forward_batch)
        assert (fixture.backend.prefill._planned is not None) == planned


def test_decoding_requests_of_a_mixed_step_have_the_positions_of_their_lengths() -> None:
    """0.5.17 sometimes counts one token too many."""
    fixture = shared_batch(4, 2, (40, 310, 347, 33), (20, 1, 1, 1), members=(1, 2))
    mixed = fixture.forward_batch
    right = mixed.positions.clone(), list(mixed.extend_prefix_lens_cpu), mixed.extend_prefix_lens.clone()
    mixed.positions[-3:] += 1
    mixed.extend_prefix_lens[1:] += 1
    told = mixed.extend_prefix_lens_cpu = [right[1][0], *(length + 1 for length in right[1][1:])]
    compat.batch.right_mixed_lengths(mixed)
    assert mixed.positions.tolist() == right[0].tolist()
    assert (mixed.extend_prefix_lens_cpu, mixed.extend_prefix_lens.tolist()) == (right[1], right[2].tolist())
    assert told[1] == right[1][1] + 1, "the scheduler's own list stays as it is"
    compat.batch.right_mixed_lengths(mixed)
    assert mixed.extend_prefix_lens_cpu == right[1]


@pytest.mark.parametrize("mode", [ForwardMode.MIXED, ForwardMode.EXTEND])
def test_a_plan_lives_on_from_decode_steps_to_mixed_ones(mode: ForwardMode) -> None:
    """While the same requests decode, in the same order: a prompt that comes in chunks joins them only with its last. 0.5.23 shows a mixed step as an
    extend."""
    fixture = shared_batch(4, 2, (40, 310, 347, 33), (20, 1, 1, 1), members=(1, 2))
    mixed = fixture.forward_batch
    assert mixed.forward_mode.is_mixed()
    mixed.forward_mode = mode
    mixed.rids.unfinished = 0
    fixture.backend.init_forward_metadata(mixed)
    for batch in (mixed, fixture.backend.prefill._decoding.second, mixed):
        fixture.backend.init_forward_metadata(batch)
    assert (fixture.backend.reporter.counters()["steps"], fixture.backend.reporter.counters()["plans"]) == (4, 1)
    mixed.rids.unfinished = None
    for _ in range(2):
        fixture.backend.init_forward_metadata(mixed)
    assert fixture.backend.reporter.counters()["plans"] == 2


def test_two_backends_of_one_process_plan_for_themselves() -> None:
    """SGLang makes one for a draft model, and one for each of two half batches. What is gone follows no longer."""
    gc.collect()
    before = len(hooks.followers())
    first, second = shared_batch(4, 2, (310, 347, 33)), shared_batch(4, 2, (304, 305))
    assert hooks.followers()[before:] == [first.backend, second.backend]
    for fixture in (first, second, first):
        assert_right(fixture)
    assert [fixture.backend.reporter.counters()["steps"] for fixture in (first, second)] == [2, 1]
    del first, fixture
    gc.collect()
    assert hooks.followers()[before:] == [second.backend]


def test_an_empty_step_that_verifies_has_masks() -> None:
    """A kernel for drafts asks for some, of no drafts too; one for single tokens refuses any."""
    step = Step.__new__(Step)
    step._windows, step._requests = {}, SimpleNamespace(req_to_token=torch.zeros(1, 4, dtype=torch.int32))
    step.rows = step.seq_lens = torch.empty(0, dtype=torch.int64)
    step._masks = torch.ones(2, 3, dtype=torch.int64)
    assert step.tables(0).masks is None
    found = step.tables(0, drafts=0).masks
    assert found is not None and found.shape == (0, 3)
