"""What forward and merge execute."""

from __future__ import annotations

import msgspec

from sglang_pat.packing.cost import CostModel
from sglang_pat.packing.tiles import Tile

OPEN = -1
"""The bound of a span that is the end of the request's tokens, however many these are when the item runs."""


def position(bound: int, length: int) -> int:
    """Where a bound lies in a request of `length` tokens.

    From 0 on it is a position. Below, it counts back from the request's end: OPEN is that end, OPEN - n lies n tokens before
    it, and what would lie before the first token is 0.
    """
    return bound if bound >= 0 else max(0, length + bound - OPEN)


class WorkItem(msgspec.Struct):
    """One pack's share of one forward configuration.

    Attributes:
        start, end: The span of KV that is read, [start, end); see `position`. The `end` of a tail is OPEN, and both bounds
            count back from the request's end where it sees a window only. Several queries have positions.
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

    def span(self, seq_lens: list[int]) -> tuple[int, int]:
        """The positions that it reads in a batch of these lengths."""
        length = seq_lens[self.queries[0]]
        return position(self.start, length), position(self.end, length)


class Plan(msgspec.Struct):
    """Work items that cover every (query, KV position) of a batch exactly once, as far as queries see.

    Attributes:
        items: Bin after bin.
        bins: [bins + 1]; items bins[i] up to bins[i + 1] are for one worker, one after the other.
        num_parts: Parts of each query; one part needs no merge.
        steps: Decode steps for which the plan stays good; after that tails have made its bins uneven, outgrown its split, or
            left a window.
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
