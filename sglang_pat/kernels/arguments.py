"""What an executor is given besides Q: a layer's KV, a step's tables, and how scores are made."""

from __future__ import annotations

import msgspec
import torch

from sglang_pat.kernels.low_bit import Pages


class KvView(msgspec.Struct, frozen=True):
    """A layer's KV, as a step reads it.

    Attributes:
        k: [slots, kv_heads, head_dim], the layer's pool: float32 (CPU), float16, bfloat16, float8_e4m3fn or float8_e5m2. `kv_heads` divides the
            heads of Q.
        v: [slots, kv_heads, v_head_dim], of the same dtype.
        k_scale, v_scale: What K and V were divided by when they were stored.
        pages: With a cache of 4 or 2 bits: the pool. `k` and `v` are then only the tokens behind the queries' last full pages, in 16 bits or more: on
            a GPU [64 * requests, kv_heads, head_dim] in Q's dtype, where token t of row r's unfinished page is at 64 * r + t. A query reads its full
            pages from the pool and the rest from `k` and `v`. Without windows and drafts.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0
    pages: Pages | None = None


class Tables(msgspec.Struct, frozen=True):
    """Where the KV of a step's queries is, and how much of it they see.

    In a decode step each request has one query. In an extend it has one per new token; their K and V are already in the cache. In a verify step
    each request has one query of several tokens, its draft: the last tokens of `seq_lens`. `masks` says which of these each token sees.

    Attributes:
        req_to_token: [requests, context], int32: the slot of each position of each request.
        rows: [batch], int64: each query's row of `req_to_token`. On a GPU there may be more, as of `seq_lens` and `masks`.
        seq_lens: [batch], int64: how many tokens of its request each query sees at most, its own included.
        masks: [batch, tokens], int64, in verify steps: bit j of a token's mask says that it sees token j of its draft, at most 64 tokens. The
            number of bits set is the token's position behind the cached tokens; its window counts back from there.
    """

    req_to_token: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    masks: torch.Tensor | None = None


class Scores(msgspec.Struct, frozen=True):
    """How a layer makes scores of products of Q and K.

    Attributes:
        scale: Factor on q k^T, besides `KvView.k_scale`.
        logit_cap: Scores become cap * tanh(score / cap); 0 for none.
        sinks: [heads]: for each head a logit without a value, to which `scale` and `logit_cap` do not apply.
    """

    scale: float
    logit_cap: float = 0.0
    sinks: torch.Tensor | None = None
