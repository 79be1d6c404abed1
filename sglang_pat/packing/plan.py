"""The plan that the forward and merge kernels execute."""

from __future__ import annotations

import msgspec

OPEN = -1
"""A bound that means the end of the request, at whatever length it has when the item runs."""


def position(bound: int, length: int) -> int:
    """The position of a bound in a request of `length` tokens.

    A bound of 0 or more is a position. A negative one counts back from the request's end: OPEN is the end, OPEN - n is n tokens before it,
    but never before position 0.
    """
    return bound if bound >= 0 else max(0, length + bound - OPEN)


class WorkItem(msgspec.Struct):
    """A pack, or a piece of one, that one worker runs with one tile.

    Attributes:
        start, end: The span of KV to read, [start, end), as bounds (`position`). The `end` of a tail is OPEN. If the request has outgrown
            its window, both bounds count back from its end. With several queries, both are positions.
        queries: Batch positions. All queries have the same KV slots in the span; they are read from the first query's row of
            `req_to_token`.
        parts: For each query, the number of this part among its parts.
        m: Rows of the tile that runs it.
        tails: Whether each query's tail follows: its own KV from `end` to the end of its request, which only its own rows read. Then both
            bounds are positions, and a query's rows are those of one warpgroup.
        rows: For each query which of its rows are computed, as (first, end), where some of its first or last query may be in other work items
            (`PackConfig.straddled_rows`); empty: all rows of all queries.
    """

    start: int
    end: int
    queries: list[int]
    parts: list[int]
    m: int
    tails: bool = False
    rows: list[tuple[int, int]] = []

    def span(self, seq_lens: list[int]) -> tuple[int, int]:
        """The positions that it reads for all of its queries, in a batch with these lengths."""
        length = seq_lens[self.queries[0]]
        return position(self.start, length), position(self.end, length)

    def seen(self, query: int, seq_lens: list[int]) -> tuple[int, int]:
        """The positions that it reads for one of its queries."""
        start, end = self.span(seq_lens)
        return start, seq_lens[query] if self.tails else end


class Plan(msgspec.Struct):
    """Work items that cover every visible (query, KV position) of a batch exactly once.

    Attributes:
        items: Work items, bin after bin.
        bins: [bins + 1]; items bins[i] up to bins[i + 1] are run by one worker; those of one tile in this order.
        num_parts: Parts of each query; a query with one part needs no merge.
        steps: How many decode steps the plan is good for. After that, growing tails have made its bins uneven or outgrown its split, or a
            request has filled its window.
        kv_tokens: KV tokens that the first step reads.
        narrow_first: Whether every second worker runs its narrow work items, those of single warps, before its wide ones. Then some workers read
            while others compute.
        straddles: Whether there are parts, and some may have only some rows of their query (`PackConfig.straddled_rows`).
    """

    items: list[WorkItem]
    bins: list[int]
    num_parts: list[int]
    steps: int
    kv_tokens: int
    narrow_first: bool = False
    straddles: bool = False

    @property
    def merged_parts(self) -> int:
        """Parts that are written to memory and merged."""
        return sum(parts for parts in self.num_parts if parts > 1)
