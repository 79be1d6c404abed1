"""Tiles: which one runs a pack (PAT §5.2), and how long that takes."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sglang_pat.packing.constants import KV_TILE
from sglang_pat.packing.cost import MAX_PRICE, Count

Nanoseconds = Annotated[float, Meta(ge=0)]

PerSm = Annotated[int, Meta(ge=0, le=1 << 20)]
"""So many for each SM."""

Rows = Annotated[int, Meta(ge=0, le=4096)]

MeanTokens = Annotated[int, Meta(ge=0, le=1 << 30)]

Sharing = Annotated[int, Meta(ge=1, le=1 << 12)]

Splits = Literal["none", "wide", "all"]


class WideSteps(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which steps are planned without tiles of single warps. `PerSm` numbers of queries and tokens are counted times `CostModel.runs`; tokens are those
    that are read if each is read once.

    Small ones:

    Attributes:
        small_tokens: The most tokens of a small step.
        small_long_draft_queries: The most queries of a verify step whose drafts have more rows than the smallest tile; 0: such steps are never small.
        small_queries: The most queries of another step; 0: they are never small.
        small_sharing: Such a step is small only if its requests, each reading for itself, would read so many times as many tokens,
        small_draft_tokens: or if it is a verify step and there are at most so many tokens.

    And steps whose requests share little (`constants.LITTLE_PERCENT`):

        little_shared_long_draft_queries, little_shared_draft_queries: The most queries of such a verify step, with drafts of more rows than the smallest
            tile and with others; 0: none is planned so.
        ragged_queries: The most queries of such a step whose requests' lengths differ (`constants.RAGGED`); 0: none is planned so.
        ragged_tokens: The fewest tokens that its requests have on average.
        ragged_draft_rows, ragged_rows: The fewest rows of a query, in a verify step and in a decode step.
    """

    small_tokens: PerSm = 0
    small_long_draft_queries: PerSm = 0
    small_queries: PerSm = 0
    small_sharing: Sharing = 1
    small_draft_tokens: PerSm = 0
    little_shared_long_draft_queries: PerSm = 0
    little_shared_draft_queries: PerSm = 0
    ragged_queries: PerSm = 0
    ragged_tokens: MeanTokens = 0
    ragged_draft_rows: Rows = 0
    ragged_rows: Rows = 0


class TileTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tiles that a device has, and the rule that picks one.

    Attributes:
        query_tiles: Every m, ascending: rows (query heads that share a KV head, for each query).
        token_ns: For each m, the time per token of one KV head; empty if not measured. It counts if the token's bytes take less. All times are
            in ns.
        item_ns: For each m, the time to start and end a work item; `CostModel.start_price` counts if it is empty.
        warp_m: Tiles of up to so many rows are run by single warps, before or after the worker has done all others (`Plan.narrow_first`).
        warp_tokens: Tokens that a single warp computes at a time: a work item of fewer takes as long. Longer ones count their tokens, as the warps of
            a worker wait for memory together.
        slice_token_ns: A query of more than `warp_m` rows can be run in slices of `warp_m` rows, by several warps of one worker; the first warp
            brings the KV into the cache for all. This is the time per token and slice, for one KV head; 0 if no query is run so.
        turn_ns: Time of a worker to switch from the other tiles to those of single warps.
        bin_ns: Time that one more bin adds to a step in which single warps run everything, with 8 KV heads or more.
        wave_ns: Time that one more bin per worker adds to such a step.
        bytes_per_ns: Memory bandwidth; needed if there are times, to express them in bytes (`PackConfig`).
        sms: Streaming multiprocessors that share the bandwidth.
        wide_steps: Which steps are planned without tiles of single warps.
        tails_m: Rows of each query in a work item with tails (`plan.WorkItem`): those of a warpgroup; 0 if there are no such items.
        narrow_first_ns: From how much time of each worker on, which wide work items compute beyond reading their KV once, every second worker runs narrow
            ones first (`plan.Plan.narrow_first`); 0: none does.
        splits: In which plans packs are split into work items of fewer queries where a bin is too long: in none, in those without tiles of single warps, or in
            all.
        bins_token_ns, bins_item_ns: What counts in place of `token_ns` and `item_ns` when packs are laid out in bins; the same if empty.
        kv_tile: KV tokens that a worker computes at a time: no bin is worth its start for fewer.
    """

    query_tiles: tuple[Count, ...]
    token_ns: tuple[Nanoseconds, ...] = ()
    item_ns: tuple[Nanoseconds, ...] = ()
    warp_m: Annotated[int, Meta(ge=0, le=4096)] = 0
    warp_tokens: Annotated[int, Meta(ge=1, le=64)] = 1
    slice_token_ns: Nanoseconds = 0
    turn_ns: Nanoseconds = 0
    bin_ns: Nanoseconds = 0
    wave_ns: Nanoseconds = 0
    bytes_per_ns: Annotated[float, Meta(ge=0)] = 0
    sms: Annotated[int, Meta(ge=1, le=10_000)] = 1
    wide_steps: WideSteps = WideSteps()
    bins_token_ns: tuple[Nanoseconds, ...] = ()
    bins_item_ns: tuple[Nanoseconds, ...] = ()
    tails_m: Annotated[int, Meta(ge=0, le=4096)] = 0
    narrow_first_ns: Nanoseconds = 0
    splits: Splits = "none"
    kv_tile: Count = KV_TILE

    def __post_init__(self) -> None:
        if not self.query_tiles or list(self.query_tiles) != sorted(set(self.query_tiles)):
            raise ValueError("there must be query_tiles, and they must ascend")
        times = (self.token_ns, self.item_ns, self.bins_token_ns, self.bins_item_ns)
        if {*map(len, times)} - {0, len(self.query_tiles)}:
            raise ValueError("there must be a time for each m, or none")
        in_bins = (len(self.bins_token_ns), len(self.bins_item_ns))
        if any(in_bins) and in_bins != (len(self.token_ns), len(self.item_ns)):
            raise ValueError("there must be times in bins for all that has times, or for nothing")
        if self.slice_token_ns and not (self.item_ns and self.warp_m in self.query_tiles):
            raise ValueError("there must be times of the tile that slices have")
        prices = [("a price", ns, self.share) for ns in itertools.chain(*times)]
        prices += [(name, getattr(self, name), self.share) for name in ("slice_token_ns", "turn_ns")]
        prices += [(name, getattr(self, name), self.bytes_per_ns) for name in ("bin_ns", "wave_ns", "narrow_first_ns")]
        if any(ns for _, ns, _ in prices) and not self.bytes_per_ns:
            raise ValueError("there must be a bandwidth where there are times")
        for name, ns, bandwidth in prices:
            if not 0 <= ns * bandwidth <= MAX_PRICE:
                raise ValueError(f"{name} of {ns:g} ns is too long for a plan's sums")

    @property
    def share(self) -> float:
        """Bytes that one SM's share of the bandwidth moves in a nanosecond."""
        return self.bytes_per_ns / self.sms

    def without_warps(self) -> TileTable:
        """The same without tiles of single warps; with them if there are no others."""
        return self.above(self.warp_m)

    def above(self, rows: int) -> TileTable:
        """The same without tiles of so many rows or fewer, nor those of single warps; itself if there are no such or no others."""
        first = bisect_right(self.query_tiles, max(rows, self.warp_m))
        if first in (0, len(self.query_tiles)):
            return self
        return msgspec.structs.replace(
            self, query_tiles=self.query_tiles[first:], token_ns=self.token_ns[first:], item_ns=self.item_ns[first:], warp_m=0, slice_token_ns=0,
            bins_token_ns=self.bins_token_ns[first:], bins_item_ns=self.bins_item_ns[first:],
        )  # fmt: skip

    def for_bins(self) -> TileTable:
        """The same with the times that count when packs are laid out in bins."""
        if not (self.bins_token_ns or self.bins_item_ns):
            return self
        return msgspec.structs.replace(
            self, token_ns=self.bins_token_ns, item_ns=self.bins_item_ns, bins_token_ns=(), bins_item_ns=()
        )

    def max_queries(self, group: int) -> int:
        """How many queries the largest m holds if `group` query heads share a KV head; at least one."""
        return max(1, self.query_tiles[-1] // group)

    def tails_queries(self, group: int) -> int:
        """How many queries of `group` rows a work item with tails holds; 1 if there are none. Each takes `tails_m` rows, so with fewer queries' rows
        the tile must be the same."""
        most = max(1, self.query_tiles[-1] // self.tails_m) if self.tails_m else 1
        return (
            most if all(self.query_tile(count * group) == count * self.tails_m for count in range(1, most + 1)) else 1
        )

    def head_splits(self, heads: int, kv_heads: int) -> int:
        """In how many groups the query heads of a KV head are computed: one, unless the largest m has fewer rows."""
        return -(-(heads // kv_heads) // self.query_tiles[-1])

    def query_tile(self, rows: int) -> int:
        """The smallest m that holds `rows`; the largest if none does."""
        return self.query_tiles[min(bisect_left(self.query_tiles, rows), len(self.query_tiles) - 1)]


CPU_TILES = TileTable(query_tiles=(16, 64, 128), kv_tile=128)
"""Tiles of the CPU executor (benchmarks/notes/first-versions.md, "CPU executor"); m by `python benchmarks/cpu_decode.py --tiles`."""
