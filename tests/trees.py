"""Hypothesis strategies and builders for batches with prefix trees."""

from __future__ import annotations

import random

import msgspec
from hypothesis import strategies as st

from sglang_pat.packing import POLICIES, Batch, CostModel, Node, PackConfig, TileTable, WideSteps
from sglang_pat.packing.tree import walk

TILES = TileTable(query_tiles=(4, 16, 64), kv_tile=16)
PRICED = msgspec.structs.replace(
    TILES, token_ns=(32, 40, 50), item_ns=(250, 500, 4_500), warp_m=16, warp_tokens=16, turn_ns=6_000, bin_ns=1_000, wave_ns=7_500,
    bytes_per_ns=4, sms=2,
)  # fmt: skip
"""Tiles of more rows cost more a token, and much more to start."""
WARPS = msgspec.structs.replace(TILES, warp_m=16, warp_tokens=16)
"""No prices, but single warps compute 16 tokens at a time: as on a GPU that was not measured."""
IN_SLICES = msgspec.structs.replace(PRICED, slice_token_ns=30)
"""Queries of more than 16 rows with few tokens are run in slices."""

IN_BINS = msgspec.structs.replace(
    IN_SLICES, bins_token_ns=(30, 60, 40), bins_item_ns=(0, 2_000, 3_000), narrow_first_ns=4_000
)
"""Packs are laid out in bins by other prices than it is decided what is packed. Where wide items compute for long, every second worker runs narrow ones
first."""

SPLIT = msgspec.structs.replace(
    IN_BINS, query_tiles=(4, 16, 32, 64), token_ns=(32, 40, 45, 50), item_ns=(250, 500, 1_000, 4_500), warp_m=4,
    bins_token_ns=(30, 60, 50, 40), bins_item_ns=(0, 500, 1_000, 9_000), splits="all",
)  # fmt: skip
SPLIT_TAILS = msgspec.structs.replace(SPLIT, query_tiles=(4, 16, 32, 48), tails_m=16)
SPLIT_WIDE = msgspec.structs.replace(SPLIT, warp_m=0, slice_token_ns=0, splits="wide")
"""Where a bin is too long, packs are split: beside narrow items and items with tails, and where there are neither."""

TAILS = msgspec.structs.replace(
    IN_BINS, query_tiles=(4, 16, 32, 48), token_ns=(32, 40, 45, 50), item_ns=(250, 500, 3_000, 4_500), warp_m=4,
    bins_token_ns=(30, 60, 50, 40), bins_item_ns=(0, 2_000, 2_500, 3_000), tails_m=16,
)  # fmt: skip
"""Up to three queries of 11 to 16 rows read what they share, and then each its tail, in one work item."""

SMALL = msgspec.structs.replace(
    IN_BINS,
    wide_steps=WideSteps(
        small_tokens=150, small_long_draft_queries=6, small_queries=5, small_sharing=2, small_draft_tokens=60
    ),
)
"""Small batches of drafts of more than four rows are run with tiles of 64, and others that share half of what they read or
read little."""

LITTLE_SHARED = msgspec.structs.replace(
    IN_BINS,
    wide_steps=WideSteps(
        little_shared_long_draft_queries=4,
        little_shared_draft_queries=3,
        ragged_queries=6,
        ragged_tokens=40,
        ragged_draft_rows=2,
        ragged_rows=4,
    ),
)
"""So are those that share little, if they are few drafts or their lengths differ."""


@st.composite
def batches(draw: st.DrawFn, max_queries: int = 24, max_length: int = 80) -> Batch:
    """Any prefix tree over up to `max_queries` requests: nodes with one query, chains and short tails included."""
    count = draw(st.integers(1, max_queries))
    queries = list(range(count))
    draw(st.randoms(use_true_random=False)).shuffle(queries)
    ends = [0] * count

    def grow(members: list[int], start: int, depth: int) -> list[Node]:
        nodes = []
        while members:
            size = draw(st.integers(0, len(members)))
            if size == 0:
                break
            group, members = members[:size], members[size:]
            node = Node(start, start + draw(st.integers(1, max_length)), sorted(group))
            for query in group:
                ends[query] = node.end
            node.children = grow(group, node.end, depth + 1) if depth < 6 else []
            nodes.append(node)
        return nodes

    roots = grow(queries, 0, 0)
    return Batch([end + draw(st.integers(1, max_length)) for end in ends], roots)


@st.composite
def straddling(draw: st.DrawFn) -> PackConfig:
    """Configs with which a query may straddle two work items, also where its heads are computed in sets."""
    sets, group = draw(st.sampled_from([1, 1, 2])), draw(st.integers(33, 63))
    tiles = draw(st.sampled_from([TILES, msgspec.structs.replace(PRICED, warp_m=0), SPLIT_WIDE]))
    cost = CostModel(
        sets * group, 1, draw(st.sampled_from([8, 576])), 8, 2, flop_per_byte=draw(st.sampled_from([0, 180])),
        start_price=draw(st.sampled_from([0, 10_000])), head_splits=sets, latent=True,
    )  # fmt: skip
    config = PackConfig(
        cost, tiles, draw(st.sampled_from([1, 2, 132])), draw(st.sampled_from(list(POLICIES))),
        grain=draw(st.sampled_from([8, 64])), drafts=draw(st.booleans()), straddles=True,
    )  # fmt: skip
    assert config.straddled_rows == 64
    return config


@st.composite
def configs(draw: st.DrawFn) -> PackConfig:
    if draw(st.sampled_from([False, False, False, True])):
        return draw(straddling())
    kv_heads = draw(st.sampled_from([1, 2, 8]))
    group = draw(st.sampled_from([1, 3, 4, 16, 32, 65, 200]))
    tiles = draw(
        st.sampled_from(
            [TILES, WARPS, PRICED, IN_SLICES, IN_BINS, SPLIT, SPLIT_TAILS, SPLIT_WIDE, SMALL, LITTLE_SHARED, TAILS]
        )
    )
    tails = tiles is TAILS and draw(st.booleans())
    group = draw(st.integers(11, 16)) if tails else group
    dim = draw(st.sampled_from([8, 64, 128]))
    cost = CostModel(
        kv_heads * group,
        kv_heads,
        dim,
        draw(st.sampled_from([8, 64, 128])),
        draw(st.sampled_from([2, 4])),
        flop_per_byte=draw(st.sampled_from([0, 1, 180])),
        start_price=draw(st.sampled_from([0, 10_000])),
        part_overhead=draw(st.sampled_from([0, 500])),
        head_splits=tiles.head_splits(group, 1),
    )
    return PackConfig(
        cost,
        tiles,
        workers=draw(st.sampled_from([1, 2, 132, 4096])),
        policy="optimal" if tails else draw(st.sampled_from(list(POLICIES))),
        window=0 if tails else draw(st.sampled_from([0, 0, 0, 1, 8, 60, 2_000])),
        grain=draw(st.sampled_from([8, 8, 64])),
        drafts=draw(st.booleans()),
    )


def random_batch(generator: random.Random, depth: int, fanout: int, length: int) -> Batch:
    """A regular tree: `fanout` children below every node, `depth` levels, lengths up to `length`."""
    seq_lens: list[int] = []

    def grow(start: int, level: int) -> Node:
        node = Node(start, start + generator.randint(1, length), [])
        if level == depth:
            for _ in range(fanout):
                node.queries.append(len(seq_lens))
                seq_lens.append(node.end + generator.randint(1, length))
        else:
            node.children = [grow(node.end, level + 1) for _ in range(fanout)]
            node.queries = [query for child in node.children for query in child.queries]
        return node

    roots = [grow(0, 1)]
    return Batch(seq_lens, roots)


def check(batch: Batch) -> None:
    """Raise ValueError if `batch` is not a prefix tree; the message names the node."""
    for node in batch.roots:
        if node.start != 0:
            raise ValueError(f"a first-level prefix must start at position 0, not {node.start}")
    _check_disjoint(batch.roots, set(range(len(batch.seq_lens))), "the batch")
    for node in walk(batch.roots):
        name = f"node [{node.start}, {node.end})"
        if node.end <= node.start:
            raise ValueError(f"{name} is empty")
        for query in node.queries:
            if batch.seq_lens[query] < node.end:
                raise ValueError(f"{name} is longer than request {query}, which has {batch.seq_lens[query]} tokens")
        for child in node.children:
            if child.start != node.end:
                raise ValueError(f"a child of {name} starts at {child.start}")
        _check_disjoint(node.children, set(node.queries), name)


def _check_disjoint(nodes: list[Node], allowed: set[int], name: str) -> None:
    for node in nodes:
        if not node.queries or not allowed.issuperset(node.queries) or len(set(node.queries)) != len(node.queries):
            raise ValueError(f"below {name}: queries {node.queries} are repeated, unknown or missing")
        allowed = allowed.difference(node.queries)
