"""`--attention-backend pat`: the interface that SGLang calls in each step."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_pat import compat
from sglang_pat.backend import verify
from sglang_pat.backend.check import check_plan
from sglang_pat.backend.executors import CudaExecutor
from sglang_pat.backend.extends import paged_attention
from sglang_pat.backend.extends.low_bit_prefill import LowBitPrefill
from sglang_pat.backend.extends.planned import PackedExtend
from sglang_pat.backend.extends.prefill import Prefill
from sglang_pat.backend.groups import LayerGroup, LayerGroups
from sglang_pat.backend.kv.choose import store_of
from sglang_pat.backend.kv.pages import LowBitKVPool
from sglang_pat.backend.kv.rotation import Rotation
from sglang_pat.backend.reporter import Reporter
from sglang_pat.backend.start import low_bit
from sglang_pat.backend.step import Step
from sglang_pat.config import PatConfig
from sglang_pat.kernels.arguments import Scores
from sglang_pat.kernels.low_bit import PAGE_TOKENS
from sglang_pat.radix_bridge import Observer, hooks
from sglang_pat.radix_bridge.trace import TraceWriter

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class PatAttnBackend(AttentionBackend):
    """Decodes by plan, on a CPU extends too; hands everything else to one of SGLang's own backends.

    A step has two phases. `init_forward_metadata_out_graph` runs on the host before a CUDA graph is replayed: it decides which plan
    the step runs and copies it to the device. `init_forward_metadata_in_graph` is part of the graph. Then SGLang calls `forward_decode`
    or `forward_extend` for each layer.

    Attributes:
        needs_cpu_seq_lens: Whether SGLang has to know lengths on the host in verify steps, for which it would wait in each. Extends always come with
            them.
        inner: SGLang's backend for prefill; None where the user chose one, or no stock backend can read the pool.
        groups: The model's layers, with their executors and planners.
        prefill: Divides extends, or runs all of them where KV has few bits on a GPU; None where the user chose another backend.
        observer: Follows the prefix cache for all groups.
        reporter: Publishes what both do.
        step: The requests of the present decode or verify step.
        store: How their KV is written and read.
        rotation: Of Q, K, V and the output around all of this; None where KV has more than 2 bits.
    """

    needs_cpu_seq_lens = False

    def __init__(
        self,
        runner: ModelRunner,
        config: PatConfig,
        groups: LayerGroups,
        inner: AttentionBackend | None,
        writer: TraceWriter | None,
    ) -> None:
        """
        Args:
            writer: Records events and the plans of the first group, if anything does.
        """
        super().__init__()
        self.inner, self.config, self.groups = inner, config, groups
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.data_type = self.kv_cache_dtype = runner.kv_cache_dtype
        self.max_context_len = runner.model_config.context_len  # SGLang sizes the masks of draft trees by it
        for name in compat.stock.PREFILL_ATTRIBUTES:
            if hasattr(inner, name):
                setattr(self, name, getattr(inner, name))
        self.step = Step(runner, groups)
        self.store = store_of(runner, groups.single)
        self.rotation = self._make_rotation(runner)
        self.prefill = self._make_prefill(runner)
        self.observer = Observer(*(group.scheduler for group in groups.everyone))
        self.observer.planners += [group.planner.on_change for group in groups.everyone]
        self.reporter = Reporter(groups, self.observer, self.prefill, writer)
        if writer:
            groups.steps[0].planner.on_plan = writer.on_plan
            self.observer.subscribers.append(writer.on_event)
        on_gpu = runner.device != "cpu"
        hooks.install(self, graphs=on_gpu, defer=config.defer)
        if on_gpu:
            compat.batch.fence_table_reads()
        self._introduce(runner)

    def _make_rotation(self, runner: ModelRunner) -> Rotation | None:
        pool = self.token_to_kv_pool
        rotates = isinstance(pool, LowBitKVPool) and pool.form.name == "int2"
        return Rotation(pool.head_dim, runner.dtype, runner.device) if rotates else None

    def _make_prefill(self, runner: ModelRunner) -> Prefill | LowBitPrefill | None:
        group_of = functools.partial(self.groups.of, groups=self.groups.single)
        if isinstance(self.token_to_kv_pool, LowBitKVPool) and runner.device != "cpu":
            return self._make_low_bit_prefill(self.token_to_kv_pool, runner, group_of)
        if self.inner is None:
            return None
        extend = PackedExtend(runner, self.groups.single, self.store) if self.groups.extends else None
        return Prefill(runner, self.inner, extend, self._begin_decode, self._decode, group_of)

    def _make_low_bit_prefill(
        self, pool: LowBitKVPool, runner: ModelRunner, group_of: Callable[..., LayerGroup]
    ) -> LowBitPrefill:
        step = compat.arguments.prefill_step(runner.server_args, self.max_context_len)
        pages = low_bit.workspace_pages(self.max_context_len, step)
        shape = (2, pages, PAGE_TOKENS, pool.head_num, pool.head_dim)
        workspace = torch.empty(shape, dtype=runner.dtype, device=runner.device)
        name = compat.stock.prefill_backend(False, runner.kv_cache_dtype, scaled=False)
        logger.info("sglang-pat: prefill runs on %s, over %.0f MiB of pages", name, workspace.nbytes / 2**20)
        executors = [(group.spec.kv.name, group.executor) for group in self.groups.single]
        unpack = {form: executor.unpack for form, executor in executors if isinstance(executor, CudaExecutor)}
        req_to_token = self.req_to_token_pool.req_to_token
        return LowBitPrefill(pool, req_to_token, workspace, unpack, paged_attention.ATTENTIONS[name](), group_of)

    @property
    def packs_extends(self) -> bool:
        return isinstance(self.prefill, Prefill) and self.prefill.extend is not None

    def _introduce(self, runner: ModelRunner) -> None:
        """Log what was made."""
        for group in self.groups.steps:
            logger.info(
                "sglang-pat: %s, %d layers of %s, %s", self.config, group.layers, group.spec, group.executor.description
            )
            found = verify.advice(group.spec) if runner.device != "cpu" else None
            if found is not None:
                logger.warning("sglang-pat: %s", found)
        self.step.introduce(compat.arguments.prefill_step(runner.server_args, self.max_context_len))

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        if forward_batch.forward_mode.is_decode() or self.step.verifies(forward_batch):
            self.init_forward_metadata_out_graph(forward_batch)
            self.init_forward_metadata_in_graph(forward_batch)
        elif not forward_batch.forward_mode.is_idle() and self.prefill is not None:
            check = functools.partial(check_plan, self.req_to_token_pool.req_to_token, hides=True)
            self.prefill.begin(forward_batch, check if self.config.verify else None)
            self._expect(forward_batch)

    def _begin_decode(self, forward_batch: ForwardBatch, aside: bool) -> None:
        self._begin_step(forward_batch, False, aside)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        self._begin_step(forward_batch, in_capture)

    def _begin_step(self, forward_batch: ForwardBatch, in_capture: bool, aside: bool = False) -> None:
        mode = forward_batch.forward_mode
        verifies = self.step.verifies(forward_batch)
        assert mode.is_decode_or_idle() or verifies  # SGLang begins extends so in full graphs only, which are refused
        self.step.begin(forward_batch)
        groups, more = (self.groups.steps, self.step.draft_tokens) if verifies else (self.groups.single, 0)
        actual = getattr(forward_batch, "actual_forward_mode", mode)
        if in_capture or mode.is_idle() or actual.is_idle():
            for group in groups:
                group.unload()
            return
        seq_lens = compat.batch.cached_lengths(forward_batch)
        requests = self.step.requests(forward_batch, len(seq_lens))
        self.step.drop_padding(forward_batch, len(requests))
        if verifies:
            self.step.take_masks(forward_batch, len(requests))
        self._plan(groups, requests, functools.partial(_on_host, seq_lens, len(requests), more), aside)

    def _plan(
        self, groups: list[LayerGroup], requests: torch.Tensor, lengths: Callable[[], torch.Tensor], aside: bool
    ) -> None:
        for group in groups:
            check = functools.partial(
                check_plan,
                self.req_to_token_pool.req_to_token,
                rows=self.step.rows,
                seq_lens=lengths,
                window=group.spec.planned_window,
                hides=group.spec.query_tokens > 1,
            )
            group.plan(requests, lengths, check if self.config.verify else None, aside)

    @property
    def verify_mask(self) -> Any:
        """Where SGLang writes the masks of drafts."""
        return self.step.verify_mask

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        self.step.fill(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Size what graphs read and is not allocated yet; the executors have allocated the rest."""
        self.step.reserve(max_bs)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def forward_decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        return self._rotated(self._decode, q, k, v, *args, **kwargs)

    def forward_extend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch,
        save_kv_cache: bool = True, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        if self.step.verifies(forward_batch):
            return self._decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        assert self.prefill is not None
        return self._rotated(self.prefill.forward, q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def _rotated(
        self, forward: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, *args: Any, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Attention by `forward`, which does not know of the rotation."""
        rotation = self.rotation
        if rotation is None:
            return forward(q, k, v, *args, **kwargs)
        k, v = (x if x is None else rotation.stored(x) for x in (k, v))
        return rotation.output(forward(rotation.query(q), k, v, *args, **kwargs))

    def _decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch,
        save_kv_cache: bool = True, sinks: torch.Tensor | None = None, q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Run the plan of a decode or verify step in a layer: [tokens, heads * v_head_dim].

        MLA models pass latents whole or, on GPUs, in two tensors: Q and K of `v_head_dim` columns, and the rest (`compat.model.treat_as`).
        """
        verifies = self.step.verifies(forward_batch)
        group = self.groups.of(layer, self.groups.steps if verifies else self.groups.single, sinks, **kwargs)
        if save_kv_cache and k is not None:
            self.store.write(layer, k, v, self.step.new_tokens(forward_batch, k_rope))
        drafts = len(q) // self.step.draft_tokens if verifies else None
        tables = self.step.tables(group.spec.planned_window, drafts)
        kv = self.store.read(layer, tables)
        scores = Scores(layer.scaling, compat.model.logit_cap(layer), sinks)
        heads, dim = layer.tp_q_head_num, layer.qk_head_dim
        if q_rope is not None:
            q_rope = q_rope.reshape(-1, heads, dim - layer.v_head_dim)
            dim = layer.v_head_dim
        out = group.executor.decode(q.reshape(-1, heads, dim), kv, tables, scores, q_rope)
        return out.reshape(len(q), layer.tp_q_head_num * layer.v_head_dim)

    def shared_read_ends(self, mode: Any) -> Any:
        """0.5.23 asks when the scheduler may write `req_to_token` again: after the kernels have read it."""
        from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

        return SharedReadEnds.POST_REPLAY

    def _expect(self, forward_batch: ForwardBatch) -> None:
        """Tell the observer that the requests whose prompts this batch completes decode next."""
        rows, lengths = hooks.rows_of(forward_batch), forward_batch.seq_lens_cpu
        if rows is not None and lengths is not None:
            completed = forward_batch.rids.completed()
            rids = [forward_batch.rids[i] for i in completed if i < len(forward_batch.rids)]
            requests = compat.requests.numbers(self.req_to_token_pool, rows[completed]).tolist()
            # The first step of a request that verifies includes its whole draft.
            more = max(0, self.step.draft_tokens - 1)
            told = (lengths[: len(rows)][completed] + more).tolist()
            hooks.tell(self.observer, lambda observer: observer.on_prefill(requests, told, rids))


def _on_host(seq_lens: torch.Tensor, size: int, more: int) -> torch.Tensor:
    return seq_lens[:size].to("cpu", torch.int64) + more
