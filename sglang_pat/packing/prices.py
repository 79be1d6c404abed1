"""What a plan depends on besides the batch: the device, the model, and the prices of work."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from sglang_pat.packing.constants import KV_TILE, MAX_WAVES
from sglang_pat.packing.cost import CostModel, Count
from sglang_pat.packing.spec import AttentionSpec, Window
from sglang_pat.packing.tiles import TileTable

GRAIN = 8
"""KV positions between possible cuts. With 16, small batches missed the even share by up to 7 %; with 8 they stay within 5 % if a worker has
at least two KV tiles (`python benchmarks/policies.py --random 200`)."""


BIN_RUNS = 8
"""KV heads from which on a bin costs `TileTable.bin_ns`; with fewer it has so much fewer parts to write and merge. `bin_ns` was measured with 8 and 4 KV heads
(benchmarks/notes/bins.md, "How many bins" and "Bins of few KV heads")."""


ALWAYS = 2**31 - 1
"""Stands for "no limit": more tokens than any pack has, more steps than any plan is used for."""


Policy = Literal["query", "naive", "pat", "optimal"]
"""How queries are packed: `optimal` has the lowest price; `pat` is the paper's heuristic, `naive` packs every node, `query` none (one query per CTA)."""

POLICIES: tuple[Policy, ...] = get_args(Policy)
"""The native scheduler numbers them in this order."""


class PackConfig(msgspec.Struct, frozen=True):
    """The device and the model, and the prices of work.

    A plan moves bytes and takes time. A price expresses both in bytes: a time costs the bytes that a worker's share of the memory bandwidth
    moves in it. So traffic costs its own bytes, and work that takes longer than its traffic costs more. Prices are for all KV heads.

    Attributes:
        cost: The model's shape and its bytes.
        tiles: Tiles of the device.
        workers: How many work items run at the same time (SMs, CPU threads).
        policy: How queries are packed.
        window: `AttentionSpec.planned_window`.
        grain: KV positions between possible cuts.
        drafts: Whether queries are drafts of several tokens.
        straddles: Whether a query may straddle two work items, for executors that merge parts by row (`straddled_rows`).
        piece: Every request is cut where its positions are multiples of this, and nowhere else, so its work does not depend on the batch; whatever whole
            pieces requests share is packed, by any policy but `query`. A multiple of `grain`, or 0: cut as is best.
    """

    cost: CostModel
    tiles: TileTable
    workers: Count
    policy: Policy = "optimal"
    window: Window = 0
    grain: Count = GRAIN
    drafts: bool = False
    piece: Window = 0
    straddles: bool = False

    @classmethod
    def of(
        cls, spec: AttentionSpec, tiles: TileTable, workers: int, policy: Policy = "optimal", piece: int = 0
    ) -> PackConfig:
        """The config for layers of a spec. Their query heads are split if the largest tile has fewer rows. What a format stores together is not
        cut, nor are KV tiles of latents: half of one takes as long as all of it."""
        cost = spec.cost(tiles.head_splits(spec.query_heads, spec.kv_heads))
        grain = max(spec.kv.grain, KV_TILE if spec.latent else GRAIN)
        return cls(cost, tiles, workers, policy, spec.planned_window, grain, spec.query_tokens > 1, piece, spec.latent)

    @property
    def wide_only(self) -> PackConfig | None:
        """What batches within `wide_limits` are planned with; None if it is the same."""
        tiles = self.tiles.without_warps()
        straddles = self.straddled_rows > 0
        return msgspec.structs.replace(self, tiles=tiles, straddles=straddles) if tiles != self.tiles else None

    @property
    def for_bins(self) -> PackConfig:
        """The same with the prices by which packs are laid out in bins; itself if they are no others."""
        tiles = self.tiles.for_bins()
        return self if tiles is self.tiles else msgspec.structs.replace(self, tiles=tiles)

    @property
    def wide_limits(self) -> dict[str, int]:
        """Which batches are planned with `wide_only`: `WideLimits` in csrc/packing/prices.h."""
        steps, workers = self.tiles.wide_steps, self.workers
        long_drafts = self.drafts and self.tiles.query_tiles[0] < self.cost.group
        queries, sharing = (
            (steps.small_long_draft_queries, 1) if long_drafts else (steps.small_queries, steps.small_sharing)
        )
        little_shared = steps.little_shared_long_draft_queries if long_drafts else steps.little_shared_draft_queries
        ragged_rows = steps.ragged_draft_rows if self.drafts else steps.ragged_rows
        return {
            "small_queries": queries * workers,
            "small_tokens": steps.small_tokens * workers,
            "small_sharing": sharing,
            "small_draft_tokens": steps.small_draft_tokens * workers if self.drafts else 0,
            "little_shared_queries": little_shared * workers if self.drafts else 0,
            "ragged_queries": steps.ragged_queries * workers if ragged_rows <= self.cost.group else 0,
            "ragged_tokens": steps.ragged_tokens,
        }

    @property
    def max_queries(self) -> int:
        """How many queries a work item may have, those counted of which it has some rows only."""
        if self.straddled_rows:
            return 2 + (self.straddled_rows - 2) // self.cost.group
        return self.tiles.max_queries(self.cost.group)

    @property
    def straddled_rows(self) -> int:
        """At so many rows, those of the largest tile, the rows of a pack are cut into work items, wherever its queries end; 0: at whole queries. So it is
        where the tile has room for one query, but not for a second one, and is the same for one query and for several."""
        cost, m = self.cost, self.tiles.query_tiles[-1]
        may = (
            self.straddles
            and not (self.piece or self.window or self.tiles.warp_m)
            and cost.heads == cost.group * cost.runs
        )
        return m if may and cost.group < m < 2 * cost.group and self.tiles.query_tile(cost.group) == m else 0

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
    def rebalance_queries(self) -> int:
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
        return round(self.tiles.bin_ns * self.tiles.bytes_per_ns * min(1, self.cost.runs / BIN_RUNS))

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
        if self.straddled_rows and queries <= self.max_queries:
            rows = min(rows, self.straddled_rows)
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

    def short_tokens(self, queries: int) -> int:
        """Up to how many tokens a pack of `queries` queries costs less as several work items of `few_queries`, each of which reads the KV, than
        as one work item."""
        items = -(-queries // self.few_queries)
        size = -(-queries // items)
        token, start = self.token_price(queries), self.start_price(queries)
        saved, more = start - items * self.start_price(size), items * self.token_price(size) - token
        longest = self._cheaper_up_to(saved, more, size <= self.warp_queries)
        if size == 1:
            saved, more = start - items * self.slices_start_price, items * self.slices_token_price - token
            longest = max(longest, min(self.slices_tokens, self._cheaper_up_to(saved, more, by_warps=True)))
        return longest

    def _cheaper_up_to(self, saved: int, more: int, by_warps: bool) -> int:
        """Up to how many tokens it pays to save `saved` once and spend `more` per token; 0 if single warps would compute fewer than they do at a time."""
        if saved <= 0:
            return 0
        longest = min(ALWAYS, (saved - 1) // more) if more > 0 else ALWAYS
        return 0 if by_warps and longest < self.tiles.warp_tokens else longest

    @property
    def max_bins(self) -> int:
        """The most bins that a plan has."""
        return max(1, MAX_WAVES * self.workers // self.cost.runs)
