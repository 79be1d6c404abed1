"""Decode attention and verify steps of others on the same tensors, each as SGLang or its own documentation calls it."""

from __future__ import annotations

import functools
from typing import Any

import torch


class UnsupportedError(Exception):
    """This kernel cannot run this problem; the message says why."""


def failure(error: Exception) -> str:
    """Why a rival has no time, in a line."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')[:150]}"


@functools.cache
def workspace() -> torch.Tensor:
    """FlashInfer's; it must be zero at first."""
    return torch.zeros(2 << 30, dtype=torch.uint8, device="cuda")


def first_tokens(problem: Any) -> torch.Tensor:
    """Where each request's tokens begin in Q, with the end of the last; int32."""
    return torch.arange(problem.size + 1, dtype=torch.int32, device="cuda") * problem.tokens


class FlashInfer:
    """FlashInfer's batch decode with tensor cores, which SGLang uses for GQA."""

    name = "flashinfer"

    def __init__(self, problem: Any) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

        size, page = problem.size, problem.page_size
        indptr, indices = problem.page_list(page)
        last = torch.full((size,), page, dtype=torch.int32, device="cuda")
        self._problem, self.out = problem, problem.new_out()
        # Its wrapper for decode knows one dimension only.
        if problem.tokens > 1 or problem.v_dim != problem.dim:
            # SGLang gives it a mask for drafts without branches too; causal, as here, it is faster.
            starts = first_tokens(problem)
            self._wrapper = BatchPrefillWithPagedKVCacheWrapper(
                workspace(), "NHD", use_cuda_graph=True, qo_indptr_buf=starts, paged_kv_indptr_buf=indptr,
                paged_kv_indices_buf=indices, paged_kv_last_page_len_buf=last, backend="fa2",
            )  # fmt: skip
            self._wrapper.plan(
                starts, indptr, indices, last, problem.heads, problem.kv_heads, problem.dim, page,
                head_dim_vo=problem.v_dim, causal=True, sm_scale=problem.scale, q_data_type=problem.q.dtype, kv_data_type=problem.k.dtype,
            )  # fmt: skip
            return
        self._wrapper = BatchDecodeWithPagedKVCacheWrapper(
            workspace(), "NHD", use_cuda_graph=True, use_tensor_cores=True, paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=indices, paged_kv_last_page_len_buffer=last,
        )  # fmt: skip
        self._wrapper.plan(
            indptr, indices, last, problem.heads, problem.kv_heads, problem.dim, page, q_data_type=problem.q.dtype,
            kv_data_type=problem.k.dtype, sm_scale=problem.scale,
        )  # fmt: skip

    def run(self) -> None:
        self._wrapper.run(self._problem.q, self._problem.paged, out=self.out)


class Cascade:
    """FlashInfer's multi-level cascade: one level of it for each level of the tree."""

    name = "cascade"

    def __init__(self, problem: Any) -> None:
        from flashinfer import MultiLevelCascadeAttentionWrapper

        if problem.tokens > 1:
            raise UnsupportedError("its levels have no causal mask")
        if problem.v_dim != problem.dim:
            raise UnsupportedError("K and V have one head dimension")
        if len(problem.levels) < 2:
            raise UnsupportedError("one level is plain decode, and others than regular trees are not laid out here")
        page, size = problem.page_size, problem.size
        queries, indptr, indices, last = [], [], [], []
        start = 0
        for count, length in problem.levels:
            ends = [-(-(i * size) // count) for i in range(count + 1)]
            slots = problem.slots[ends[:-1], start : start + length]
            start += length
            queries.append(torch.tensor(ends, dtype=torch.int32, device="cuda"))
            pages = problem.pages(slots)
            indptr.append(torch.arange(count + 1, dtype=torch.int32, device="cuda") * pages.shape[1])
            indices.append(pages.flatten())
            last.append(torch.full((count,), page, dtype=torch.int32, device="cuda"))
        self._wrapper = MultiLevelCascadeAttentionWrapper(
            len(queries), workspace(), "NHD", use_cuda_graph=True, qo_indptr_buf_arr=queries,
            paged_kv_indptr_buf_arr=indptr, paged_kv_indices_buf_arr=indices, paged_kv_last_page_len_buf_arr=last,
        )  # fmt: skip
        self._wrapper.plan(
            queries, indptr, indices, last, problem.heads, problem.kv_heads, problem.dim, page,
            q_data_type=problem.q.dtype, kv_data_type=problem.k.dtype, sm_scale=problem.scale,
        )  # fmt: skip
        self._problem = problem
        self.out: Any = None

    def run(self) -> None:
        self.out = self._wrapper.run(self._problem.q, self._problem.paged)


class Triton:
    """SGLang's Triton decode kernel, with the splits that its backend chooses."""

    name = "triton"
    max_splits = 8  # --triton-attention-num-kv-splits

    def __init__(self, problem: Any) -> None:
        import triton
        from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
        from sglang.srt.layers.attention.triton_backend import get_num_kv_splits_triton

        size, heads = problem.size, problem.heads
        self._forward, self._problem, self.out = decode_attention_fwd, problem, problem.new_out()
        self._indptr, slots = problem.page_list(1)
        self._indices = slots.long()
        self._logits = torch.empty(size, heads, self.max_splits, problem.v_dim, device="cuda")
        self._lse = torch.empty(size, heads, self.max_splits, device="cuda")
        self._splits = torch.empty(size, dtype=torch.int32, device="cuda")
        get_num_kv_splits_triton[(1,)](
            self._splits, problem.seq_lens, size, 1, heads, problem.kv_heads, self.max_splits,
            torch.cuda.get_device_properties(0).multi_processor_count,
            MAX_NUM_SEQ=256 if size < 256 else triton.next_power_of_2(size),
        )  # fmt: skip

    def run(self) -> None:
        p = self._problem
        self._forward(
            p.q, p.k, p.v, self.out, self._indptr, self._indices, self._logits, self._lse, self._splits,
            self.max_splits, p.scale, 1.0, 1.0,
        )  # fmt: skip


class TritonVerify:
    """SGLang's Triton extend kernel, as its backend verifies drafts: K and V of the drafts apart from what is cached."""

    name = "triton"

    def __init__(self, problem: Any) -> None:
        from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

        size, tokens = problem.size, problem.tokens
        self._forward, self._problem, self.out = extend_attention_fwd, problem, problem.new_out()
        self._starts = first_tokens(problem)
        cached = problem.seq_lens - tokens
        self._indptr = torch.zeros(size + 1, dtype=torch.int32, device="cuda")
        self._indptr[1:] = cached.cumsum(0)
        places = torch.arange(problem.slots.shape[1], device="cuda")
        self._indices = problem.slots[places < cached[:, None]].long()
        last = problem.slots.gather(1, cached[:, None] + torch.arange(tokens, device="cuda")).flatten().long()
        self._k, self._v = problem.k[last], problem.v[last]

    def run(self) -> None:
        p = self._problem
        self._forward(
            p.q, self._k, self._v, self.out, p.k, p.v, self._starts, self._indptr, self._indices, None, True, None, p.tokens,
            1.0, 1.0, p.scale,
        )  # fmt: skip


class Fa3:
    """FlashAttention 3 with a page table, as SGLang's fa3 backend calls it."""

    name = "fa3"
    splits = 0
    """As many as its heuristic says."""
    dims_8bit = (64, 128, 256)
    """With KV of 8 bits the library has kernels of these alone where it was run; without one it ends the process."""

    def __init__(self, problem: Any) -> None:
        try:
            import sgl_kernel.flash_ops  # noqa: F401
            from sgl_kernel.flash_attn import flash_attn_with_kvcache
        except (ImportError, OSError) as error:
            raise UnsupportedError(f"not installed: {error}") from None
        if problem.k.dtype == torch.float8_e5m2:
            raise UnsupportedError("of the two kinds of 8 bits it knows e4m3")
        if problem.k.itemsize == 1 and (problem.dim != problem.v_dim or problem.dim not in self.dims_8bit):
            raise UnsupportedError("no kernel of 8 bits for these head dimensions")
        self._problem, self._forward = problem, flash_attn_with_kvcache
        self._table = problem.pages(problem.slots).contiguous()
        self._lens = problem.seq_lens.int()
        self._cu_q = first_tokens(problem)
        self.out: Any = None

    def run(self) -> None:
        p = self._problem
        self.out = self._forward(
            # As SGLang's backend does: with KV of 8 bits, Q has 8 bits too.
            q=p.q.to(p.k.dtype), k_cache=p.paged[0], v_cache=p.paged[1], page_table=self._table, cache_seqlens=self._lens,
            cu_seqlens_q=self._cu_q, max_seqlen_q=p.tokens, softmax_scale=p.scale, causal=True,
            num_splits=self.splits,
        )  # fmt: skip


class AlikeTriton(Triton):
    """The same as its backend calls it for deterministic inference: each request in splits of 256 tokens, however many it has."""

    split_tokens = 256  # SGLANG_TRITON_DECODE_SPLIT_TILE_SIZE

    def __init__(self, problem: Any) -> None:
        # Its backend has room for the model's context; the kernel starts as many blocks. Here for the longest request.
        self.max_splits = -(-max(problem.batch.seq_lens) // self.split_tokens)
        super().__init__(problem)
        self._splits[:] = (problem.seq_lens + self.split_tokens - 1) // self.split_tokens


class AlikeFa3(Fa3):
    """The same as its backend calls it for deterministic inference: without splits."""

    splits = 1


NAMES = ("flashinfer", "cascade", "triton", "fa3")


def of(problem: Any) -> tuple[Any, ...]:
    """A class of each name."""
    return FlashInfer, Cascade, TritonVerify if problem.tokens > 1 else Triton, Fa3
