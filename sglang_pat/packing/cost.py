"""The profit model: bytes of KV memory that a plan moves (PAT §5.1)."""

from __future__ import annotations

import msgspec

PARTIAL_BYTES = 4
"""Partial outputs and their LSE are float32 (PAT §5.1, footnote 2)."""


class CostModel(msgspec.Struct, frozen=True):
    """Bytes per layer; the unit that matters is the ratio between the two.

    For the paper's case, one query head per KV head and 16-bit KV, `merge_tokens(s)` is its rule
    "merge if 4 s >= l" (§5.1, scheme comparison) to the last byte but the LSE's.

    Attributes:
        heads, kv_heads: Query and KV heads on this rank.
        head_dim, v_head_dim: Dimensions of K and of V.
        kv_bytes: Bytes of one KV element.
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    kv_bytes: int

    @property
    def token_bytes(self) -> int:
        """K and V of one token."""
        return self.kv_heads * (self.head_dim + self.v_head_dim) * self.kv_bytes

    @property
    def part_bytes(self) -> int:
        """One part of one query: its output and LSE, written by forward and read by merge."""
        return 2 * self.heads * (self.v_head_dim + 1) * PARTIAL_BYTES

    def merge_tokens(self, queries: int) -> float:
        """The length up to which a prefix is better read again than merged from parts, for `queries` queries.

        Splitting a query for the first time makes two parts of it, hence the factor (§5.1, equation 2).
        """
        return 2 * self.part_bytes * queries / self.token_bytes

    def bytes(self, kv_tokens: int, parts: int) -> int:
        """Bytes of a plan that reads `kv_tokens` tokens and passes `parts` parts through memory."""
        return kv_tokens * self.token_bytes + parts * self.part_bytes
