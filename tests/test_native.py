"""The native scheduler makes the plans of the Python one. Needs neither torch nor SGLang, so that sanitizers can run it."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trees import PRICED, TILES, batches, configs

from sglang_pat.kernels import jit, layout
from sglang_pat.kernels.scheduler import NativeScheduler, PlanTooLargeError
from sglang_pat.packing import OPEN, POLICIES, Batch, CostModel, Node, PackConfig, TileTable, WorkItem, make_plan, tree
from sglang_pat.packing.tree import InconsistentError
from sglang_pat.radix_bridge.events import (
    ROOT,
    NodeInserted,
    NodeSplit,
    RequestBound,
    RequestReleased,
)
from sglang_pat.radix_bridge.mirror import Mirror

EXAMPLES = 40 if os.environ.get(jit.SANITIZE) else 400

CONFIG = PackConfig(CostModel(8, 2, 64, 64, 2), TILES, workers=132)


def head(number: int) -> bytes:
    return number.to_bytes(16, "little")


def load(batch: Batch, config: PackConfig, **limits: int) -> tuple[NativeScheduler, np.ndarray]:
    """A scheduler that heard of the batch's tree event by event, and the sequence lengths."""
    scheduler = NativeScheduler(config, max_batch=len(batch.seq_lens), **limits)
    last = [ROOT] * len(batch.seq_lens)
    number = 0
    stack = [(node, ROOT) for node in batch.roots]
    while stack:
        node, parent = stack.pop()
        number += 1
        scheduler.insert(number, parent, node.end - node.start, head(number))
        for query in node.queries:
            last[query] = number
        stack.extend((child, number) for child in node.children)
    rids = [str(query) for query in range(len(last))]
    for query, node in enumerate(last):
        scheduler.bind(rids[query], query, node)
    scheduler.set_batch(rids)
    return scheduler, np.array(batch.seq_lens, dtype=np.int64)


def used(data: np.ndarray) -> list[int]:
    return data[: layout.sections(data).header["size"]].tolist()


@given(batches(), configs())
@settings(max_examples=EXAMPLES, deadline=None)
def test_plans_are_those_of_the_oracle(batch: Batch, config: PackConfig) -> None:
    scheduler, seq_lens = load(batch, config)
    index, steps, _ = scheduler.take(seq_lens, 0)
    plan = make_plan(batch, config)
    assert used(scheduler.buffers[index]) == layout.flatten(plan).tolist()
    assert (steps, scheduler.current()[:2]) == (plan.steps, (plan.kv_tokens, plan.merged_parts))


# A bin with two kinds of work items, and tails of which one bin has more: both count for how long the plan is good.
@example(
    Batch([118] * 22 + [1244, *[1] * 6, 488, 1, 1, 11], [Node(0, 117, list(range(23)))]),
    PackConfig(CostModel(1, 1, 8, 8, 2), PRICED, workers=2, policy="naive"),
)
@given(batches(max_queries=60, max_length=3000), configs())
@settings(max_examples=EXAMPLES // 6, deadline=None)
def test_plans_of_larger_batches_are_those_of_the_oracle(batch: Batch, config: PackConfig) -> None:
    scheduler, seq_lens = load(batch, config)
    index, _, _ = scheduler.take(seq_lens, 0)
    assert used(scheduler.buffers[index]) == layout.flatten(make_plan(batch, config)).tolist()


@pytest.mark.parametrize("depth", [31, 32, 33, 70, 1100])
@pytest.mark.parametrize("policy", ["optimal", "pat"])
def test_segments_of_many_levels_are_packed_like_the_oracle_packs_them(depth: int, policy: str) -> None:
    """At each level one query leaves, and levels are short enough to be read again."""
    generator = random.Random(depth)
    queries = list(range(depth + 1))
    root = node = Node(0, 3, queries)
    for level in range(1, depth):
        node.children = [Node(node.end, node.end + generator.randint(1, 40), queries[level:])]
        node = node.children[0]
    batch = Batch([node.end + generator.randint(1, 99) for _ in queries], [root])
    config = msgspec.structs.replace(CONFIG, policy=policy)
    scheduler, seq_lens = load(batch, config)
    index, _, _ = scheduler.take(seq_lens, 0)
    assert used(scheduler.buffers[index]) == layout.flatten(make_plan(batch, config)).tolist()


def assert_right(items: list[WorkItem], batch: Batch) -> None:
    """Every query reads every position once, and what it reads with others is what it shares with them."""
    paths: list[list[tuple[int, int]]] = [[] for _ in batch.seq_lens]
    for node in tree.walk(batch.roots):
        for query in node.queries:
            paths[query].append((node.end, id(node)))
    read: list[list[tuple[int, int]]] = [[] for _ in batch.seq_lens]
    for item in items:
        for query in item.queries:
            read[query].append((item.start, batch.seq_lens[query] if item.end == OPEN else item.end))
            if len(item.queries) > 1:
                ends = [end for end, node in paths[query] if (end, node) in paths[item.queries[0]]]
                assert item.end != OPEN and item.end <= max(ends)
    for query, length in enumerate(batch.seq_lens):
        starts, ends = zip(*sorted(read[query]), strict=True)
        assert [*starts, length] == [0, *ends]


class Pair:
    """The native scheduler and the Python mirror, told the same."""

    def __init__(self, seed: int, config: PackConfig) -> None:
        self.random = random.Random(seed)
        self.native = NativeScheduler(config, max_batch=64)
        self.mirror = Mirror()
        self.config = config
        self.nodes = 0
        self.rids = 0
        self.batch: list[str] = []
        self.lengths: dict[str, int] = {}
        self.ahead = 0

    def insert(self) -> None:
        self.nodes += 1
        parent = self.random.choice(list(self.mirror.nodes))
        event = NodeInserted(self.nodes, parent, self.random.randint(1, 200), head(self.nodes))
        self.mirror.apply(event)
        self.native.insert(event.node, event.parent, event.length, event.head)

    def split(self) -> None:
        node = self.random.choice(list(self.mirror.nodes.values()))
        if node.parent is None or node.length < 2:
            return
        self.nodes += 1
        event = NodeSplit(node.id, self.nodes, self.random.randint(1, node.length - 1), head(-self.nodes % 2**64))
        self.mirror.apply(event)
        self.native.split(event.node, event.upper, event.length, event.head)

    def bind(self) -> None:
        rid = self.random.choice(self.batch) if self.batch and self.random.random() < 0.2 else f"r{self.rids}"
        self.rids += 1
        node = self.random.choice(list(self.mirror.nodes))
        self.mirror.apply(RequestBound(rid, 7, node, 0))
        self.native.bind(rid, 7, node)
        if rid not in self.batch and self.random.random() < 0.8:
            self.batch.append(rid)
            self.native.join(rid, 5)

    def release(self) -> None:
        if self.mirror.bindings:
            rid = self.random.choice(list(self.mirror.bindings))
            self.mirror.apply(RequestReleased(rid))
            self.native.release(rid)
            if rid in self.batch:
                self.batch.remove(rid)

    def withdraw(self) -> None:
        if self.batch:
            rid = self.random.choice(self.batch)
            self.native.withdraw(rid)
            self.batch.remove(rid)

    def shuffle(self) -> None:
        """Another order, and requests that nobody bound."""
        self.batch = self.random.sample(list(self.mirror.bindings), len(self.mirror.bindings))
        if self.random.random() < 0.5:
            self.batch.append("stranger")
        self.native.set_batch(self.batch)
        if "stranger" in self.batch:
            self.native.release("stranger")
            self.batch.remove("stranger")

    def check(self, prepare: bool = False) -> None:
        mirror, native = self.mirror, self.native
        assert native.num_nodes == len(mirror.nodes) - 1
        assert native.batch == self.batch
        for node in mirror.nodes.values():
            if node.parent is not None:
                assert native.find(node.id) == (node.parent.id, node.length)
                assert native.child(node.parent.id, node.head) == node.id
        for rid, (node, row) in mirror.bindings.items():
            assert native.binding(rid) == (node.id, row, node.end)
        if self.batch:
            # A plan that was made ahead is not taken where a request has become shorter.
            for rid in self.batch:
                end = mirror.bindings[rid][0].end
                self.lengths[rid] = max(end, self.lengths.get(rid, end + self.random.randint(0, 300)) + 1)
            seq_lens = [self.lengths[rid] for rid in self.batch]
            batch = Batch(seq_lens, mirror.batch_tree(self.batch))
            if prepare:
                native.prepare(0)
            index, _, ahead = native.take(np.array(seq_lens, dtype=np.int64), 1)
            self.ahead += ahead
            if ahead:
                assert_right(layout.work_items(native.buffers[index]), batch)
            else:
                assert used(native.buffers[index]) == layout.flatten(make_plan(batch, self.config)).tolist()


@given(st.integers(0, 2**32), configs(), st.booleans())
@settings(max_examples=EXAMPLES // 6, deadline=None)
def test_event_sequences_lead_to_the_oracles_mirror_and_plans(seed: int, config: PackConfig, prepare: bool) -> None:
    pair = Pair(seed, config)
    for step in range(80):
        actions = [pair.insert, pair.insert, pair.split, pair.bind, pair.bind, pair.bind, pair.release, pair.withdraw]
        pair.random.choice(actions)()
        if step % 20 == 19:
            pair.shuffle()
        if step % 5 == 0:
            pair.check(prepare and step % 2 == 0)
    for rid in list(pair.mirror.bindings):
        pair.mirror.apply(RequestReleased(rid))
        pair.native.release(rid)


def test_a_withdrawn_request_stays_bound() -> None:
    scheduler, _ = load(Batch([50] * 3, [Node(0, 9, [0, 1, 2])]), CONFIG)
    version = scheduler.version
    scheduler.withdraw("1")
    assert (scheduler.batch, scheduler.version > version) == (["0", "2"], True)
    version = scheduler.version
    scheduler.withdraw("1")
    scheduler.withdraw("stranger")
    assert scheduler.binding("1") == (1, 1, 9)
    scheduler.release("1")
    assert (scheduler.binding("1"), scheduler.version) == (None, version), "the batch was told before"
    scheduler.expect("late", 5)
    scheduler.withdraw("late")
    assert scheduler.batch == ["0", "2"]


def test_releasing_everything_forgets_everything() -> None:
    scheduler, _ = load(Batch([50] * 4, [Node(0, 9, [0, 1, 2], [Node(9, 20, [1, 2])])]), CONFIG)
    for query in range(4):
        scheduler.release(str(query))
    assert (scheduler.num_nodes, len(scheduler), scheduler.batch) == (0, 0, [])


def test_an_eviction_under_running_requests_unbinds_them_and_they_stay_in_the_batch() -> None:
    batch = Batch([50] * 4, [Node(0, 30, [0, 1, 2], [Node(30, 40, [1, 2])])])
    scheduler, seq_lens = load(batch, CONFIG)
    with pytest.raises(InconsistentError, match="evicted while requests"):
        scheduler.evict(2)
    scheduler.evict(77)
    assert "1" not in scheduler and "0" in scheduler and scheduler.batch == ["0", "1", "2", "3"]
    index, _, _ = scheduler.take(seq_lens, 0)
    assert {tuple(item.queries) for item in layout.work_items(scheduler.buffers[index])} == {(0,), (1,), (2,), (3,)}


@pytest.mark.parametrize("how", ["expect", "set_batch"])
def test_a_request_may_join_before_it_has_a_path(how: str) -> None:
    """With overlap scheduling the first step comes before the cache."""
    scheduler, seq_lens = load(Batch([500] * 2, [Node(0, 300, [0, 1])]), CONFIG)
    scheduler.take(seq_lens, 0)
    if how == "expect":
        scheduler.expect("late", 500)
        scheduler.expect("late", 500)
    else:
        scheduler.set_batch(["0", "1", "late"])
    assert scheduler.batch == ["0", "1", "late"]
    lengths = np.full(3, 500)
    alone = layout.work_items(scheduler.buffers[scheduler.take(lengths, 1)[0]])
    assert max(len(item.queries) for item in alone) == 2
    version = scheduler.version
    scheduler.bind("late", 2, 1)
    assert scheduler.version != version and scheduler.batch == ["0", "1", "late"]
    shared = layout.work_items(scheduler.buffers[scheduler.take(lengths, 1)[0]])
    assert max(len(item.queries) for item in shared) == 3
    assert scheduler.totals(0).requests == 3
    scheduler.release("late")
    assert scheduler.batch == ["0", "1"]


def test_a_request_without_a_path_leaves_the_batch_when_it_is_released() -> None:
    scheduler, seq_lens = load(Batch([500] * 3), CONFIG)
    scheduler.reset()
    scheduler.release("1")
    assert scheduler.batch == ["0", "2"]
    index, _, _ = scheduler.take(seq_lens[:2], 0)
    assert layout.sections(scheduler.buffers[index]).header["batch"] == 2


def test_after_a_reset_the_batch_shares_nothing() -> None:
    scheduler, seq_lens = load(Batch([500] * 3, [Node(0, 300, [0, 1, 2])]), CONFIG)
    scheduler.reset()
    assert scheduler.num_nodes == 0 and "0" not in scheduler
    index, _, _ = scheduler.take(seq_lens, 0)
    assert layout.sections(scheduler.buffers[index]).header["num_queries"] >= 3
    assert all(len(item.queries) == 1 for item in layout.work_items(scheduler.buffers[index]))


@pytest.mark.parametrize(
    "event",
    [
        lambda s: s.insert(1, ROOT, 5, head(9)),
        lambda s: s.insert(8, 99, 5, head(9)),
        lambda s: s.insert(8, ROOT, 5, head(1)),
        lambda s: s.insert(8, ROOT, 0, head(9)),
        lambda s: s.split(1, 8, 30, head(9)),
        lambda s: s.split(99, 8, 1, head(9)),
        lambda s: s.bind("d", 1, 99),
    ],
)
def test_events_that_cannot_be_are_refused(event) -> None:
    scheduler, seq_lens = load(Batch([500] * 3, [Node(0, 30, [0, 1, 2])]), CONFIG)
    before = used(scheduler.buffers[scheduler.take(seq_lens, 0)[0]])
    with pytest.raises(InconsistentError):
        event(scheduler)
    assert used(scheduler.buffers[scheduler.take(seq_lens, 0)[0]]) == before


def test_a_plan_with_more_parts_than_the_workspace_is_refused_and_the_fall_back_needs_none() -> None:
    batch = Batch([5000] * 6, [Node(0, 3000, list(range(6)))])
    scheduler, seq_lens = load(batch, CONFIG, max_slots=5)
    with pytest.raises(PlanTooLargeError, match="workspace of 5"):
        scheduler.take(seq_lens, 0)
    data = scheduler.buffers[scheduler.fall_back(seq_lens, 0)]
    assert layout.sections(data).header["num_slots"] == 0
    items = layout.work_items(data)
    assert sorted(item.queries for item in items) == [[query] for query in range(6)]
    assert {(item.start, item.end) for item in items} == {(0, OPEN)}


def test_a_plan_larger_than_its_buffer_is_refused() -> None:
    batch = Batch([5000] * 6, [Node(0, 3000, list(range(6)))])
    buffers = [np.zeros(64, dtype=np.int32) for _ in range(2)]
    scheduler, seq_lens = load(batch, CONFIG, buffers=buffers)
    with pytest.raises(PlanTooLargeError, match="buffer of 64"):
        scheduler.take(seq_lens, 0)


def test_lengths_of_another_batch_are_refused() -> None:
    scheduler, seq_lens = load(Batch([50] * 4), CONFIG)
    with pytest.raises(PlanTooLargeError, match="as many lengths"):
        scheduler.take(seq_lens[:3], 0)


def test_a_prepared_plan_is_taken_for_the_batch_that_it_was_made_for() -> None:
    scheduler, seq_lens = load(Batch([5000] * 4, [Node(0, 3000, [0, 1, 2, 3])]), CONFIG)
    first, good, ahead = scheduler.take(seq_lens, 0)
    assert not ahead
    scheduler.prepare(10)
    time.sleep(0.05)
    second, good_later, ahead = scheduler.take(seq_lens + 12, 10)
    assert ahead and second != first
    assert good_later <= good + 10 - 2, "two tokens more than the plan was made for"


@pytest.mark.parametrize("change", ["join", "release", "withdraw", "move", "reset", "set_batch", "shorter"])
def test_a_prepared_plan_is_never_taken_for_another_batch(change: str) -> None:
    batch = Batch([5000] * 4, [Node(0, 3000, [0, 1, 2, 3], [Node(3000, 3500, [0, 1])])])
    for before_copy, before_publish in ((0, 0), (3000, 0), (0, 3000)):
        scheduler, seq_lens = load(batch, CONFIG)
        scheduler.bind("new", 4, 1)
        scheduler.take(seq_lens, 0)
        scheduler.set_delays(before_copy, before_publish)
        scheduler.prepare(0)
        if before_copy + before_publish == 0:
            time.sleep(0.02)
        fresh, lens = load(batch, CONFIG)
        for target in (scheduler, fresh):
            if change == "join":
                target.bind("new", 4, 1)
                target.join("new", 4000)
            elif change == "release":
                target.release("2")
            elif change == "withdraw":
                target.withdraw("2")
            elif change == "move":
                target.bind("1", 1, 1)
            elif change == "reset":
                target.reset()
            elif change == "set_batch":
                target.set_batch(["3", "2", "1", "0"])
        lens = (
            lens[:3]
            if change in ("release", "withdraw")
            else np.full(len(fresh.batch), 4000 if change == "shorter" else 5000)
        )
        index, _, ahead = scheduler.take(lens, 1)
        assert not ahead or change != "shorter"
        assert used(scheduler.buffers[index]) == used(fresh.buffers[fresh.take(lens, 0)[0]])


def test_under_load_every_plan_is_for_its_batch() -> None:
    """Requests come and go while the scheduler's thread works at random speed; plans are compared with the oracle's."""
    ahead = 0
    for delays in ((0, 0), (200, 0), (0, 200), (100, 100)):
        pair = Pair(7, msgspec.structs.replace(CONFIG, policy="optimal"))
        pair.native.set_delays(*delays)
        for step in range(150):
            pair.random.choice([pair.insert, pair.split, pair.bind, pair.bind, pair.release, pair.withdraw])()
            if pair.batch:
                pair.native.prepare(0)
            if step % 3 == 0:
                time.sleep(pair.random.random() * 1e-3)
                pair.check()
        ahead += pair.ahead
    assert ahead > 20


@pytest.mark.skipif(bool(os.environ.get(jit.SANITIZE)), reason="counts allocations itself")
def test_a_steady_state_allocates_nothing(tmp_path: Path) -> None:
    source, program = Path(__file__).parent / "csrc" / "steady_state.cpp", tmp_path / "steady_state"
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, "-std=c++17", "-O1", "-Wno-psabi", "-pthread", source, "-o", program], check=True)
    plans, everything, steady = map(int, subprocess.run([program], capture_output=True, check=True).stdout.split())
    assert plans > 4000 and everything > 100
    assert steady == 0


def test_schedulers_are_closed_while_their_threads_work() -> None:
    def work() -> None:
        for _ in range(10):
            scheduler, _ = load(Batch([5000] * 4, [Node(0, 3000, [0, 1, 2, 3])]), CONFIG)
            scheduler.set_delays(200, 200)
            scheduler.prepare(0)
            del scheduler

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_totals_are_those_of_the_steps() -> None:
    batch = Batch([600, 700], [Node(0, 500, [0, 1])])
    scheduler, seq_lens = load(batch, msgspec.structs.replace(CONFIG, workers=1))
    scheduler.take(seq_lens, 0)
    scheduler.take(seq_lens + 3, 3)
    totals = scheduler.totals(2)
    unpacked = sum(1300 + 2 * step for step in range(5))
    assert (totals.steps, totals.kv_tokens_unpacked, totals.kv_tokens) == (5, unpacked, unpacked - 500 * 5)
    assert totals.query_sizes == {1: 10, 2: 5} and totals.work_items == 15 and totals.parts == 20


def test_the_policies_are_numbered_as_the_native_scheduler_numbers_them() -> None:
    """Each policy alone makes this plan: a mixed up number would show."""
    batch = Batch(
        [900] * 40, [Node(0, 60, list(range(40)), [Node(60, 90, list(range(20))), Node(60, 800, list(range(20, 40)))])]
    )
    tiles = TileTable((16, 64, 128), (32, 64, 128), (64, 512))
    plans = {}
    for policy in POLICIES:
        config = PackConfig(CostModel(32, 8, 128, 128, 2), tiles, 132, policy)
        scheduler, seq_lens = load(batch, config)
        plans[policy] = used(scheduler.buffers[scheduler.take(seq_lens, 0)[0]])
        assert plans[policy] == layout.flatten(make_plan(batch, config)).tolist()
    assert plans["query"] != plans["pat"] != plans["naive"]
    tree.check(batch)
