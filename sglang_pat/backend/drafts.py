"""Attention of draft models on a CPU, for which the stock backends lack some steps and are slow in others. Drafts share nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sglang_pat import compat
from sglang_pat.backend.extends.planned import PackedExtend
from sglang_pat.backend.groups import make_groups
from sglang_pat.backend.kv.choose import store_of
from sglang_pat.backend.start import layers
from sglang_pat.backend.start.layers import SpecReader
from sglang_pat.config import PatConfig

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class DraftExtend(TorchNativeAttnBackend):
    """Runs a draft model's extends (prompts, accepted tokens) on the CPU executor."""

    needs_cpu_seq_lens = False

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        config = PatConfig.from_environment()
        self._reader = SpecReader(runner)
        self._groups = make_groups(runner, config, layers.count(runner))
        self._extend = PackedExtend(runner, self._groups, store_of(runner, self._groups))

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        if not forward_batch.forward_mode.is_decode_or_idle():
            self._extend.begin(forward_batch, None)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: ForwardBatch, save_kv_cache: bool = True, **kwargs: Any
    ) -> Any:
        if not compat.model.decodes(layer) or kwargs:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        spec = self._reader.spec(layer)
        group = next(group for group in self._groups if group.spec == spec)
        return self._extend.forward(q, k, v, layer, group, forward_batch, save_kv_cache, None)


class DraftStep(TorchNativeAttnBackend):
    """One draft step: `torch_native`'s decode, over a table with a row for each branch."""

    seq_lens: torch.Tensor

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: ForwardBatch, *args: Any, **kwargs: Any
    ) -> Any:
        branches = SimpleNamespace(
            req_pool_indices=torch.arange(len(self.seq_lens)), seq_lens=self.seq_lens, encoder_lens=None,
            out_cache_loc=forward_batch.out_cache_loc,
        )  # fmt: skip
        return super().forward_decode(q, k, v, layer, branches, *args, **kwargs)


class DraftSteps:
    """The attention backend of SGLang's draft workers: one backend per draft step.

    Attributes:
        attn_backends: One for each step but the last, whose token is not fed back.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: ModelRunner, topk: int, steps: int) -> None:
        """
        Args:
            topk: Branches per request.
            steps: Tokens per branch.
        """
        self._topk, self._steps = topk, steps
        self._req_to_token: torch.Tensor = runner.req_to_token_pool.req_to_token
        self.attn_backends = [DraftStep(runner) for _ in range(steps - 1)]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Make the table: a row for each branch, with its request's slots and then those that SGLang has chosen for the branch's tokens
        (speculative/eagle_utils.py, `per_step_draft_out_cache_loc`)."""
        lengths = forward_batch.seq_lens.long()
        chosen = forward_batch.out_cache_loc.view(len(lengths), self._topk, self._steps)
        table = torch.zeros(len(lengths) * self._topk, int(lengths.max()) + self._steps, dtype=torch.int32)
        for request, length in enumerate(lengths.tolist()):
            rows = table[request * self._topk : (request + 1) * self._topk]
            rows[:, :length] = self._req_to_token[forward_batch.req_pool_indices[request], :length]
            rows[:, length : length + self._steps] = chosen[request]
        for step, backend in enumerate(self.attn_backends):
            backend.req_to_token_pool = SimpleNamespace(req_to_token=table)
            backend.seq_lens = lengths.repeat_interleave(self._topk) + step + 1
