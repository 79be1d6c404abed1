"""Plans of extends. Needs neither torch nor SGLang, so that sanitizers can run it."""

from __future__ import annotations

import os

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracle import bin_prices, pricing
from trees import PRICED, TILES, batches, configs

from sglang_pat import jit
from sglang_pat.kernels import capabilities
from sglang_pat.packing import (
    FORMATS,
    OPEN,
    AttentionSpec,
    Batch,
    CostModel,
    Node,
    PackConfig,
    TileTable,
    WorkItem,
    layout,
    tree,
)
from sglang_pat.packing.native import NativeScheduler, PlanTooLargeError, load

pytestmark = pytest.mark.once

EXAMPLES = 40 if os.environ.get(jit.SANITIZE) else 300

CONFIG = PackConfig(CostModel(8, 2, 64, 64, 2), TILES, workers=2)
"""Its largest tile has 16 queries."""


class Extend(msgspec.Struct):
    """New tokens behind the requests of a batch.

    Attributes:
        batch: What is cached; `seq_lens` are cached tokens.
        added: New tokens of each request.
    """

    batch: Batch
    added: list[int]

    @property
    def requests(self) -> list[int]:
        """The request of each new token."""
        return [request for request, count in enumerate(self.added) for _ in range(count)]

    @property
    def lengths(self) -> list[int]:
        """What each new token sees, itself included, where there is no window."""
        pairs = zip(self.batch.seq_lens, self.added, strict=True)
        return [cached + j for cached, count in pairs for j in range(1, count + 1)]


@st.composite
def extends(draw: st.DrawFn) -> Extend:
    batch = draw(batches(max_queries=10, max_length=60))
    counts = st.one_of(st.integers(0, 3), st.integers(0, 70))
    return Extend(batch, draw(st.lists(counts, min_size=len(batch.seq_lens), max_size=len(batch.seq_lens))))


def plan(extend: Extend, config: PackConfig) -> tuple[list[WorkItem], np.ndarray, int]:
    """The work items, the plan that they are of, and the prefixes that are read together."""
    scheduler = NativeScheduler(config, len(extend.added))
    return extended(scheduler, load(scheduler, extend.batch), extend)


def extended(
    scheduler: NativeScheduler, requests: np.ndarray, extend: Extend
) -> tuple[list[WorkItem], np.ndarray, int]:
    made = scheduler.extend(requests, np.array(extend.batch.seq_lens), np.array(extend.added))
    return layout.work_items(made.data), made.data, made.shared


@given(extends(), configs())
@settings(max_examples=EXAMPLES, deadline=None)
def test_every_new_token_reads_what_it_sees_exactly_once(extend: Extend, config: PackConfig) -> None:
    lengths = extend.lengths
    counts = [[0] * length for length in lengths]
    for item in plan(extend, config)[0]:
        start, end = item.span(lengths)
        assert 0 <= start < end
        for query in item.queries:
            # An executor hides the rest.
            hidden = max(0, lengths[query] - config.window) if config.window else 0
            for position in range(max(start, hidden), min(end, lengths[query])):
                counts[query][position] += 1
    for length, count in zip(lengths, counts, strict=True):
        hidden = max(0, length - config.window) if config.window else 0
        assert count == [0] * hidden + [1] * (length - hidden)


SPLIT_BEHIND_A_WINDOW = (
    Extend(
        Batch([56, 56, 56, 56, 56, 1], [Node(0, 1, [0, 1, 2, 3, 4], [Node(1, 55, [0, 1, 2, 3, 4])])]),
        [0, 0, 1, 3, 18, 0],
    ),
    PackConfig(CostModel(3, 1, 64, 8, 2), TileTable((4, 16, 64), kv_tile=16), workers=1, policy="naive", window=60),
)
"""More tokens share a prefix than a tile holds, and those of the second tile see less of it."""


@given(extends(), configs())
@example(*SPLIT_BEHIND_A_WINDOW)
@settings(max_examples=EXAMPLES, deadline=None)
def test_work_items_are_what_executors_expect(extend: Extend, config: PackConfig) -> None:
    requests, lengths = extend.requests, extend.lengths
    items, data, _ = plan(extend, config)
    header = layout.sections(data).header
    assert header["size"] == len(data) and header["batch"] == len(lengths)
    most = 1 if config.straddled_rows else config.max_queries
    assert not layout.sections(data).part_rows.size, "tokens have all of their rows in one work item"
    parts: list[list[int]] = [[] for _ in lengths]
    for item in items:
        assert not item.rows
        members = {requests[query] for query in item.queries}
        assert len(item.queries) <= most and len(set(item.queries)) == len(item.queries)
        if item.end == OPEN:
            assert len(members) == 1 and lengths[item.queries[0]] == max(lengths[query] for query in item.queries)
        if len(members) > 1:
            held = [node for node in tree.walk(extend.batch.roots) if members <= set(node.queries)]
            assert set(range(item.start, item.end)) <= {p for node in held for p in range(node.start, node.end)}
        seen = [max(0, lengths[query] - config.window) if config.window else 0 for query in item.queries]
        assert item.start >= min(seen), "what no query sees may be somebody else's by now"
        for query, part in zip(item.queries, item.parts, strict=True):
            parts[query].append(part)
    assert all(sorted(numbers) == list(range(len(numbers))) and numbers for numbers in parts)


def test_short_turns_on_one_document_read_it_once_and_long_ones_by_themselves() -> None:
    def reads(added: int, policy: str = "optimal") -> tuple[int, int]:
        extend = Extend(Batch([1_100] * 8, [Node(0, 1_000, list(range(8)))]), [added] * 8)
        items, _, shared = plan(extend, msgspec.structs.replace(CONFIG, policy=policy))
        spans = [item.span(extend.lengths) for item in items]
        return shared, sum(max(0, min(end, 1_000) - start) for start, end in spans)

    assert reads(2) == (1, 1_000)
    assert reads(15) == (1, 8_000), "as many tokens as there are tiles to fill"
    assert reads(16) == (0, 8_000), "their own fill a tile"
    assert reads(2, "query") == (0, 8_000)


@given(extends(), configs())
@settings(max_examples=EXAMPLES, deadline=None)
def test_prices_are_those_of_the_work_items(extend: Extend, config: PackConfig) -> None:
    """And of the parts that pass through memory; alone, each request's KV is read once."""
    scheduler = NativeScheduler(config, len(extend.added))
    made = scheduler.extend(load(scheduler, extend.batch), np.array(extend.batch.seq_lens), np.array(extend.added))
    lengths, price, parts = extend.lengths, 0, [0] * sum(extend.added)
    # Cut where a bin ends, an item starts once more, and its queries have a part more.
    for item in layout.work_items(made.data):
        start, end = item.span(lengths)
        in_row_slices = pricing.runs_in_row_slices(config, len(item.queries), item.m)
        price += pricing.item_price(config, len(item.queries), end - start, in_row_slices)
        for query in item.queries:
            parts[query] += 1
    price += sum(count for count in parts if count > 1) * config.cost.part_bytes
    assert made.price <= price
    alone = 0
    for cached, added in zip(extend.batch.seq_lens, extend.added, strict=True):
        unseen = max(0, cached + 1 - config.window) if config.window else 0
        alone += (cached + added - unseen) * config.cost.token_bytes if added else 0
    assert made.alone == alone


def test_packs_of_extends_are_not_split() -> None:
    """They begin where their first token sees, and whether a plan pays is decided by their prices before."""
    tiles = capabilities.tile_table("9.0a", 128, "NVIDIA H200", kv=FORMATS["float8_e4m3fn"])
    config = PackConfig.of(AttentionSpec(8, 1, 128, 128, FORMATS["float8_e4m3fn"]), tiles, workers=132)
    batch = Batch([4_116] * 2, [Node(0, 4_096, [0, 1])])
    items = plan(Extend(batch, [8, 8]), config)[0]
    assert config.rebalance_queries == 8 and max(len(item.queries) for item in items) == config.max_queries == 16


def test_bins_are_even_by_the_prices_of_bins() -> None:
    """Work items cost more there: by the other prices the first bins would be less full, and the last take the rest, twice the mean."""
    dear = msgspec.structs.replace(PRICED, bins_token_ns=(96, 120, 150), bins_item_ns=(750, 1_500, 13_500))
    config = PackConfig(CostModel(8, 2, 64, 64, 2), dear, workers=32)
    extend = Extend(Batch([4_000 + 40 * i for i in range(12)], [Node(0, 3_000, list(range(12)))]), [2] * 12)
    scheduler = NativeScheduler(config, 12)
    made = scheduler.extend(load(scheduler, extend.batch), np.array(extend.batch.seq_lens), np.array(extend.added))
    prices = bin_prices(layout.read(made.data, 0), extend.lengths, config)
    assert len(prices) == 16 and max(prices) < 1.2 * sum(prices) / len(prices)


def test_a_request_that_is_not_known_shares_nothing() -> None:
    extend = Extend(Batch([110] * 3, [Node(0, 100, [0, 1, 2])]), [3] * 3)
    scheduler = NativeScheduler(CONFIG, 3)
    requests = load(scheduler, extend.batch)
    requests[1] = -1
    items, _, shared = extended(scheduler, requests, extend)
    assert shared == 1
    members = [{extend.requests[query] for query in item.queries} for item in items]
    assert {0, 2} in members and all(who == {1} or 1 not in who for who in members)


@given(extends())
@settings(max_examples=EXAMPLES // 4, deadline=None)
def test_the_batch_that_decodes_notices_nothing(extend: Extend) -> None:
    """Both are planned from one mirror, by turns."""
    lengths = np.array(extend.batch.seq_lens) + 1
    scheduler = NativeScheduler(CONFIG, len(lengths))
    requests = load(scheduler, extend.batch)
    index, steps, _ = scheduler.take(requests, lengths, 0)
    before = scheduler.buffers[index].copy()
    first = extended(scheduler, requests, extend)
    assert scheduler.stands(requests)
    assert (scheduler.buffers[index] == before).all()
    scheduler.prepare(1)
    again = extended(scheduler, requests, extend)
    assert (first[1] == again[1]).all() and first[2] == again[2]
    index, _, _ = scheduler.take(requests, lengths, 1)
    size = layout.sections(before).header["size"]
    assert (scheduler.buffers[index][:size] == before[:size]).all() and steps > 0


@pytest.mark.parametrize(
    ("cached", "added", "message"),
    [
        ([1, -1], [1, 1], "a request's tokens must be 0 to"),
        ([1, 1], [1, -1], "a request's new tokens must be 0 to"),
        ([1, 2**31 - 1], [1, 1], "a request's new tokens must be 0 to 0"),
        ([0, 0], [1, 2**24], "new tokens must be 0 to"),
        ([1], [1, 1], "cached must have 2 numbers"),
        ([1, 1], [1], "added must have 2 numbers"),
    ],
)
def test_numbers_that_cannot_be_are_refused(cached: list[int], added: list[int], message: str) -> None:
    scheduler = NativeScheduler(CONFIG, 2)
    with pytest.raises(ValueError, match=message):
        scheduler.extend(np.array([0, 1]), np.array(cached), np.array(added))
    assert scheduler.extend(np.array([0, 1]), np.array([1, 1]), np.array([1, 1])).shared == 0


def test_more_tokens_than_prices_can_add_up_are_refused() -> None:
    scheduler = NativeScheduler(CONFIG, 1000)
    with pytest.raises(ValueError, match="tokens read must be 0 to"):
        scheduler.extend(np.arange(1000), np.full(1000, 2**31 - 2), np.ones(1000, dtype=np.int64))


def test_a_tree_of_more_levels_than_a_plan_can_hold_is_refused() -> None:
    """On each of 6,000 levels one request ends: all others are in a pack of each level above."""
    levels, length = 6_000, 50_000
    scheduler = NativeScheduler(msgspec.structs.replace(CONFIG, cost=CostModel(2, 2, 64, 64, 2)), levels)
    for level in range(levels):
        scheduler.insert(level, level - 1, length, level.to_bytes(16, "little"))
        scheduler.bind(level, level)
    cached, added = np.arange(1, levels + 1) * length, np.ones(levels, dtype=np.int64)
    with pytest.raises(PlanTooLargeError, match="too many queries"):
        scheduler.extend(np.arange(levels), cached, added)
    assert scheduler.extend(np.arange(9), cached[:9], added[:9]).shared > 0


def test_an_extend_of_nothing_is_an_empty_plan() -> None:
    for requests in ([], [3, 4]):
        scheduler = NativeScheduler(CONFIG, 2)
        numbers = np.zeros(len(requests), dtype=np.int64)
        made = scheduler.extend(np.array(requests, dtype=np.int64), numbers, numbers)
        assert layout.work_items(made.data) == [] and (made.price, made.alone) == (0, 0)
