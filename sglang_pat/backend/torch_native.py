"""Prefill on a CPU, where `torch_native` alone would be wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sglang_pat import compat

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class PrefillBackend(TorchNativeAttnBackend):
    """`torch_native`, mended for FP8 caches and for pools for windows, as stock backends on a GPU are right.

    `torch_native` casts what it reads of an FP8 cache to Q's dtype, but neither divides by the layer's scales nor multiplies by them. It
    writes to a pool for windows (`SWAKVPool`) by that pool's slots, but reads it by those of the other one. Nor does it know the argument
    by which models hand over sinks, where they may have some; here nobody has (support.py).
    """

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self._mapping: torch.Tensor | None = None  # while a layer runs whose slots are another pool's

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: None = None,
    ) -> torch.Tensor:
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            compat.save_kv(pool, layer, forward_batch.out_cache_loc, k, v, self.swa_out_cache_loc)
        self._mapping = compat.window_mapping(pool) if compat.in_window_pool(pool, layer) else None
        if not compat.is_fp8(pool.dtype):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache=False)
        k_scale, v_scale = compat.kv_scales(layer)
        return super().forward_extend(q * k_scale, k, v, layer, forward_batch, save_kv_cache=False) * v_scale

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if self._mapping is not None:
            # What a window has left behind is read from slot 0, SGLang's for padding, and masked.
            req_to_token = self._mapping[req_to_token[req_pool_indices].long()]
            req_pool_indices = torch.arange(len(req_pool_indices))
        return super()._run_sdpa_forward_extend(
            query, output, k_cache, v_cache, req_to_token, req_pool_indices, *args, **kwargs
        )
