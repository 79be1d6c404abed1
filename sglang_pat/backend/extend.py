"""Extends on a CPU: new tokens of several requests, which share what they have in the prefix cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from sglang_pat import compat
from sglang_pat.backend.layers import LayerGroup
from sglang_pat.kernels import cpu
from sglang_pat.packing import layout

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class PackedExtend:
    """Runs the extends of decoder layers by plan, one for each group of layers.

    Attributes:
        count: Extends run.
        shared: How many of them read a prefix once for several requests, in any layer.
    """

    def __init__(self, runner: ModelRunner, groups: Collection[LayerGroup]) -> None:
        self.count = self.shared = 0
        self._groups = groups
        self._req_to_token: torch.Tensor = runner.req_to_token_pool.req_to_token
        self._pool = runner.token_to_kv_pool
        self._plans: Mapping[LayerGroup, torch.Tensor] = {}
        # Of each new token: its request's row of the table, and what it sees. The same by the slots of a pool for windows.
        self._rows = self._seq_lens = self._window_rows = self._window_table = torch.empty(0)
        self._window_slots: torch.Tensor | None = None
        self._failed = False

    def begin(self, forward_batch: ForwardBatch, requests: torch.Tensor, check: Callable[..., None] | None) -> None:
        """Plan a batch's extend, before its layers run.

        Args:
            forward_batch: SGLang's.
            requests: As many as are known, in batch order; int64 on the host.
            check: Called with a plan's items, each query's row, what gives their lengths, and the window; raises where these contradict.
        """
        size = min(len(forward_batch.extend_prefix_lens), len(forward_batch.extend_seq_lens))
        cached, added = forward_batch.extend_prefix_lens[:size].long(), forward_batch.extend_seq_lens[:size].long()
        named = torch.full((size,), -1)
        named[: len(requests)] = requests[:size]
        rows = forward_batch.req_pool_indices[:size].long()
        self._rows = rows.repeat_interleave(added)
        firsts = (added.cumsum(0) - added).repeat_interleave(added)
        self._seq_lens = cached.repeat_interleave(added) + torch.arange(len(firsts)) - firsts + 1
        made = {group: self._plan(group, named, cached, added, check) for group in self._groups}
        self._plans = {group: torch.from_numpy(plan) for group, (plan, _) in made.items()}
        self.count += 1
        self.shared += any(shared for _, shared in made.values())
        if compat.has_window_pool(self._pool):
            # What a window has left behind is called 0 there, and not read.
            mapping = compat.window_mapping(self._pool)
            self._window_slots = mapping[forward_batch.out_cache_loc]
            longest = int((cached + added).max()) if size else 0
            self._window_table = mapping[self._req_to_token[rows, :longest].long()].int()
            self._window_rows = torch.arange(size).repeat_interleave(added)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, group: LayerGroup,
        forward_batch: ForwardBatch, save_kv_cache: bool, sinks: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """One layer's attention, [tokens, heads * v_head_dim]; rows with which the batch was padded are zero."""
        pool, apart = self._pool, compat.in_window_pool(self._pool, layer)
        if save_kv_cache and k is not None:
            compat.save_kv(pool, layer, forward_batch.out_cache_loc, k, v, self._window_slots if apart else None)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        k_scale, v_scale = compat.kv_scales(layer) if compat.is_fp8(pool.dtype) else (1.0, 1.0)
        real = len(self._rows)
        out = cpu.attention(
            q[:real],
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            self._window_table if apart else self._req_to_token,
            self._window_rows if apart else self._rows,
            self._seq_lens,
            self._plans[group],
            scale=layer.scaling * k_scale,
            logit_cap=layer.logit_cap,
            v_scale=v_scale,
            sinks=sinks,
            window=group.spec.window,
        )
        if real < len(q):
            out = torch.cat([out, out.new_zeros(len(q) - real, *out.shape[1:])])
        return out.reshape(len(q), -1)

    def _plan(
        self, group: LayerGroup, requests: torch.Tensor, cached: torch.Tensor, added: torch.Tensor,
        check: Callable[..., None] | None,
    ) -> tuple[np.ndarray, int]:  # fmt: skip
        try:
            plan, shared = group.scheduler.extend(requests, cached, added)
            if check is not None:
                check(layout.work_items(plan), self._rows, lambda: self._seq_lens, group.spec.window)
        except Exception:
            if not self._failed:
                self._failed = True
                logger.exception("planning failed: this extend shares nothing (reported once)")
            return group.scheduler.extend(torch.full_like(requests, -1), cached, added)
        return plan, shared
