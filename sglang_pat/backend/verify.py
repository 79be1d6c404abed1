"""Verify steps of speculative decoding: a request's draft is one query, which has the heads of all its tokens.

To a tile and to the planner, a draft of 4 tokens is four times as many heads per KV head. So packs, prices and kernels are the same as in decode
steps, and only the last KV of each request is masked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from sglang_pat.packing import AttentionSpec

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


FAST_ROWS = 64
"""Up to so many rows per KV head, drafts over shared prefixes are verified faster than by FA3: at 64 rows in 17 of 18 cases, and in 17 of 18 over an
FP8 cache (docs/measured-drafts.md, Verify steps, one H200, 2026-11-27 and 28). More were not measured."""


def advice(spec: AttentionSpec) -> str | None:
    """A warning for GPUs if drafts have more rows per KV head than were measured; None otherwise, and for latents, of which the log says whether they are packed."""
    heads, rows = spec.heads // spec.kv_heads, spec.query_heads // spec.kv_heads
    if spec.latent or spec.query_tokens == 1 or rows <= FAST_ROWS:
        return None
    fewer = f"drafts of up to {FAST_ROWS // heads} tokens" if heads * 2 <= FAST_ROWS else "no drafts"
    return (
        f"drafts of {spec.query_tokens} tokens make {rows} rows of a KV head: more than {FAST_ROWS} were not measured and may be slow "
        f"(docs/measured-drafts.md, Verify steps); take {fewer}, or compare with another --attention-backend"
    )


def without_branches(requests: int, tokens: int, device: torch.device | str) -> torch.Tensor:
    """Masks of drafts without branches, whose tokens see all previous tokens and themselves: [requests, tokens] int64."""
    return _bits(tokens, device).cumsum(0).expand(requests, tokens).contiguous()


def branches(forward_batch: ForwardBatch) -> bool:
    """Whether drafts have branches. DFLASH's have none, whatever the mask that graphs are captured with."""
    spec_info: Any = forward_batch.spec_info
    return spec_info.custom_mask is not None and getattr(spec_info, "tree_topk", 1) != 1


def masks(forward_batch: ForwardBatch, tokens: int, requests: int, preallocated: Any = None) -> torch.Tensor:
    """Which tokens of its draft each token sees (`kernels.arguments.Tables`), [requests, tokens] int64.

    SGLang has a row of flags for each token of each request, concatenated: one flag per KV token (`TreeMaskMode.FULL_MASK`), or per token of the
    draft (`QLEN_ONLY`). The batch may have padding at its end. Nothing here synchronizes with a GPU.

    Args:
        tokens: Tokens of a draft.
        requests: How many drafts.
        preallocated: SGLang's `VerifyMask`, whose buffer has flags per token of the draft, and room for more drafts; None if there is none.
    """
    spec_info: Any = forward_batch.spec_info
    flags = spec_info.custom_mask
    own = torch.arange(requests * tokens * tokens, device=flags.device)
    if len(flags) != len(own) and (preallocated is None or flags is not preallocated.buffer):
        # A token's row is as long as its request; the draft is the end of the row.
        seen = forward_batch.seq_lens[:requests].long().repeat_interleave(tokens)
        own += seen.cumsum(0).repeat_interleave(tokens)
    return (flags[own].view(requests, tokens, tokens).long() * _bits(tokens, flags.device)).sum(-1)


def _bits(tokens: int, device: torch.device | str) -> torch.Tensor:
    return torch.ones((), dtype=torch.int64, device=device) << torch.arange(tokens, device=device)


def gather(q: torch.Tensor, tokens: int, kv_heads: int) -> torch.Tensor:
    """Q of drafts, [requests * tokens, heads, dim], as queries: [requests, tokens * heads, dim], ordered by KV head, then by token."""
    group = q.shape[1] // kv_heads
    by_token = q.view(-1, tokens, kv_heads, group, q.shape[2])
    return by_token.transpose(1, 2).reshape(len(by_token), -1, q.shape[2])


def scatter(out: torch.Tensor, tokens: int, kv_heads: int) -> torch.Tensor:
    """The inverse: [requests, tokens * heads, dim] to [requests * tokens, heads, dim]."""
    by_head = out.view(len(out), kv_heads, tokens, -1, out.shape[2])
    return by_head.transpose(1, 2).reshape(len(out) * tokens, -1, out.shape[2])


def spread(sinks: torch.Tensor | None, tokens: int, kv_heads: int) -> torch.Tensor | None:
    """Repeat the sinks of heads, [heads], for the heads of a query: [tokens * heads]."""
    return None if sinks is None else sinks.view(kv_heads, 1, -1).expand(-1, tokens, -1).reshape(-1)
