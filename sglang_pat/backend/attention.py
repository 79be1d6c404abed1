"""`--attention-backend pat`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sglang_pat import compat
from sglang_pat.backend import support
from sglang_pat.backend.planner import Planner
from sglang_pat.config import PatConfig
from sglang_pat.kernels import cpu, jit, layout
from sglang_pat.kernels.scheduler import NativeScheduler
from sglang_pat.packing import CPU_TILES, CostModel, PackConfig, WorkItem
from sglang_pat.radix_bridge import Observer, hooks
from sglang_pat.radix_bridge.trace import FORMAT, Header, TraceWriter

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


def create(runner: ModelRunner) -> PatAttnBackend:
    """What SGLang calls for `--attention-backend pat`.

    Raises:
        UnsupportedError: A flag or the model needs what PAT does not do.
        ConfigError: A `SGLANG_PAT_*` variable is wrong.
        BuildError: The executor cannot be compiled here.
        TraceError: The file of `SGLANG_PAT_TRACE` cannot be written.
    """
    try:
        support.check_flags(runner.server_args)
        if runner.device != "cpu":
            raise support.UnsupportedError(
                f"sglang-pat has no kernels for {runner.device} yet: use another --attention-backend, or --device cpu"
            )
        support.check_model(runner, fallback="torch_native")
        config = PatConfig.from_environment()
        jit.load("cpu")
        jit.load("packing")
        return PatAttnBackend(runner, config)
    except (ValueError, jit.BuildError) as error:
        # SGLang prints a traceback; the reason shall also stand on a line of its own.
        logger.error("%s", error)
        raise


def trace_writer(runner: ModelRunner, config: PatConfig, pack_config: PackConfig) -> TraceWriter | None:
    """Records what `SGLANG_PAT_TRACE` asks for; on the first rank alone, since all ranks plan alike.

    Raises:
        TraceError: The file cannot be written.
    """
    if not config.trace or compat.tp_rank() != 0:
        return None
    header = Header(FORMAT, pack_config, runner.req_to_token_pool.size, runner.model_config.num_hidden_layers)
    return TraceWriter(Path(config.trace), header, config.trace_mb * 1_000_000)


class PatAttnBackend(AttentionBackend):
    """Decodes by plan; prefill and everything else goes to SGLang's `torch_native`."""

    def __init__(self, runner: ModelRunner, config: PatConfig) -> None:
        super().__init__()
        self.inner = TorchNativeAttnBackend(runner)
        self.config = config
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.plan: torch.Tensor | None = None
        self.rows: torch.Tensor | None = None
        self.seq_lens: torch.Tensor | None = None

        cost = CostModel(*compat.attention_shape(runner), runner.kv_cache_dtype.itemsize)
        pack_config = PackConfig(cost, CPU_TILES, workers=torch.get_num_threads(), policy=config.policy)
        max_batch = runner.req_to_token_pool.size
        buffers = [torch.zeros(layout.capacity(pack_config, max_batch), dtype=torch.int32) for _ in range(2)]
        scheduler = NativeScheduler(pack_config, max_batch, buffers=buffers)
        observer = Observer(scheduler)
        writer = trace_writer(runner, config, pack_config)
        self.planner = Planner(scheduler, config.reuse, config.ahead, on_plan=writer.on_plan if writer else None)
        observer.subscribers += [self.planner.on_event, *([writer.on_event] if writer else [])]
        layer_bytes = cost.token_bytes * runner.model_config.num_hidden_layers
        hooks.install(
            observer,
            lambda: {
                **self.planner.counters().report(layer_bytes),
                "nodes": observer.nodes,
                "faults": observer.faults,
                "bound": len(scheduler),
            },
        )
        logger.info("sglang-pat: %s, %d threads", config, torch.get_num_threads())

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        lengths = forward_batch.seq_lens_cpu if forward_batch.seq_lens_cpu is not None else forward_batch.seq_lens
        if not forward_batch.forward_mode.is_decode():
            self.inner.init_forward_metadata(forward_batch)
            if forward_batch.forward_mode.is_extend() and forward_batch.rids:
                self.planner.expect(forward_batch.rids, lengths[: len(forward_batch.rids)].tolist())
            return
        # Without ids (SGLang's own dry runs) nothing is known about sharing.
        rids = forward_batch.rids or [""] * len(lengths)
        self.rows = forward_batch.req_pool_indices[: len(rids)].long()
        self.seq_lens = forward_batch.seq_lens[: len(rids)].long()
        self.plan = self.planner.plan(
            rids,
            lambda: lengths[: len(rids)].to("cpu", torch.int64).contiguous(),
            self._verify if self.config.verify else None,
        )

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        unknown = [name for name, value in kwargs.items() if value is not None]
        if unknown:
            raise support.UnsupportedError(
                f"--attention-backend pat does not support '{unknown[0]}' in attention layers: "
                "use another --decode-attention-backend"
            )
        if save_kv_cache and k is not None:
            compat.save_kv(self.token_to_kv_pool, layer, forward_batch.out_cache_loc, k, v)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        assert self.plan is not None and self.rows is not None and self.seq_lens is not None
        real = self.rows.shape[0]
        out = cpu.decode(
            q[:real],
            self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            self.req_to_token_pool.req_to_token,
            self.rows,
            self.seq_lens,
            self.plan,
            scale=layer.scaling,
            logit_cap=layer.logit_cap,
        )
        if real < q.shape[0]:
            out = torch.cat([out, out.new_zeros(q.shape[0] - real, *out.shape[1:])])
        return out.reshape(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)

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
        return self.inner.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)

    def shared_read_ends(self, mode: Any) -> Any:
        """0.5.23 asks when the scheduler may write `req_to_token` again: only after the kernels have read it."""
        from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds

        return SharedReadEnds.POST_REPLAY

    def support_triton(self) -> bool:
        return self.inner.support_triton()

    def _verify(self, items: list[WorkItem]) -> None:
        assert self.rows is not None
        table = self.req_to_token_pool.req_to_token
        for item in items:
            if len(item.queries) > 1:
                slots = table[self.rows[item.queries], item.start : item.end]
                if not (slots == slots[0]).all():
                    raise AssertionError(f"queries {item.queries} do not share the KV of [{item.start}, {item.end})")
