"""The CPU executor (csrc/cpu)."""

from __future__ import annotations

import torch

from sglang_pat import jit
from sglang_pat.packing import layout


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    plan: torch.Tensor,
    *,
    scale: float,
    logit_cap: float = 0.0,
    v_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode attention of one layer.

    Args:
        q: [batch, heads, head_dim], float32, float16 or bfloat16.
        k: [slots, kv_heads, head_dim], the layer's pool, float32, float16, bfloat16, float8_e4m3fn or float8_e5m2; `kv_heads`
            divides `heads`.
        v: [slots, kv_heads, v_head_dim], of the same dtype.
        req_to_token: [requests, context], int32: the slot of each position of each request.
        rows: [batch], int64: each query's row of `req_to_token`.
        seq_lens: [batch], int64: tokens of each query's request, its own included.
        plan: A plan for this batch (layout.py), int32; tails end where `seq_lens` says.
        scale: Factor on q k^T; where K is kept divided by something, times that.
        logit_cap: Scores become cap * tanh(score / cap); 0 for none.
        v_scale: Factor on the result: what V is kept divided by.
        sinks: [heads]: a logit without a value for each head, which `scale` and `logit_cap` leave as it is.

    Returns:
        [batch, heads, v_head_dim] in q's dtype, accumulated in float32.

    Raises:
        jit.BuildError: There is no working C++ compiler.
        ValueError: A tensor's device, dtype or shape is none of the above, or an index in one is out of range.
    """
    batch, heads = q.shape[:2]
    out = torch.empty(batch, heads, v.shape[2])
    # No plan needs more slots than it has ints; the native code refuses one that says so.
    num_slots = max(0, min(layout.num_slots(plan.numpy()), len(plan)))
    partial = torch.empty(num_slots, heads, v.shape[2])
    lse = torch.empty(num_slots, heads)
    jit.load("cpu").decode(
        q.float(),
        k,
        v,
        out,
        req_to_token,
        rows,
        seq_lens,
        plan,
        partial,
        lse,
        torch.empty(0) if sinks is None else sinks.float(),
        scale,
        logit_cap,
    )
    if v_scale != 1.0:
        out *= v_scale
    return out.to(q.dtype)
