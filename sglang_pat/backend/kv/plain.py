"""KV of 16 and 8 bits, in SGLang's own pools: [slots, kv_heads, head_dim], with scales if it has 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sglang_pat import compat
from sglang_pat.backend.kv import NewTokens
from sglang_pat.kernels.arguments import KvView, Tables

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention


class PlainStore:
    """A `Store`."""

    def __init__(self, pool: Any) -> None:
        """`pool`: SGLang's KV pool."""
        self._pool, self._scaled = pool, compat.pool.is_fp8(pool.dtype)

    def write(self, layer: RadixAttention, k: torch.Tensor, v: torch.Tensor, new: NewTokens) -> None:
        compat.pool.save_kv(self._pool, layer, new.slots, k, v, new.window_slots)

    def read(self, layer: RadixAttention, tables: Tables) -> KvView:
        k, v = self._pool.get_key_buffer(layer.layer_id), self._pool.get_value_buffer(layer.layer_id)
        return KvView(k, v, *compat.pool.kv_scales(layer)) if self._scaled else KvView(k, v)

    def begin_extend(self, rows: Sequence[int], cached: Sequence[int], added: Sequence[int]) -> None:
        pass

    def extend(
        self, layer: RadixAttention, k: torch.Tensor | None, v: torch.Tensor | None, new: NewTokens, tables: Tables
    ) -> KvView:
        if k is not None and v is not None:
            self.write(layer, k, v, new)
        return self.read(layer, tables)
