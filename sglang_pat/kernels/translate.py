"""Looks up the slots of each request's window in the KV pool for windows (SGLang's `SWAKVPool`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 256
"""Tokens per program: two for each thread of Triton's four warps."""


def translate(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    mapping: torch.Tensor,
    slots: torch.Tensor,
    firsts: torch.Tensor,
) -> None:
    """Fill a table with the slots of each request's last tokens. On a GPU this is one kernel, which can be captured in a CUDA graph.

    Args:
        req_to_token: [requests, context], int32: the slot of each position of each request.
        rows: [batch], int64: each query's row of it.
        seq_lens: [batch], int64: tokens of each query's request, its own included.
        mapping: [slots], int64: for each slot of the full pool, its slot in the pool for windows.
        slots: [batch or more, window], int32, contiguous: receives the slots of up to `window` last tokens, from the first column on.
        firsts: [batch or more], int64: receives where position 0 would be in the storage of `slots`, if the slots of all positions stood in front of
            these.
    """
    batch, window = len(rows), slots.shape[1]
    if not len(seq_lens) >= batch <= min(len(slots), len(firsts)):
        raise ValueError(f"a batch of {batch} has no room in {len(slots)} rows of slots, {len(firsts)} of firsts")
    if batch == 0:
        return
    begin = int(slots.storage_offset())
    if rows.is_cuda:
        grid = (batch, triton.cdiv(window, BLOCK))
        _translate[grid](
            req_to_token, req_to_token.stride(0), rows, seq_lens, mapping, slots, begin, firsts, window, BLOCK
        )
        return
    unseen = (seq_lens[:batch] - window).clamp(min=0)
    columns = torch.arange(window)
    positions = unseen[:, None] + columns
    found = req_to_token[rows[:, None], positions.clamp(max=req_to_token.shape[1] - 1)]
    slots[:batch] = mapping[found.where(positions < seq_lens[:batch, None], 0).long()]
    firsts[:batch] = begin + window * torch.arange(batch) - unseen


_ARGUMENTS = ["req_to_token", "row_stride", "rows", "seq_lens", "mapping", "slots", "begin", "firsts", "window"]


# Compile once for all values and alignments: nothing may be compiled while a graph is captured.
@triton.jit(do_not_specialize=_ARGUMENTS, do_not_specialize_on_alignment=_ARGUMENTS)
def _translate(req_to_token, row_stride, rows, seq_lens, mapping, slots, begin, firsts, window, block: tl.constexpr):  # type: ignore[no-untyped-def]
    query, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(seq_lens + query)
    tokens = tl.minimum(length, window)
    columns = part * block + tl.arange(0, block)
    valid = columns < tokens
    first = tl.load(rows + query) * row_stride + length - tokens
    from_slots = tl.load(req_to_token + first + columns, mask=valid, other=0)
    to_slots = tl.load(mapping + from_slots, mask=valid, other=0)
    tl.store(slots + query * window + columns, to_slots.to(tl.int32), mask=valid)
    if part == 0:
        tl.store(firsts + query, begin + query * window + tokens - length)
