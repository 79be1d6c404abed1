"""The CPU executor (csrc/cpu)."""

from __future__ import annotations

import torch

from sglang_pat import jit
from sglang_pat.kernels.arguments import KvView, Scores, Tables
from sglang_pat.packing import layout


def attention(
    q: torch.Tensor, kv: KvView, tables: Tables, scores: Scores, plan: torch.Tensor, window: int = 0
) -> torch.Tensor:
    """Attention of one layer: each query sees its request's KV up to its own token.

    Args:
        q: [batch, heads, head_dim], float32, float16 or bfloat16; `batch` counts queries. In a verify step the heads are those of all tokens of
            a query: ordered by KV head, then by token.
        kv, tables, scores: All on the CPU.
        plan: A plan for this batch (layout.py), int32. Open ends are at `seq_lens`.
        window: A query sees only the last so many tokens of its request, whatever its work items read; 0 for all. Plans of decode steps read no
            more than that, so they need no window here.

    Returns:
        [batch, heads, v_head_dim] in q's dtype, accumulated in float32.

    Raises:
        jit.BuildError: There is no working C++ compiler.
        ValueError: A tensor's device, dtype or shape is not as above, or an index is out of range.
    """
    batch, heads = q.shape[:2]
    out = torch.empty(batch, heads, kv.v.shape[2])
    if plan.ndim != 1 or len(plan) < len(layout.HEADER):
        raise ValueError("the plan is shorter than its header")
    # No plan needs more slots than it has ints; the native code refuses a plan that claims more.
    num_slots = max(0, min(layout.num_slots(plan.numpy()), len(plan)))
    partial = torch.empty(num_slots, heads, kv.v.shape[2])
    lse = torch.empty(num_slots, heads)
    jit.load("cpu").attention(
        q.float(),
        kv.k,
        kv.v,
        out,
        tables.req_to_token,
        tables.rows,
        tables.seq_lens,
        plan,
        partial,
        lse,
        torch.empty(0) if scores.sinks is None else scores.sinks.float(),
        torch.empty(0, 0, dtype=torch.int64) if tables.masks is None else tables.masks,
        torch.empty(0, 0, 0, dtype=torch.uint8) if kv.pages is None else kv.pages.records,
        torch.empty(0, dtype=torch.int64) if kv.pages is None or kv.pages.tails is None else kv.pages.tails,
        0 if kv.pages is None else kv.pages.bits,
        scores.scale * kv.k_scale,
        scores.logit_cap,
        window,
    )
    if kv.v_scale != 1.0:
        out *= kv.v_scale
    return out.to(q.dtype)
