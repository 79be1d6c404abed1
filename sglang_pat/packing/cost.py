"""The cost model: bytes that a plan moves through memory (PAT §5.1)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

PARTIAL_BYTES = 4
"""Bytes of an element of a part, as priced: float32, as in the paper (PAT §5.1, footnote 2). The CUDA kernels store float16, but plans with half the
price were slower (benchmarks/notes/kernels-wide.md, "Parts in float16")."""


MAX_ROWS = 4096
"""Query heads of one KV head, times a draft's tokens: `kMaxTile` in csrc/packing/prices.h."""

Count = Annotated[int, Meta(ge=1, le=MAX_ROWS)]
"""A number of heads, dimensions, rows or workers. The limit, more than any model or device has, is checked when a config is read from a file."""

MAX_PRICE = 1 << 32

Price = Annotated[int, Meta(ge=0, le=MAX_PRICE)]
"""In bytes (`PackConfig`)."""


ElementBytes = Annotated[float, Meta(gt=0, le=4096)]


class CostModel(msgspec.Struct, frozen=True):
    """Bytes that one layer moves, and default prices for devices whose tiles were not measured.

    Attributes:
        heads, kv_heads: Query and KV heads on this rank.
        head_dim, v_head_dim: Dimensions of K and of V.
        kv_bytes: Bytes of one KV element, with its share of scales and zeros.
        flop_per_byte: Operations that the device computes while it moves a byte; 0 ignores arithmetic, as the paper does.
        start_price: Price to start a work item on all KV heads, before KV flows.
        part_overhead: Price of a part beyond its own bytes.
        head_splits: In how many groups the query heads of a KV head are computed, if they exceed the rows of a tile; each group reads the
            KV.
        latent: `AttentionSpec.latent`.
    """

    heads: Annotated[int, Meta(ge=1, le=64 * MAX_ROWS)]  # times a draft's tokens
    kv_heads: Count
    head_dim: Count
    v_head_dim: Count
    kv_bytes: ElementBytes
    flop_per_byte: Price = 0
    start_price: Price = 0
    part_overhead: Price = 0
    head_splits: Count = 1
    latent: bool = False

    @property
    def group(self) -> int:
        """Rows of a tile that each query of a work item takes: the query heads that it computes."""
        return -(-self.heads // self.runs)

    @property
    def runs(self) -> int:
        """How often a work item of a plan is run: once for each KV head and group of its query heads."""
        return self.kv_heads * self.head_splits

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token, times how often they are read."""
        dims = self.head_dim if self.latent else self.head_dim + self.v_head_dim
        return round(self.runs * dims * self.kv_bytes)

    @property
    def part_bytes(self) -> int:
        """Price of one part of one query: its output and LSE, written by forward and read by merge."""
        return 2 * self.heads * (self.v_head_dim + 1) * PARTIAL_BYTES + self.part_overhead

    def bytes(self, kv_tokens: int, parts: int) -> int:
        """Bytes of a plan that reads `kv_tokens` tokens, and writes and merges `parts` parts."""
        return kv_tokens * self.token_bytes + parts * self.part_bytes
