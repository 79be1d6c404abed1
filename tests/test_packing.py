from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise, product

import msgspec
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import PACKERS, bin_prices, for_batch, make_packs, makespan, packs_price, pricing
from oracle.heuristic import Pack
from trees import PRICED, TILES, batches, check, configs, random_batch

from sglang_pat.kernels import capabilities
from sglang_pat.packing import (
    FORMATS,
    OPEN,
    POLICIES,
    AttentionSpec,
    Batch,
    CostModel,
    Node,
    PackConfig,
    Plan,
    TileTable,
    WorkItem,
    tree,
)
from sglang_pat.packing.constants import LEAST_STEPS, MAX_WAVES, UNEVEN
from sglang_pat.packing.native import make_plan

pytestmark = pytest.mark.once

MHA = CostModel(heads=32, kv_heads=32, head_dim=128, v_head_dim=128, kv_bytes=2)


def covered(plan: Plan, seq_lens: list[int], rows: int) -> list[np.ndarray]:
    """How often each row of each query is computed at each position, of so many rows of a query."""
    counts = [np.zeros((rows, length), dtype=np.int8) for length in seq_lens]
    for item in plan.items:
        for query, (first, end) in zip(item.queries, item.rows or [(0, rows)] * len(item.queries), strict=True):
            assert 0 <= first < end <= rows
            start, stop = item.seen(query, seq_lens)
            counts[query][first:end, start:stop] += 1
    return counts


def seen(length: int, window: int) -> list[int]:
    """How often each position of a query shall be covered."""
    hidden = max(0, length - window) if window else 0
    return [0] * hidden + [1] * (length - hidden)


def path_node(batch: Batch, query: int, position: int) -> int | None:
    """Identity of the node that holds a position of a query, None in its tail."""
    for node in tree.walk(batch.roots):
        if query in node.queries and node.start <= position < node.end:
            return id(node)
    return None


@given(batches(), configs())
@settings(max_examples=300, deadline=None)
def test_every_query_and_position_is_covered_exactly_once(batch: Batch, config: PackConfig) -> None:
    check(batch)
    plan = make_plan(batch, config)
    # In the first step that the plan is good for, in the last, and for all of them where only windows move.
    for step in {0, min(plan.steps - 1, 300)}:
        lengths = [length + step for length in batch.seq_lens]
        for counts, length in zip(covered(plan, lengths, config.cost.group), lengths, strict=True):
            assert (counts == seen(length, config.window)).all()


@pytest.mark.parametrize("rows", [33, 40, 43, 48, 63, 80])
def test_a_pack_whose_queries_straddle_work_items_takes_as_few_as_its_rows_fill(rows: int) -> None:
    """Of latents, where a tile has room for one query and a part of another: none of 64 rows is like that. With 80 rows each item is run for two sets of 40."""
    tiles = TileTable(capabilities.latent_query_tiles("9.0a"))
    group = rows if rows < 64 else rows // 2
    spec = AttentionSpec(rows, 1, 576, 512, FORMATS["bfloat16"], latent=True)
    config = PackConfig.of(spec, tiles, workers=1)
    assert (config.straddled_rows, config.cost.group) == (64, group)
    whole = msgspec.structs.replace(config, straddles=False)
    assert config.token_price(64) == whole.token_price(64), (
        "more queries than a work item has take the tiles that their rows fill"
    )
    assert msgspec.structs.replace(config, window=100).straddled_rows == 0
    for count in (2, 3, 9, 33, 64, 67):
        batch = Batch([40_001 + i for i in range(count)], [Node(0, 40_000, list(range(count)))])
        plan = make_plan(batch, config)
        for counts, length in zip(covered(plan, batch.seq_lens, group), batch.seq_lens, strict=True):
            assert (counts == seen(length, 0)).all()
        items = sum(1 for item in plan.items if (item.start, item.end) == (0, 40_000))
        fewest = -(-count * group // 64)
        assert items == (fewest if fewest < count else 0), "packing that saves nothing is not done"
    for other in (8, 20, 32, 64, 65, 128):
        assert PackConfig.of(msgspec.structs.replace(spec, heads=other), tiles, workers=1).straddled_rows == 0
    assert PackConfig.of(msgspec.structs.replace(spec, latent=False), tiles, workers=1).straddled_rows == 0


@given(batches(), configs())
@settings(max_examples=200, deadline=None)
def test_queries_of_a_work_item_share_all_of_its_kv(batch: Batch, config: PackConfig) -> None:
    for item in make_plan(batch, config).items:
        if len(item.queries) > 1:
            assert 0 <= item.start < item.end
            for position in range(item.start, item.end):
                nodes = {path_node(batch, query, position) for query in item.queries}
                assert len(nodes) == 1 and None not in nodes


@given(batches(), configs())
@settings(max_examples=200, deadline=None)
def test_part_numbers_are_dense_and_items_name_them(batch: Batch, config: PackConfig) -> None:
    plan = make_plan(batch, config)
    parts: list[list[int]] = [[] for _ in batch.seq_lens]
    for item in plan.items:
        assert len(item.parts) == len(item.queries)
        for query, part in zip(item.queries, item.parts, strict=True):
            parts[query].append(part)
    assert [sorted(numbers) for numbers in parts] == [list(range(count)) for count in plan.num_parts]


@given(batches(), configs())
@settings(max_examples=200, deadline=None)
def test_counts_of_the_plan_are_those_of_its_items(batch: Batch, config: PackConfig) -> None:
    plan = make_plan(batch, config)
    spans = [item.span(batch.seq_lens) for item in plan.items]
    tails = sum(oracle.tail_tokens(item, batch.seq_lens) for item in plan.items)
    assert plan.kv_tokens == sum(end - start for start, end in spans) + tails
    growing = [length for length in batch.seq_lens if config.window == 0 or length <= config.window]
    # A tail that starts at a position grows; one that counts back is a window, which moves.
    tails = sum(len(item.queries) if item.tails else item.start >= 0 and item.end == OPEN for item in plan.items)
    assert tails == len(growing), "every request has one tail that grows, until its window is full"
    ends = [len(item.queries) if item.tails else item.end == OPEN for item in plan.items]
    assert sum(ends) == len(batch.seq_lens)


@given(batches(), configs())
@settings(max_examples=200, deadline=None)
def test_work_items_respect_the_largest_tile(batch: Batch, config: PackConfig) -> None:
    plan = make_plan(batch, config)
    config = for_batch(batch, config)
    for item in plan.items:
        rows = sum(end - first for first, end in item.rows) or len(item.queries) * config.cost.group
        if pricing.runs_in_row_slices(config, len(item.queries), item.m):
            assert item.m == config.tiles.warp_m < rows and len(item.queries) == 1
            continue
        assert rows <= item.m, "with any number of heads"
        assert item.m == config.tiles.query_tiles[0] or item.m < 4 * rows, "the smallest tile that holds the rows"


@given(batches(), configs())
@settings(max_examples=100, deadline=None)
def test_a_plan_is_good_as_long_as_growing_tails_leave_its_bins_even(batch: Batch, config: PackConfig) -> None:
    plan = make_plan(batch, config)
    config = for_batch(batch, config).for_bins
    full = min(
        [config.window - length + 1 for length in batch.seq_lens if length <= config.window], default=LEAST_STEPS
    )
    assert plan.steps >= min(LEAST_STEPS, full) and plan.steps > 0

    def sizes(item: WorkItem, steps: int) -> tuple[int, int, bool, int]:
        lengths = [length + steps for length in batch.seq_lens]
        start, end = item.span(lengths)
        in_row_slices = pricing.runs_in_row_slices(config, len(item.queries), item.m)
        return len(item.queries), end - start, in_row_slices, oracle.tail_tokens(item, lengths)

    members = [plan.items[begin:behind] for begin, behind in pairwise(plan.bins)]

    # With the last step a window may be full, and then does not grow any more.
    average = sum(pricing.bin_price(config, [sizes(item, 0) for item in items]) for items in members) / len(members)
    tolerated = max(average / UNEVEN, TILES.kv_tile * config.token_price(1))

    def growth(item: WorkItem) -> int:
        queries, tokens, in_row_slices, tails = sizes(item, 0)
        _, later, _, later_tails = sizes(item, plan.steps)
        own = (later - tokens) * pricing.growth_price(config, queries, in_row_slices)
        return own + (later_tails - tails) * config.token_price(1)

    growths = [sum(map(growth, items)) for items in members]
    assert plan.steps <= LEAST_STEPS or max(growths) - sum(growths) / len(growths) <= tolerated


def test_the_model_reproduces_the_papers_rule_for_one_head_per_kv_head() -> None:
    # §5.1 merges a child of s queries into a parent of l tokens if 4 s >= l; our model adds the LSE, 1 in 128.
    for queries in (1, 2, 16):
        assert pricing.merge_tokens(MHA, queries) == pytest.approx(4 * queries, rel=0.01)


def pack(policy: str, batch: Batch, cost: CostModel = MHA) -> list[Pack]:
    """The packs of a policy when a work item holds any number of queries and nothing is cut."""
    return PACKERS[policy](tree.compact(batch), batch, roomy(cost))


def roomy(cost: CostModel) -> PackConfig:
    return PackConfig(cost, TileTable((4096,), kv_tile=16), workers=1)


def test_a_long_prefix_is_packed_once_and_a_short_one_merged_into_the_tails() -> None:
    def spans(length: int) -> list[tuple[int, int | None, int]]:
        packs = pack("pat", Batch([length + 100] * 3, [Node(0, length, [0, 1, 2])]))
        return [(p.start, p.end, len(p.queries)) for p in packs]

    assert spans(5) == [(0, 5, 3), *[(5, None, 1)] * 3]
    assert spans(4) == [(0, None, 1)] * 3


def test_a_large_child_takes_a_short_parents_kv_along() -> None:
    batch = Batch([1000] * 9, [Node(0, 30, list(range(9)), [Node(30, 600, list(range(8)))])])
    packs = {(p.start, p.end): p.queries for p in pack("pat", batch)}
    assert packs[0, 600] == list(range(8))
    assert packs[0, None] == [8], "the one query left reads the parent with its own tail"


def every_packing(batch: Batch) -> Iterator[list[Pack]]:
    """All ways to let each child of each node join its parent's segment or not."""

    def of_child(node: Node, start: int) -> Iterator[list[Pack]]:
        if len(node.queries) == 1:
            yield [Pack(start, None, node.queries)]
            return
        below = {query for child in node.children for query in child.queries}
        leaves = [Node(node.end, node.end, [query]) for query in node.queries if query not in below]
        children = node.children + leaves
        for joins in product([True, False], repeat=len(children)):
            stay = [query for child, join in zip(children, joins, strict=True) if not join for query in child.queries]
            own = [Pack(start, node.end, stay)] if stay else []
            options = [list(of_child(c, start if join else node.end)) for c, join in zip(children, joins, strict=True)]
            for choice in product(*options):
                yield own + [pack for packs in choice for pack in packs]

    shared = {query for root in batch.roots for query in root.queries}
    rest = [Pack(0, None, [query]) for query in range(len(batch.seq_lens)) if query not in shared]
    for choice in product(*(list(of_child(root, 0)) for root in batch.roots)):
        yield rest + [pack for packs in choice for pack in packs]


def small(batch: Batch) -> Batch:
    """The same tree without what packing ignores, so that it can be searched exhaustively."""
    prefixes = tree.compact(batch)
    nodes = [Node(prefix.start, prefix.end, prefix.queries, []) for prefix in prefixes]
    for node, prefix in zip(nodes, prefixes, strict=True):
        node.children = [nodes[child] for child in prefix.children]
    return Batch(batch.seq_lens, nodes[0].children)


COSTS = [
    MHA,
    CostModel(32, 8, 128, 128, 2),
    CostModel(16, 1, 64, 64, 4),
    CostModel(32, 8, 128, 128, 2, flop_per_byte=20, start_price=30_000, part_overhead=5_000),
]


@given(batches(max_queries=5, max_length=60), st.sampled_from(COSTS))
@settings(max_examples=100, deadline=None)
def test_the_optimal_policy_finds_the_minimum(batch: Batch, cost: CostModel) -> None:
    config = roomy(cost)
    least = min(packs_price(packs, batch, config) for packs in every_packing(small(batch)))
    assert packs_price(pack("optimal", batch, cost), batch, config) == least


@given(batches(max_queries=6, max_length=60), st.sampled_from(COSTS))
@settings(max_examples=100, deadline=None)
def test_with_work_items_of_few_queries_the_optimal_policy_stays_close_to_the_minimum(batch, cost: CostModel) -> None:
    config = PackConfig(cost, TileTable((4 * cost.group // 2,), kv_tile=16), workers=1)
    least = min(packs_price(packs, batch, config) for packs in every_packing(small(batch)))
    assert packs_price(make_packs(batch, config), batch, config) <= 1.25 * least


@given(batches(), st.sampled_from(COSTS))
@settings(max_examples=100, deadline=None)
def test_no_policy_beats_the_optimal_one(batch: Batch, cost: CostModel) -> None:
    least = packs_price(pack("optimal", batch, cost), batch, roomy(cost))
    for policy in POLICIES:
        assert packs_price(pack(policy, batch, cost), batch, roomy(cost)) >= least


@given(st.integers(1, 200), st.integers(1, 3_000), st.sampled_from([1, 3, 4, 16]))
@settings(deadline=None)
def test_a_short_pack_is_run_by_small_tiles_where_that_costs_less(queries: int, tokens: int, group: int) -> None:
    config = PackConfig(CostModel(2 * group, 2, 8, 8, 2), PRICED, workers=132)

    def cost(pieces: int) -> int:
        size = -(-queries // pieces)
        computed = max(tokens, PRICED.warp_tokens) if size <= config.warp_queries else tokens
        return pieces * (computed * config.token_price(size) + config.start_price(size))

    fewest, most = -(-queries // config.max_queries), -(-queries // config.few_queries)
    pieces = pricing.items_of_pack(config, queries, tokens)
    assert pricing.pack_price(config, queries, tokens) == cost(pieces)
    if fewest == 1 and tokens >= PRICED.warp_tokens:
        assert pieces == min((fewest, most), key=cost)
    else:
        assert pieces in (fewest, most) and cost(pieces) <= 1.5 * min(map(cost, (fewest, most)))


@pytest.mark.parametrize(("longer", "m"), [(0, 16), (1, 64)])
def test_work_items_are_run_in_slices_if_the_pack_that_they_are_cut_from_is(longer: int, m: int) -> None:
    """However short they are: a few in slices among wide ones are slow."""
    spec = AttentionSpec(32, 1, 128, 128, FORMATS["bfloat16"])
    config = PackConfig.of(spec, capabilities.tile_table("9.0a", 128, "NVIDIA H200"), workers=132)
    assert config.row_slices == 2 and config.slices_tokens > 150
    # Not alike, so that some are cut.
    lengths = [config.slices_tokens + (longer + i % 20 if longer else -(i % 20)) for i in range(300)]
    plan = make_plan(Batch(lengths, []), config)
    assert {item.m for item in plan.items} == {m}
    spans = [item.span(lengths) for item in plan.items if plan.num_parts[item.queries[0]] > 1]
    assert sum(end - start <= config.slices_tokens for start, end in spans) > 2, "alone each would be in slices"


@pytest.mark.parametrize(
    ("requests", "tokens", "bins"), [(32, 4_096, 16), (16, 2_048, 16), (8, 512, 8), (33, 4_096, 33)]
)
def test_work_items_that_are_alike_are_not_cut(requests: int, tokens: int, bins: int) -> None:
    """Of one query each, run by all warps: a cut makes them start twice, which costs more than some idle workers."""
    spec = AttentionSpec(64, 8, 128, 128, FORMATS["bfloat16"], query_tokens=8)
    config = PackConfig.of(spec, capabilities.tile_table("9.0a", 128, "NVIDIA H200"), workers=132)
    plan = make_plan(Batch([tokens] * requests, []), config)
    assert len(plan.bins) - 1 == bins and len(plan.items) == requests


@pytest.mark.parametrize(("rows", "queries"), [(42, 1), (43, 3), (64, 3), (65, 1), (8, 1), (192, 1)])
def test_work_items_have_tails_where_a_query_needs_a_group_of_warps(rows: int, queries: int) -> None:
    tiles = capabilities.tile_table("9.0a", 128, "NVIDIA H200")
    spec = AttentionSpec(rows, 1, 128, 128, FORMATS["bfloat16"])
    config = PackConfig.of(spec, tiles, workers=1)
    assert config.tails_queries == queries
    assert capabilities.has_tails(tiles.query_tiles, rows, spec.kv, 128) == (queries > 1)
    assert PackConfig.of(msgspec.structs.replace(spec, window=500), tiles, workers=1).tails_queries == 1
    batch = Batch([630] * 11 + [1_200], [Node(0, 600, list(range(12)))])
    sizes = [len(item.queries) for item in make_plan(batch, config).items if item.tails]
    assert sizes == ([3, 3, 3] if queries == 3 else []), "not those with the tail that is too long to be left uncut"
    many = msgspec.structs.replace(config, workers=3)
    assert not any(item.tails for item in make_plan(batch, many).items), "there would be four for three workers"


def test_queries_whose_tails_are_too_long_for_one_work_item_share_their_prefix_even_so() -> None:
    spec = AttentionSpec(64 * 8, 8, 128, 128, FORMATS["bfloat16"])
    config = PackConfig.of(spec, capabilities.tile_table("9.0a", 128, "NVIDIA H200"), workers=6)
    batch = Batch([30_001] * 3 + [30_000 + 9_000] * 3, [Node(0, 30_000, list(range(6)))])
    plan = make_plan(batch, config)
    assert any(item.tails for item in plan.items)
    assert plan.kv_tokens <= 2 * 30_000 + sum(length - 30_000 for length in batch.seq_lens)


def test_single_warps_take_as_long_for_one_token_as_for_those_that_they_compute_at_a_time() -> None:
    tiles = capabilities.tile_table("9.0a", 128, "NVIDIA H200")
    assert tiles.warp_tokens == capabilities.WARP_TOKENS == 16
    config = PackConfig.of(AttentionSpec(32, 8, 128, 128, FORMATS["bfloat16"], query_tokens=8), tiles, workers=132)
    for in_row_slices in (True, False):
        one, some, more = (pricing.item_price(config, 1, tokens, in_row_slices) for tokens in (1, 16, 17))
        assert (one == some) == in_row_slices and some < more, "32 rows: alone wide"
    narrow = PackConfig.of(AttentionSpec(32, 8, 128, 128, FORMATS["bfloat16"]), tiles, workers=132)
    assert (
        pricing.item_price(narrow, 1, 1, False)
        == pricing.item_price(narrow, 1, 16, False)
        < pricing.item_price(narrow, 1, 17, False)
    )


@pytest.mark.parametrize("tokens", [1, 4, 8])
def test_no_requests_are_planned(tokens: int) -> None:
    spec = AttentionSpec(32, 8, 128, 128, FORMATS["bfloat16"], query_tokens=tokens)
    config = PackConfig.of(spec, capabilities.tile_table("9.0a", 128, "NVIDIA H200"), workers=132)
    plan = make_plan(Batch([]), config)
    assert plan == oracle.make_plan(Batch([]), config)
    assert (plan.items, plan.num_parts) == ([], [])


@pytest.mark.parametrize(
    ("queries", "heads", "found"),
    [
        (32, 32, False),  # a prefix for each tile of 128 rows: no more is computed than read
        (32, 64, True),  # two tiles read it
        (2, 64, False),  # by single warps
    ],
)
def test_every_second_worker_runs_narrow_items_first_where_wide_ones_compute_for_long(
    queries: int, heads: int, found: bool
) -> None:
    batch = Batch(
        [2_048 + 256] * (8 * queries), [Node(0, 2_048, list(range(i * queries, (i + 1) * queries))) for i in range(8)]
    )
    tiles = msgspec.structs.replace(capabilities.tile_table("9.0a", 128, "NVIDIA H200"), narrow_first_ns=12_000)
    config = PackConfig.of(AttentionSpec(heads, 8, 128, 128, FORMATS["bfloat16"]), tiles, workers=132)
    assert make_plan(batch, config).narrow_first == found
    price = pricing.computing_price(config, queries, 2_048)
    assert (price > 0) == (queries > 2)
    if price:
        per_worker = 8 * price / tiles.bytes_per_ns
        for threshold, first in ((per_worker - 1, True), (per_worker + 1, False), (0, False)):
            other = msgspec.structs.replace(config, tiles=msgspec.structs.replace(tiles, narrow_first_ns=threshold))
            assert make_plan(batch, other).narrow_first == first, threshold
            alone = Batch([2_100] * len(batch.seq_lens), batch.roots)
            wide = msgspec.structs.replace(other, tiles=other.tiles.without_warps())
            assert not make_plan(alone, wide).narrow_first, "there are no narrow items"


def test_the_naive_policy_packs_every_node() -> None:
    batch = Batch([40, 40, 9], [Node(0, 3, [0, 1], [Node(3, 5, [0])])])
    packs = {(p.start, p.end, *p.queries) for p in pack("naive", batch)}
    assert packs == {(0, 3, 0, 1), (3, None, 0), (3, None, 1), (0, None, 2)}


def test_a_prefix_of_many_queries_is_read_once_per_full_work_item() -> None:
    batch = Batch([2100] * 100, [Node(0, 2000, list(range(100)))])
    packs = make_packs(batch, PackConfig(CostModel(32, 8, 128, 128, 2), TileTable((16, 128)), workers=1))
    assert [len(p.queries) for p in packs if p.end] == [25, 25, 25, 25], "128 rows hold 32 queries of four heads"


def test_a_chain_of_nodes_without_branches_is_one_prefix() -> None:
    chain = Node(0, 10, [0, 1], [Node(10, 40, [0, 1], [Node(40, 90, [0, 1])])])
    _, node = tree.compact(Batch([100, 100], [chain]))
    assert (node.start, node.end, node.children) == (0, 90, [])


def test_paths_of_ten_thousand_nodes_are_planned() -> None:
    root = node = Node(0, 1, [0, 1, 2])
    for depth in range(1, 10_000):
        node.children = [Node(depth, depth + 1, [0, 1] if depth > 5_000 else [0, 1, 2])]
        node = node.children[0]
    batch = Batch([10_050, 10_050, 6_000], [root])
    plan = make_plan(batch, PackConfig(MHA, TILES, workers=132))
    assert all((counts == 1).all() for counts in covered(plan, batch.seq_lens, 1))


def test_long_kv_is_cut_until_every_worker_has_its_share() -> None:
    batch = Batch([64_000, 100, 100, 100])
    config = PackConfig(CostModel(8, 8, 128, 128, 2), TILES, workers=132)
    plan = make_plan(batch, config)
    assert plan.num_parts[0] >= 16, "132 workers for 8 heads"
    assert plan.num_parts[1:] == [1, 1, 1]
    average = sum(batch.seq_lens) * config.cost.token_bytes / 132
    assert makespan(plan, batch.seq_lens, config) <= 1.05 * average


@given(batches(max_length=20_000), configs())
@settings(max_examples=200, deadline=None)
def test_where_there_is_work_for_all_workers_finish_together(batch: Batch, config: PackConfig) -> None:
    plan = make_plan(batch, config)
    config = for_batch(batch, config).for_bins
    heads, workers = config.cost.runs, config.workers
    share = sum(bin_prices(plan, batch.seq_lens, config)) / workers
    # Below this the grain of a cut or the start of a work item outweighs what there is to balance.
    quantum = max(
        config.grain * config.token_price(queries) + config.start_price(queries)
        for queries in range(1, config.max_queries + 1)
    )
    # Work items are not cut within their tails.
    quantum += max(oracle.tail_tokens(item, batch.seq_lens) for item in plan.items) * config.token_price(1)
    idle = min(waves * workers / (waves * workers // heads * heads or 1) for waves in range(1, MAX_WAVES + 1))
    if all(len(item.queries) <= config.warp_queries for item in plan.items):
        # Then memory is the bound, and idle workers may be worth it.
        bins = len(plan.bins) - 1
        idle = -(-bins * heads // workers) * workers / (bins * heads)
    if share * heads >= 40 * quantum and idle <= 1.02:
        assert makespan(plan, batch.seq_lens, config) <= 1.05 * idle * share + quantum / heads


@pytest.mark.parametrize(
    ("heads", "tokens", "form", "requests", "prefix", "own"),
    [
        (32, 4, "float8_e4m3fn", 10, 4_096, 416),
        (64, 1, "bfloat16", 128, 4_000, 64),
        (64, 1, "float8_e4m3fn", 4, 8_192, 300),
        (64, 1, "bfloat16", 1_024, 2_048, 32),
    ],
)
def test_bins_are_even_where_a_cut_costs_as_much_as_hundreds_of_tokens(
    heads: int, tokens: int, form: str, requests: int, prefix: int, own: int
) -> None:
    """Filled once, without knowing what cuts will cost, the longest was 1.18 to 2.0 times as long as the average."""
    spec = AttentionSpec(heads, 8, 128, 128, FORMATS[form], query_tokens=tokens)
    tiles = capabilities.tile_table("9.0a", 128, "NVIDIA H200", kv=spec.kv)
    config = PackConfig.of(spec, tiles, workers=132)
    batch = Batch([prefix + own] * requests, [Node(0, prefix, list(range(requests)))])
    prices = bin_prices(make_plan(batch, config), batch.seq_lens, for_batch(batch, config))
    assert max(prices) * len(prices) <= 1.05 * sum(prices)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "form", "requests", "prefix", "own", "ms"),
    [
        # m with "none", as the table says, with "all"
        (8, 1, "bfloat16", 64, 4_096, 128, (192, 64, 64)),
        (4, 1, "bfloat16", 64, 512, 64, (128, 64, 64)),
        (8, 1, "float8_e4m3fn", 64, 4_096, 128, (128, 64, 64)),
        (8, 2, "bfloat16", 256, 256, 32, (192, 192, 64)),  # beside narrow items
        (8, 1, "int4", 64, 4_096, 128, (192, 192, 64)),  # not measured
        (32, 4, "float8_e4m3fn", 24, 2_048, 64, (128, 128, 128)),  # too little gain
        (64, 8, "float8_e4m3fn", 64, 8_192, 64, (128, 128, 128)),  # bins are even
    ],
)
def test_where_a_bin_is_too_long_packs_are_split(
    heads: int, kv_heads: int, form: str, requests: int, prefix: int, own: int, ms: tuple[int, int, int]
) -> None:
    """Where few KV heads make many bins, a work item of 192 rows takes longer to start than others run."""
    spec = AttentionSpec(heads, kv_heads, 128, 128, FORMATS[form])
    tiles = capabilities.tile_table("9.0a", 128, "NVIDIA H200", kv=spec.kv)
    batch = Batch([prefix + own] * requests, [Node(0, prefix, list(range(requests)))])
    longest = []
    for splits, m in zip(("none", tiles.splits, "all"), ms, strict=True):
        config = PackConfig.of(spec, msgspec.structs.replace(tiles, splits=splits), workers=132)
        plan = make_plan(batch, config)
        assert plan == oracle.make_plan(batch, config)
        assert {item.m for item in plan.items if len(item.queries) > 1} == {m}
        longest.append(max(bin_prices(plan, batch.seq_lens, for_batch(batch, config))))
    for price, m in zip(longest[1:], ms[1:], strict=True):
        assert price == longest[0] if m == ms[0] else price <= longest[0] * 15 / 16


def test_plans_with_split_packs_are_the_oracles() -> None:
    """In random trees, by the prices of an H200; about one in seven is split."""
    generator, split = random.Random(3), 0
    for _ in range(60):
        heads, kv_heads = generator.choice([(8, 1), (4, 1), (16, 2), (32, 4), (12, 2)])
        spec = AttentionSpec(
            heads, kv_heads, 128, 128, FORMATS[generator.choice(["bfloat16", "float8_e4m3fn"])],
            query_tokens=generator.choice([1, 1, 4]),
        )  # fmt: skip
        tiles = capabilities.tile_table("9.0a", 128, "NVIDIA H200", kv=spec.kv)
        batch = random_batch(generator, generator.randint(1, 2), generator.choice([4, 8]), 2_000)
        config, whole = (
            PackConfig.of(spec, one, workers=132) for one in (tiles, msgspec.structs.replace(tiles, splits="none"))
        )
        plan = make_plan(batch, config)
        assert plan == oracle.make_plan(batch, config)
        split += plan != make_plan(batch, whole)
    assert split > 5


@pytest.mark.parametrize("form", ["int4", "int2", "bfloat16"])
def test_pages_of_few_bits_are_not_cut(form: str) -> None:
    batch = Batch([64_001, 6_400, 900, 30], [Node(0, 640, [0, 1, 2])])
    config = PackConfig.of(AttentionSpec(32, 8, 128, 128, FORMATS[form]), TileTable((8, 16)), workers=132)
    bounds = {bound for item in make_plan(batch, config).items for bound in (item.start, item.end) if bound >= 0}
    assert len(bounds) > 10
    assert all(bound % 64 == 0 for bound in bounds) == (FORMATS[form].layout == "pages")


@pytest.mark.parametrize(
    ("requests", "length", "heads", "tokens", "ms"),
    [
        (66, 200, 32, 4, {64}),  # four queries for each SM
        (67, 200, 32, 4, {16}),
        (8, 2_475, 32, 4, {64}),
        (8, 2_476, 32, 4, {16}),  # 1,200 tokens for each SM
        (8, 300, 32, 1, {8}),
        (8, 300, 64, 2, {64}),
        (8, 600, 32, 2, {8}),  # no more rows than the smallest tile
        (8, 300, 32, 2, {64}),
        (8, 24, 64, 4, {64}),  # else in slices of 16 rows
        (90, 24, 64, 4, {16}),
    ],
)
def test_small_batches_of_drafts_are_run_with_wide_tiles(
    requests: int, length: int, heads: int, tokens: int, ms: set[int]
) -> None:
    tiles = capabilities.tile_table("9.0a", 128, "NVIDIA H200")
    small = msgspec.structs.replace(tiles.wide_steps, little_shared_long_draft_queries=0, little_shared_draft_queries=0)
    tiles = msgspec.structs.replace(tiles, wide_steps=small)
    spec = AttentionSpec(heads, 8, 128, 128, FORMATS["bfloat16"], query_tokens=tokens)
    plan = make_plan(Batch([length] * requests), PackConfig.of(spec, tiles, workers=132))
    assert {item.m for item in plan.items} == ms


@pytest.mark.parametrize(
    ("requests", "shared", "own", "ms"), [(8, 4096, 64, {64}), (8, 512, 512, {8, 64}), (64, 4096, 64, {8, 128})]
)
def test_small_batches_that_share_most_of_what_they_read_are_run_with_wide_tiles(
    requests: int, shared: int, own: int, ms: set[int]
) -> None:
    tiles = capabilities.tile_table("9.0a", 128, "NVIDIA H200")
    config = PackConfig.of(AttentionSpec(32, 8, 128, 128, FORMATS["bfloat16"]), tiles, workers=132)
    plan = make_plan(Batch([shared + own] * requests, [Node(0, shared, list(range(requests)))]), config)
    assert {item.m for item in plan.items} == ms


@pytest.mark.parametrize(
    ("batch", "heads", "tokens", "smallest"),
    [
        (Batch([1024] * 32), 32, 2, 64),
        (Batch([512] * 132), 32, 2, 64),  # times 8 KV heads, eight for each SM
        (Batch([512] * 133), 32, 2, 8),
        # 1.49 and 1.63 times as many tokens as when each is read once.
        (Batch([512] * 132, [Node(0, 170, list(range(132)))]), 32, 2, 64),
        (Batch([512] * 132, [Node(0, 200, list(range(132)))]), 32, 2, 8),
        (Batch([512] * 133), 64, 2, 16),
        (Batch([512] * 132), 64, 2, 64),
        (Batch([512] * 131 + [300]), 32, 1, 64),  # their lengths differ
        (Batch([512] * 131 + [400]), 32, 1, 8),
        (Batch([512] * 132 + [300]), 32, 1, 8),
        (Batch([300] * 131 + [512]), 32, 1, 8),  # fewer than 384 tokens on average
        (Batch([512] * 131 + [300]), 16, 1, 8),  # of a query two rows
        (Batch([512] * 131 + [300]), 8, 2, 64),
    ],
)
def test_batches_that_share_little_are_run_with_wide_tiles_if_they_are_few_drafts_or_of_different_lengths(
    batch: Batch, heads: int, tokens: int, smallest: int
) -> None:
    tiles = capabilities.tile_table("9.0a", 128, "NVIDIA H100")
    spec = AttentionSpec(heads, 8, 128, 128, FORMATS["bfloat16"], query_tokens=tokens)
    plan = make_plan(batch, PackConfig.of(spec, tiles, workers=132))
    assert min(item.m for item in plan.items) == smallest


def test_a_table_without_wide_tiles_keeps_those_of_warps() -> None:
    assert TileTable((8, 16), warp_m=16).without_warps().query_tiles == (8, 16)
    assert TileTable((8, 16, 64)).without_warps().query_tiles == (8, 16, 64)
    assert TileTable((8, 16, 64), warp_m=16).without_warps().query_tiles == (64,)


@pytest.mark.parametrize("form", ["int4", "int2"])
def test_a_prefix_in_few_bits_that_many_share_is_read_by_groups_of_warps_and_tails_by_single_ones(form: str) -> None:
    tiles = capabilities.tile_table("9.0a", 128, "NVIDIA H200", kv=FORMATS[form])
    config = PackConfig.of(AttentionSpec(32, 8, 128, 128, FORMATS[form]), tiles, workers=132)
    plan = make_plan(Batch([2_048 + 64 + 32] * 1024, [Node(0, 2_048, list(range(1024)))]), config)
    shared = [item for item in plan.items if len(item.queries) > 1]
    assert {item.m for item in shared} == {192} and all(item.end <= 2_048 for item in shared)
    assert {item.m for item in plan.items if len(item.queries) == 1} == {8}


@pytest.mark.parametrize(
    ("lengths", "bins"), [([512] * 32, 16), ([4096] * 8, 16), ([32_768], 16), ([512], 4), ([32_768] * 128, 33)]
)
def test_where_single_warps_run_everything_a_second_bin_for_each_worker_must_be_worth_its_start(
    lengths: list[int], bins: int
) -> None:
    """Of 132 SMs, 16 bins of 8 KV heads leave four idle. That costs memory next to nothing; two bins each cost some 3 us."""
    tiles = capabilities.tile_table("9.0a", 128, "NVIDIA H200")
    config = PackConfig.of(AttentionSpec(32, 8, 128, 128, FORMATS["bfloat16"]), tiles, workers=132)
    assert len(make_plan(Batch(lengths), config).bins) - 1 == bins
    # With so much work for tensor cores beside it an idle worker is missed; with less, more cuts are.
    for prefix, of_shared in ((2_048, 16), (8_192, 33)):
        shared = Batch([prefix + 32] * 1024, [Node(0, prefix, list(range(1024)))])
        assert len(make_plan(shared, config).bins) - 1 == of_shared


@pytest.mark.parametrize(("kv_heads", "bins"), [(1, 132), (2, 66), (4, 33), (8, 16)])
def test_bins_of_few_kv_heads_keep_all_sms_busy(kv_heads: int, bins: int) -> None:
    """A bin of one KV head has an eighth of the parts of one of eight: charged alike, half of the SMs were idle."""
    spec = AttentionSpec(8 * kv_heads, kv_heads, 128, 128, FORMATS["bfloat16"])
    config = PackConfig.of(spec, capabilities.tile_table("9.0a", 128, "NVIDIA H200"), 132)
    assert len(make_plan(Batch([333] * 200, []), config).bins) - 1 == bins


def test_a_bin_that_turns_from_one_kind_of_work_items_to_the_other_gets_fewer_of_them() -> None:
    batch = Batch([2_000] * 64, [Node(0, 300, list(range(64)))])

    def config(turn: int) -> PackConfig:
        tiles = msgspec.structs.replace(PRICED, turn_ns=turn / PRICED.share)
        return PackConfig(CostModel(8, 2, 8, 8, 2), tiles, workers=16)

    # One bin of eight has the pack of 64 queries; all others would wait for it.
    blind, turning = (
        makespan(make_plan(batch, config(turn)), batch.seq_lens, config(120_000)) for turn in (0, 120_000)
    )
    free = makespan(make_plan(batch, config(0)), batch.seq_lens, config(0))
    assert blind >= free + 100_000 and turning <= free + 20_000


@pytest.mark.parametrize(
    ("rows", "m"),
    [(1, 4), (4, 4), (5, 16), (64, 64), (65, 64)],
)
def test_tiles_round_up_in_queries(rows: int, m: int) -> None:
    assert TILES.query_tile(rows) == m


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (Batch([9, 9], [Node(1, 4, [0, 1])]), "start at position 0"),
        (Batch([9, 9], [Node(0, 0, [0, 1])]), "is empty"),
        (Batch([9, 3], [Node(0, 4, [0, 1])]), "longer than request 1"),
        (Batch([9, 9], [Node(0, 4, [0, 1], [Node(5, 6, [0, 1])])]), "starts at 5"),
        (Batch([9, 9], [Node(0, 4, [0]), Node(0, 3, [0])]), "repeated"),
        (Batch([9, 9], [Node(0, 4, [0], [Node(4, 5, [1])])]), "unknown"),
    ],
)
def test_what_is_no_prefix_tree_is_named(batch: Batch, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(batch)
