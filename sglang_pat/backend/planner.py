"""Lazy update (PAT §5.1): when a plan may be used again, and what happens when none can be made."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import msgspec

from sglang_pat.backend.counters import Counters
from sglang_pat.kernels.layout import PlanTensors, flatten
from sglang_pat.packing import Batch, PackConfig, Plan, make_plan
from sglang_pat.radix_bridge import Mirror

logger = logging.getLogger(__name__)


class Current(msgspec.Struct):
    """The plan in use, and what it was made from."""

    rids: list[str]
    paths: list[tuple[int, int]]
    seq_lens: list[int]
    plan: Plan
    tensors: PlanTensors
    used: int = 0


class Planner:
    """Makes and reuses plans for the batches of one scheduler process.

    A plan does not depend on how long tails are, and names KV by batch position, not by row: it stays right as long
    as the same requests are in the same order and hang at the same places in the tree.
    """

    def __init__(self, mirror: Mirror, config: PackConfig, reuse: bool = True) -> None:
        self._mirror = mirror
        self._config = config
        self._reuse = reuse
        self._current: Current | None = None
        self._epoch = -1
        self._retired = Counters()
        self._failed = False

    def plan(
        self,
        rids: Sequence[str],
        seq_lens: Callable[[], list[int]],
        verify: Callable[[Plan], None] | None = None,
    ) -> PlanTensors:
        """The plan for the next decode step; it counts as a step run.

        Args:
            rids: Request ids in batch order.
            seq_lens: Gives their lengths; asked for only when a plan has to be made.
            verify: Raises where a plan contradicts the KV slots.
        """
        rids = list(rids)
        current = self._current
        if current is None or not self._may_reuse(current, rids):
            current = self._make(rids, seq_lens())
        if verify is not None and not self._accepted(verify, current):
            current = self._fall_back(rids, seq_lens())
        self._current = current
        current.used += 1
        return current.tensors

    def counters(self) -> Counters:
        """Counts up to now."""
        counters = msgspec.structs.replace(self._retired, query_sizes=self._retired.query_sizes.copy())
        if self._current is not None:
            counters.add_run(self._current.plan, self._current.seq_lens, self._current.used)
        return counters

    def _may_reuse(self, current: Current, rids: list[str]) -> bool:
        if not self._reuse or current.used >= current.plan.steps or current.rids != rids:
            return False
        if self._epoch != self._mirror.epoch:
            self._epoch = self._mirror.epoch
            return current.paths == self._mirror.paths(rids)
        return True

    def _make(self, rids: list[str], seq_lens: list[int]) -> Current:
        self._epoch = self._mirror.epoch
        try:
            paths = self._mirror.paths(rids)
            plan = make_plan(Batch(seq_lens, self._mirror.batch_tree(rids)), self._config)
        except Exception:
            self._report_failure()
            return self._fall_back(rids, seq_lens)
        self._start(rids)
        return Current(rids, paths, seq_lens, plan, flatten(plan))

    def _accepted(self, verify: Callable[[Plan], None], current: Current) -> bool:
        try:
            verify(current.plan)
        except Exception:
            self._report_failure()
            return False
        return True

    def _fall_back(self, rids: list[str], seq_lens: list[int]) -> Current:
        """One query per work item, for this step only."""
        self._start(rids)
        self._retired.fallbacks += 1
        plan = make_plan(Batch(seq_lens), msgspec.structs.replace(self._config, policy="query"))
        plan.steps = 0
        return Current(rids, [], seq_lens, plan, flatten(plan))

    def _start(self, rids: list[str]) -> None:
        """Close the account of the plan so far."""
        previous: Sequence[str] = ()
        if self._current is not None:
            previous = self._current.rids
            self._retired.add_run(self._current.plan, self._current.seq_lens, self._current.used)
            self._current = None
        self._retired.plans += 1
        self._retired.requests += len(set(rids).difference(previous))

    def _report_failure(self) -> None:
        if not self._failed:
            self._failed = True
            logger.exception("planning failed: this step runs one query per work item (reported once, then counted)")
