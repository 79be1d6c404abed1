"""Prefill on a CPU with an FP8 cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sglang_pat import compat

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class ScaledTorchNativeBackend(TorchNativeAttnBackend):
    """`torch_native` casts what it reads of an FP8 cache to Q's dtype, but neither divides by the layer's scales nor multiplies by
    them. Here it does, as every stock backend on a GPU: decoding reads what prefill wrote."""

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        if save_kv_cache and k is not None and v is not None:
            compat.save_kv(self.token_to_kv_pool, layer, forward_batch.out_cache_loc, k, v)
        k_scale, v_scale = compat.kv_scales(layer)
        return super().forward_extend(q * k_scale, k, v, layer, forward_batch, save_kv_cache=False) * v_scale
