"""What a plan depends on besides the batch: the device, the model, and what work costs there."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import msgspec

from sglang_pat.packing.cost import CostModel, Count
from sglang_pat.packing.spec import AttentionSpec, Window
from sglang_pat.packing.tiles import TileTable

MAX_WAVES = 8
"""Bins that one worker may run one after the other. With 8 KV heads on 132 SMs two waves fill every SM, where one leaves
four of them idle; eight leave at most 4 % idle for any GPU and model (`python benchmarks/policies.py --waves`)."""

ALWAYS = 2**31 - 1
"""More tokens than any pack has, and more steps than any plan is used for."""


Policy = Literal["query", "naive", "pat", "compute", "optimal"]
"""How queries are packed (oracle.py)."""


class PackConfig(msgspec.Struct, frozen=True):
    """The device and the model, and what work costs there.

    A plan moves bytes and takes time. Both are weighed here, in one currency: a price is the bytes that a worker's share of the
    memory bandwidth moves in a time. Traffic has its own bytes for a price; what takes longer has more. Prices are of all KV heads.

    Attributes:
        cost: The model's shape and prices.
        tiles: Tiles of the device.
        workers: Work items that run at the same time (SMs, CPU threads).
        policy: A key of `oracle.POLICIES`.
        window: `AttentionSpec.planned_window`.
    """

    cost: CostModel
    tiles: TileTable
    workers: Count
    policy: Policy = "optimal"
    window: Window = 0

    @classmethod
    def of(cls, spec: AttentionSpec, tiles: TileTable, workers: int, policy: Policy = "optimal") -> PackConfig:
        """For layers of a spec, whose query heads are split where the largest tile has fewer rows."""
        cost = spec.cost(tiles.head_splits(spec.heads * spec.query_tokens, spec.kv_heads))
        return cls(cost, tiles, workers, policy, spec.planned_window)

    @property
    def max_queries(self) -> int:
        """Queries that one work item may have."""
        return self.tiles.max_queries(self.cost.group)

    @property
    def few_queries(self) -> int:
        """Queries of the tile whose start costs least for each of its rows; at least one."""
        m = self.tiles.query_tiles[-1]
        if self.tiles.item_ns:
            _, m = min(
                (self._price(ns) / m, m) for ns, m in zip(self.tiles.item_ns, self.tiles.query_tiles, strict=True)
            )
        return max(1, m // self.cost.group)

    @property
    def warp_queries(self) -> int:
        """Queries of the largest tile that a single warp runs."""
        return self.tiles.warp_m // self.cost.group

    def _price(self, ns: float) -> int:
        """Of a time that one worker takes for one KV head."""
        return round(ns * self.tiles.share)

    @property
    def turn_price(self) -> int:
        """What it costs a bin to go over from work items of all warps to those of single ones."""
        return self.cost.runs * self._price(self.tiles.turn_ns)

    @property
    def bin_end_price(self) -> int:
        """What each bin costs a step besides its work where single warps run everything. All workers wait for it: so does `wave_price`."""
        return round(self.tiles.bin_ns * self.tiles.bytes_per_ns)

    @property
    def wave_price(self) -> int:
        """What such a step costs more where each worker has one more bin."""
        return round(self.tiles.wave_ns * self.tiles.bytes_per_ns)

    def token_price(self, queries: int) -> int:
        """What a token costs a work item with `queries` queries: its bytes, or computing with it where that takes longer."""
        cost = self.cost
        rows = queries * cost.group
        m = self.tiles.query_tile(rows)
        tiles = -(-rows // m)
        price = cost.token_bytes
        if cost.flop_per_byte:
            flop = 2 * tiles * m * cost.runs * (cost.head_dim + cost.v_head_dim)
            price = max(price, flop // cost.flop_per_byte)
        if self.tiles.token_ns:
            ns = self.tiles.token_ns[self.tiles.query_tiles.index(m)]
            price = max(price, tiles * cost.runs * self._price(ns))
        return price

    def start_price(self, queries: int) -> int:
        """What a work item with `queries` queries costs besides its tokens: to start and end."""
        if not self.tiles.item_ns:
            return self.cost.start_price
        m = self.tiles.query_tile(queries * self.cost.group)
        return self.cost.runs * self._price(self.tiles.item_ns[self.tiles.query_tiles.index(m)])

    @property
    def row_parts(self) -> int:
        """In how many parts of `TileTable.warp_m` rows a query is run that has more; 1 where none is."""
        return -(-self.cost.group // self.tiles.warp_m) if self.tiles.part_token_ns else 1

    @property
    def parts_token_price(self) -> int:
        """What a token costs a work item that is run in such parts."""
        computing = self.row_parts * self.cost.runs * self._price(self.tiles.part_token_ns)
        return max(self.cost.token_bytes, computing)

    @property
    def parts_start_price(self) -> int:
        """What it costs besides."""
        if self.row_parts == 1:
            return 0
        index = self.tiles.query_tiles.index(self.tiles.warp_m)
        return self.row_parts * self.cost.runs * self._price(self.tiles.item_ns[index])

    @property
    def parts_tokens(self) -> int:
        """Up to how many tokens a work item of one query costs less in such parts than by a tile for all its rows; below 0: it never does."""
        if self.row_parts == 1:
            return -1
        saved = self.start_price(1) - self.parts_start_price
        return _crossing(saved, self.parts_token_price - self.token_price(1)) or -1

    def in_parts(self, queries: int, tokens: int) -> bool:
        """Whether a work item is run in such parts."""
        return queries == 1 and tokens <= self.parts_tokens

    def growth_price(self, queries: int, tokens: int) -> int:
        """What one more token costs a work item that has `tokens`."""
        return self.parts_token_price if self.in_parts(queries, tokens) else self.token_price(queries)

    def fixed_price(self, queries: int, tokens: int) -> int:
        """What a work item costs besides its tokens."""
        return self.parts_start_price if self.in_parts(queries, tokens) else self.start_price(queries)

    def by_warps(self, queries: int, tokens: int) -> bool:
        """Whether single warps run a work item."""
        return queries <= self.warp_queries or self.in_parts(queries, tokens)

    def item_price(self, queries: int, tokens: int) -> int:
        """What a work item costs that reads `tokens` tokens for `queries` queries of one tile."""
        return tokens * self.growth_price(queries, tokens) + self.fixed_price(queries, tokens)

    def bin_price(self, members: Iterable[tuple[int, int]]) -> int:
        """What a bin costs whose work items have so many (queries, tokens)."""
        price, kinds = 0, set()
        for queries, tokens in members:
            price += self.item_price(queries, tokens)
            kinds.add(self.by_warps(queries, tokens))
        return price + (self.turn_price if len(kinds) == 2 else 0)

    def short_tokens(self, queries: int) -> int:
        """Up to how many tokens a pack of `queries` queries is read faster again and again, by work items of
        `few_queries`, than once by a tile for all of them."""
        items = -(-queries // self.few_queries)
        size = -(-queries // items)
        token, start = self.token_price(queries), self.start_price(queries)
        longest = _crossing(start - items * self.start_price(size), items * self.token_price(size) - token)
        if size == 1:
            in_parts = _crossing(start - items * self.parts_start_price, items * self.parts_token_price - token)
            longest = max(longest, min(self.parts_tokens, in_parts))
        return longest

    def pieces(self, queries: int, tokens: int) -> int:
        """In how many work items a pack is run: as few as the largest tile allows, more where it is short."""
        pieces = -(-queries // self.max_queries)
        size = -(-queries // pieces)
        return -(-queries // self.few_queries) if tokens <= self.short_tokens(size) else pieces

    def pack_price(self, queries: int, tokens: int) -> int:
        """What it costs to read `tokens` tokens for `queries` queries."""
        if queries == 0:
            return 0
        items = self.pieces(queries, tokens)
        size = -(-queries // items)
        return items * self.item_price(size, tokens)

    @property
    def max_bins(self) -> int:
        """More bins than this are never made."""
        return max(1, MAX_WAVES * self.workers // self.cost.runs)

    def bins(self, limit: int, work: float, cut: float, narrow: bool) -> int:
        """In how many bins, at most `limit`, the work of each KV head is laid out.

        All KV heads run the same bins, so only some numbers keep every worker busy. The more bins, the less is idle,
        and the more packs are cut. Where single warps run everything, memory is the bound, of which half of the workers
        use more than half (`sqrt`), and what bins cost besides was measured (benchmarks/NOTES.md, 2026-11-23).

        Args:
            limit: Bins that still have enough to do.
            work: What all packs cost.
            cut: What it costs to end a bin within a pack.
            narrow: Whether single warps run all packs.
        """
        heads, workers = self.cost.runs, self.workers
        best, least = 0, math.inf
        quarters = [part * workers // (4 * heads) for part in range(1, 4)] if narrow else []
        waves = [wave * workers // heads for wave in range(1, MAX_WAVES + 1)]
        for bins in [max(1, min(limit, workers // heads)), *quarters, *waves]:
            if 0 < bins <= limit:
                wave = -(-bins * heads // workers)
                idle = wave * workers / (bins * heads)
                if narrow:
                    price = work * math.sqrt(idle) + wave * self.wave_price + bins * (cut + self.bin_end_price)
                else:
                    price = work * idle + bins * cut
                if price < least:
                    best, least = bins, price
        return best


def _crossing(saved: int, more: int) -> int:
    """Up to how many tokens something costs less that saves `saved` once and costs `more` for each token."""
    if saved <= 0:
        return 0
    return (saved - 1) // more if more > 0 else ALWAYS
