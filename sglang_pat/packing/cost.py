"""The profit model: what a plan moves through memory, in bytes (PAT §5.1)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

PARTIAL_BYTES = 4
"""Partial outputs and their LSE are float32 (PAT §5.1, footnote 2)."""


Count = Annotated[int, Meta(ge=1, le=4096)]
"""Of heads, dimensions, rows or workers: more than any model or device has. Checked where a config comes from a file."""

MAX_PRICE = 1 << 32

Price = Annotated[int, Meta(ge=0, le=MAX_PRICE)]
"""In the bytes of `PackConfig`'s prices."""


ElementBytes = Annotated[float, Meta(gt=0, le=4096)]


class CostModel(msgspec.Struct, frozen=True):
    """Bytes per layer, and what a device takes whose tiles were not measured (`PackConfig` weighs both).

    For the paper's case, one query head per KV head and 16-bit KV, `merge_tokens(s)` is its rule
    "merge if 4 s >= l" (§5.1, scheme comparison) to the last byte but the LSE's.

    Attributes:
        heads, kv_heads: Query and KV heads on this rank.
        head_dim, v_head_dim: Dimensions of K and of V.
        kv_bytes: Bytes of one KV element, with its share of scales and zeros.
        flop_per_byte: What the device computes while it moves a byte; 0 leaves arithmetic out, as the paper does.
        start_price: Of a work item (all KV heads): its start-up before KV flows.
        part_overhead: Price of a part beyond its own bytes.
        head_splits: In how many parts the query heads of a KV head are computed, where they are more than a tile has rows; each
            part reads the KV.
    """

    heads: Count
    kv_heads: Count
    head_dim: Count
    v_head_dim: Count
    kv_bytes: ElementBytes
    flop_per_byte: Price = 0
    start_price: Price = 0
    part_overhead: Price = 0
    head_splits: Count = 1

    @property
    def group(self) -> int:
        """Query heads that a work item computes for each of its queries: so many rows of a tile."""
        return -(-self.heads // self.runs)

    @property
    def runs(self) -> int:
        """How often a work item of a plan is run: for each KV head and part of its query heads."""
        return self.kv_heads * self.head_splits

    @property
    def token_bytes(self) -> int:
        """K and V of one token, as often as they are read."""
        return round(self.runs * (self.head_dim + self.v_head_dim) * self.kv_bytes)

    @property
    def part_bytes(self) -> int:
        """One part of one query: its output and LSE, written by forward and read by merge."""
        return 2 * self.heads * (self.v_head_dim + 1) * PARTIAL_BYTES + self.part_overhead

    def merge_tokens(self, queries: int) -> float:
        """The length up to which a prefix is better read again than merged from parts, for `queries` queries.

        Splitting a query for the first time makes two parts of it, hence the factor (§5.1, equation 2).
        """
        return 2 * self.part_bytes * queries / self.token_bytes

    def bytes(self, kv_tokens: int, parts: int) -> int:
        """Bytes of a plan that reads `kv_tokens` tokens and passes `parts` parts through memory."""
        return kv_tokens * self.token_bytes + parts * self.part_bytes
