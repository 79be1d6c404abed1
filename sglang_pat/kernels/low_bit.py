"""Pages of KV in 4 or 2 bits, on the CPU (csrc/cpu/low_bit.h describes their layout).

A page of the pool holds 64 tokens of a request. It is quantised when it is full: K by channel, V by token. The tokens behind a request's last
full page are its tail, in the model's dtype. A query sees full pages in few bits, its own too if its token completes it, and what is behind them as
it was computed. So what it sees depends only on its position in its request, and not on what was cached or how the prompt was cut into chunks.
"""

from __future__ import annotations

import msgspec
import torch

from sglang_pat import jit
from sglang_pat.packing.spec import LOW_BIT_PAGE

PAGE_TOKENS = LOW_BIT_PAGE


class Pages(msgspec.Struct, frozen=True):
    """What a query reads besides `k` and `v` (`kernels.arguments.KvView`), which are then tails.

    Attributes:
        records: [pages, kv_heads, record_bytes], uint8: slot s is token s % 64 of page s // 64.
        bits: 4 or 2.
        tails: [batch], int64: for each query, what to add to a position behind its last full page to get the token's index in `k` and `v`. None on a
            GPU, whose kernels find tails by `rows`.
    """

    records: torch.Tensor
    bits: int
    tails: torch.Tensor | None


def in_pages(tokens: torch.Tensor) -> torch.Tensor:
    """How many of a request's tokens are in full pages."""
    return tokens // PAGE_TOKENS * PAGE_TOKENS


def v_parameters(bits: int, head_dim: int) -> int:
    """Where V begins in a record, with fp16 scales and zeros of its tokens: behind scales and zeros of K's channels, and K's codes."""
    return 4 * head_dim + PAGE_TOKENS * head_dim * bits // 8


def record_bytes(bits: int, head_dim: int) -> int:
    """Of a page of one KV head, K and V."""
    return v_parameters(bits, head_dim) + 4 * PAGE_TOKENS + PAGE_TOKENS * head_dim * bits // 8


def store(
    k: torch.Tensor, v: torch.Tensor, records: torch.Tensor, tail_k: torch.Tensor, tail_v: torch.Tensor, rows: torch.Tensor,
    seq_lens: torch.Tensor, slots: torch.Tensor, bits: int,
) -> None:  # fmt: skip
    """Write new tokens to the tails of their rows, and quantise each page that becomes full.

    Args:
        k, v: [tokens, kv_heads, head_dim], float32, float16 or bfloat16; each request's tokens in order.
        records: [pages, kv_heads, record_bytes], uint8.
        tail_k, tail_v: [rows, 64, kv_heads, head_dim], of k's dtype.
        rows: [tokens], int64: the row of each token's request.
        seq_lens: [tokens], int64: the request's tokens up to this one, itself included.
        slots: [tokens], int64: each token's slot of the pool. Those of page 0 are for padding, as in SGLang: a token with one is passed over.
        bits: 4 or 2.

    Raises:
        ValueError: A dtype or shape is none of the above, or an index is out of range.
    """
    jit.load("cpu").store_tokens(k, v, records, tail_k, tail_v, rows, seq_lens, slots, bits)


def pack(k: torch.Tensor, v: torch.Tensor, bits: int) -> torch.Tensor:
    """Quantise full pages.

    Args:
        k, v: [pages, 64, kv_heads, head_dim]; head_dim a multiple of 32 up to 256.
        bits: 4 or 2.

    Returns:
        [pages, kv_heads, record_bytes], uint8. A channel of K, or a token of V, that has a NaN or infinity is all NaN.

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
