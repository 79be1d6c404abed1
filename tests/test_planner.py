from __future__ import annotations

import logging

import pytest

from sglang_pat.backend.planner import Planner
from sglang_pat.packing import CPU_TILES, CostModel, PackConfig
from sglang_pat.packing.scheduler import POLICIES
from sglang_pat.radix_bridge import Mirror
from sglang_pat.radix_bridge.events import ROOT, NodeInserted, NodeSplit, RequestBound, RequestReleased

COST = CostModel(8, 2, 64, 64, 2)


class Decode:
    """A batch that decodes: `step` runs one step, and every request has one token more."""

    def __init__(self, reuse: bool = True, policy: str = "pat") -> None:
        self.mirror = Mirror()
        self.mirror.apply(NodeInserted(1, ROOT, 500, "prefix"))
        self.planner = Planner(self.mirror, PackConfig(COST, CPU_TILES, 132, policy), reuse)
        self.seq_lens: dict[str, int] = {}

    def join(self, rid: str, length: int = 520, bind: bool = True) -> None:
        self.seq_lens[rid] = length
        if bind:
            self.mirror.apply(RequestBound(rid, len(self.seq_lens), 1))

    def leave(self, rid: str) -> None:
        del self.seq_lens[rid]
        self.mirror.apply(RequestReleased(rid))

    def step(self, **arguments):
        plan = self.planner.plan(list(self.seq_lens), lambda: list(self.seq_lens.values()), **arguments)
        for rid in self.seq_lens:
            self.seq_lens[rid] += 1
        return plan

    @property
    def plans(self) -> int:
        return self.planner.counters().plans


@pytest.fixture
def decode() -> Decode:
    decode = Decode()
    for rid in "abc":
        decode.join(rid)
    return decode


def test_a_batch_that_stands_still_is_planned_once(decode: Decode) -> None:
    first = decode.step()
    assert all(decode.step() is first for _ in range(50))
    assert decode.plans == 1


def test_joining_and_leaving_make_a_new_plan(decode: Decode) -> None:
    decode.step()
    decode.join("d")
    decode.step()
    decode.leave("a")
    decode.step()
    assert decode.plans == 3


def test_a_request_outside_the_batch_makes_no_new_plan(decode: Decode) -> None:
    first = decode.step()
    decode.mirror.apply(RequestBound("still prefilling", 9, 1))
    assert decode.step() is first


def test_a_split_of_an_active_path_alone_makes_no_new_plan(decode: Decode) -> None:
    first = decode.step()
    decode.mirror.apply(NodeSplit(1, 2, 100, "rest"))
    assert decode.step() is first


def test_binding_a_request_of_the_batch_makes_a_new_plan(decode: Decode) -> None:
    decode.join("d", bind=False)
    decode.step()
    decode.mirror.apply(RequestBound("d", 9, 1))
    decode.step()
    assert decode.plans == 2


def test_the_same_ids_after_a_retraction_are_planned_again(decode: Decode) -> None:
    decode.step()
    decode.mirror.apply(RequestReleased("b"))
    decode.step()
    assert decode.plans == 2


def test_a_tail_that_outgrows_its_split_makes_a_new_plan(decode: Decode) -> None:
    for _ in range(4000):
        decode.step()
    assert 2 <= decode.plans <= 8


def test_without_reuse_every_step_is_planned() -> None:
    decode = Decode(reuse=False)
    decode.join("a")
    for _ in range(10):
        decode.step()
    assert decode.plans == 10


def test_counters_are_those_of_the_steps(decode: Decode) -> None:
    expected = 0
    for step in range(30):
        if step == 10:
            decode.join("d", 700)
        expected += sum(decode.seq_lens.values())
        decode.step()
    counters = decode.planner.counters()
    assert (counters.steps, counters.requests, counters.fallbacks) == (30, 4, 0)
    assert counters.kv_tokens_unpacked == expected
    assert counters.kv_tokens == expected - 500 * (2 * 10 + 3 * 20), "the prefix is read once a step"
    assert sum(counters.query_sizes.values()) == counters.work_items


def test_a_failure_of_planning_serves_the_step_unpacked_and_is_reported_once(
    decode: Decode, monkeypatch, caplog
) -> None:
    def fail(batch, cost):
        raise RuntimeError("boom")

    monkeypatch.setitem(POLICIES, "pat", fail)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            plan = decode.step()
            assert plan.items.shape[0] == 3 and plan.num_slots == 0
    assert [record.exc_info[1].args for record in caplog.records] == [("boom",)]
    monkeypatch.undo()
    packed = decode.step()
    assert packed.num_slots > 0, "packing goes on as soon as it works again"
    counters = decode.planner.counters()
    assert (counters.fallbacks, counters.steps, counters.plans) == (3, 4, 4)


def test_a_plan_that_contradicts_the_slots_is_not_used(decode: Decode) -> None:
    def refuse(plan):
        raise AssertionError("not shared")

    plan = decode.step(verify=refuse)
    assert plan.num_slots == 0 and decode.planner.counters().fallbacks == 1
