"""How a KV cache is written and read: one file for each format. What a step asks of a format is a `Store`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
import torch

from sglang_pat.kernels.arguments import KvView, Tables

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention


class NewTokens(msgspec.Struct, frozen=True):
    """The tokens whose K and V a step's layers write.

    Attributes:
        slots: [tokens or more], of the pool; padding behind the tokens.
        rows: [tokens], int64: the row of each token's request.
        seq_lens: [tokens], int64: the request's tokens up to this one, itself included.
        window_slots: [tokens or more]: the same slots in the pool for windows, if there is one.
        k_rope: [tokens or more, 1, head_dim - v_head_dim]: of latents the rest of K's columns, where K comes without them.
    """

    slots: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    window_slots: torch.Tensor | None
    k_rope: torch.Tensor | None = None


class Store(Protocol):
    """The KV cache of a server's layers. K and V of new tokens are [tokens or more, kv_heads * head_dim], or with heads apart."""

    def write(self, layer: RadixAttention, k: torch.Tensor, v: torch.Tensor, new: NewTokens) -> None:
        """Write new tokens."""

    def read(self, layer: RadixAttention, tables: Tables) -> KvView:
        """What the executor of a decode or verify step reads, its new tokens written."""

    def begin_extend(self, rows: Sequence[int], cached: Sequence[int], added: Sequence[int]) -> None:
        """Before the layers of an extend: each request's row, its tokens before the extend, and its new tokens."""

    def extend(
        self, layer: RadixAttention, k: torch.Tensor | None, v: torch.Tensor | None, new: NewTokens, tables: Tables
    ) -> KvView:
        """Write an extend's new tokens, unless they are None because another layer wrote them, and what the extend's executor reads.

        Raises:
            UnsupportedError: Layers of this format must have K and V of their own.
        """
