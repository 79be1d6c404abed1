"""Which (m, n) tile runs a pack (PAT §5.2)."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from sglang_pat.packing.cost import Count, Price


class Tile(msgspec.Struct, frozen=True, order=True):
    """A forward configuration: m rows of queries (query heads that share a KV head) by n KV positions."""

    m: int
    n: int


class TileTable(msgspec.Struct, frozen=True):
    """The tiles that a device has, and the rule that picks one.

    Attributes:
        query_tiles: Every m, ascending.
        kv_tiles: Every n, ascending.
        kv_bounds: Piecewise rule for n: the i-th n serves KV lengths up to `kv_bounds[i]`, the last n the rest.
        token_bytes: For each m what a tile of it takes for one token of one KV head, in bytes that its worker's share of
            the memory bandwidth moves in that time. It counts where it is more than the token's own bytes; empty where
            nothing was measured.
        item_bytes: For each m what starting and ending a work item of it takes, likewise; `CostModel.item_bytes` for all
            where it is empty.
        warp_m: Tiles of up to so many rows are run by single warps, when a worker has done all others.
        turn_bytes: What a worker that has both takes to go over to these, likewise.
        bin_bytes: Where single warps run everything, what one more bin costs a step, in bytes that the device moves meanwhile.
        wave_bytes: What a step then takes longer where each worker has one more bin, likewise.
    """

    query_tiles: tuple[Count, ...]
    kv_tiles: tuple[Count, ...]
    kv_bounds: tuple[Price, ...]
    token_bytes: tuple[Price, ...] = ()
    item_bytes: tuple[Price, ...] = ()
    warp_m: Price = 0
    turn_bytes: Price = 0
    bin_bytes: Price = 0
    wave_bytes: Price = 0

    def __post_init__(self) -> None:
        for name in ("query_tiles", "kv_tiles", "kv_bounds"):
            values = getattr(self, name)
            if list(values) != sorted(set(values)):
                raise ValueError(f"{name} must ascend")
        if not self.query_tiles or len(self.kv_tiles) != len(self.kv_bounds) + 1:
            raise ValueError("there must be a tile for queries, and for KV one more than bounds")
        if {len(self.token_bytes), len(self.item_bytes)} - {0, len(self.query_tiles)}:
            raise ValueError("there must be a price for each m, or none")

    def max_queries(self, group: int) -> int:
        """Queries that the largest m holds when `group` query heads share a KV head; at least one."""
        return max(1, self.query_tiles[-1] // group)

    def head_splits(self, heads: int, kv_heads: int) -> int:
        """In how many parts the query heads of a KV head are computed: one, unless the largest m has fewer rows."""
        return -(-(heads // kv_heads) // self.query_tiles[-1])

    def query_tile(self, rows: int) -> int:
        """The smallest m that holds `rows`, the largest where none does."""
        return self.query_tiles[min(bisect_left(self.query_tiles, rows), len(self.query_tiles) - 1)]

    def select(self, rows: int, kv_len: int) -> Tile:
        """The m for `rows` and the n for `kv_len`."""
        return Tile(self.query_tile(rows), self.kv_tiles[bisect_left(self.kv_bounds, kv_len)])


CPU_TILES = TileTable(query_tiles=(16, 64, 128), kv_tiles=(32, 64, 128), kv_bounds=(32, 64))
"""Tiles of the CPU executor; measured by `python benchmarks/cpu_decode.py --tiles` (benchmarks/NOTES-archive.md)."""
