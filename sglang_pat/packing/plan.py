"""What forward and merge execute."""

from __future__ import annotations

import msgspec

from sglang_pat.packing.cost import CostModel
from sglang_pat.packing.tiles import Tile

OPEN = -1
"""`WorkItem.end` of a tail: the kernel reads the end from the request's sequence length."""


class WorkItem(msgspec.Struct):
    """One pack's share of one forward configuration.

    Attributes:
        start, end: KV positions [start, end); `end` is OPEN for a tail.
        queries: Batch positions. The KV slots are those of the first one's row of `req_to_token`: all of them
            have the same slots there.
        parts: For each query the number of this part among its parts.
        tile: The configuration that runs it.
    """

    start: int
    end: int
    queries: list[int]
    parts: list[int]
    tile: Tile


class Plan(msgspec.Struct):
    """Work items that cover every (query, KV position) of a batch exactly once.

    Attributes:
        items: Bin after bin.
        bins: [bins + 1]; items bins[i] up to bins[i + 1] are for one worker, one after the other.
        num_parts: Parts of each query; one part needs no merge.
        steps: Decode steps for which the plan stays good; after that tails have made its bins uneven, or outgrown its split.
        kv_tokens: KV tokens read by the first step.
        open_items: Work items whose KV grows by one token a step.
    """

    items: list[WorkItem]
    bins: list[int]
    num_parts: list[int]
    steps: int
    kv_tokens: int
    open_items: int

    @property
    def merged_parts(self) -> int:
        """Parts that pass through memory."""
        return sum(parts for parts in self.num_parts if parts > 1)

    def bytes(self, cost: CostModel) -> int:
        """Bytes that the first step moves, by the model."""
        return cost.bytes(self.kv_tokens, self.merged_parts)
