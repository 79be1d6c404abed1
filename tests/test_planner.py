from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable
from itertools import pairwise

import msgspec
import pytest
import torch
from natives import settle

from sglang_pat.backend.check import check_plan
from sglang_pat.backend.planner import Planner
from sglang_pat.kernels import capabilities
from sglang_pat.packing import CPU_TILES, FORMATS, OPEN, AttentionSpec, CostModel, PackConfig, WorkItem, layout
from sglang_pat.packing.native import NativeScheduler
from sglang_pat.radix_bridge.events import (
    ROOT,
    Event,
    NodeInserted,
    NodeSplit,
    RequestBound,
    RequestReleased,
    RequestsExpected,
    RequestWithdrawn,
)
from sglang_pat.radix_bridge.observer import apply

CONFIG = PackConfig(CostModel(8, 2, 64, 64, 2), CPU_TILES, 1)
A, B, C, D = range(4)


class Decode:
    """A batch that decodes: `step` runs one step, and every request has one token more, or what `gains` says."""

    def __init__(
        self,
        reuse: bool = True,
        ahead: bool = False,
        config: PackConfig = CONFIG,
        max_slots: int = 2**31 - 1,
        growth: int = 1,
        watch: bool = False,
    ) -> None:
        buffers = [torch.zeros(layout.capacity(config, 64), dtype=torch.int32) for _ in range(2)]
        self.scheduler = NativeScheduler(config, 64, max_slots, buffers)
        self.planner = Planner(self.scheduler, reuse, ahead, growth=growth, watch=watch)
        self.seq_lens: dict[int, int] = {}
        self.gains: Callable[[], int] = lambda: 1
        self.apply(NodeInserted(1, ROOT, 500, bytes(16)))

    def apply(self, event: Event) -> None:
        apply(self.scheduler, event)
        self.planner.on_change()

    def join(self, request: int, length: int = 520, bind: bool = True) -> None:
        self.seq_lens[request] = length
        if bind:
            self.apply(RequestBound(request, 1, length))

    def leave(self, request: int) -> None:
        del self.seq_lens[request]
        self.apply(RequestReleased(request))

    def step(self, **arguments) -> torch.Tensor:
        lengths = torch.tensor(list(self.seq_lens.values()))
        plan = self.planner.plan(torch.tensor(list(self.seq_lens)), lambda: lengths, **arguments)
        for request in self.seq_lens:
            self.seq_lens[request] += self.gains()
        return plan

    @property
    def plans(self) -> int:
        return self.planner.counters().plans


@pytest.fixture
def decode() -> Decode:
    decode = Decode()
    for request in (A, B, C):
        decode.join(request)
    return decode


def test_a_batch_that_stands_still_is_planned_once(decode: Decode) -> None:
    first = decode.step()
    assert all(decode.step() is first for _ in range(50))
    assert decode.plans == 1


def test_joining_and_leaving_make_a_new_plan(decode: Decode) -> None:
    decode.step()
    decode.join(D)
    decode.step()
    decode.leave(A)
    decode.step()
    assert decode.plans == 3


def test_a_request_outside_the_batch_makes_no_new_plan(decode: Decode) -> None:
    first = decode.step()
    decode.apply(RequestBound(9, 1, 0))
    assert decode.step() is first


def test_a_split_of_an_active_path_alone_makes_no_new_plan(decode: Decode) -> None:
    first = decode.step()
    decode.apply(NodeSplit(1, 2, 100, b"rest".ljust(16)))
    assert decode.step() is first


def test_binding_a_request_of_the_batch_makes_a_new_plan(decode: Decode) -> None:
    decode.join(D, bind=False)
    decode.step()
    decode.apply(RequestBound(D, 1, 521))
    decode.step()
    assert decode.plans == 2


def test_the_same_ids_after_a_retraction_are_planned_again(decode: Decode) -> None:
    decode.step()
    decode.apply(RequestReleased(B))
    decode.step()
    assert decode.plans == 2


def test_a_tail_that_outgrows_its_split_makes_a_new_plan(decode: Decode) -> None:
    for _ in range(4000):
        decode.step()
    assert 2 <= decode.plans <= 8


def test_what_is_left_after_a_request_is_withdrawn_is_planned_ahead() -> None:
    decode = Decode(ahead=True)
    for request in (A, B, C):
        decode.join(request)
    decode.step()
    before = decode.planner.counters()
    decode.apply(RequestWithdrawn(B))
    del decode.seq_lens[B]
    settle(decode.scheduler)
    plan = decode.step()
    counters = decode.planner.counters()
    assert (counters.plans - before.plans, counters.plans_ahead - before.plans_ahead) == (1, 1)
    decode.apply(RequestReleased(B))
    assert decode.step() is plan


def test_without_reuse_every_step_is_planned() -> None:
    decode = Decode(reuse=False)
    decode.join(A)
    for _ in range(10):
        decode.step()
    assert decode.plans == 10


def test_counters_are_those_of_the_steps(decode: Decode) -> None:
    expected = 0
    for step in range(30):
        if step == 10:
            decode.join(D, 700)
        expected += sum(decode.seq_lens.values())
        decode.step()
    counters = decode.planner.counters()
    assert (counters.steps, counters.requests, counters.fallbacks) == (30, 4, 0)
    assert counters.kv_tokens_unpacked == expected
    assert counters.kv_tokens == expected - 500 * (2 * 10 + 3 * 20), "the prefix is read once a step"
    assert sum(counters.query_sizes.values()) == counters.work_items
    together = sum(size * tokens for size, tokens in counters.kv_by_queries.items())
    assert together == expected and sum(counters.kv_by_queries.values()) == counters.kv_tokens


def test_a_failure_of_planning_serves_the_step_unpacked_and_is_reported_once(
    decode: Decode, monkeypatch, caplog
) -> None:
    def fail(*_):
        raise RuntimeError("boom")

    monkeypatch.setattr(decode.scheduler, "take", fail)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            plan = decode.step().numpy()
            assert layout.num_slots(plan) == 0 and len(layout.work_items(plan)) == 3
    assert [record.exc_info[1].args for record in caplog.records] == [("boom",)]
    monkeypatch.undo()
    assert layout.num_slots(decode.step().numpy()) > 0, "packing goes on as soon as it works again"
    counters = decode.planner.counters()
    assert (counters.fallbacks, counters.steps, counters.plans) == (3, 4, 4)


def test_where_no_thread_can_be_started_plans_are_made_when_their_steps_come(monkeypatch, caplog) -> None:
    decode = Decode(ahead=True)
    decode.join(A)
    decode.step()

    def fail(tokens: int, spread: int) -> None:
        raise RuntimeError("Resource temporarily unavailable")

    monkeypatch.setattr(decode.scheduler, "prepare", fail)
    decode.join(B)
    decode.join(C)
    for _ in range(3):
        assert layout.num_slots(decode.step().numpy()) > 0
    counters = decode.planner.counters()
    assert (counters.fallbacks, counters.plans, counters.plans_ahead) == (0, 2, 0)
    assert len([record for record in caplog.records if "no longer plans ahead" in record.message]) == 1


@pytest.mark.parametrize("gains", [(60, 60), (0, 60), (60, 0)])
def test_windows_hold_where_requests_gain_tokens_in_steps_of_another_backend(gains: tuple[int, int]) -> None:
    """Mixed steps that a backend for prefill runs, or verify steps beside mixed ones, in which requests gain differently: nothing else tells the planner
    of them, if what they prefill is aborted."""
    decode = Decode(config=msgspec.structs.replace(CONFIG, window=600), watch=True)
    decode.join(A, 560)
    decode.join(B, 565)
    first = decode.step()
    assert decode.step() is first
    for request, gain in zip((A, B), gains, strict=True):
        decode.seq_lens[request] += gain
    lengths = list(decode.seq_lens.values())
    items = layout.work_items(decode.step().numpy())
    spans = [item.span([min(length, 600) for length in lengths]) for item in items]
    seen = sum(min(length, 600) for length in lengths)
    assert sum(len(item.queries) * (end - start) for item, (start, end) in zip(items, spans, strict=True)) == seen
    assert decode.plans == 2
    if all(gains):
        assert not any(item.start == 0 for item in items), "both windows are full, and begin behind the prefix's start"


@pytest.mark.parametrize(("length", "window", "hides", "right"), [
    (100, 0, False, True), (100, 130, False, True), (131, 130, False, False), (131, 130, True, True), (187, 130, False, False)
])  # fmt: skip
def test_verify_sees_what_lies_before_a_window(length: int, window: int, hides: bool, right: bool) -> None:
    slots, rows = torch.arange(200, dtype=torch.int32)[None], torch.tensor([0])
    item = WorkItem(0, OPEN, [0], [0], 8)
    checked = functools.partial(check_plan, slots, [item], rows, lambda: torch.tensor([length]), window, hides)
    if right:
        checked()
    else:
        with pytest.raises(AssertionError, match=f"query 0 reads {length} tokens and sees {window}"):
            checked()


@pytest.mark.parametrize(("rows", "right"), [
    ([(0, 24), (24, 40)], True), ([(0, 24), (25, 40)], False), ([(0, 24), (20, 40)], False), ([(8, 24), (24, 40)], False),
])  # fmt: skip
def test_verify_counts_rows_of_a_query_that_straddles(rows: list[tuple[int, int]], right: bool) -> None:
    """Two work items read 60 tokens for some rows each, a third one the rest for all."""
    slots, row = torch.arange(200, dtype=torch.int32)[None], torch.tensor([0])
    items = [WorkItem(0, 60, [0], [part], 64, False, [some]) for part, some in enumerate(rows)]
    items.append(WorkItem(60, OPEN, [0], [2], 64))
    checked = functools.partial(check_plan, slots, items, row, lambda: torch.tensor([100]), 0)
    if right:
        checked()
    else:
        with pytest.raises(AssertionError, match=r"query 0 reads (40|160) tokens and sees 100"):
            checked()


@pytest.mark.parametrize("tokens", [1, 2])
def test_verify_accepts_plans_whose_queries_straddle(tokens: int) -> None:
    spec = AttentionSpec(40 // tokens, 1, 576, 512, FORMATS["bfloat16"], latent=True, query_tokens=tokens)
    decode = Decode(config=PackConfig.of(spec, capabilities.tile_table_of(spec, "9.0a", "NVIDIA H200"), 132))
    decode.apply(NodeInserted(2, 1, 4000, b"rest".ljust(16)))
    requests = 32
    for request in range(requests):
        decode.join(request, 4600, bind=False)
        decode.apply(RequestBound(request, 2, 4600))
    slots = torch.arange(requests * 5000, dtype=torch.int32).reshape(requests, 5000)
    slots[:, :4500] = slots[0, :4500]
    lengths = torch.tensor(list(decode.seq_lens.values()))
    plan = decode.step(check=lambda items: check_plan(slots, items, torch.arange(requests), lambda: lengths, 0)).numpy()
    assert any(item.rows for item in layout.work_items(plan)) and decode.planner.counters().fallbacks == 0


def test_a_plan_that_contradicts_the_slots_is_not_used(decode: Decode) -> None:
    def refuse(items):
        raise AssertionError("not shared")

    plan = decode.step(check=refuse).numpy()
    assert layout.num_slots(plan) == 0 and decode.planner.counters().fallbacks == 1


def test_a_plan_that_is_too_large_gives_way_to_one_that_stands(caplog) -> None:
    """It is not made again in each step; another batch is planned anew."""
    small = Decode(config=msgspec.structs.replace(CONFIG, workers=16), max_slots=1)
    for request in (A, B, C):
        small.join(request)
    plans = [small.step() for _ in range(5)]
    assert all(plan is plans[0] for plan in plans) and layout.num_slots(plans[0].numpy()) == 0
    counters = small.planner.counters()
    assert (counters.too_large, counters.fallbacks, counters.steps, counters.plans) == (5, 0, 5, 1)
    assert [record.levelname for record in caplog.records if "did not fit" in record.message] == ["WARNING"]
    small.leave(B)
    assert layout.sections(small.step().numpy()).header["batch"] == 2 and small.plans == 2


def test_a_plan_that_packs_fewer_levels_stands_too(caplog) -> None:
    """Steps are counted apart from failures, and a trace says that such a plan is not the whole one."""
    recorded = []
    deep = Decode(config=msgspec.structs.replace(CONFIG, workers=16), max_slots=180)
    deep.planner.on_plan = lambda requests, **plan: recorded.append(plan["fallback"])
    for level in range(2, 22):
        deep.apply(NodeInserted(level, level - 1, 500, level.to_bytes(16, "big")))
        deep.seq_lens[level] = 500 * level + 20
        deep.apply(RequestBound(level, level, 0))
    plans = [deep.step() for _ in range(5)]
    assert all(plan is plans[0] for plan in plans) and deep.scheduler.levels == 6
    assert max(len(item.queries) for item in layout.work_items(plans[0].numpy())) > 1
    for request in list(deep.seq_lens)[4:]:
        deep.leave(request)
    deep.step()
    counters = deep.planner.counters()
    assert (counters.too_large, counters.fallbacks, counters.steps, counters.plans) == (5, 0, 6, 2)
    assert recorded == [True, False]
    assert len([record for record in caplog.records if "did not fit" in record.message]) == 1


@pytest.mark.parametrize("steps", [1, 9, 50])
def test_requests_with_one_token_left_of_their_prompts_do_not_disturb_what_is_planned_ahead(steps: int) -> None:
    decode = Decode(ahead=True)
    decode.join(A)
    decode.join(B)
    for _ in range(steps):
        decode.step()
    decode.planner.plan(torch.tensor([C]), lambda: torch.tensor([520]), aside=True)
    decode.apply(RequestsExpected([C], [520], [""]))
    decode.join(C)
    settle(decode.scheduler)
    decode.step()
    counters = decode.planner.counters()
    assert (counters.plans, counters.plans_ahead) == (3, 1)


def test_a_draft_that_was_counted_is_not_forgotten_when_the_request_is_cached() -> None:
    """Its first step has 16 tokens more; who hears of its prompt later does not know of them, and its plan would be too short."""
    decode = Decode(ahead=True)
    decode.join(A)
    decode.step()
    decode.apply(RequestsExpected([B], [536], [""]))
    decode.apply(RequestBound(B, 1, 521))
    settle(decode.scheduler)
    decode.seq_lens[B] = 536
    decode.step()
    assert decode.planner.counters().plans_ahead == 1


def test_another_order_makes_a_new_plan(decode: Decode) -> None:
    decode.step()
    decode.seq_lens = dict(reversed(decode.seq_lens.items()))
    plan = decode.step().numpy()
    assert decode.plans == 2
    tails = [item for item in layout.work_items(plan) if len(item.queries) == 1]
    assert len(tails) == 3


def test_with_time_to_spare_every_plan_but_the_first_is_made_ahead() -> None:
    decode = Decode(ahead=True)
    for request in (A, B, C):
        decode.join(request)
    decode.step()
    for change in (lambda: decode.join(D), lambda: decode.leave(A), lambda: decode.leave(D), lambda: None):
        change()
        settle(decode.scheduler)
        decode.step()
    while decode.plans < 5:
        if decode.planner._used == decode.planner._good:
            settle(decode.scheduler)
        decode.step()
    counters = decode.planner.counters()
    assert (counters.plans, counters.plans_ahead) == (5, 4)


@pytest.mark.parametrize(
    ("growth", "gains"), [(4, [1]), (4, [2]), (4, [4]), (8, [5]), (4, [2, 3, 4]), (4, [1, 2, 3, 4])]
)
def test_verify_steps_have_their_plans_ahead_too(growth: int, gains: list[int]) -> None:
    """However many tokens of their drafts requests accept: when a plan ends, and in the midst of one."""
    decode, generator = Decode(ahead=True, growth=growth), random.Random(growth)
    decode.gains = lambda: generator.choice(gains)
    for request in (A, B, C):
        decode.join(request, 1000)
    for step in range(400):
        settle(decode.scheduler)
        decode.step()
        if step > 200 and step % 10 == 0:
            decode.leave(D) if D in decode.seq_lens else decode.join(D, 1000)
    counters = decode.planner.counters()
    assert counters.plans > 20 and counters.plans_ahead >= 0.85 * counters.plans


def test_a_request_that_decodes_before_it_is_cached_has_its_plans_ahead_too() -> None:
    decode = Decode(ahead=True)
    decode.join(A)
    decode.join(B)
    decode.step()
    decode.apply(RequestsExpected([C], [520], [""]))
    settle(decode.scheduler)
    decode.join(C, 520, bind=False)
    decode.step()
    decode.apply(RequestBound(C, 1, 520))
    settle(decode.scheduler)
    assert max(len(item.queries) for item in layout.work_items(decode.step().numpy())) == 3
    counters = decode.planner.counters()
    assert (counters.plans, counters.plans_ahead, counters.requests) == (3, 2, 3)


def longest_bin(plan: torch.Tensor, seq_lens: dict[str, int]) -> float:
    """Tokens of the longest bin over those of the average one."""
    lengths = list(seq_lens.values())
    tokens = [
        (lengths[item.queries[0]] if item.end == OPEN else item.end) - item.start
        for item in layout.work_items(plan.numpy())
    ]
    bins = [sum(tokens[begin:end]) for begin, end in pairwise(layout.sections(plan.numpy()).bins.tolist())]
    return max(bins) / (sum(bins) / len(bins))


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("told", [True, False])
def test_a_prompt_that_comes_in_chunks_is_planned_with_the_length_that_it_gets(bound: bool, told: bool) -> None:
    """A plan for the first chunk alone would have as many steps to go as the prompt has tokens."""
    decode = Decode(ahead=True, config=msgspec.structs.replace(CONFIG, workers=16))
    for request in range(10, 17):
        decode.join(request, 4000)
    decode.step()
    for length in (1000, 2500, 4000) if told else (2500,):
        decode.apply(RequestsExpected([D], [length], [""]))
        settle(decode.scheduler)
        if bound and length == 1000:
            decode.apply(RequestBound(D, 1, 0))
    decode.join(D, 4000, bind=False)
    plan = decode.step()
    counters = decode.planner.counters()
    assert (counters.plans, counters.plans_ahead) == (2, int(told))
    assert longest_bin(plan, decode.seq_lens) < 1.06


def test_a_request_that_does_not_come_though_it_was_expected_costs_a_plan_and_nothing_else() -> None:
    decode = Decode(ahead=True)
    decode.join(A)
    decode.join(B)
    decode.step()
    decode.apply(RequestBound(9, 1, 600))
    settle(decode.scheduler)
    for _ in range(3):
        assert layout.sections(decode.step().numpy()).header["batch"] == 2
    assert decode.planner.counters().fallbacks == 0
    assert decode.plans == 2


@pytest.mark.gpu
def test_a_plan_in_pinned_memory_reaches_the_device_by_one_copy() -> None:
    buffers = [torch.zeros(layout.capacity(CONFIG, 64), dtype=torch.int32, pin_memory=True) for _ in range(2)]
    scheduler = NativeScheduler(CONFIG, max_batch=64, buffers=buffers)
    scheduler.insert(1, ROOT, 500, bytes(16))
    for request in (A, B, C):
        scheduler.bind(request, 1)
    index, _, _ = scheduler.take(torch.tensor([A, B, C]), torch.tensor([520, 530, 540]), 0)
    device = torch.empty_like(buffers[index], device="cuda")
    device.copy_(buffers[index], non_blocking=True)
    torch.cuda.synchronize()
    assert [item.queries for item in layout.work_items(device.cpu().numpy())] == [[0, 1, 2], [0], [1], [2]]
