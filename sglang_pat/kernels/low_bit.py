"""Pages of KV in 4 or 2 bits, on the CPU (csrc/cpu/low_bit.h says how they are kept)."""

from __future__ import annotations

import torch

from sglang_pat import jit

PAGE_TOKENS = 64


def record_bytes(bits: int, head_dim: int) -> int:
    """Of a page of one KV head: codes of K and V, fp16 scales and zeros of K's channels and of V's tokens."""
    return 2 * PAGE_TOKENS * head_dim * bits // 8 + 4 * head_dim + 4 * PAGE_TOKENS


def pack(k: torch.Tensor, v: torch.Tensor, bits: int) -> torch.Tensor:
    """Quantise full pages.

    Args:
        k, v: [pages, 64, kv_heads, head_dim]; head_dim a multiple of 128.
        bits: 4 or 2.

    Returns:
        [pages, kv_heads, record_bytes], uint8. A channel of K, or a token of V, that has a NaN is all NaN.

    Raises:
        ValueError: A shape or `bits` is none of the above.
    """
    records = torch.empty(k.shape[0], k.shape[2], record_bytes(bits, k.shape[3]), dtype=torch.uint8)
    jit.load("cpu").pack_pages(k.float().contiguous(), v.float().contiguous(), records, bits)
    return records


def unpack(records: torch.Tensor, bits: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of `pack`'s pages: [pages, 64, kv_heads, head_dim], float32.

    Raises:
        ValueError: The records are not of this size.
    """
    k, v = torch.empty(2, records.shape[0], PAGE_TOKENS, records.shape[1], head_dim)
    jit.load("cpu").unpack_pages(records, k, v, bits)
    return k, v
