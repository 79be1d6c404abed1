"""Divides an extend in two: its first requests run on one backend, the rest on another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from sglang_pat import compat
from sglang_pat.radix_bridge import hooks

Forward = Callable[..., torch.Tensor]
"""An attention backend's `forward_extend` or `forward_decode`."""


class Halves(msgspec.Struct, frozen=True):
    """An extend's batch in two. In a mixed step SGLang puts decoding requests last.

    Attributes:
        tokens: New tokens in the first half.
        end: All new tokens; the batch may have padding after them.
        first: The batch of the first half; None if it has no tokens.
        second: The batch of the second half, which is never empty.
    """

    tokens: int
    end: int
    first: Any
    second: Any

    def forward(
        self, first: Forward, second: Forward, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any,
        forward_batch: Any, *arguments: Any, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        """One layer's attention, [tokens, heads * v_head_dim]: each half on its own backend; padding is zero.

        Args:
            first, second: The backends' forward functions.
            q, k, v, layer, forward_batch: Their arguments, for the whole batch. Between attention layers a CUDA graph may run with buffers of
                its own; so the slots are read from this batch, and the output is written to its `_attn_output`.
            arguments, options: Passed on.
        """
        if self.first is None and self.end == len(q):
            return second(q, k, v, layer, forward_batch, *arguments, **options)
        out = getattr(forward_batch, "_attn_output", None)
        if out is None:
            out = q.new_empty(len(q), layer.tp_q_head_num * layer.v_head_dim)
        found = out.view(len(q), -1)
        sides = ((self.first, first, slice(0, self.tokens)), (self.second, second, slice(self.tokens, self.end)))
        for batch, forward, tokens in sides:
            if batch is None:
                continue
            batch.out_cache_loc, batch._attn_output = forward_batch.out_cache_loc[tokens], found[tokens]
            kept = [None if one is None else one[tokens] for one in (k, v)]
            result = forward(q[tokens], *kept, layer, batch, *arguments, **options)
            if result.data_ptr() != found[tokens].data_ptr():
                found[tokens].copy_(result.view(tokens.stop - tokens.start, -1))
            batch._attn_output = None  # or the last layer's would stay until the next extend
        found[self.end :].zero_()
        return out


def divide(forward_batch: Any, added: Sequence[int], first: int) -> Halves:
    """Divide an extend's batch, with its `rids` and rows.

    Args:
        added: New tokens of each request.
        first: The first request of the second half.
    """
    size, tokens, end = len(added), sum(added[:first]), sum(added)

    def half(requests: slice, of: slice) -> Any:
        found = compat.batch.part(forward_batch, requests, of)
        found.rids = forward_batch.rids.part(requests)
        return found

    # A client may send an empty prompt beside others, which SGLang passes on: requests without new tokens have nothing to compute.
    front = half(slice(0, first), slice(0, tokens)) if tokens else None
    return Halves(tokens, end, front, half(slice(first, size), slice(tokens, end)))


def trailing(added: Sequence[int], most: int) -> int:
    """The index of the first request from which on all have 1 to `most` new tokens; `len(added)` if the last one has not."""
    first = len(added)
    while first and 1 <= added[first - 1] <= most:
        first -= 1
    return first


def decoding(forward_batch: Any) -> Halves | None:
    """Divide an extend's batch before its last requests with one new token: they decode (in a mixed step), or have one token of prompt left.
    None if there are no such requests."""
    rows = hooks.rows_of(forward_batch)
    added = None if rows is None else compat.batch.new_tokens(forward_batch, len(rows))
    if added is None:
        return None
    first = trailing(added, 1)
    if first == len(added):
        return None
    divided = divide(forward_batch, added, first)
    compat.batch.as_decode(divided.second)
    return divided
