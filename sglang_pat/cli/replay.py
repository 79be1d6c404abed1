"""Replays a recorded trace with the scheduler, without SGLang."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sglang_pat.packing import Batch, PackConfig, Plan, layout
from sglang_pat.packing.native import NativeScheduler, PlanTooLargeError, TooDeepError, Totals, batch_in
from sglang_pat.packing.tree import InconsistentError
from sglang_pat.radix_bridge import trace
from sglang_pat.radix_bridge.observer import apply

MakePlan = Callable[[Batch, PackConfig], Plan]


class Replayed(msgspec.Struct):
    """The result of a replay.

    Attributes:
        config: The config, with the policy that was replayed.
        layers: As in the trace's header.
        events, plans: How many the trace has.
        fallbacks: How many plans failed or did not fit, in the server or here.
        totals: Counts over all recorded steps.
        planning_us: Time of each plan.
        differing: How many plans read or merge something else than recorded, of those with the same policy and lengths.
    """

    config: PackConfig
    layers: int
    events: int
    plans: int
    fallbacks: int
    totals: Totals
    planning_us: list[float]
    differing: int

    def summary(self) -> dict[str, Any]:
        """What `--json` prints for a policy."""
        layer = self.config.cost.token_bytes * self.layers
        times = sorted(self.planning_us) or [0.0]
        return {
            "policy": self.config.policy,
            "events": self.events,
            "plans": self.plans,
            "steps": self.totals.steps,
            "failed_plans": self.fallbacks,
            "work_items": self.totals.work_items,
            "parts": self.totals.parts,
            "kv_bytes": self.totals.kv_tokens * layer,
            "kv_bytes_unpacked": self.totals.kv_tokens_unpacked * layer,
            "less_kv_read": self.totals.kv_tokens_unpacked / self.totals.kv_tokens if self.totals.kv_tokens else None,
            "planning_us": {"median": statistics.median(times), "p99": times[len(times) * 99 // 100]},
            "not_as_recorded": self.differing,
        }

    def lines(self) -> Iterator[str]:
        """The report that the command prints."""
        found = self.summary()
        yield f"policy                   {found['policy']}"
        yield f"events                   {self.events:,}"
        yield f"plans                    {self.plans:,} for {found['steps']:,} decode steps (one for the last plan: how long it was used is not recorded), {self.fallbacks} plans that failed or did not fit"
        yield f"work items               {found['work_items']:,}"
        yield f"parts merged             {found['parts']:,}"
        yield f"KV bytes read            {found['kv_bytes'] / 1e9:,.3f} GB"
        yield f"without packing          {found['kv_bytes_unpacked'] / 1e9:,.3f} GB, {found['less_kv_read'] or 0:.2f} times as much"
        yield f"planning, here           {found['planning_us']['median']:.1f} us a plan (median), 99th percentile {found['planning_us']['p99']:.1f} us"
        if self.differing:
            yield f"not as recorded          {self.differing:,} plans: another version of sglang-pat wrote the trace"


def replay(
    path: Path, policy: str | None = None, oracle: MakePlan | None = None, truncated: bool = False, mirror: Any = None
) -> Replayed:
    """Replay a trace.

    Args:
        policy: Use this policy instead of the recorded one.
        oracle: Compare every plan with the one that this makes of the batch's tree.
        truncated: Accept a file that was cut off.
        mirror: Hears of every event, and has that tree (its `apply` and `batch`); the scheduler's own tree is taken if None.

    Raises:
        TraceError: The file is no trace, or not a whole one, or too deep for the comparison.
        AssertionError: They disagree.
    """
    try:
        return _replay(trace.read(path, truncated), policy, oracle, mirror)
    except (InconsistentError, PlanTooLargeError, ValueError) as fault:
        if isinstance(fault, trace.TraceError):
            raise
        raise trace.TraceError(f"{path} is damaged: {fault}") from None
    except TooDeepError as error:
        raise trace.TraceError(f"{path} cannot be compared (--oracle): {error}") from None


def _replay(
    records: Iterator[trace.Record], policy: str | None, oracle: MakePlan | None, mirror: Any = None
) -> Replayed:
    header = next(records)
    assert isinstance(header, trace.Header)
    config = header.config if policy is None else msgspec.structs.replace(header.config, policy=policy)
    scheduler = NativeScheduler(config, header.max_batch)
    result = Replayed(config, header.layers, 0, 0, 0, Totals(), [], 0)
    batch: list[int] = []
    for record in records:
        if isinstance(record, trace.Header):
            continue
        if not isinstance(record, trace.PlanMade):
            result.events += 1
            trace.repeat(functools.partial(apply, scheduler), record)
            if mirror is not None:
                trace.repeat(mirror.apply, record)
            continue
        batch = trace.apply_difference(batch, record)
        lengths = np.array(record.seq_lens, dtype=np.int64)
        result.plans += 1
        requests = np.array(batch, dtype=np.int64)
        began = time.perf_counter()
        try:
            index, _, _ = scheduler.take(requests, lengths, record.steps, record.aside)
            fitted = scheduler.levels is None
        except PlanTooLargeError:
            # As in serving: one query per work item.
            fitted = False
            scheduler.fall_back(lengths, record.steps, stands=not record.aside)
        result.planning_us.append((time.perf_counter() - began) * 1e6)
        result.fallbacks += record.fallback or not fitted
        if oracle and fitted:
            tree = mirror.batch(batch, record.seq_lens) if mirror else batch_in(scheduler, batch, record.seq_lens)
            expected = layout.flatten(oracle(tree, config))
            if scheduler.buffers[index][: len(expected)].tolist() != expected.tolist():
                raise AssertionError(f"plan {result.plans} is not the one that is made of the batch's tree")
        if fitted and not (record.ahead or record.fallback) and config == header.config:
            result.differing += scheduler.current()[:2] != (record.kv_tokens, record.parts)
    # The trace does not say how many steps the last plan ran: assume one.
    result.totals = scheduler.totals(1)
    return result
