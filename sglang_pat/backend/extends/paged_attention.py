"""Causal attention of others over K and V in pages, for extends over KV of 4 and 2 bits on GPUs."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from sglang_pat.backend.extends.page_tables import PAGE, Blocks

FLASHINFER_WORKSPACE = 384 << 20
"""Bytes of FlashInfer's workspace: SGLang's default (environ.py, SGLANG_FLASHINFER_WORKSPACE_SIZE)."""


class PagedAttention(Protocol):
    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Blocks, scale: float, logit_cap: float
    ) -> torch.Tensor:
        """Attention of blocks of queries: [tokens, heads, head_dim].

        Args:
            q: [tokens, heads, head_dim], float16 or bfloat16, on a GPU.
            k, v: [pages, 64, kv_heads, head_dim], of Q's dtype: what `blocks.table` refers to.
            blocks: Which queries read which pages.
            scale: Factor on q k^T.
            logit_cap: Scores become cap * tanh(score / cap); 0 for none.
        """


class Fa3:
    """FlashAttention 3 with a page table, as SGLang's fa3 backend calls it."""

    def __init__(self) -> None:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        self._forward = flash_attn_with_kvcache

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Blocks, scale: float, logit_cap: float
    ) -> torch.Tensor:
        found: torch.Tensor = self._forward(
            q=q.contiguous(), k_cache=k, v_cache=v, page_table=blocks.table, cache_seqlens=blocks.lengths, cu_seqlens_q=blocks.starts,
            max_seqlen_q=blocks.longest, softmax_scale=scale, causal=True, softcap=logit_cap,
        )  # fmt: skip
        return found


class FlashInfer:
    """FlashInfer's prefill on a paged cache. It makes a plan on the host for each new set of blocks."""

    def __init__(self) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device="cuda")
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        self._planned: tuple[Any, ...] = ()

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Blocks, scale: float, logit_cap: float
    ) -> torch.Tensor:
        what = (blocks, q.shape[1], scale, logit_cap)
        if not self._planned or self._planned[0] is not blocks or self._planned[1:] != what[1:]:
            self._plan(q, k, blocks, scale, logit_cap)
            self._planned = what
        found: torch.Tensor = self._wrapper.run(q.contiguous(), (k, v))
        return found

    def _plan(self, q: torch.Tensor, k: torch.Tensor, blocks: Blocks, scale: float, logit_cap: float) -> None:
        lengths = blocks.lengths.cpu()
        counts = (lengths + PAGE - 1) // PAGE
        ends = torch.zeros(len(counts) + 1, dtype=torch.int32)
        ends[1:] = counts.cumsum(0)
        table = blocks.table.cpu()
        self._wrapper.plan(
            blocks.starts.cpu(), ends, table[torch.arange(table.shape[1]) < counts[:, None]].to(q.device), lengths - PAGE * (counts - 1),
            q.shape[1], k.shape[2], q.shape[2], PAGE, causal=True, sm_scale=scale, logits_soft_cap=logit_cap or None,
            q_data_type=q.dtype, kv_data_type=k.dtype,
        )  # fmt: skip


ATTENTIONS: dict[str, type[Fa3] | type[FlashInfer]] = {"fa3": Fa3, "flashinfer": FlashInfer}
"""By the names of SGLang's attention backends."""
