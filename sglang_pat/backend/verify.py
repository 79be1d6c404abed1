"""Verify steps of speculative decoding: a request's draft is one query of several tokens, whose heads are those of all of them.

A tile holds the heads of a KV head for several queries; to it, and to the planner, a draft of 4 tokens is four times as many heads. So
packs, prices and kernels are those of decode steps, and only the last KV of each request is masked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def masks(forward_batch: ForwardBatch, tokens: int) -> torch.Tensor:
    """Which tokens of its draft each token sees (`kernels.cpu.attention`), [requests, tokens] int64.

    SGLang gives a row of flags for each token of each request, one after the other: of the whole KV (`TreeMaskMode.FULL_MASK`), or of
    the draft alone (`QLEN_ONLY`). A draft without branches needs none: each token sees those in front of it.
    """
    spec_info: Any = forward_batch.spec_info
    flags, requests = spec_info.custom_mask, len(forward_batch.seq_lens)
    bits = torch.ones((), dtype=torch.int64) << torch.arange(tokens)
    if flags is None or spec_info.tree_topk == 1:
        return (bits.cumsum(0)).expand(requests, tokens).contiguous()
    own = torch.arange(requests * tokens * tokens)
    if len(flags) != len(own):
        # A token's row is as long as its request: its draft is the end of it.
        seen = forward_batch.seq_lens.long().repeat_interleave(tokens)
        own += seen.cumsum(0).repeat_interleave(tokens)
    return (flags[own].view(requests, tokens, tokens).long() * bits).sum(-1)


def gather(q: torch.Tensor, tokens: int, kv_heads: int) -> torch.Tensor:
    """Q of drafts, [requests * tokens, heads, dim], as queries: [requests, tokens * heads, dim], KV head by KV head and token by token."""
    group = q.shape[1] // kv_heads
    by_token = q.view(-1, tokens, kv_heads, group, q.shape[2])
    return by_token.transpose(1, 2).reshape(len(by_token), -1, q.shape[2])


def scatter(out: torch.Tensor, tokens: int, kv_heads: int) -> torch.Tensor:
    """The other way round: [requests, tokens * heads, dim] to [requests * tokens, heads * dim]."""
    by_head = out.view(len(out), kv_heads, tokens, -1, out.shape[2])
    return by_head.transpose(1, 2).reshape(len(out) * tokens, -1)


def spread(sinks: torch.Tensor | None, tokens: int, kv_heads: int) -> torch.Tensor | None:
    """Sinks of heads, [heads], for the heads of queries: [tokens * heads]."""
    return None if sinks is None else sinks.view(kv_heads, 1, -1).expand(-1, tokens, -1).reshape(-1)
