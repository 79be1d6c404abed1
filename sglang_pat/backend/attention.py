"""`--attention-backend pat`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_pat import compat, jit
from sglang_pat.backend import executors, layers, support, verify
from sglang_pat.backend.check import check_plan
from sglang_pat.backend.extend import PackedExtend
from sglang_pat.backend.layers import LayerGroup
from sglang_pat.backend.metrics import Metrics
from sglang_pat.backend.prefill import Prefill
from sglang_pat.backend.windows import WindowTable
from sglang_pat.config import PatConfig
from sglang_pat.packing import AttentionSpec, PackConfig
from sglang_pat.radix_bridge import Observer, hooks
from sglang_pat.radix_bridge.trace import FORMAT, Header, TraceWriter

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


def create(runner: ModelRunner) -> AttentionBackend:
    """What SGLang calls for `--attention-backend pat`. Drafts, and encoders, which decode nothing, are all a stock backend's.

    Raises:
        UnsupportedError: A flag or the model needs what PAT does not do.
        ConfigError: A `SGLANG_PAT_*` variable is wrong.
        BuildError: The kernels cannot be compiled here.
        TraceError: The file of `SGLANG_PAT_TRACE` cannot be written.
    """
    try:
        support.check_arguments(runner.server_args)
        support.check_release(runner)
        support.check_device(runner)
        support.check_model(runner, fallback="torch_native" if runner.device == "cpu" else "triton")
        if runner.is_draft_worker or not layers.count(runner):
            logger.info("sglang-pat: %s runs on a stock backend", type(runner.model).__name__)
            return stock_backend(runner, [])
        config = PatConfig.from_environment()
        jit.load("packing")
        if runner.device == "cpu":
            jit.load("cpu")
        return PatAttnBackend(runner, config)
    except (ValueError, jit.BuildError) as error:
        # SGLang prints a traceback; the reason shall also stand on a line of its own.
        logger.error("%s", error)
        raise


def stock_backend(runner: ModelRunner, specs: Collection[AttentionSpec]) -> AttentionBackend:
    """Runs prefill and all that is not plain decode.

    Args:
        runner: SGLang's.
        specs: Of its layers that decode.
    """
    if runner.device == "cpu":
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        return TorchNativeAttnBackend(runner)
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    windows, sinks = any(spec.window for spec in specs), any(spec.sinks for spec in specs)
    unequal = any(spec.head_dim != spec.v_head_dim for spec in specs)
    name = compat.prefill_backend(windows, runner.kv_cache_dtype, compat.has_scales(runner), sinks, unequal)
    support.check_prefill(runner, name)
    logger.info("sglang-pat: prefill runs on %s", name)
    return ATTENTION_BACKENDS[name](runner)


def trace_writer(
    runner: ModelRunner, config: PatConfig, pack_config: PackConfig, num_layers: int
) -> TraceWriter | None:
    """Records what `SGLANG_PAT_TRACE` asks for: one file for each replica (`--dp-size`), whose ranks all plan alike.

    Raises:
        TraceError: The file cannot be written.
    """
    if not config.trace or hooks.followers():
        # Another backend of this process writes it.
        return None
    replica = compat.replica(runner)
    if replica is None:
        return None
    path = Path(config.trace if replica == 0 else f"{config.trace}.dp{replica}")
    header = Header(FORMAT, pack_config, runner.req_to_token_pool.size, num_layers)
    return TraceWriter(path, header, config.trace_mb * 1_000_000)


class PatAttnBackend(AttentionBackend):
    """Decodes by plan, on a CPU extends too; everything else goes to a stock backend of SGLang's."""

    def __init__(self, runner: ModelRunner, config: PatConfig) -> None:
        super().__init__()
        specs = layers.count(runner)
        # None where the user chose a backend for prefill.
        prefills = compat.backends_chosen(runner.server_args)[0] == "pat"
        self.inner = stock_backend(runner, specs) if prefills else None
        self.config = config
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.rows: torch.Tensor | None = None
        self.seq_lens: torch.Tensor | None = None
        self._cached: torch.Tensor | None = None  # likewise, without drafts
        self._rows_of_batch: torch.Tensor | None = None
        self._requests = torch.empty(0, dtype=torch.int64)  # in these rows
        if self.inner is not None:
            for name in compat.PREFILL_ATTRIBUTES:
                if hasattr(self.inner, name):
                    setattr(self, name, getattr(self.inner, name))
        self.data_type = self.kv_cache_dtype = runner.kv_cache_dtype

        self._kv_format, self._context = layers.kv_format(runner.kv_cache_dtype), layers.none_from(runner)
        self._draft_tokens = compat.draft_tokens(
            runner.server_args
        )  # of a request, to be verified; 0 without speculation
        stepping = {msgspec.structs.replace(spec, query_tokens=self._draft_tokens or 1): specs[spec] for spec in specs}
        made = executors.create(runner, config, stepping, extends=prefills and not self._draft_tokens)
        self._writer = writer = trace_writer(runner, config, made[0].pack_config, next(iter(specs.values())))
        # A trace is of the first group's plans.
        tellers = [writer.on_plan if writer else None, *[None] * (len(made) - 1)]
        self.groups = [
            LayerGroup(spec, size, executor, runner.req_to_token_pool.size, config, on_plan)
            for (spec, size), executor, on_plan in zip(stepping.items(), made, tellers, strict=True)
        ]
        # What one token of a request attends to, where steps are of several: extends, and dry runs.
        self._single_groups = self.groups
        if self._draft_tokens:
            made = executors.create(runner, config, specs, extends=prefills)
            self._single_groups = [
                LayerGroup(spec, size, executor, runner.req_to_token_pool.size, config)
                for (spec, size), executor in zip(specs.items(), made, strict=True)
            ]
        everyone = [*self.groups, *(self._single_groups if self._draft_tokens else [])]
        self.prefill = self._make_prefill(runner)
        self._group_of: dict[
            tuple[int, int], LayerGroup
        ] = {}  # by the id of a layer that was seen, and tokens of a query
        # Of drafts; those without branches are all alike.
        self._masks = verify.without_branches(runner.req_to_token_pool.size, self._draft_tokens, runner.device)
        self.max_context_len = runner.model_config.context_len  # by which SGLang sizes the flags of a tree
        own_pool = compat.has_window_pool(runner.token_to_kv_pool)
        windows = {group.spec.planned_window for group in everyone if own_pool and group.spec.window}
        self._tables = {window: WindowTable(runner, window) for window in windows}
        self._window_slots: torch.Tensor | None = None  # of the new tokens
        self._with_sinks = layers.with_sinks(runner)
        self.observer = Observer(*(group.scheduler for group in everyone))
        self.observer.subscribers += [group.planner.on_event for group in everyone]
        if writer:
            self.observer.subscribers.append(writer.on_event)
        self._metrics = Metrics()
        hooks.install(self, graphs=runner.device != "cpu", defer=config.defer)
        if runner.device != "cpu":
            compat.fence_table_reads()
        self._introduce(on_gpu=runner.device != "cpu")

    def _make_prefill(self, runner: ModelRunner) -> Prefill | None:
        if self.inner is None:
            return None
        extend = PackedExtend(runner, self._single_groups)
        group_of = functools.partial(self._group_for, groups=self._single_groups)
        return Prefill(runner, self.inner, extend, self.init_forward_metadata, self.forward_decode, group_of)

    @property
    def packs_extends(self) -> bool:
        return self.prefill is not None

    def _introduce(self, on_gpu: bool) -> None:
        """Into the log, what was made."""
        for group in self.groups:
            logger.info(
                "sglang-pat: %s, %d layers of %s, %s", self.config, group.layers, group.spec, group.executor.description
            )
            found = verify.advice(group.spec) if on_gpu else None
            if found is not None:
                logger.warning("sglang-pat: %s", found)
        for window, table in self._tables.items():
            logger.info("sglang-pat: a table of windows of %d, %.0f MiB", window, table.bytes / 2**20)

    def counters(self) -> dict[str, Any]:
        """What `/server_info` shows (docs/settings.md)."""
        extend = self.prefill.extend if self.prefill else None
        return {
            **layers.total([group.report() for group in self.groups]),
            "mixed_steps": self.prefill.mixed_steps if self.prefill else 0,
            "extends": extend.count if extend else 0,
            "extends_shared": extend.shared if extend else 0,
            "deferred": hooks.deferred(),
            "nodes": self.observer.nodes,
            "faults": self.observer.faults,
            "bound": len(self.observer.scheduler),
            "trace": self._writer.recording if self._writer else "",
        }

    def publish(self, labels: dict[str, str] | None) -> None:
        """Log and export what was counted since the last time."""
        self._metrics.publish(self.counters(), labels)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        if forward_batch.forward_mode.is_decode() or self._verifies(forward_batch):
            self.init_forward_metadata_out_graph(forward_batch)
            self.init_forward_metadata_in_graph(forward_batch)
        elif not forward_batch.forward_mode.is_idle() and self.inner is not None:
            assert self.prefill is not None
            check = functools.partial(check_plan, self.req_to_token_pool.req_to_token)
            self.prefill.begin(forward_batch, check if self.config.verify else None)
            self._expect(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        mode = forward_batch.forward_mode
        verifies = self._verifies(forward_batch)
        if not (mode.is_decode_or_idle() or verifies):
            if self.inner is not None:
                self.inner.init_forward_metadata_out_graph(forward_batch, in_capture)
                self._expect(forward_batch)
            return
        # A captured graph reads these where they are now, in every replay.
        self.rows, self.seq_lens = forward_batch.req_pool_indices.long(), forward_batch.seq_lens.long()
        self._cached = self.seq_lens
        groups, more = (self.groups, self._draft_tokens) if verifies else (self._single_groups, 0)
        actual = getattr(forward_batch, "actual_forward_mode", mode)
        if in_capture or mode.is_idle() or actual.is_idle():
            for group in groups:
                group.unload()
            return
        seq_lens = forward_batch.seq_lens_cpu if forward_batch.seq_lens_cpu is not None else forward_batch.seq_lens
        requests = self._requests_of(forward_batch, len(seq_lens))
        if not compat.is_graph_view(forward_batch):
            self.rows, self.seq_lens = self.rows[: len(requests)], self.seq_lens[: len(requests)]
            self._cached = self.seq_lens
        if verifies:
            self._mask(forward_batch, len(requests))
        self._plan(groups, requests, functools.partial(_on_host, seq_lens, len(requests), more))

    def _plan(self, groups: list[LayerGroup], requests: torch.Tensor, lengths: Callable[[], torch.Tensor]) -> None:
        assert self.rows is not None
        for group in groups:
            check = functools.partial(
                check_plan,
                self.req_to_token_pool.req_to_token,
                rows=self.rows,
                seq_lens=lengths,
                window=group.spec.planned_window,
            )
            group.plan(requests, lengths, check if self.config.verify else None)

    def _verifies(self, forward_batch: ForwardBatch) -> bool:
        return bool(self._draft_tokens) and forward_batch.forward_mode.is_target_verify()

    def _mask(self, forward_batch: ForwardBatch, requests: int) -> None:
        """What the tokens of so many drafts see, in front of a step that verifies them."""
        tokens = self._draft_tokens
        found = compat.tokens_of_drafts(forward_batch)
        if found != tokens:
            raise support.UnsupportedError(f"a draft has {found} tokens, and pat was made for {tokens}")
        if verify.branches(forward_batch):
            self._masks[:requests] = verify.masks(forward_batch, tokens, requests)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        verifies = self._verifies(forward_batch)
        if not (forward_batch.forward_mode.is_decode_or_idle() or verifies):
            if self.inner is not None:
                self.inner.init_forward_metadata_in_graph(forward_batch)
            return
        assert self.rows is not None and self.seq_lens is not None
        if verifies:
            # SGLang's are without the drafts. A graph is warmed up before it is captured: this is called several times.
            assert self._cached is not None
            self.seq_lens = self._cached + self._draft_tokens
        if self._tables:
            mapping = compat.window_mapping(self.token_to_kv_pool)
            self._window_slots = mapping[forward_batch.out_cache_loc]
            for table in self._tables.values():
                table.fill(self.rows, self.seq_lens, mapping)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Everything else that graphs read was allocated with the executor."""
        for table in self._tables.values():
            table.reserve(max_bs)
        if self._draft_tokens and max_bs > len(self._masks):
            self._masks = verify.without_branches(max_bs, self._draft_tokens, self._masks.device)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        group = self._group_for(layer, self._single_groups, sinks, **kwargs)
        if save_kv_cache and k is not None:
            compat.save_kv(self.token_to_kv_pool, layer, forward_batch.out_cache_loc, k, v, self._window_slots)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        return self._run(group, q, layer, sinks).reshape(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)

    def _forward_verify(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch,
        save_kv_cache: bool, sinks: torch.Tensor | None = None, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        group = self._group_for(layer, self.groups, sinks, **kwargs)
        if save_kv_cache and k is not None:
            compat.save_kv(self.token_to_kv_pool, layer, forward_batch.out_cache_loc, k, v, self._window_slots)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = self._run(group, q, layer, sinks, self._masks[: len(q) // self._draft_tokens])
        return out.reshape(len(q), layer.tp_q_head_num * layer.v_head_dim)

    def _run(
        self,
        group: LayerGroup,
        q: torch.Tensor,
        layer: RadixAttention,
        sinks: torch.Tensor | None,
        masks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A layer's attention of the step that was planned, Q [tokens, heads, head_dim]."""
        assert self.rows is not None and self.seq_lens is not None
        k_scale, v_scale = compat.kv_scales(layer) if compat.is_fp8(self.kv_cache_dtype) else (1.0, 1.0)
        table = self._tables.get(group.spec.planned_window)
        own = (self.req_to_token_pool.req_to_token, self.rows, self.seq_lens)
        req_to_token, rows, seq_lens = own if table is None else table.of_batch(len(self.rows))
        return group.executor.decode(
            q,
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            req_to_token,
            rows,
            seq_lens,
            scale=layer.scaling * k_scale,
            logit_cap=layer.logit_cap,
            v_scale=v_scale,
            sinks=sinks,
            masks=masks,
        )

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        if self._verifies(forward_batch):
            return self._forward_verify(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        assert self.prefill is not None
        return self.prefill.forward(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    # Prefill in graphs is the inner backend's business.

    def prepare_full_cuda_graph_chunked_prefix(self, forward_batch: ForwardBatch, *, in_capture: bool) -> None:
        assert self.inner is not None
        self.inner.prepare_full_cuda_graph_chunked_prefix(forward_batch, in_capture=in_capture)

    def init_forward_metadata_for_breakable_cuda_graph_capture(self, forward_batch: ForwardBatch) -> Any:
        assert self.inner is not None
        return self.inner.init_forward_metadata_for_breakable_cuda_graph_capture(forward_batch)

    def prepare_forward_metadata_for_breakable_cuda_graph_replay(
        self, capture_metadata: Any, forward_batch: ForwardBatch, **kwargs: Any
    ) -> None:
        assert self.inner is not None and self.prefill is not None
        self.prefill.forget()
        self.inner.prepare_forward_metadata_for_breakable_cuda_graph_replay(capture_metadata, forward_batch, **kwargs)
        self._expect(forward_batch)

    def shared_read_ends(self, mode: Any) -> Any:
        """0.5.23 asks when the scheduler may write `req_to_token` again: only after the kernels have read it."""
        from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

        return SharedReadEnds.POST_REPLAY

    def support_triton(self) -> bool:
        return self.inner is None or self.inner.support_triton()

    def _group_for(
        self, layer: RadixAttention, groups: list[LayerGroup], sinks: torch.Tensor | None = None, **others: Any
    ) -> LayerGroup:
        """The layer's group of these; raises UnsupportedError where its attention is asked for with something else than the group's."""
        unknown = [name for name, value in others.items() if value is not None]
        if unknown:
            raise support.UnsupportedError(
                f"--attention-backend pat does not support '{unknown[0]}' in attention layers: "
                "use another --decode-attention-backend"
            )
        group = self._group(layer, groups)
        if (sinks is not None) != group.spec.sinks:
            raise support.UnsupportedError(
                f"layer {layer.layer_id} has {'' if group.spec.sinks else 'no '}attention sinks by its model's parameters, and is asked for "
                "otherwise: use another --decode-attention-backend"
            )
        return group

    def _group(self, layer: RadixAttention, groups: list[LayerGroup]) -> LayerGroup:
        key = layer.layer_id, groups[0].spec.query_tokens
        if key not in self._group_of:
            spec = layers.spec_of(layer, self._kv_format, self._context, layer.layer_id in self._with_sinks, key[1])
            found = [group for group in groups if group.spec == spec]
            if not found:
                raise support.UnsupportedError(f"layer {layer.layer_id} is none of those that pat was made for: {spec}")
            self._group_of[key] = found[0]
        return self._group_of[key]

    def _requests_of(self, forward_batch: ForwardBatch, size: int) -> torch.Tensor:
        """The requests of a batch of `size` rows, without what it was padded with; the same object while it is the same batch."""
        rows = hooks.rows_of(forward_batch)
        if rows is None:
            # Of SGLang's own dry runs nothing is known.
            return torch.full((size - compat.padding(forward_batch),), -1)
        if rows is not self._rows_of_batch:
            self._rows_of_batch, self._requests = rows, compat.requests(self.req_to_token_pool, rows)
        return self._requests

    def _expect(self, forward_batch: ForwardBatch) -> None:
        """The requests whose prompts this batch completes decode next."""
        rows, lengths = hooks.rows_of(forward_batch), forward_batch.seq_lens_cpu
        if rows is not None and lengths is not None:
            completed = forward_batch.rids.completed()
            rids = [forward_batch.rids[i] for i in completed if i < len(forward_batch.rids)]
            requests = compat.requests(self.req_to_token_pool, rows[completed]).tolist()
            # Of a request that verifies, the first step has its whole draft.
            more = max(0, self._draft_tokens - 1)
            told = (lengths[: len(rows)][completed] + more).tolist()
            hooks.tell(self.observer, lambda observer: observer.on_prefill(requests, told, rids))


def _on_host(seq_lens: torch.Tensor, size: int, more: int) -> torch.Tensor:
    return seq_lens[:size].to("cpu", torch.int64) + more
