"""What work costs by `PackConfig`, and how many bins it is laid out in: the arithmetic of csrc/packing/prices.h."""

from __future__ import annotations

import math
from collections.abc import Iterable

from sglang_pat.packing import CostModel, PackConfig
from sglang_pat.packing.constants import BUSY_WORKERS, LITTLE_PERCENT, MAX_WAVES, RAGGED


def merge_tokens(cost: CostModel, queries: int) -> float:
    """Up to which length reading a prefix again costs less than merging, for `queries` queries.

    The first split of a query makes two parts, hence the factor (§5.1, equation 2). With one query head per KV head and 16-bit KV, this is the paper's
    rule "merge if 4 s >= l" (§5.1, scheme comparison), except that it also counts the bytes of the LSE.
    """
    return 2 * cost.part_bytes * queries / cost.token_bytes


def hold(limits: dict[str, int], seq_lens: list[int], tokens: int, runs: int) -> bool:
    """Whether a batch of these lengths is within the limits; it has so many tokens when each is read once."""
    if not seq_lens:
        return False
    queries, own, longest = len(seq_lens) * runs, sum(seq_lens), max(seq_lens)
    small = queries <= limits["small_queries"] and tokens * runs <= limits["small_tokens"]
    if small and (tokens * runs <= limits["small_draft_tokens"] or own >= limits["small_sharing"] * tokens):
        return True
    few = queries <= limits["little_shared_queries"]
    ragged = (
        queries <= limits["ragged_queries"]
        and own >= limits["ragged_tokens"] * len(seq_lens)
        and RAGGED * (longest - min(seq_lens)) > longest
    )
    return (few or ragged) and 100 * own <= (100 + LITTLE_PERCENT) * tokens


def in_row_slices(config: PackConfig, queries: int, tokens: int) -> bool:
    """Whether a pack is run in slices of `TileTable.warp_m` rows, and so the work items that it is cut into."""
    return queries == 1 and tokens <= config.slices_tokens


def runs_in_row_slices(config: PackConfig, queries: int, m: int) -> bool:
    """Whether a work item of `queries` queries with a tile of `m` rows is run in slices."""
    return queries == 1 and config.row_slices > 1 and m == config.tiles.warp_m


def growth_price(config: PackConfig, queries: int, in_row_slices: bool) -> int:
    """Price of one more token for a work item. The first `TileTable.warp_tokens` cost it all the same; plans are made anew a little early then."""
    return config.slices_token_price if in_row_slices else config.token_price(queries)


def fixed_price(config: PackConfig, queries: int, in_row_slices: bool) -> int:
    """Price of a work item besides its tokens."""
    return config.slices_start_price if in_row_slices else config.start_price(queries)


def by_warps(config: PackConfig, queries: int, in_row_slices: bool) -> bool:
    """Whether single warps run a work item."""
    return queries <= config.warp_queries or in_row_slices


def item_price(config: PackConfig, queries: int, tokens: int, in_row_slices: bool, tail_tokens: int = 0) -> int:
    """Price of a work item that reads `tokens` tokens for `queries` queries with one tile, or in slices, and then `tail_tokens` in their tails."""
    computed = max(tokens, config.tiles.warp_tokens) if by_warps(config, queries, in_row_slices) else tokens
    reading = computed * growth_price(config, queries, in_row_slices) + tail_tokens * config.token_price(1)
    return reading + fixed_price(config, queries, in_row_slices)


def uncut_price(config: PackConfig, queries: int, tokens: int) -> int:
    """Price of a pack that is one work item."""
    return item_price(config, queries, tokens, in_row_slices(config, queries, tokens))


def bin_price(config: PackConfig, members: Iterable[tuple[int, int, bool, int]]) -> int:
    """Price of a bin whose work items have these (queries, tokens, whether they are run in slices, tokens of tails)."""
    price, kinds = 0, set()
    for queries, tokens, in_row_slices, tail_tokens in members:
        price += item_price(config, queries, tokens, in_row_slices, tail_tokens)
        kinds.add(by_warps(config, queries, in_row_slices))
    return price + (config.turn_price if len(kinds) == 2 else 0)


def items_of_pack(config: PackConfig, queries: int, tokens: int) -> int:
    """In how many work items a pack is run: as few as the largest tile allows, or more if the pack is short."""
    if config.straddled_rows:
        return -(-queries * config.cost.group // config.straddled_rows)
    pieces = -(-queries // config.max_queries)
    size = -(-queries // pieces)
    return -(-queries // config.few_queries) if tokens <= config.short_tokens(size) else pieces


def pack_price(config: PackConfig, queries: int, tokens: int) -> int:
    """Price of reading `tokens` tokens for `queries` queries."""
    if queries == 0:
        return 0
    items = items_of_pack(config, queries, tokens)
    size = -(-queries // items)
    return items * uncut_price(config, size, tokens)


def computing_price(config: PackConfig, queries: int, tokens: int, tail_tokens: int | None = None) -> int:
    """What the wide work items of a pack cost beyond reading its KV once; 0 where single warps run it. With `tail_tokens`, the pack is one
    work item, which tails follow."""
    count = items_of_pack(config, queries, tokens) if tail_tokens is None else 1
    sizes = [queries * (i + 1) // count - queries * i // count for i in range(count)]
    wide = [size for size in sizes if not by_warps(config, size, in_row_slices(config, size, tokens))]
    tails = tail_tokens or 0
    price = sum(item_price(config, size, tokens, False, tails) for size in wide)
    return max(0, price - (tokens + tails) * config.cost.token_bytes)


def num_bins(config: PackConfig, limit: int, work: float, cut: float, narrow: bool) -> int:
    """How many bins, at most `limit`, the work of each KV head is laid out in.

    Args:
        limit: The most bins that still have enough work each.
        work: Price of all packs.
        cut: Price of ending a bin within a pack.
        narrow: Whether single warps run all packs.
    """
    runs, workers = config.cost.runs, config.workers
    best, least = 0, math.inf
    quarters = [part * workers // (4 * runs) for part in range(1, 4)] if narrow else []
    waves = [wave * workers // runs for wave in range(1, MAX_WAVES + 1)]
    for bins in [max(1, min(limit, workers // runs)), *quarters, *waves]:
        if 0 < bins <= limit:
            wave = -(-bins * runs // workers)
            idle = wave * workers / (bins * runs)
            if narrow:
                price = work * math.sqrt(idle) + wave * config.wave_price + bins * (cut + config.bin_end_price)
            else:
                price = work * idle + bins * cut
            if price < least:
                best, least = bins, price
    return best


def num_bins_of_single(config: PackConfig, limit: int, count: int, work: int, alike: bool) -> int:
    """The same where every work item has one query, and all warps of a worker run it.

    Args:
        limit: As above.
        count: Work items.
        work: Their price.
        alike: Whether they cost the same but for what a bin may miss the average by.
    """
    runs, workers = config.cost.runs, config.workers
    share, start = workers / runs, config.start_price(1)
    needed = min(1.0, BUSY_WORKERS * config.token_price(1) / config.cost.token_bytes) * share
    best, least = 0, math.inf
    waves = [wave * workers // runs for wave in range(1, MAX_WAVES + 1)]
    for bins in [max(1, min(limit, workers // runs)), *waves, count]:
        if 0 < bins <= min(limit, config.max_bins):
            wave = -(-bins * runs // workers)
            cuts = 0 if alike and count % bins == 0 else bins
            full = (wave - 1) * share
            busy = (full + max(bins - full, needed)) / bins
            idle = wave * workers / (bins * runs)
            price = (work - count * start) * busy + (count + cuts) * start * idle + cuts * config.cost.part_bytes
            if price < least:
                best, least = bins, price
    return best
