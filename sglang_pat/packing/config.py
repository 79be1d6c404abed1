"""What a plan depends on besides the batch."""

from __future__ import annotations

import msgspec

from sglang_pat.packing.cost import CostModel
from sglang_pat.packing.tiles import TileTable

MAX_WAVES = 8
"""Bins that one worker may run one after the other. With 8 KV heads on 132 SMs two waves fill every SM, where one leaves
four of them idle; eight leave at most 4 % idle for any GPU and model (`python benchmarks/policies.py --waves`)."""


class PackConfig(msgspec.Struct, frozen=True):
    """The device and the model.

    Attributes:
        cost: The model's shape and prices.
        tiles: Tiles of the device.
        workers: Work items that run at the same time (SMs, CPU threads).
        policy: A key of `scheduler.POLICIES`.
    """

    cost: CostModel
    tiles: TileTable
    workers: int
    policy: str = "optimal"

    @property
    def max_queries(self) -> int:
        """Queries that one work item may have."""
        return self.tiles.max_queries(self.cost.group)

    def rate(self, queries: int) -> int:
        """What a token costs a work item with `queries` queries."""
        rows = queries * self.cost.group
        m = self.tiles.query_tile(rows)
        tiles = -(-rows // m)
        rate = self.cost.row_bytes(tiles * m)
        if self.tiles.token_bytes:
            computing = self.tiles.token_bytes[self.tiles.query_tiles.index(m)]
            rate = max(rate, tiles * self.cost.kv_heads * computing)
        return rate

    def pack_bytes(self, queries: int, tokens: int) -> int:
        """Reading `tokens` tokens for `queries` queries, in as many work items as the largest tile asks for."""
        if queries == 0:
            return 0
        items = -(-queries // self.max_queries)
        return items * (tokens * self.rate(-(-queries // items)) + self.cost.item_bytes)

    @property
    def max_bins(self) -> int:
        """More bins than this are never made."""
        return max(1, MAX_WAVES * self.workers // self.cost.kv_heads)

    def bins(self, limit: int, work: float, cut: float) -> int:
        """In how many bins, at most `limit`, the work of each KV head is laid out.

        All KV heads run the same bins, so only some numbers keep every worker busy. The more bins, the less is idle,
        and the more packs are cut.

        Args:
            limit: Bins that still have enough to do.
            work: What all packs cost.
            cut: What it costs to end a bin within a pack.
        """
        heads = self.cost.kv_heads
        best = max(1, min(limit, self.workers // heads))
        least = work * -(-best * heads // self.workers) * self.workers / (best * heads) + best * cut
        for waves in range(1, MAX_WAVES + 1):
            bins = waves * self.workers // heads
            if 0 < bins <= limit:
                cost = work * waves * self.workers / (bins * heads) + bins * cut
                if cost < least:
                    best, least = bins, cost
        return best
