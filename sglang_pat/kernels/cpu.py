"""The CPU executor (csrc/cpu)."""

from __future__ import annotations

import torch

from sglang_pat import jit
from sglang_pat.kernels.low_bit import Pages
from sglang_pat.packing import layout


def attention(
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
    window: int = 0,
    masks: torch.Tensor | None = None,
    pages: Pages | None = None,
) -> torch.Tensor:
    """Attention of one layer: each query sees its request's KV up to its own token.

    In a decode step each request has one query. In an extend it has one per new token; their K and V are already in the cache. In a verify step
    each request has one query of several tokens, its draft: the last tokens of `seq_lens`. `masks` says which of these each token sees.

    Args:
        q: [batch, heads, head_dim], float32, float16 or bfloat16; `batch` counts queries. In a verify step the heads are those of all tokens of
            a query: ordered by KV head, then by token.
        k: [slots, kv_heads, head_dim], the layer's pool, float32, float16, bfloat16, float8_e4m3fn or float8_e5m2; `kv_heads`
            divides `heads`.
        v: [slots, kv_heads, v_head_dim], of the same dtype.
        req_to_token: [requests, context], int32: the slot of each position of each request.
        rows: [batch], int64: each query's row of `req_to_token`.
        seq_lens: [batch], int64: how many tokens of its request each query may see, its own included.
        plan: A plan for this batch (layout.py), int32. Open ends are at `seq_lens`.
        scale: Factor on q k^T, including the scale of K.
        logit_cap: Scores become cap * tanh(score / cap); 0 for none.
        v_scale: Factor on the result: the scale of V.
        sinks: [heads]: for each head a logit without a value; `scale` and `logit_cap` do not apply to it.
        window: A query sees only the last so many tokens of its request, whatever its work items read; 0 for all. Plans of decode steps read no
            more than that, so they need no window here.
        masks: [batch, tokens], int64, in verify steps: bit j of a token's mask says that it sees token j of its draft, at most 64 tokens. The
            number of bits set is the token's position behind the cached tokens; its window counts back from there.
        pages: With a cache of 4 or 2 bits: the pool. `k` and `v`, [tokens, kv_heads, head_dim], are then only the tokens behind the queries'
            last full pages, in 16 bits or more. A query reads its full pages from the pool and the rest from `k` and `v`. Without windows
            and drafts.

    Returns:
        [batch, heads, v_head_dim] in q's dtype, accumulated in float32.

    Raises:
        jit.BuildError: There is no working C++ compiler.
        ValueError: A tensor's device, dtype or shape is not as above, or an index is out of range.
    """
    batch, heads = q.shape[:2]
    out = torch.empty(batch, heads, v.shape[2])
    if plan.ndim != 1 or len(plan) < len(layout.HEADER):
        raise ValueError("the plan is shorter than its header")
    # No plan needs more slots than it has ints; the native code refuses a plan that claims more.
    num_slots = max(0, min(layout.num_slots(plan.numpy()), len(plan)))
    partial = torch.empty(num_slots, heads, v.shape[2])
    lse = torch.empty(num_slots, heads)
    jit.load("cpu").attention(
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
        torch.empty(0, 0, dtype=torch.int64) if masks is None else masks,
        torch.empty(0, 0, 0, dtype=torch.uint8) if pages is None else pages.records,
        torch.empty(0, dtype=torch.int64) if pages is None or pages.tails is None else pages.tails,
        0 if pages is None else pages.bits,
        scale,
        logit_cap,
        window,
    )
    if v_scale != 1.0:
        out *= v_scale
    return out.to(q.dtype)
