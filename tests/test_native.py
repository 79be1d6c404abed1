"""The native scheduler makes the plans of the Python one. Needs neither torch nor SGLang, so that sanitizers can run it."""

from __future__ import annotations

import itertools
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import headers
import msgspec
import numpy as np
import pytest
import tvm_ffi
from hypothesis import example, given, settings
from hypothesis import strategies as st
from natives import next_batch, set_delays, settle
from oracle import for_batch, make_packs, make_plan, makespan, pricing
from oracle.mirror import Mirror
from trees import PRICED, SMALL, TILES, WARPS, batches, check, configs, random_batch, straddling

from sglang_pat import jit
from sglang_pat.packing import (
    OPEN,
    POLICIES,
    Batch,
    CostModel,
    Node,
    PackConfig,
    TileTable,
    WorkItem,
    layout,
    native,
    tree,
)
from sglang_pat.packing.constants import LEVELS
from sglang_pat.packing.native import NativeScheduler, PlanTooLargeError, _halves, batch_in
from sglang_pat.packing.tree import InconsistentError
from sglang_pat.radix_bridge.events import (
    ROOT,
    NodeEvicted,
    NodeInserted,
    NodeSplit,
    RequestBound,
    RequestReleased,
    RequestsExpected,
)

pytestmark = pytest.mark.once

EXAMPLES = 40 if os.environ.get(jit.SANITIZE) else 400

CONFIG = PackConfig(CostModel(8, 2, 64, 64, 2), TILES, workers=132)
STRANGER = 5 << 32 | 99


def head(number: int) -> bytes:
    return number.to_bytes(16, "little")


def load(batch: Batch, config: PackConfig, **limits: Any) -> tuple[NativeScheduler, np.ndarray]:
    """A scheduler that heard of the batch's tree event by event, and the sequence lengths."""
    scheduler = NativeScheduler(config, max_batch=len(batch.seq_lens), **limits)
    native.load(scheduler, batch)
    for query, length in enumerate(batch.seq_lens):
        scheduler.expect(query, length)
    return scheduler, np.array(batch.seq_lens, dtype=np.int64)


def take(
    scheduler: NativeScheduler, seq_lens: Sequence[int], steps: int = 0, requests: Sequence[int] = ()
) -> tuple[int, int, bool]:
    """The plan for these requests, by default those of `load`."""
    requests = requests or range(len(seq_lens))
    return scheduler.take(np.array(requests, dtype=np.int64), np.array(seq_lens, dtype=np.int64), steps)


def used(data: np.ndarray) -> list[int]:
    return data[: layout.sections(data).header["size"]].tolist()


@given(batches(), configs())
@settings(max_examples=EXAMPLES, deadline=None)
def test_plans_are_those_of_the_oracle(batch: Batch, config: PackConfig) -> None:
    scheduler, seq_lens = load(batch, config)
    index, steps, _ = take(scheduler, seq_lens)
    plan = make_plan(batch, config)
    assert used(scheduler.buffers[index]) == layout.flatten(plan).tolist()
    assert (steps, scheduler.current()[:2]) == (plan.steps, (plan.kv_tokens, plan.merged_parts))


@given(batches(), configs())
@settings(max_examples=EXAMPLES, deadline=None)
def test_tools_are_told_the_oracles_packs_and_prices(batch: Batch, config: PackConfig) -> None:
    found, planned, seen = (
        native.inspect(batch, config),
        for_batch(batch, config),
        tree.in_windows(batch, config.window),
    )
    assert (found.plan, found.config) == (make_plan(batch, config), planned)
    packs = sorted((pack.start, pack.end or 0, pack.queries, pack.tails) for pack in found.packs)
    assert packs == sorted((pack.start, pack.end or 0, pack.queries, pack.tails) for pack in make_packs(seen, planned))
    prefixes, bins = tree.compact(seen), planned.for_bins
    for pack in found.packs:
        prefix = prefixes[pack.node]
        assert set(pack.queries) <= set(prefix.queries) and pack.end in (None, prefix.end)
    spans = [item.span(batch.seq_lens) for item in found.plan.items]
    assert found.prices == [
        pricing.item_price(
            bins, len(item.queries), end - start, pricing.runs_in_row_slices(bins, len(item.queries), item.m)
        )
        for item, (start, end) in zip(found.plan.items, spans, strict=True)
    ]
    assert (found.tail_price, found.turn_price) == (bins.token_price(1), bins.turn_price)
    assert found.makespan == makespan(found.plan, batch.seq_lens, planned)


def test_there_is_nothing_to_inspect_before_a_plan() -> None:
    scheduler = NativeScheduler(PackConfig(CostModel(1, 1, 8, 8, 2), PRICED, workers=2), max_batch=4, max_slots=0)
    with pytest.raises(ValueError, match="no plan to inspect"):
        scheduler.inspected()


# A bin with two kinds of work items, and tails of which one bin has more: both count for how long the plan is good.
@example(
    Batch([118] * 22 + [1244, *[1] * 6, 488, 1, 1, 11], [Node(0, 117, list(range(23)))]),
    PackConfig(CostModel(1, 1, 8, 8, 2), PRICED, workers=2, policy="naive"),
)
@given(batches(max_queries=60, max_length=3000), configs())
@settings(max_examples=EXAMPLES // 6, deadline=None)
def test_plans_of_larger_batches_are_those_of_the_oracle(batch: Batch, config: PackConfig) -> None:
    scheduler, seq_lens = load(batch, config)
    index, _, _ = take(scheduler, seq_lens)
    assert used(scheduler.buffers[index]) == layout.flatten(make_plan(batch, config)).tolist()


@given(batches(max_queries=60, max_length=3000), straddling())
@settings(max_examples=EXAMPLES // 4, deadline=None)
def test_plans_whose_queries_straddle_work_items_are_those_of_the_oracle(batch: Batch, config: PackConfig) -> None:
    scheduler, seq_lens = load(batch, config)
    index, _, _ = take(scheduler, seq_lens)
    data = scheduler.buffers[index]
    assert used(data) == layout.flatten(make_plan(batch, config)).tolist()
    assert layout.read(data, scheduler.current()[0]) == make_plan(batch, config)


@pytest.mark.parametrize("seed", range(24))
def test_without_prices_items_of_single_warps_count_as_many_tokens_as_they_compute(seed: int) -> None:
    """Of prefixes so short that this decides what is packed. The planner's shorter way, for tiles that all cost the same, left it out."""
    generator = random.Random(seed)
    batch = random_batch(generator, 3, 3, generator.choice([6, 10, 20]))
    config = PackConfig(CostModel(4, 2, 64, 64, 2), WARPS, workers=generator.choice([1, 4]))
    assert native.make_plan(batch, config) == make_plan(batch, config)


def test_both_languages_know_the_same_constants() -> None:
    for path, text in headers.headers().items():
        assert path.read_text() == text, "run python tests/headers.py"


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
    index, _, _ = take(scheduler, seq_lens)
    assert used(scheduler.buffers[index]) == layout.flatten(make_plan(batch, config)).tolist()


@given(batches(), configs(), st.integers(1, 30), st.integers(0, 40))
@settings(max_examples=EXAMPLES // 2, deadline=None)
def test_a_plan_that_does_not_fit_packs_as_many_levels_as_the_oracle_says(
    batch: Batch, config: PackConfig, ints: int, slots: int
) -> None:
    buffers = [np.zeros(100 + 20 * ints, dtype=np.int32) for _ in range(2)]
    scheduler, seq_lens = load(batch, config, max_slots=slots, buffers=buffers)
    for levels in (None, *LEVELS):
        data = layout.flatten(make_plan(batch, config, levels))
        if len(data) <= len(buffers[0]) and layout.num_slots(data) <= slots:
            index, _, _ = take(scheduler, seq_lens)
            assert (scheduler.levels, used(buffers[index])) == (levels, data.tolist())
            return
    with pytest.raises(PlanTooLargeError):
        take(scheduler, seq_lens)


def nested(count: int, length: int) -> Batch:
    """Each prompt begins with the one before; and two requests that share something else."""
    root = node = Node(0, length, list(range(count)))
    for _ in range(1, count - 1):
        node.children = [Node(node.end, node.end + length, node.queries[1:])]
        node = node.children[0]
    lengths = [length * (query + 1) + 5 for query in range(count)]
    return Batch([*lengths, 3000, 3000], [root, Node(0, 2900, [count, count + 1])])


@pytest.mark.parametrize(
    ("policy", "slots", "levels"), [("optimal", 2**31 - 1, 14), ("optimal", 8 * 102, 6), ("pat", 2**31 - 1, 32)]
)
@pytest.mark.parametrize("ahead", [False, True])
def test_others_are_packed_beside_many_nested_prompts(policy: str, slots: int, levels: int, ahead: bool) -> None:
    batch, config = nested(100, 1000), PackConfig(CostModel(32, 8, 128, 128, 2), PRICED, 16, policy)
    scheduler, seq_lens = load(batch, config, max_slots=slots)
    if ahead:
        scheduler.prepare(0)
        settle(scheduler)
    index, good, taken_ahead = take(scheduler, seq_lens)
    assert (scheduler.levels, taken_ahead) == (levels, ahead) and good > 0
    data = scheduler.buffers[index]
    assert used(data) == layout.flatten(make_plan(batch, config, levels)).tolist()
    items = layout.work_items(data)
    assert_right(items, batch, 0)
    assert any(item.queries == [100, 101] for item in items)
    assert scheduler.current()[0] < (1 - levels / 80) * seq_lens.sum(), "the nested prompts share some, too"
    whole = native.make_plan(batch, config)
    assert whole == make_plan(batch, config), "tools see the plan of all levels"


def assert_right(items: list[WorkItem], batch: Batch, window: int) -> None:
    """Every row of a query reads every position that it sees once, and what it reads with others is what it shares with them."""
    paths: list[list[tuple[int, int]]] = [[] for _ in batch.seq_lens]
    for node in tree.walk(batch.roots):
        for query in node.queries:
            paths[query].append((node.end, id(node)))
    read: list[list[tuple[tuple[int, int], tuple[int, int]]]] = [[] for _ in batch.seq_lens]  # rows and positions
    for item in items:
        for query, rows in zip(item.queries, item.rows or [(0, 1 << 15)] * len(item.queries), strict=True):
            read[query].append((rows, item.seen(query, batch.seq_lens)))
            if len(item.queries) > 1:
                ends = [end for end, node in paths[query] if (end, node) in paths[item.queries[0]]]
                assert item.end != OPEN and item.end <= max(ends)
    for query, length in enumerate(batch.seq_lens):
        for row in {0, *(first for (first, _), _ in read[query])}:
            spans = [span for (first, end), span in read[query] if first <= row < end]
            starts, ends = zip(*sorted(spans), strict=True)
            assert [*starts, length] == [max(0, length - (window or length)), *ends]


class Pair:
    """The native scheduler and the Python mirror, told the same."""

    def __init__(self, seed: int, config: PackConfig) -> None:
        self.random = random.Random(seed)
        self.native = NativeScheduler(config, max_batch=64)
        self.mirror = Mirror()
        self.config = config
        self.nodes = 0
        self.requests = 0
        self.batch: list[int] = []
        self.lengths: dict[int, int] = {}
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

    def new_request(self) -> int:
        """In a row of its own, or now and then in one that somebody else has and never gave back."""
        self.requests += 1
        if self.random.random() < 0.05 and self.mirror.bindings:
            owner = self.random.choice(list(self.mirror.bindings))
            if owner in self.batch:
                self.batch.remove(owner)
            return owner + (1 << 32)
        return self.requests

    def bind(self) -> None:
        known = [request for request in self.batch if request in self.mirror.bindings]
        request = self.random.choice(known) if known and self.random.random() < 0.2 else self.new_request()
        node = self.random.choice(list(self.mirror.nodes))
        self.mirror.apply(RequestBound(request, node, 0))
        self.native.bind(request, node)
        if request not in self.batch and self.random.random() < 0.8:
            self.batch.append(request)
            self.native.expect(request, 5)

    def expect(self) -> None:
        """With overlap scheduling the first step comes before the cache."""
        request = self.new_request()
        self.mirror.apply(RequestsExpected([request], [9], [""]))
        self.native.expect(request, 9)
        self.batch.append(request)

    def release(self) -> None:
        if self.mirror.bindings:
            request = self.random.choice(list(self.mirror.bindings))
            self.mirror.apply(RequestReleased(request))
            self.native.release(request)
            if request in self.batch:
                self.batch.remove(request)

    def withdraw(self) -> None:
        if self.batch:
            request = self.random.choice(self.batch)
            self.native.withdraw(request)
            self.batch.remove(request)

    def evict(self) -> None:
        node = self.random.choice(list(self.mirror.nodes))
        for target in (lambda: self.mirror.apply(NodeEvicted(node)), lambda: self.native.evict(node)):
            if node == ROOT:
                target()
            else:
                with pytest.raises(InconsistentError, match="evicted while requests"):
                    target()

    def shuffle(self) -> None:
        """Another order, and rows of which nothing is known."""
        self.batch = self.random.sample(list(self.mirror.bindings), len(self.mirror.bindings))
        for _ in range(self.random.choice([0, 0, 1, 2])):
            self.requests += 1
            self.batch.insert(self.random.randint(0, len(self.batch)), self.requests)
        self.check_plan()

    def aside(self) -> None:
        """A batch that is not the next one."""
        bindings = self.mirror.bindings
        batch = self.random.sample(list(bindings), self.random.randint(0, len(bindings)))
        if not batch or batch == self.batch:
            return
        seq_lens = [bindings[request].end + self.random.randint(1, 50) for request in batch]
        index, good, ahead = self.native.take(np.array(batch), np.array(seq_lens), 1, aside=True)
        assert (good, ahead, self.native.stands(np.array(batch))) == (0, False, False)
        tree = self.mirror.batch(batch, seq_lens)
        assert batch_in(self.native, batch, seq_lens) == tree
        assert used(self.native.buffers[index]) == layout.flatten(make_plan(tree, self.config)).tolist()
        assert next_batch(self.native) == self.batch

    def check(self, prepare: bool = False) -> None:
        mirror, native = self.mirror, self.native
        assert native.num_nodes == len(mirror.nodes) - 1
        assert next_batch(native) == self.batch
        for node in mirror.nodes.values():
            if node.parent is not None:
                assert native.find(node.id) == (node.parent.id, node.length)
                assert native.child(node.parent.id, node.head) == node.id
        for request, node in mirror.bindings.items():
            assert native.binding(request) == (node.id, node.end)
        if prepare:
            native.prepare(0)
        self.check_plan()

    def check_plan(self) -> None:
        if not self.batch:
            return
        native, bindings = self.native, self.mirror.bindings
        # A plan that was made ahead is not taken where a request has become shorter; it may be shorter than its path.
        for request in self.batch:
            end = bindings[request].end if request in bindings else 0
            least = end if self.random.random() < 0.95 else 0
            self.lengths[request] = max(least, self.lengths.get(request, end + self.random.randint(0, 300)) + 1)
        seq_lens = [self.lengths[request] for request in self.batch]
        batch = self.mirror.batch(self.batch, seq_lens)
        index, _, ahead = take(native, seq_lens, 1, self.batch)
        self.ahead += ahead
        if ahead:
            assert_right(layout.work_items(native.buffers[index]), batch, self.config.window)
        else:
            assert used(native.buffers[index]) == layout.flatten(make_plan(batch, self.config)).tolist()


@given(st.integers(0, 2**32), configs(), st.booleans())
@settings(max_examples=EXAMPLES // 6, deadline=None)
def test_event_sequences_lead_to_the_oracles_mirror_and_plans(seed: int, config: PackConfig, prepare: bool) -> None:
    pair = Pair(seed, config)
    for step in range(80):
        actions = [pair.insert] * 2 + [pair.split] + [pair.bind] * 3 + [pair.expect, pair.release, pair.withdraw]
        pair.random.choice(actions if step % 16 else [pair.evict])()
        if step % 20 == 19:
            pair.shuffle()
        if step % 7 == 3:
            pair.aside()
        if step % 5 == 0:
            pair.check(prepare and step % 2 == 0)
    for request in list(pair.mirror.bindings):
        pair.mirror.apply(RequestReleased(request))
        pair.native.release(request)
    assert len(pair.native) == 0


def test_a_withdrawn_request_stays_bound() -> None:
    scheduler, _ = load(Batch([50] * 3, [Node(0, 9, [0, 1, 2])]), CONFIG)
    version = scheduler.version
    scheduler.withdraw(1)
    assert (next_batch(scheduler), scheduler.version > version) == ([0, 2], True)
    version = scheduler.version
    scheduler.withdraw(1)
    scheduler.withdraw(STRANGER)
    assert scheduler.binding(1) == (1, 9)
    scheduler.release(1)
    assert (scheduler.binding(1), scheduler.version) == (None, version), "the batch was told before"
    scheduler.expect(3, 5)
    scheduler.withdraw(3)
    assert next_batch(scheduler) == [0, 2]


def test_releasing_everything_forgets_everything() -> None:
    scheduler, _ = load(Batch([50] * 4, [Node(0, 9, [0, 1, 2], [Node(9, 20, [1, 2])])]), CONFIG)
    for query in range(4):
        scheduler.release(query)
    assert (scheduler.num_nodes, len(scheduler), next_batch(scheduler)) == (0, 0, [])


def test_requests_on_an_evicted_node_stay_in_the_batch_and_share_nothing() -> None:
    batch = Batch([50] * 4, [Node(0, 30, [0, 1, 2], [Node(30, 40, [1, 2])])])
    scheduler, seq_lens = load(batch, CONFIG)
    with pytest.raises(InconsistentError, match="evicted while requests"):
        scheduler.evict(2)
    scheduler.evict(77)
    assert scheduler.binding(1) == (ROOT, 0) and scheduler.binding(0) == (1, 30)
    assert next_batch(scheduler) == [0, 1, 2, 3]
    assert groups(scheduler, seq_lens) == {(0,), (1,), (2,), (3,)}
    scheduler.expect(1, 51)
    scheduler.release(1)
    assert next_batch(scheduler) == [0, 2, 3]


def groups(scheduler: NativeScheduler, seq_lens: Sequence[int], requests: Sequence[int] = ()) -> set[tuple[int, ...]]:
    """Who reads together, in the plan for these requests."""
    index, _, _ = take(scheduler, seq_lens, 0, requests)
    return {tuple(item.queries) for item in layout.work_items(scheduler.buffers[index])}


def test_a_request_may_join_before_it_has_a_path() -> None:
    """With overlap scheduling the first step comes before the cache."""
    scheduler, seq_lens = load(Batch([500] * 2, [Node(0, 300, [0, 1])]), CONFIG)
    take(scheduler, seq_lens)
    scheduler.expect(2, 500)
    scheduler.expect(2, 500)
    assert next_batch(scheduler) == [0, 1, 2]
    assert groups(scheduler, [500] * 3) == {(0, 1), (0,), (1,), (2,)}
    version = scheduler.version
    scheduler.bind(2, 1)
    assert scheduler.version != version and next_batch(scheduler) == [0, 1, 2]
    assert (0, 1, 2) in groups(scheduler, [500] * 3)
    assert scheduler.totals(0).requests == 3
    scheduler.release(2)
    assert next_batch(scheduler) == [0, 1]


def test_a_batch_may_have_a_request_that_was_never_heard_of() -> None:
    """Rows that beam search adds, for example."""
    scheduler, _ = load(Batch([500] * 2, [Node(0, 300, [0, 1])]), CONFIG)
    batch = [0, STRANGER, 1, -1, 7]
    assert groups(scheduler, [500] * 5, batch) == {(0, 2), (0,), (1,), (2,), (3,), (4,)}
    assert next_batch(scheduler) == batch and len(scheduler) == 2
    scheduler.bind(7, 1)
    assert (0, 2, 4) in groups(scheduler, [500] * 5, batch)
    scheduler.release(0)
    scheduler.release(STRANGER)
    assert next_batch(scheduler) == [1, -1, 7]


def test_a_row_has_one_request_and_whoever_had_it_before_shares_nothing() -> None:
    """Whatever way the row was given back."""
    scheduler, seq_lens = load(Batch([500] * 3, [Node(0, 300, [0, 1, 2])]), CONFIG)
    heir = 1 << 32 | 1
    assert groups(scheduler, seq_lens, [0, heir, 2]) == {(0, 2), (0,), (1,), (2,)}
    scheduler.expect(heir, 500)
    assert scheduler.binding(1) is None and scheduler.binding(heir) == (ROOT, 0)
    assert groups(scheduler, seq_lens, [0, 1, 2]) == {(0, 2), (0,), (1,), (2,)}
    scheduler.bind(heir, 1)
    assert (0, 1, 2) in groups(scheduler, seq_lens, [0, heir, 2])
    scheduler.bind(2 << 32 | 1, 1)
    assert scheduler.binding(heir) is None and next_batch(scheduler) == [0, 2]


def test_a_request_that_is_in_a_batch_twice_is_known_once() -> None:
    scheduler, _ = load(Batch([500] * 2, [Node(0, 300, [0, 1])]), CONFIG)
    assert groups(scheduler, [500] * 3, [0, 1, 1]) == {(0, 1), (0,), (1,), (2,)}
    for request in (1, 0, 1):
        scheduler.release(request)
    assert (scheduler.num_nodes, len(scheduler), next_batch(scheduler)) == (0, 0, [])


def test_a_request_that_is_shorter_than_its_path_shares_nothing() -> None:
    scheduler, _ = load(Batch([500] * 3, [Node(0, 300, [0, 1, 2])]), CONFIG)
    assert groups(scheduler, [500, 299, 500]) == {(0, 2), (0,), (1,), (2,)}
    assert (0, 1, 2) in groups(scheduler, [500, 300, 500])


def test_after_a_reset_the_batch_shares_nothing() -> None:
    scheduler, seq_lens = load(Batch([500] * 3, [Node(0, 300, [0, 1, 2])]), CONFIG)
    scheduler.reset()
    assert scheduler.num_nodes == 0 and scheduler.binding(0) == (ROOT, 0)
    assert groups(scheduler, seq_lens) == {(0,), (1,), (2,)}


def test_a_plan_stands_while_its_batch_and_paths_do() -> None:
    scheduler, seq_lens = load(Batch([500] * 3, [Node(0, 300, [0, 1, 2])]), CONFIG)
    batch = np.arange(3)
    assert not scheduler.stands(batch)
    take(scheduler, seq_lens)
    scheduler.insert(9, ROOT, 5, head(9))
    scheduler.bind(7, 9)
    assert scheduler.stands(batch) and not scheduler.stands(batch[:2]) and not scheduler.stands(batch[::-1].copy())
    scheduler.bind(1, 9)
    assert not scheduler.stands(batch)
    assert scheduler.fall_back(seq_lens, 0)[1] == 0
    assert not scheduler.stands(batch)


@pytest.mark.parametrize(
    "event",
    [
        lambda s: s.insert(1, ROOT, 5, head(9)),
        lambda s: s.insert(8, 99, 5, head(9)),
        lambda s: s.insert(8, ROOT, 5, head(1)),
        lambda s: s.insert(8, ROOT, 0, head(9)),
        lambda s: s.split(1, 8, 30, head(9)),
        lambda s: s.split(99, 8, 1, head(9)),
        lambda s: s.bind(1, 99),
        lambda s: s.bind(-1, 1),
        lambda s: s.expect(1 << 31, 5),
    ],
)
def test_events_that_cannot_be_are_refused(event) -> None:
    scheduler, seq_lens = load(Batch([500] * 3, [Node(0, 30, [0, 1, 2])]), CONFIG)
    before = used(scheduler.buffers[take(scheduler, seq_lens)[0]])
    with pytest.raises(InconsistentError):
        event(scheduler)
    assert used(scheduler.buffers[take(scheduler, seq_lens)[0]]) == before


def test_a_plan_with_more_parts_than_the_workspace_is_refused_and_the_fall_back_needs_none() -> None:
    batch = Batch([5000] * 6, [Node(0, 3000, list(range(6)))])
    scheduler, seq_lens = load(batch, CONFIG, max_slots=5)
    with pytest.raises(PlanTooLargeError, match="workspace of 5"):
        take(scheduler, seq_lens)
    index, good = scheduler.fall_back(seq_lens, 0, stands=True)
    assert good > 0 and scheduler.stands(np.arange(6)) and not scheduler.stands(np.arange(5))
    data = scheduler.buffers[index]
    assert layout.sections(data).header["num_slots"] == 0
    items = layout.work_items(data)
    assert sorted(item.queries for item in items) == [[query] for query in range(6)]
    assert {(item.start, item.end) for item in items} == {(0, OPEN)}


def test_the_fall_back_of_a_small_batch_is_not_cut_either() -> None:
    cost = CostModel(128, 8, 128, 128, 2)
    config = PackConfig(
        cost,
        msgspec.structs.replace(SMALL, wide_steps=msgspec.structs.replace(SMALL.wide_steps, small_tokens=10_000)),
        132,
        drafts=True,
    )
    scheduler, seq_lens = load(Batch([5000] * 6), config, max_slots=1)
    with pytest.raises(PlanTooLargeError, match="workspace of 1"):
        take(scheduler, seq_lens)
    index, _ = scheduler.fall_back(seq_lens, 0)
    items = layout.work_items(scheduler.buffers[index])
    assert {(item.start, item.end) for item in items} == {(0, OPEN)} and len(items) == 6


@pytest.mark.parametrize("lengths", [[4000] * 300, [30_000, *[700] * 90], [200_000], list(range(50, 900))])
def test_a_fall_back_is_as_even_as_whole_requests_let_it_be(lengths: list[int]) -> None:
    """It runs on all SMs, as a plan of one query per work item does."""
    config = PackConfig(CostModel(64, 8, 128, 128, 2), PRICED, 132, "query")
    scheduler, seq_lens = load(Batch(lengths), config)
    take(scheduler, seq_lens)
    even = scheduler.current()[2]
    scheduler.fall_back(seq_lens, 1)
    longest_request = pricing.uncut_price(config, 1, max(lengths))
    assert scheduler.current()[2] <= 1.1 * max(even, longest_request) + longest_request


def test_a_batch_aside_leaves_the_next_one_as_it_was() -> None:
    """Also if it has no plan. Requests of both may be the same."""
    scheduler, seq_lens = load(Batch([500] * 4, [Node(0, 300, [0, 1, 2, 3])]), CONFIG)
    first = used(scheduler.buffers[take(scheduler, seq_lens)[0]])
    batch = next_batch(scheduler)
    index, good, _ = scheduler.take(np.array([3, 7]), np.array([500, 9]), 1, aside=True)
    assert good == 0 and layout.sections(scheduler.buffers[index]).header["batch"] == 2
    assert (
        next_batch(scheduler) == batch and not scheduler.stands(np.array([3, 7])) and not scheduler.stands(np.arange(4))
    )
    with pytest.raises(ValueError, match="tokens"):
        scheduler.take(np.array([3]), np.array([-1]), 1, aside=True)
    assert next_batch(scheduler) == batch
    index, good, _ = take(scheduler, seq_lens)
    assert good > 0 and used(scheduler.buffers[index]) == first and scheduler.stands(np.arange(4))


def test_a_plan_larger_than_its_buffer_is_refused() -> None:
    batch = Batch([5000] * 6, [Node(0, 3000, list(range(6)))])
    buffers = [np.zeros(64, dtype=np.int32) for _ in range(2)]
    scheduler, seq_lens = load(batch, CONFIG, buffers=buffers)
    with pytest.raises(PlanTooLargeError, match="buffer of 64"):
        take(scheduler, seq_lens)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([50] * 3, "seq_lens must have 4"), ([50, 50, -1, 50], "a request's tokens"), ([2**31] * 4, "a request's tokens")],
)
def test_lengths_that_cannot_be_are_refused(lengths: list[int], message: str) -> None:
    scheduler, _ = load(Batch([50] * 4), CONFIG)
    with pytest.raises(ValueError, match=message):
        take(scheduler, lengths, 0, range(4))
    with pytest.raises(ValueError, match="steps must be"):
        take(scheduler, [50] * 4, -1)


@pytest.mark.skipif(not os.environ.get(jit.SANITIZE), reason="only a sanitizer sees an overflow")
def test_prices_of_a_batch_that_cannot_be_do_not_overflow() -> None:
    """Requests are expected one at a time; `take` would refuse them together, but they are planned ahead."""
    native = NativeScheduler(msgspec.structs.replace(CONFIG, cost=CostModel(8, 2, 2**18, 2**18, 4)), max_batch=2000)
    for request in range(2000):
        native.expect(request, 2**31 - 1)
    native.prepare(0)
    settle(native)


def test_a_prepared_plan_is_taken_for_the_batch_that_it_was_made_for() -> None:
    scheduler, seq_lens = load(Batch([5000] * 4, [Node(0, 3000, [0, 1, 2, 3])]), CONFIG)
    first, good, ahead = take(scheduler, seq_lens)
    assert not ahead
    scheduler.prepare(10)
    settle(scheduler)
    second, good_later, ahead = take(scheduler, seq_lens + 12, 10)
    assert ahead and second != first
    assert good_later <= good + 10 - 2, "two tokens more than the plan was made for"


@pytest.mark.parametrize("change", ["join", "release", "withdraw", "move", "reset", "order", "shorter"])
def test_a_prepared_plan_is_never_taken_for_another_batch(change: str) -> None:
    batch = Batch([5000] * 4, [Node(0, 3000, [0, 1, 2, 3], [Node(3000, 3500, [0, 1])])])
    for before_copy, before_publish in ((0, 0), (3000, 0), (0, 3000)):
        scheduler, seq_lens = load(batch, CONFIG)
        scheduler.bind(4, 1)
        take(scheduler, seq_lens)
        set_delays(scheduler, before_copy, before_publish)
        scheduler.prepare(0)
        if before_copy + before_publish == 0:
            settle(scheduler)
        fresh, _ = load(batch, CONFIG)
        for target in (scheduler, fresh):
            if change == "join":
                target.bind(4, 1)
                target.expect(4, 4000)
            elif change == "release":
                target.release(2)
            elif change == "withdraw":
                target.withdraw(2)
            elif change == "move":
                target.bind(1, 1)
            elif change == "reset":
                target.reset()
        requests = [3, 2, 1, 0] if change == "order" else next_batch(fresh)
        lengths = [4000 if change == "shorter" else 5000] * len(requests)
        index, _, ahead = take(scheduler, lengths, 1, requests)
        assert not ahead or change != "shorter"
        assert used(scheduler.buffers[index]) == used(fresh.buffers[take(fresh, lengths, 0, requests)[0]])


def test_under_load_every_plan_is_for_its_batch() -> None:
    """Requests come and go while the scheduler's thread works at random speed; plans are compared with the oracle's."""
    ahead = 0
    for delays in ((0, 0), (200, 0), (0, 200), (100, 100)):
        pair = Pair(7, msgspec.structs.replace(CONFIG, policy="optimal"))
        set_delays(pair.native, *delays)
        for step in range(150):
            pair.random.choice([pair.insert, pair.split, pair.bind, pair.bind, pair.release, pair.withdraw])()
            if pair.batch:
                pair.native.prepare(0)
            if step % 3 == 0:
                time.sleep(pair.random.random() * 1e-3)
                pair.check()
        ahead += pair.ahead
    assert ahead > 20


ODD = [-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**62, 2**63 - 1]
REFUSED = (InconsistentError, PlanTooLargeError, ValueError)


@pytest.mark.parametrize("seed", range(4 if os.environ.get(jit.SANITIZE) else 20))
def test_whatever_is_called_there_is_an_error_or_a_plan_that_is_right(seed: int) -> None:
    """Unknown and repeated requests, rows that change hands, numbers that cannot be: no trust in the caller."""
    generator = random.Random(seed)
    native, mirror = NativeScheduler(CONFIG, max_batch=64), Mirror()
    module, handle = native.load_module(), native._handle

    def number() -> int:
        return generator.choice([*ODD, *range(30)]) if generator.random() < 0.3 else generator.randrange(12)

    def request() -> int:
        return (
            generator.choice(ODD)
            if generator.random() < 0.05
            else generator.randrange(3) << 32 | generator.randrange(12)
        )

    def both(event: Any, name: str, *arguments: Any) -> None:
        getattr(module, name)(handle, *arguments)
        mirror.apply(event)  # what the native mirror took, this one takes

    def evict(node: int) -> None:
        for action in (lambda: module.evict(handle, node), lambda: mirror.apply(NodeEvicted(node))):
            try:
                action()
            except InconsistentError:
                pass

    def plan() -> None:
        batch = [request() for _ in range(generator.randrange(20))]
        lengths = [number() if generator.random() < 0.05 else generator.randrange(2000) for _ in batch]
        if generator.random() < 0.5:
            module.prepare(handle, number(), number())
        told = lengths[: generator.choice([None, -1])] if generator.random() < 0.05 else lengths
        aside = generator.random() < 0.3
        index, _, _ = native.take(np.array(batch, dtype=np.int64), np.array(told, dtype=np.int64), 1, aside)
        if batch:
            assert_right(layout.work_items(native.buffers[index]), mirror.batch(batch, lengths), CONFIG.window)

    def insert() -> None:
        node, parent, length, first = number(), number(), number(), generator.randrange(2**64)
        event = NodeInserted(node, parent, length, head(first))
        both(event, "insert", node, parent, length, *_halves(head(first)))

    def split() -> None:
        node, upper, length, first = number(), number(), number(), generator.randrange(2**64)
        both(NodeSplit(node, upper, length, head(first)), "split", node, upper, length, *_halves(head(first)))

    def bind() -> None:
        one, node = request(), generator.choice([number(), *mirror.nodes])
        both(RequestBound(one, node, 0), "bind", one, node)

    def expect() -> None:
        one, length = request(), number()
        both(RequestsExpected([one], [length], [""]), "expect", one, length)

    def release() -> None:
        one = request()
        both(RequestReleased(one), "release", one)

    actions = [
        *[insert, split, bind, bind, bind, expect, release, plan, plan],
        lambda: evict(number()),
        lambda: module.withdraw(handle, request()),
        lambda: native.fall_back(np.array([number() for _ in range(5)]), number()),
        lambda: (native.find(number()), native.child(number(), bytes(16)), native.any_request(number())),
        lambda: (native.binding(request()), native.totals(number()), native.current(), next_batch(native)),
        lambda: module.take(handle, *(tvm_ffi.from_dlpack(np.zeros(2, dtype=np.int32)),) * 2, 0, False, native._out),
        lambda: module.totals(handle, 0, tvm_ffi.from_dlpack(np.zeros(3, dtype=np.int64))),
        lambda: module.release(number() & ~1 | 1 << 40, request()),
        lambda: module.destroy(number() | 1 << 40),
    ]
    refused = 0
    for _ in range(800):
        try:
            generator.choice(actions)()
        except REFUSED:
            refused += 1
    assert 50 < refused < 750
    assert native.num_nodes == len(mirror.nodes) - 1 and len(native) == len(mirror.bindings)


VALUES = {
    "token_bytes": [64],
    "part_bytes": [64],
    "turn_price": [0],
    "bin_end_price": [0],
    "wave_price": [0],
    "narrow_first_price": [0],
    "group": [4],
    "runs": [2],
    "workers": [132],
    "max_queries": [8],
    "few_queries": [8],
    "warp_queries": [0],
    "rebalance_queries": [0],
    "tails_queries": [1],
    "straddled_rows": [0],
    "policy": [3],
    "window": [0],
    "grain": [8],
    "piece": [0],
    "warp_tokens": [1],
    "slices_tokens": [-1],
    "slice_rows": [0],
    "slices_token_price": [1],
    "slices_start_price": [0],
    "bin_slices_token_price": [1],
    "bin_slices_start_price": [0],
    "token_prices": [1] * 9,
    "start_prices": [1] * 9,
    "short_tokens": [0] * 9,
    "bin_token_prices": [1] * 9,
    "bin_start_prices": [1] * 9,
    "query_tiles": [16, 32],
    "kv_tile": [64],
}
"""Such as `config_of` wants (csrc/packing/module.cpp)."""

LIMITS = {
    "small_queries": [0],
    "small_tokens": [0],
    "small_sharing": [1],
    "small_draft_tokens": [0],
    "little_shared_queries": [0],
    "ragged_queries": [0],
    "ragged_tokens": [0],
}


def create(
    values: dict[str, list[int]],
    wide: dict[str, list[int]] = VALUES,
    limits: dict[str, list[int]] = LIMITS,
    max_batch: int = 64,
) -> int:
    buffers = [tvm_ffi.from_dlpack(np.zeros(1 << 12, dtype=np.int32)) for _ in range(2)]
    return NativeScheduler.load_module().create(values, wide, limits, max_batch, 99, *buffers)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, []) for name in VALUES),
        *((name, value[:-1]) for name, value in VALUES.items() if len(value) == 9),
        *((name, [0]) for name in ("token_bytes", "group", "runs", "workers", "grain", "warp_tokens", "tails_queries")),
        *((name, [0]) for name in ("max_queries", "few_queries", "slices_token_price", "bin_slices_token_price")),
        *((name, [-1]) for name in ("part_bytes", "bin_end_price", "wave_price", "turn_price", "warp_queries")),
        *((name, [-1]) for name in ("narrow_first_price", "rebalance_queries")),
        ("rebalance_queries", [9]),
        *((name, [-1]) for name in ("policy", "window", "slice_rows", "slices_start_price", "bin_slices_start_price")),
        *((name, [2**40]) for name in VALUES),
        ("window", [2**30 + 1]),
        ("piece", [-8]),
        ("piece", [12]),  # a cut lies between two grains
        ("slices_tokens", [2**31]),
        ("slices_tokens", [5]),  # there are no rows of a slice
        ("tails_queries", [9]),
        ("policy", [4]),
        ("kv_tile", [0]),
        ("start_prices", [-1] * 9),
        ("bin_start_prices", [-1] * 9),
        ("bin_token_prices", [0] * 9),
        ("query_tiles", [32, 16]),
        ("straddled_rows", [4]),  # as many as a query has
        ("straddled_rows", [32]),  # of 10 queries then
        ("straddled_rows", [256]),
    ],
)
def test_a_scheduler_with_values_that_cannot_be_is_not_made(name: str, value: list[int]) -> None:
    NativeScheduler.load_module().destroy(create(VALUES))
    with pytest.raises(ValueError):  # noqa: PT011
        create(VALUES | {name: value})
    # That of wide tiles only is looked at alike.
    with pytest.raises(ValueError):  # noqa: PT011
        create(VALUES, VALUES | {name: value})


@pytest.mark.parametrize(("name", "value"), [("rebalance_queries", 2), ("query_tiles", 256), ("piece", 64)])
def test_rows_of_a_pack_are_not_cut_beside_what_knows_whole_queries_only(name: str, value: int) -> None:
    straddling = VALUES | {"straddled_rows": [7]}
    NativeScheduler.load_module().destroy(create(straddling, straddling))
    with pytest.raises(ValueError, match=r"rows of a pack are cut|a tile must be"):
        create(straddling | {name: [value]}, straddling)


def test_a_scheduler_is_not_made_without_all_values_or_for_limits_that_cannot_be() -> None:
    for name in VALUES:
        with pytest.raises(ValueError, match=f"a config must say {name}"):
            create({other: value for other, value in VALUES.items() if other != name})
    for name in LIMITS:
        with pytest.raises(ValueError, match=f"a config must say {name}"):
            create(VALUES, limits={other: value for other, value in LIMITS.items() if other != name})
    for other in ({"values": VALUES | {"grian": [8]}}, {"limits": LIMITS | {"grian": [8]}}):
        with pytest.raises(ValueError, match="a config has no grian"):
            create(**{"values": VALUES} | other)
    fewer = {name: value[:8] for name, value in VALUES.items() if len(value) == 9}
    with pytest.raises(ValueError, match="max_queries of wide tiles only"):
        create(VALUES, VALUES | fewer | {"max_queries": [7], "few_queries": [7]})
    for name, value in itertools.product(LIMITS, (-1, 2**60)):
        with pytest.raises(ValueError, match=name):
            create(VALUES, limits=LIMITS | {name: [value]})
    for max_batch in (-1, 2**40):
        with pytest.raises(ValueError, match="max_batch"):
            create(VALUES, max_batch=max_batch)
    buffers = [tvm_ffi.from_dlpack(np.zeros(size, dtype=np.int32)) for size in (1 << 12, 3)]
    with pytest.raises(ValueError, match="buffers must have"):
        NativeScheduler.load_module().create(VALUES, VALUES, LIMITS, 64, 99, *buffers)


@pytest.mark.slow
@pytest.mark.skipif(bool(os.environ.get(jit.SANITIZE)), reason="compiles programs of its own")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names x86's vectors")
def test_plans_do_not_depend_on_how_wide_vectors_are(tmp_path: Path) -> None:
    """`Optimal` weighs as many segments at once as the processor has lanes; ranks on different processors need the same plans."""
    source, found = Path(__file__).parent / "csrc" / "plan_hash.cpp", set()
    for arch in ("native", "x86-64-v3", "x86-64-v2"):
        program = tmp_path / arch
        command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-Wno-psabi", "-pthread", f"-march={arch}"]
        subprocess.run([*command, source, "-o", program], check=True)
        found.add(subprocess.run([program], capture_output=True, check=True).stdout)
    assert len(found) == 1


def printed(name: str, folder: Path, *flags: str) -> list[int]:
    """The numbers that a program in tests/csrc prints."""
    source, program = Path(__file__).parent / "csrc" / f"{name}.cpp", folder / name
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-Wno-psabi", "-pthread", *flags]
    subprocess.run([*command, source, "-o", program], check=True)
    found = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return [int(number) for number in found.stdout.split()]


@pytest.mark.skipif(bool(os.environ.get(jit.SANITIZE)), reason="counts allocations itself")
def test_a_steady_state_allocates_nothing(tmp_path: Path) -> None:
    plans, everything, steady = printed("steady_state", tmp_path)
    assert plans > 3000 and everything > 100
    assert steady == 0


@pytest.mark.skipif(bool(os.environ.get(jit.SANITIZE)), reason="replaces what allocates")
def test_where_memory_runs_out_an_event_is_done_or_not_at_all(tmp_path: Path) -> None:
    failures, left = printed("failing_memory", tmp_path, "-D_GLIBCXX_ASSERTIONS")
    assert failures > 5000
    assert left == 0


FIRST_ERROR = """
import time
from sglang_pat.packing.native import NativeScheduler

module = NativeScheduler.load_module()
began = time.thread_time()
try:
    module.version(77)
except ValueError:
    print(round((time.thread_time() - began) * 1e6))
"""


@pytest.mark.skipif(bool(os.environ.get(jit.SANITIZE)), reason="takes its time")
def test_the_first_error_while_serving_takes_no_longer_than_others() -> None:
    """TVM FFI's own would take seconds, in which nobody is served (csrc/error.h)."""
    found = subprocess.run([sys.executable, "-c", FIRST_ERROR], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 50_000


def test_schedulers_are_closed_while_their_threads_work() -> None:
    def work() -> None:
        for _ in range(10):
            scheduler, _ = load(Batch([5000] * 4, [Node(0, 3000, [0, 1, 2, 3])]), CONFIG)
            set_delays(scheduler, 200, 200)
            scheduler.prepare(0)
            del scheduler

    with ThreadPoolExecutor(3) as pool:
        for worker in [pool.submit(work) for _ in range(3)]:
            worker.result()


def test_totals_are_those_of_the_steps() -> None:
    batch = Batch([600, 700], [Node(0, 500, [0, 1])])
    scheduler, seq_lens = load(batch, msgspec.structs.replace(CONFIG, workers=1))
    take(scheduler, seq_lens)
    take(scheduler, seq_lens + 3, 3)
    totals = scheduler.totals(2)
    unpacked = sum(1300 + 2 * step for step in range(5))
    assert (totals.steps, totals.kv_tokens_unpacked, totals.kv_tokens) == (5, unpacked, unpacked - 500 * 5)
    assert totals.query_sizes == {1: 10, 2: 5} and totals.work_items == 15 and totals.parts == 20
    assert totals.kv_by_queries == {1: unpacked - 2 * 500 * 5, 2: 500 * 5}


@pytest.mark.parametrize(
    ("change", "prefix", "room", "counted"),
    [
        ({}, 0, 900, (2, 0)),
        ({}, 1, 900, (0, 2)),
        ({}, 500, 900, (0, 0)),
        ({"policy": "query"}, 500, 900, (0, 0)),
        ({}, 500, 40, (0, 0)),
        ({"piece": 256}, 200, 900, (2, 0)),
        ({"piece": 256}, 300, 900, (0, 0)),
    ],
    ids=[
        "nothing is shared",
        "too little is",
        "packed",
        "not asked for",
        "levels do not fit",
        "shorter than a piece",
        "a piece",
    ],
)
def test_totals_say_why_nothing_was_packed(
    change: dict[str, Any], prefix: int, room: int, counted: tuple[int, int]
) -> None:
    config = msgspec.structs.replace(PackConfig(CostModel(32, 8, 128, 128, 2), TILES, 4, grain=1), **change)
    buffers = [np.zeros(room, dtype=np.int32) for _ in range(2)]
    scheduler, seq_lens = load(Batch([600, 700], [Node(0, prefix, [0, 1])] if prefix else []), config, buffers=buffers)
    take(scheduler, seq_lens)
    assert (scheduler.levels is None) == (room > 40)
    totals = scheduler.totals(2)
    assert (totals.unshared, totals.unpaid) == counted
    scheduler.fall_back(seq_lens, 2)
    totals = scheduler.totals(3)
    assert totals.steps == 5 and (totals.unshared, totals.unpaid) == counted, "a fall-back was not asked to pack"


def test_the_policies_are_numbered_as_the_native_scheduler_numbers_them() -> None:
    """Each policy alone makes this plan: a mixed up number would show."""
    batch = Batch(
        [900] * 40, [Node(0, 60, list(range(40)), [Node(60, 90, list(range(20))), Node(60, 800, list(range(20, 40)))])]
    )
    tiles = TileTable((16, 64, 128), kv_tile=128)
    plans = {}
    for policy in POLICIES:
        config = PackConfig(CostModel(32, 8, 128, 128, 2), tiles, 132, policy)
        scheduler, seq_lens = load(batch, config)
        plans[policy] = used(scheduler.buffers[take(scheduler, seq_lens)[0]])
        assert plans[policy] == layout.flatten(make_plan(batch, config)).tolist()
    assert plans["query"] != plans["pat"] != plans["naive"]
    check(batch)


@pytest.mark.slow
@pytest.mark.skipif(bool(os.environ.get(jit.SANITIZE)), reason="builds a module of its own")
def test_the_benchmark_of_planning_runs() -> None:
    """It builds the scheduler into a module of its own, by calls that nobody else makes."""
    script = Path(__file__).parents[1] / "benchmarks" / "packing.py"
    found = subprocess.run([sys.executable, script, "--quick"], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stdout.count("paper's deepest") > 20


def test_a_process_that_is_forked_while_a_plan_is_made_goes_on_without_its_scheduler() -> None:
    """The thread that makes it is not there: whoever waited for it, or for its end at exit, would wait for ever."""
    code = """
import os, signal, sys, time
import numpy as np
from test_native import CONFIG, NativeScheduler, set_delays

batch = np.array([1], dtype=np.int64), np.array([11], dtype=np.int64)
scheduler = NativeScheduler(CONFIG, max_batch=4)
scheduler.expect(1, 10)
set_delays(scheduler, before_publish=500_000)
scheduler.prepare(1)
time.sleep(0.1)
child = os.fork()
if child:
    assert scheduler.take(*batch, 0)[2]
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
signal.alarm(20)
try:
    scheduler.take(*batch, 0)
except ValueError as error:
    assert "is in the process that this one was forked from" in str(error)
own = NativeScheduler(CONFIG, max_batch=4)
del scheduler
own.take(*batch, 0)
print("done")
"""
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr
