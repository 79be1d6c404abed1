"""What a plan depends on besides the batch: the device, the model, and the prices of work."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import msgspec

from sglang_pat.packing.constants import BUSY_WORKERS, LITTLE_PERCENT, MAX_WAVES, RAGGED
from sglang_pat.packing.cost import CostModel, Count
from sglang_pat.packing.spec import LOW_BIT_PAGE, AttentionSpec, Window
from sglang_pat.packing.tiles import TileTable

GRAIN = 8
"""KV positions between possible cuts. With 16, small batches missed the even share by up to 7 %; with 8 they stay within 5 % if a worker has
at least two KV tiles (`python benchmarks/policies.py --random 200`)."""


ALWAYS = 2**31 - 1
"""Stands for "no limit": more tokens than any pack has, more steps than any plan is used for."""


Policy = Literal["query", "naive", "pat", "optimal"]
"""How queries are packed (oracle.py)."""


class WideLimits(msgspec.Struct, frozen=True):
    """`WideSteps` for a config: which batches it plans without tiles of single warps. Queries and tokens are those of the batch, times `CostModel.runs`.

    Attributes:
        small_queries, small_tokens, small_sharing, small_draft_tokens: Of small batches.
        little_shared_queries: Up to how many queries batches that share little are; 0: none is.
        ragged_queries, ragged_tokens: Up to how many queries those are whose lengths differ, and how many tokens one of them has at least on average, not
            times anything.
    """

    small_queries: int
    small_tokens: int
    small_sharing: int
    small_draft_tokens: int
    little_shared_queries: int
    ragged_queries: int
    ragged_tokens: int

    def hold(self, seq_lens: list[int], tokens: int, runs: int) -> bool:
        """Whether they do for a batch of these lengths, which has so many tokens when each is read once."""
        if not seq_lens:
            return False
        queries, own, longest = len(seq_lens) * runs, sum(seq_lens), max(seq_lens)
        small = queries <= self.small_queries and tokens * runs <= self.small_tokens
        if small and (tokens * runs <= self.small_draft_tokens or own >= self.small_sharing * tokens):
            return True
        few = queries <= self.little_shared_queries
        ragged = (
            queries <= self.ragged_queries
            and own >= self.ragged_tokens * len(seq_lens)
            and RAGGED * (longest - min(seq_lens)) > longest
        )
        return (few or ragged) and 100 * own <= (100 + LITTLE_PERCENT) * tokens


class PackConfig(msgspec.Struct, frozen=True):
    """The device and the model, and the prices of work.

    A plan moves bytes and takes time. A price expresses both in bytes: a time costs the bytes that a worker's share of the memory bandwidth
    moves in it. So traffic costs its own bytes, and work that takes longer than its traffic costs more. Prices are for all KV heads.

    Attributes:
        cost: The model's shape and its bytes.
        tiles: Tiles of the device.
        workers: How many work items run at the same time (SMs, CPU threads).
        policy: A key of `oracle.POLICIES`.
        window: `AttentionSpec.planned_window`.
        grain: KV positions between possible cuts.
        drafts: Whether queries are drafts of several tokens.
    """

    cost: CostModel
    tiles: TileTable
    workers: Count
    policy: Policy = "optimal"
    window: Window = 0
    grain: Count = GRAIN
    drafts: bool = False

    @classmethod
    def of(cls, spec: AttentionSpec, tiles: TileTable, workers: int, policy: Policy = "optimal") -> PackConfig:
        """The config for layers of a spec. Their query heads are split if the largest tile has fewer rows. Pages of few bits are not cut."""
        cost = spec.cost(tiles.head_splits(spec.query_heads, spec.kv_heads))
        grain = LOW_BIT_PAGE if spec.kv.is_low_bit else GRAIN
        return cls(cost, tiles, workers, policy, spec.planned_window, grain, spec.query_tokens > 1)

    @property
    def wide_only(self) -> PackConfig | None:
        """What batches within `wide_limits` are planned with; None if it is the same."""
        tiles = self.tiles.without_warps()
        return msgspec.structs.replace(self, tiles=tiles) if tiles != self.tiles else None

    @property
    def for_bins(self) -> PackConfig:
        """The same with the prices by which packs are laid out in bins; itself if they are no others."""
        tiles = self.tiles.for_bins()
        return self if tiles is self.tiles else msgspec.structs.replace(self, tiles=tiles)

    @property
    def wide_limits(self) -> WideLimits:
        """Which batches are planned with `wide_only`."""
        steps, workers = self.tiles.wide_steps, self.workers
        long_drafts = self.drafts and self.tiles.query_tiles[0] < self.cost.group
        queries, sharing = (
            (steps.small_long_draft_queries, 1) if long_drafts else (steps.small_queries, steps.small_sharing)
        )
        little_shared = steps.little_shared_long_draft_queries if long_drafts else steps.little_shared_draft_queries
        ragged_rows = steps.ragged_draft_rows if self.drafts else steps.ragged_rows
        return WideLimits(
            queries * workers,
            steps.small_tokens * workers,
            sharing,
            steps.small_draft_tokens * workers if self.drafts else 0,
            little_shared * workers if self.drafts else 0,
            steps.ragged_queries * workers if ragged_rows <= self.cost.group else 0,
            steps.ragged_tokens,
        )

    @property
    def max_queries(self) -> int:
        """How many queries a work item may have."""
        return self.tiles.max_queries(self.cost.group)

    @property
    def tails_queries(self) -> int:
        """How many queries a work item with tails may have; 1 if there is none, as where queries see windows."""
        return 1 if self.window or self.cost.head_splits > 1 else self.tiles.tails_queries(self.cost.group)

    @property
    def few_queries(self) -> int:
        """How many queries the tile with the cheapest start per row holds; at least one."""
        m = self.tiles.query_tiles[-1]
        if self.tiles.item_ns:
            _, m = min(
                (self._price(ns) / m, m) for ns, m in zip(self.tiles.item_ns, self.tiles.query_tiles, strict=True)
            )
        return max(1, m // self.cost.group)

    @property
    def warp_queries(self) -> int:
        """How many queries the largest tile of a single warp holds."""
        return self.tiles.warp_m // self.cost.group

    @property
    def split_queries(self) -> int:
        """Up to how many queries work items have into which packs are split where a bin is too long: what the smallest wide tile holds; 0 if none are
        (`TileTable.splits`), nor into single queries, whose prices are of what they read alone."""
        tiles = self.tiles
        if tiles.splits == "none" or (tiles.splits == "wide" and tiles.warp_m):
            return 0
        wide = tiles.without_warps().query_tiles[0]
        most = wide // self.cost.group if wide > tiles.warp_m else 0
        return most if 1 < most < self.max_queries else 0

    def _price(self, ns: float) -> int:
        """The price of a time of one worker, for one KV head."""
        return round(ns * self.tiles.share)

    @property
    def turn_price(self) -> int:
        """Price of switching in a bin from work items of all warps to those of single warps."""
        return self.cost.runs * self._price(self.tiles.turn_ns)

    @property
    def bin_end_price(self) -> int:
        """Price of each bin besides its work, in steps where single warps run everything. All workers wait for it, as for `wave_price`."""
        return round(self.tiles.bin_ns * self.tiles.bytes_per_ns)

    @property
    def wave_price(self) -> int:
        """Price of one more bin per worker in such a step."""
        return round(self.tiles.wave_ns * self.tiles.bytes_per_ns)

    @property
    def narrow_first_price(self) -> int:
        """`TileTable.narrow_first_ns` of all workers."""
        return round(self.tiles.narrow_first_ns * self.tiles.bytes_per_ns)

    def token_price(self, queries: int) -> int:
        """Price per token of a work item with `queries` queries: the token's bytes, or the computation if that takes longer."""
        cost = self.cost
        rows = queries * cost.group
        m = self.tiles.query_tile(rows)
        tiles = -(-rows // m)
        price = max(cost.token_bytes, self._arithmetic(tiles * m))
        if self.tiles.token_ns:
            ns = self.tiles.token_ns[self.tiles.query_tiles.index(m)]
            price = max(price, tiles * cost.runs * self._price(ns))
        return price

    def _arithmetic(self, rows: int) -> int:
        """Price per token of the products with so many rows of Q, padding included; 0 if arithmetic is ignored."""
        cost = self.cost
        flop = 2 * rows * cost.runs * (cost.head_dim + cost.v_head_dim)
        return flop // cost.flop_per_byte if cost.flop_per_byte else 0

    def start_price(self, queries: int) -> int:
        """Price of a work item with `queries` queries besides its tokens: to start and end."""
        if not self.tiles.item_ns:
            return self.cost.start_price
        m = self.tiles.query_tile(queries * self.cost.group)
        return self.cost.runs * self._price(self.tiles.item_ns[self.tiles.query_tiles.index(m)])

    @property
    def row_slices(self) -> int:
        """In how many slices of `TileTable.warp_m` rows a query with more rows can be run; 1 if none can."""
        return -(-self.cost.group // self.tiles.warp_m) if self.tiles.slice_token_ns else 1

    @property
    def slices_token_price(self) -> int:
        """Price per token of a work item that is run in such slices."""
        computing = self.row_slices * self.cost.runs * self._price(self.tiles.slice_token_ns)
        return max(self.cost.token_bytes, computing, self._arithmetic(self.row_slices * self.tiles.warp_m))

    @property
    def slices_start_price(self) -> int:
        """Price of such a work item besides its tokens."""
        if self.row_slices == 1:
            return 0
        index = self.tiles.query_tiles.index(self.tiles.warp_m)
        return self.row_slices * self.cost.runs * self._price(self.tiles.item_ns[index])

    @property
    def slices_tokens(self) -> int:
        """Up to how many tokens a pack of one query costs less in such slices than with a tile for all its rows; negative if it never does."""
        if self.row_slices == 1:
            return -1
        saved = self.start_price(1) - self.slices_start_price
        return self._cheaper_up_to(saved, self.slices_token_price - self.token_price(1), by_warps=True) or -1

    def in_row_slices(self, queries: int, tokens: int) -> bool:
        """Whether a pack is run in such slices. Work items that it is cut into are if it is, however short: among wide ones, a few in slices made
        the kernel 7 to 9 us longer (benchmarks/NOTES.md, "Prices of an H200, and rows in parts")."""
        return queries == 1 and tokens <= self.slices_tokens

    def runs_in_row_slices(self, queries: int, m: int) -> bool:
        """Whether a work item of `queries` queries with a tile of `m` rows is run in such slices."""
        return queries == 1 and self.row_slices > 1 and m == self.tiles.warp_m

    def growth_price(self, queries: int, in_row_slices: bool) -> int:
        """Price of one more token for a work item. The first `TileTable.warp_tokens` cost it all the same; plans are made anew a little early then."""
        return self.slices_token_price if in_row_slices else self.token_price(queries)

    def fixed_price(self, queries: int, in_row_slices: bool) -> int:
        """Price of a work item besides its tokens."""
        return self.slices_start_price if in_row_slices else self.start_price(queries)

    def by_warps(self, queries: int, in_row_slices: bool) -> bool:
        """Whether single warps run a work item."""
        return queries <= self.warp_queries or in_row_slices

    def item_price(self, queries: int, tokens: int, in_row_slices: bool, tail_tokens: int = 0) -> int:
        """Price of a work item that reads `tokens` tokens for `queries` queries with one tile, or in slices, and then `tail_tokens` in their tails."""
        computed = max(tokens, self.tiles.warp_tokens) if self.by_warps(queries, in_row_slices) else tokens
        reading = computed * self.growth_price(queries, in_row_slices) + tail_tokens * self.token_price(1)
        return reading + self.fixed_price(queries, in_row_slices)

    def uncut_price(self, queries: int, tokens: int) -> int:
        """Price of a pack that is one work item."""
        return self.item_price(queries, tokens, self.in_row_slices(queries, tokens))

    def bin_price(self, members: Iterable[tuple[int, int, bool, int]]) -> int:
        """Price of a bin whose work items have these (queries, tokens, whether they are run in slices, tokens of tails)."""
        price, kinds = 0, set()
        for queries, tokens, in_row_slices, tail_tokens in members:
            price += self.item_price(queries, tokens, in_row_slices, tail_tokens)
            kinds.add(self.by_warps(queries, in_row_slices))
        return price + (self.turn_price if len(kinds) == 2 else 0)

    def short_tokens(self, queries: int) -> int:
        """Up to how many tokens a pack of `queries` queries costs less as several work items of `few_queries`, each of which reads the KV, than
        as one work item."""
        items = -(-queries // self.few_queries)
        size = -(-queries // items)
        token, start = self.token_price(queries), self.start_price(queries)
        saved, more = start - items * self.start_price(size), items * self.token_price(size) - token
        longest = self._cheaper_up_to(saved, more, self.by_warps(size, in_row_slices=False))
        if size == 1:
            saved, more = start - items * self.slices_start_price, items * self.slices_token_price - token
            longest = max(longest, min(self.slices_tokens, self._cheaper_up_to(saved, more, by_warps=True)))
        return longest

    def _cheaper_up_to(self, saved: int, more: int, by_warps: bool) -> int:
        """Up to how many tokens it pays to save `saved` once and spend `more` per token; 0 if single warps would compute fewer than they do at a time."""
        longest = _crossing(saved, more)
        return 0 if by_warps and longest < self.tiles.warp_tokens else longest

    def pieces(self, queries: int, tokens: int) -> int:
        """In how many work items a pack is run: as few as the largest tile allows, or more if the pack is short."""
        pieces = -(-queries // self.max_queries)
        size = -(-queries // pieces)
        return -(-queries // self.few_queries) if tokens <= self.short_tokens(size) else pieces

    def pack_price(self, queries: int, tokens: int) -> int:
        """Price of reading `tokens` tokens for `queries` queries."""
        if queries == 0:
            return 0
        items = self.pieces(queries, tokens)
        size = -(-queries // items)
        return items * self.uncut_price(size, tokens)

    def computing_price(self, queries: int, tokens: int, tail_tokens: int | None = None) -> int:
        """What the wide work items of a pack cost beyond reading its KV once; 0 where single warps run it. With `tail_tokens`, the pack is one
        work item, which tails follow."""
        pieces = self.pieces(queries, tokens) if tail_tokens is None else 1
        sizes = [queries * (i + 1) // pieces - queries * i // pieces for i in range(pieces)]
        wide = [size for size in sizes if not self.by_warps(size, self.in_row_slices(size, tokens))]
        tails = tail_tokens or 0
        price = sum(self.item_price(size, tokens, False, tails) for size in wide)
        return max(0, price - (tokens + tails) * self.cost.token_bytes)

    @property
    def max_bins(self) -> int:
        """The most bins that a plan has."""
        return max(1, MAX_WAVES * self.workers // self.cost.runs)

    def num_bins(self, limit: int, work: float, cut: float, narrow: bool) -> int:
        """How many bins, at most `limit`, the work of each KV head is laid out in.

        All KV heads run the same bins, so only some numbers keep every worker busy. More bins leave less idle time but cut more packs. If
        single warps run everything, memory is the bound: then half of the workers use more than half of the bandwidth (`sqrt`), and the further
        costs of bins were measured (benchmarks/NOTES.md, 2026-11-23).

        Args:
            limit: The most bins that still have enough work each.
            work: Price of all packs.
            cut: Price of ending a bin within a pack.
            narrow: Whether single warps run all packs.
        """
        runs, workers = self.cost.runs, self.workers
        best, least = 0, math.inf
        quarters = [part * workers // (4 * runs) for part in range(1, 4)] if narrow else []
        waves = [wave * workers // runs for wave in range(1, MAX_WAVES + 1)]
        for bins in [max(1, min(limit, workers // runs)), *quarters, *waves]:
            if 0 < bins <= limit:
                wave = -(-bins * runs // workers)
                idle = wave * workers / (bins * runs)
                if narrow:
                    price = work * math.sqrt(idle) + wave * self.wave_price + bins * (cut + self.bin_end_price)
                else:
                    price = work * idle + bins * cut
                if price < least:
                    best, least = bins, price
        return best

    def num_bins_of_single(self, limit: int, count: int, work: int, alike: bool) -> int:
        """The same where every work item has one query, and all warps of a worker run it.

        Memory is the bound there as long as most workers read (`BUSY_WORKERS`), but items start one after the other on each. A bin that ends
        within an item makes it start twice, and a part; if items are alike, as many as divide them end within none.

        Args:
            limit: As above.
            count: Work items.
            work: Their price.
            alike: Whether they cost the same but for what a bin may miss the average by.
        """
        runs, workers = self.cost.runs, self.workers
        share, start = workers / runs, self.start_price(1)
        needed = min(1.0, BUSY_WORKERS * self.token_price(1) / self.cost.token_bytes) * share
        best, least = 0, math.inf
        waves = [wave * workers // runs for wave in range(1, MAX_WAVES + 1)]
        for bins in [max(1, min(limit, workers // runs)), *waves, count]:
            if 0 < bins <= min(limit, self.max_bins):
                wave = -(-bins * runs // workers)
                cuts = 0 if alike and count % bins == 0 else bins
                full = (wave - 1) * share
                busy = (full + max(bins - full, needed)) / bins
                idle = wave * workers / (bins * runs)
                price = (work - count * start) * busy + (count + cuts) * start * idle + cuts * self.cost.part_bytes
                if price < least:
                    best, least = bins, price
        return best


def _crossing(saved: int, more: int) -> int:
    """Up to how many tokens it pays to save `saved` once and spend `more` per token."""
    if saved <= 0:
        return 0
    return min(ALWAYS, (saved - 1) // more) if more > 0 else ALWAYS
