"""Layers by what their attention is: those of one spec have an executor and a plan in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from sglang_pat import compat
from sglang_pat.backend.executors import Executor
from sglang_pat.backend.planner import Planner
from sglang_pat.config import PatConfig
from sglang_pat.packing import FORMATS, AttentionSpec, WorkItem
from sglang_pat.packing.native import NativeScheduler
from sglang_pat.packing.spec import MAX_WINDOW, KVFormat

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.model_runner import ModelRunner

SINKS = ("sinks", "attention_sink_bias")
"""How models call the logits that are attention sinks, where a layer has them: gpt-oss and Granite, MiMo V2."""


def kv_format(dtype: torch.dtype) -> KVFormat:
    """Of a KV cache of this dtype; an executor may not know it (`capabilities.refusal`)."""
    name = str(dtype).removeprefix("torch.")
    return FORMATS.get(name, KVFormat(name, 8 * dtype.itemsize))


def kept(runner: ModelRunner) -> KVFormat:
    """How a runner's KV pool keeps K and V."""
    form = getattr(runner.token_to_kv_pool, "form", None)  # a `LowBitKVPool`'s
    return form if isinstance(form, KVFormat) else kv_format(runner.kv_cache_dtype)


def window(radius: int | None, context: int) -> int:
    """Tokens that are seen, own included; 0 for all.

    Args:
        radius: SGLang's `sliding_window_size`: how far back; None or -1 for all.
        context: What has so many tokens is no window: the most that a request may have.
    """
    return 0 if radius is None or radius < 0 or radius + 1 >= context else radius + 1


def none_from(runner: ModelRunner) -> int:
    """How long a window has to be to count as none: as long as the longest request. Where windows have a pool of their own none does, as
    its slots have other numbers whatever it holds."""
    return MAX_WINDOW if compat.has_window_pool(runner.token_to_kv_pool) else runner.model_config.context_len


def spec_of(
    layer: RadixAttention, form: KVFormat, context: int, sinks: bool = False, query_tokens: int = 1
) -> AttentionSpec:
    """What the attention of a layer is; `context` as for `window`."""
    return AttentionSpec(
        layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim, form,
        window(layer.sliding_window_size, context), sinks, query_tokens,
    )  # fmt: skip


def with_sinks(runner: ModelRunner) -> set[int]:
    """The ids of the layers beside which a module keeps sinks: in some models only those that have windows."""
    from sglang.srt.layers.radix_attention import RadixAttention

    found: set[int] = set()
    for module in compat.modules(runner):
        if any(isinstance(getattr(module, name, None), torch.nn.Parameter) for name in SINKS):
            found |= {child.layer_id for child in module.children() if isinstance(child, RadixAttention)}
    return found


def count(runner: ModelRunner) -> Counter[AttentionSpec]:
    """How many layers of each spec this process decodes, those that see everything first: encoder-only ones are none of them."""
    form, context = kept(runner), none_from(runner)
    layers = compat.attention_layers(runner)
    sinks = with_sinks(runner)
    decoding = filter(compat.decodes, layers)
    found = Counter(spec_of(layer, form, context, layer.layer_id in sinks) for layer in decoding)
    if not layers and compat.layers_with_kv(runner.token_to_kv_pool) is None:
        # Of a draft, or a test, there may be no model: layers of the pool's shape, some of which may have the runner's window.
        shape = AttentionSpec(*compat.attention_shape(runner), form)
        windowed = AttentionSpec(*compat.attention_shape(runner), form, window(runner.sliding_window_size, context))
        found.update(dict.fromkeys((shape, windowed), compat.kv_pools(runner.token_to_kv_pool)[0].layer_num))
    return Counter(dict(sorted(found.items(), key=lambda item: item[0].window)))


class LayerGroup:
    """Layers of one spec.

    Attributes:
        spec: What their attention is.
        layers: How many there are.
        executor: Runs their plans.
        scheduler: Makes them.
        planner: Says how long each is good.
    """

    def __init__(
        self, spec: AttentionSpec, layers: int, executor: Executor, max_batch: int, config: PatConfig,
        on_plan: Callable[..., None] | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            spec, layers, executor: As above.
            max_batch: Requests of the largest batch.
            config: How long plans are kept.
            on_plan: Told of every plan (`Planner`).
        """
        self.spec, self.layers, self.executor = spec, layers, executor
        self.scheduler = NativeScheduler(executor.pack_config, max_batch, executor.max_slots, executor.buffers)
        self.planner = Planner(self.scheduler, config.reuse, config.ahead, on_plan, spec.query_tokens)
        self._loaded = -1  # the number of the plan that the executor has

    def plan(
        self,
        requests: torch.Tensor,
        seq_lens: Callable[[], torch.Tensor],
        check: Callable[[list[WorkItem]], None] | None = None,
    ) -> None:
        """Load the plan for the next decode step; arguments as for `Planner.plan`."""
        self.executor.before_plan()
        plan = self.planner.plan(requests, seq_lens, check)
        if self._loaded != self.planner.made:
            self.executor.load(plan)
        self._loaded = self.planner.made

    def unload(self) -> None:
        """The next step decodes nothing."""
        self.executor.load(None)
        self._loaded = -1

    def report(self) -> dict[str, Any]:
        """`Counters.report` of these layers."""
        return self.planner.counters().report(self.executor.pack_config.cost.token_bytes * self.layers)


SUMMED = ("plans", "plans_ahead", "planning_us", "kv_bytes", "kv_bytes_unpacked")


def total(reports: list[Mapping[str, Any]]) -> dict[str, Any]:
    """One report for several groups: plans and bytes are everybody's, a step that fell back for one did, the rest is the first group's."""
    summed = {name: sum(report[name] for report in reports) for name in SUMMED}
    return {**reports[0], **summed, "fallbacks": max(report["fallbacks"] for report in reports)}
