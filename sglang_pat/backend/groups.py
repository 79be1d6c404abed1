"""Groups of layers: layers of one spec share an executor and a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from sglang_pat import compat
from sglang_pat.backend import executors
from sglang_pat.backend.errors import UnsupportedError, unsupported
from sglang_pat.backend.executors import Executor
from sglang_pat.backend.planner import Planner
from sglang_pat.backend.start.layers import SpecReader
from sglang_pat.config import PatConfig
from sglang_pat.packing import AttentionSpec, WorkItem, devices
from sglang_pat.packing.native import NativeScheduler

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.model_runner import ModelRunner


class LayerGroup:
    """Layers of one spec."""

    def __init__(
        self,
        spec: AttentionSpec,
        layers: int,
        executor: Executor,
        max_batch: int,
        config: PatConfig,
        steps_elsewhere: bool,
    ) -> None:
        """
        Args:
            max_batch: Requests of the largest batch.
            config: How long plans are kept.
            steps_elsewhere: Whether requests gain tokens in steps that another backend runs, or that have plans of other groups.
        """
        self.spec, self.layers, self.executor = spec, layers, executor
        with devices.used(executor.table):
            self.scheduler = NativeScheduler(executor.pack_config, max_batch, executor.max_slots, executor.buffers)
        watch = steps_elsewhere and (spec.planned_window > 0 or executor.pack_config.piece > 0)
        self.planner = Planner(self.scheduler, config.reuse, config.ahead, growth=spec.query_tokens, watch=watch)
        self._loaded = -1  # the number of the plan that the executor has

    def plan(
        self,
        requests: torch.Tensor,
        seq_lens: Callable[[], torch.Tensor],
        check: Callable[[list[WorkItem]], None] | None = None,
        aside: bool = False,
    ) -> None:
        """Load the plan for the next decode step; arguments as for `Planner.plan`."""
        self.executor.before_plan()
        plan = self.planner.plan(requests, seq_lens, check, aside)
        if self._loaded != self.planner.made:
            self.executor.load(plan)
        self._loaded = self.planner.made

    def unload(self) -> None:
        """Make the next step decode nothing."""
        self.executor.load(None)
        self._loaded = -1

    def report(self) -> dict[str, Any]:
        """`Counters.report` of these layers."""
        return self.planner.counters().report(self.executor.pack_config.cost.token_bytes * self.layers)


def make_groups(
    runner: ModelRunner,
    config: PatConfig,
    specs: Mapping[AttentionSpec, int],
    extends: bool = False,
    piece: int = 0,
) -> list[LayerGroup]:
    """A group for each spec."""
    made = executors.create(runner, config, specs, extends, piece)
    steps_elsewhere = compat.arguments.mixes_steps_elsewhere(runner.server_args)
    return [
        LayerGroup(spec, layers, executor, runner.req_to_token_pool.size, config, steps_elsewhere)
        for (spec, layers), executor in zip(specs.items(), made, strict=True)
    ]


class LayerGroups:
    """All groups of a model.

    Attributes:
        draft_tokens: Tokens of each request that a step verifies; 0 without speculation.
        steps: Groups that run decode steps; with speculation, verify steps.
        single: Groups whose queries are single tokens: for extends and dry runs. Without speculation, the same as `steps`.
        extends: Whether `single` runs extends.
    """

    def __init__(
        self, runner: ModelRunner, config: PatConfig, specs: Mapping[AttentionSpec, int], extends: bool
    ) -> None:
        self.extends = extends
        self.draft_tokens = tokens = compat.arguments.draft_tokens(runner.server_args)
        drafts = {msgspec.structs.replace(spec, query_tokens=tokens): count for spec, count in specs.items() if tokens}
        deterministic = compat.arguments.is_deterministic(runner.server_args)
        # Of all: a request's attention has to have the same bits in any batch.
        piece = executors.piece_of(runner, drafts or specs) if deterministic else 0
        self.single = make_groups(runner, config, specs, extends, piece)
        self.steps = make_groups(runner, config, drafts, piece=piece) if drafts else self.single
        executors.share_workspace(group.executor for group in self.everyone)
        self._reader = SpecReader(runner)
        self._found: dict[tuple[int, int], LayerGroup] = {}  # by layer id and tokens of a query

    @property
    def everyone(self) -> list[LayerGroup]:
        """Every group once."""
        return [*self.steps, *(self.single if self.draft_tokens else [])]

    def of(
        self, layer: RadixAttention, groups: list[LayerGroup], sinks: torch.Tensor | None = None, **others: Any
    ) -> LayerGroup:
        """The layer's group.

        Args:
            groups: `steps` or `single`.
            sinks: What the model passes as attention sinks.
            others: Whatever else it passes; only None is known.

        Raises:
            UnsupportedError: The model asks for something that the group does not compute.
        """
        unknown = [name for name, value in others.items() if value is not None]
        if unknown:
            raise unsupported(f"'{unknown[0]}' in attention layers", "use another --decode-attention-backend")
        group = self._find(layer, groups)
        if (sinks is not None) != group.spec.sinks:
            raise UnsupportedError(
                f"layer {layer.layer_id} has {'' if group.spec.sinks else 'no '}attention sinks by its parameters, but the model's code "
                "disagrees: use another --decode-attention-backend"
            )
        return group

    def _find(self, layer: RadixAttention, groups: list[LayerGroup]) -> LayerGroup:
        key = layer.layer_id, groups[0].spec.query_tokens
        if key not in self._found:
            spec = self._reader.spec(layer, key[1])
            found = [group for group in groups if group.spec == spec]
            if not found:
                raise UnsupportedError(f"layer {layer.layer_id} has attention that no layer had at start: {spec}")
            self._found[key] = found[0]
        return self._found[key]

    def report(self) -> dict[str, Any]:
        """Counts of all steps (docs/settings.md). Beside drafts, steps of single tokens count if they were not packed as planned."""
        found = total([group.report() for group in self.steps])
        if self.draft_tokens:
            single = total([group.report() for group in self.single])
            for name in WORST:
                found[name] += single[name]
        return found


BY_QUERIES = "kv_bytes_by_queries"
WORST = ("fallbacks", "too_large")
COMBINED: dict[str, Callable[[Iterable[int]], int]] = {
    **dict.fromkeys(("plans", "plans_ahead", "planning_us", "kv_bytes", "kv_bytes_unpacked"), sum),
    **dict.fromkeys(WORST, max),
    **dict.fromkeys(("unshared", "unpaid"), min),
}
"""How a counter of several groups becomes one."""


def total(reports: list[Mapping[str, Any]]) -> dict[str, Any]:
    """One report for several groups.

    Plans and bytes are added up. A step counts as one fallback, however many groups fell back, and likewise if plans were too large. It
    packed nothing if none did. Everything else is the first group's.
    """
    combined = {name: combine(report[name] for report in reports) for name, combine in COMBINED.items()}
    by_queries: Counter[str] = Counter()
    for report in reports:
        by_queries.update(report[BY_QUERIES])
    return {**reports[0], **combined, BY_QUERIES: dict(sorted(by_queries.items(), key=lambda item: int(item[0])))}
