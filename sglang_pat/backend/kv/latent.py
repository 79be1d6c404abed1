"""Latents (MLA) of 16 and 8 bits, in SGLang's own pools: [slots, 1, head_dim]. V is the first `v_head_dim` columns of K."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_pat import compat
from sglang_pat.backend.kv import NewTokens
from sglang_pat.backend.kv.plain import PlainStore
from sglang_pat.kernels.arguments import KvView, Tables

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention


class LatentStore(PlainStore):
    """A `Store`. Latents of 8 bits have no scales, whatever the checkpoint says: SGLang's pools round them as they are."""

    def write(self, layer: RadixAttention, k: torch.Tensor, v: torch.Tensor, new: NewTokens) -> None:
        compat.pool.save_latents(self._pool, layer, new.slots, k, new.k_rope)

    def read(self, layer: RadixAttention, tables: Tables) -> KvView:
        k = self._pool.get_key_buffer(layer.layer_id)
        return KvView(k, k[..., : layer.v_head_dim])
