"""What a plan depends on besides the batch."""

from __future__ import annotations

import msgspec

from sglang_pat.packing.cost import CostModel
from sglang_pat.packing.tiles import TileTable

MAX_WAVES = 4
"""Bins that one worker may run one after the other. With 8 KV heads on 132 SMs, two waves fill every SM where one
leaves four of them idle; more than four never came out as the best for 1 to 64 KV heads on 78 to 148 SMs
(`python benchmarks/policies.py --waves`)."""


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
        return self.cost.row_bytes(-(-rows // m) * m)

    def pack_bytes(self, queries: int, tokens: int) -> int:
        """Reading `tokens` tokens for `queries` queries, in as many work items as the largest tile asks for."""
        if queries == 0:
            return 0
        items = -(-queries // self.max_queries)
        return items * (tokens * self.rate(-(-queries // items)) + self.cost.item_bytes)

    def bins(self, limit: int) -> int:
        """In how many bins, at most `limit`, the work of each KV head is laid out.

        All KV heads run the same bins, so the number that keeps every worker busy is a multiple of workers / heads:
        the smallest that wastes under 1/50 of the device, else the one that wastes least.
        """
        heads = self.cost.kv_heads
        best = max(1, min(limit, self.workers // heads))
        best_used, best_waves = best * heads, -(-best * heads // self.workers)
        for waves in range(1, MAX_WAVES + 1):
            bins = waves * self.workers // heads
            if not 0 < bins <= limit:
                continue
            used = bins * heads
            if used * best_waves > best_used * waves:
                best, best_used, best_waves = bins, used, waves
            if used * 50 >= waves * self.workers * 49:
                break
        return best
