"""Extends: decides which requests of a batch decode, which are planned, and which run on a stock backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sglang_pat import compat
from sglang_pat.backend.extends import halves
from sglang_pat.backend.extends.halves import Forward, Halves
from sglang_pat.backend.extends.planned import PackedExtend
from sglang_pat.radix_bridge import hooks

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_pat.backend.groups import LayerGroup


class Prefill:
    """Runs extends for a backend that decodes by plan.

    Attributes:
        inner: SGLang's backend for the rest.
        extend: Runs some or all extends by plan; None if `inner` runs all of them whole.
        mixed_steps: How many steps decoded some requests and extended others.
    """

    def __init__(
        self,
        runner: ModelRunner,
        inner: AttentionBackend,
        extend: PackedExtend | None,
        begin_decode: Callable[[Any, bool], None],
        decode: Forward,
        group_of: Callable[..., LayerGroup],
    ) -> None:
        """
        Args:
            begin_decode: Begins a step of the backend that decodes, given a batch and whether it is aside (`Planner.plan`).
            decode: What `forward_decode` of that backend runs, Q, K and V rotated if it rotates them.
            group_of: Returns a layer's group, given the layer and the options of its forward (`LayerGroups.of`).
        """
        self.inner, self.extend = inner, extend
        self.mixed_steps = 0
        self._begin_decode, self._decode, self._group_of = begin_decode, decode, group_of
        # The stock backend's metadata cover the rest of a batch only, so no layer may need it for the whole batch.
        decoders = all(map(compat.model.decodes, compat.model.attention_layers(runner)))
        self._divides = extend is not None and decoders
        self._decoding: Halves | None = None  # the batch, divided before the requests that decode
        self._planned: Halves | None = None  # the first half of that, divided before the requests that are planned

    def begin(self, forward_batch: ForwardBatch, check: Callable[..., None] | None) -> None:
        """Divide and plan a batch, before its layers run; `check` as for `PackedExtend.begin`."""
        self._decoding = self._planned = None
        left: Any = forward_batch
        extends = compat.batch.is_extend(forward_batch.forward_mode)
        if extends and self._divides:
            self._decoding = halves.decoding(forward_batch)
        if self._decoding is not None:
            self._begin_decode(self._decoding.second, not hooks.is_mixed(forward_batch))
            left = self._decoding.first
            self.mixed_steps += left is not None
        if left is not None and extends and self._divides and self.extend is not None:
            self._planned = self.extend.begin(left, check)
            left = left if self._planned is None else self._planned.first
        if left is not None:
            self.inner.init_forward_metadata(left)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch,
        save_kv_cache: bool, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        """One layer's attention, [tokens, heads * v_head_dim]."""
        arguments = (q, k, v, layer, forward_batch, save_kv_cache)
        if self._decoding is None:
            return self._forward_extend(*arguments, **options)
        return self._decoding.forward(self._forward_extend, self._decode, *arguments, **options)

    def _forward_extend(self, *arguments: Any, **options: Any) -> torch.Tensor:
        if self._planned is None:
            return self.inner.forward_extend(*arguments, **options)
        return self._planned.forward(self.inner.forward_extend, self._forward_planned, *arguments, **options)

    def _forward_planned(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch,
        save_kv_cache: bool, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        assert self.extend is not None
        group = self._group_of(layer, **options)
        return self.extend.forward(q, k, v, layer, group, forward_batch, save_kv_cache, options.get("sinks"))
