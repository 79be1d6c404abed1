"""From a batch to its plan, in Python that is easy to read: plans of csrc/packing, which serves, are compared with its, number by number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

from sglang_pat.packing.constants import TAIL_GROWTH
from sglang_pat.packing.plan import OPEN, Plan, WorkItem
from sglang_pat.packing.prices import PackConfig
from sglang_pat.packing.tree import Batch, Node, Prefix, compact, in_windows, kv_minimum

from . import pricing
from .balance import balance, even_steps
from .heuristic import Pack, cut_at_pieces, kv_length, pack_nodes, pack_queries, pack_tree, split_by_tile
from .optimal import pack_optimal

PACKERS: dict[str, Callable[[list[Prefix], Batch, PackConfig], list[Pack]]] = {
    "query": pack_queries,
    "naive": pack_nodes,
    "pat": pack_tree,
    "optimal": pack_optimal,
}
"""Of each of `packing.POLICIES`."""


def visible(batch: Batch, config: PackConfig) -> Batch:
    """The batch to plan (`in_windows`). Pieces begin at positions, so with pieces requests stay as long as they are."""
    seen = in_windows(batch, config.window)
    return Batch(batch.seq_lens, seen.roots) if config.piece else seen


def rounded(batch: Batch, config: PackConfig) -> list[Prefix]:
    """The compact tree; with pieces, of what is shared of whole ones. Prefixes may be empty then."""
    prefixes = compact(batch)
    for prefix in prefixes if config.piece else []:
        prefix.start -= prefix.start % config.piece
        prefix.end -= prefix.end % config.piece
    return prefixes


def choose_packs(batch: Batch, config: PackConfig) -> list[Pack]:
    """Pack a batch, with any number of queries per pack.

    If the policy's packs cost more than one query per CTA (some policies pack many short prefixes), the latter is returned.
    """
    prefixes = rounded(batch, config)
    if config.piece:
        return PACKERS["query" if config.policy == "query" else "naive"](prefixes, batch, config)
    candidates = (PACKERS[config.policy](prefixes, batch, config), pack_queries(prefixes, batch, config))
    return min(candidates, key=lambda packs: packs_price(split_by_tile(packs, batch.seq_lens, config), batch, config))


def make_packs(batch: Batch, config: PackConfig) -> list[Pack]:
    """The same, split into packs that are one work item each until `balance` cuts them."""
    return split_by_tile(choose_packs(batch, config), batch.seq_lens, config)


def pack_price(pack: Pack, seq_lens: list[int], config: PackConfig) -> int:
    """The price of reading a pack's KV."""
    queries, tokens = len(pack.queries), kv_length(pack, seq_lens)
    if pack.tails or pack.rows:
        return pricing.item_price(config, queries, tokens, False, pack.tail_tokens(seq_lens))
    return pricing.pack_price(config, queries, tokens)


def packs_price(packs: list[Pack], batch: Batch, config: PackConfig) -> int:
    """The price of packs before they are cut. Two parts of a query that has some rows in each have as many bytes as one."""
    parts = Counter(
        query for pack in packs for i, query in enumerate(pack.queries) if not pack.rows or pack.rows[i][0] == 0
    )
    merged = sum(count for count in parts.values() if count > 1)
    reads = sum(pack_price(pack, batch.seq_lens, config) for pack in packs)
    return reads + merged * config.cost.part_bytes


def narrow_first(packs: list[Pack], seq_lens: list[int], config: PackConfig) -> bool:
    """Whether every second worker should run narrow work items first (`Plan.narrow_first`), if there are any. `packs` have any number of queries; those
    of one count nothing."""
    least = config.narrow_first_price
    computing = sum(
        pricing.computing_price(
            config,
            len(pack.queries),
            kv_length(pack, seq_lens),
            pack.tail_tokens(seq_lens) if pack.tails else None,
        )
        for pack in packs
        if len(pack.queries) > 1
    )
    return 0 < least <= computing


def for_batch(batch: Batch, config: PackConfig) -> PackConfig:
    """What this batch is planned with: `config`, or its `wide_only`."""
    batch = visible(batch, config)
    tokens = kv_minimum(rounded(batch, config), batch.seq_lens)
    wide_only = config.wide_only
    return (
        wide_only
        if wide_only and pricing.hold(config.wide_limits, batch.seq_lens, tokens, config.cost.runs)
        else config
    )


def make_plan(batch: Batch, config: PackConfig, levels: int | None = None) -> Plan:
    """Plan one batch.

    Args:
        batch: Lengths (at least one token each) and prefix tree; see `trees.check`.
        config: Device and model.
        levels: Pack so many levels of the tree (`constants.LEVELS`); None for all.
    """
    lengths, window, piece = batch.seq_lens, config.window, config.piece
    batch = visible(batch, config)
    if levels is not None:
        batch = cut(batch, levels)
    config = for_batch(batch, config)
    seq_lens, tiles = batch.seq_lens, config.tiles
    growing = [length <= window or window == 0 or piece > 0 for length in lengths]
    num_parts = [0] * len(seq_lens)
    items: list[WorkItem] = []
    bins = [0]
    kv_tokens, longest, longest_tail, longest_with_tails = 0, tiles.kv_tile, 0, 0
    narrow = False
    packs = choose_packs(batch, config)
    split = split_by_tile(packs, seq_lens, config)
    filled = balance(cut_at_pieces(split, seq_lens, config) if piece else split, seq_lens, config)
    places = _places(filled, piece)
    for members in filled:
        for pack in members:
            length = kv_length(pack, seq_lens)
            parts = [places[query].index(pack.start) if piece else num_parts[query] for query in pack.queries]
            for query in pack.queries:
                num_parts[query] += 1
            rows = sum(end - first for first, end in pack.rows) or len(pack.queries) * config.cost.group
            m = tiles.query_tile(tiles.warp_m if pack.in_row_slices else rows)
            narrow |= pricing.by_warps(config, len(pack.queries), pack.in_row_slices)
            grows = growing[pack.queries[0]]
            # A full window moves with the end of its request.
            back = 0 if grows else window - OPEN
            end = OPEN if pack.end is None else pack.end - back
            start = pack.start - back
            if piece and window and 0 < start == seq_lens[pack.queries[0]] - window:
                start = OPEN - window
            items.append(WorkItem(start, end, pack.queries, parts, m, pack.tails, pack.rows))
            length += pack.tail_tokens(seq_lens)
            kv_tokens += length
            longest = max(longest, length)
            longest_tail = max(longest_tail, length if pack.end is None and grows else 0)
            longest_with_tails = max(longest_with_tails, length if pack.tails else 0)
        bins.append(len(items))
    steps = min(TAIL_GROWTH * longest - longest_tail, even_steps(filled, seq_lens, config, growing))
    if longest_with_tails:
        # Each of its queries becomes longer.
        steps = min(steps, (TAIL_GROWTH * longest - longest_with_tails) // config.tails_queries)
    if window:
        # Until the next window fills.
        steps = min([steps, *(window - length + 1 for length in lengths if length <= window)])
    if piece:
        # Until a request needs one more piece, or its window one less.
        steps = min([steps, *(piece - (length - 1) % piece for length in lengths)])
        steps = min([steps, *(piece - (length - window) % piece for length in lengths if 0 < window < length)])
    first = narrow and narrow_first(packs, seq_lens, config)
    straddles = config.straddled_rows > 0 and max(num_parts, default=0) > 1
    return Plan(items, bins, num_parts, steps, kv_tokens, first, straddles)


def _places(bins: list[list[Pack]], piece: int) -> dict[int, list[int]]:
    """Where the pieces of each query start, in order."""
    places: dict[int, list[int]] = {}
    for pack in (pack for members in bins for pack in members if piece):
        for query in pack.queries:
            places[query] = sorted([*places.get(query, []), pack.start])
    return places


def cut(batch: Batch, levels: int) -> Batch:
    """The batch without what its requests share below the first `levels` levels of the compact tree."""
    found = Batch(batch.seq_lens)
    places = [(found.roots, 0)]  # of the children of each prefix, and their level
    for prefix in compact(batch)[1:]:
        siblings, level = places[prefix.parent]
        node = Node(prefix.start, prefix.end, prefix.queries)
        if level < levels:
            siblings.append(node)
        places.append((node.children, level + 1))
    return found


def bin_prices(plan: Plan, seq_lens: list[int], config: PackConfig) -> list[int]:
    """The price of each bin of a plan, for all KV heads; `config` is what it was made with (`for_batch`)."""
    config = config.for_bins
    prices = []
    for first, last in pairwise(plan.bins):
        members = []
        for item in plan.items[first:last]:
            start, end = item.span(seq_lens)
            in_row_slices = pricing.runs_in_row_slices(config, len(item.queries), item.m)
            members.append((len(item.queries), end - start, in_row_slices, tail_tokens(item, seq_lens)))
        prices.append(pricing.bin_price(config, members))
    return prices


def tail_tokens(item: WorkItem, seq_lens: list[int]) -> int:
    """The tokens that a work item reads for single queries."""
    return sum(seq_lens[query] - item.end for query in item.queries) if item.tails else 0


def makespan(plan: Plan, seq_lens: list[int], config: PackConfig) -> int:
    """When the last worker finishes, as a price (`PackConfig`). Bins are dealt to the workers in turn, all KV heads of a bin side by side.
    `config` is what the plan was made with (`for_batch`)."""
    loads = [0] * config.workers
    for index, price in enumerate(bin_prices(plan, seq_lens, config)):
        for head in range(config.cost.runs):
            loads[(index * config.cost.runs + head) % config.workers] += price
    return -(-max(loads) // config.cost.runs)
