"""Lazy update (PAT §5.1): when a plan may be used again, when the next one is begun, and what happens without any."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from sglang_pat.backend.counters import Counters
from sglang_pat.packing import WorkItem, layout
from sglang_pat.packing.native import NativeScheduler
from sglang_pat.radix_bridge.events import Event

logger = logging.getLogger(__name__)


class Planner:
    """Hands out plans for the batches of one scheduler process.

    A plan does not depend on how long tails are, and names KV by batch position, not by row: it stays right as long
    as the same requests are in the same order and hang at the same places in the tree, and none of them leaves a window. The
    steps for which it is good end before that, so that no plan may be used for longer.
    """

    def __init__(
        self,
        scheduler: NativeScheduler,
        reuse: bool = True,
        ahead: bool = True,
        on_plan: Callable[..., None] | None = None,
        growth: int = 1,
    ) -> None:
        """
        Args:
            scheduler: Hears of every radix-tree event before `on_event` does.
            reuse: Keep a plan while it is good; otherwise plan every step.
            ahead: Let the scheduler's own thread plan the next batch as soon as it is expected.
            on_plan: Told of every plan made (`TraceWriter.on_plan`).
            growth: By how many tokens a request may grow in a step; the scheduler's steps are of one.
        """
        self._scheduler = scheduler
        self._reuse = reuse
        self._ahead = ahead
        self._on_plan = on_plan
        self._growth = growth
        self._data: Any = None
        self._requests: Any = None
        self._used = self._good = 0
        self._epoch = self._version = self._prepared = -1
        self._counts = Counters()
        self._planning_ns = 0
        self._failed = False

    def plan(
        self,
        requests: Any,
        seq_lens: Callable[[], Any],
        check: Callable[[list[WorkItem]], None] | None = None,
    ) -> Any:
        """The plan for the next decode step, one of the scheduler's buffers; it counts as a step run.

        Args:
            requests: In batch order, an int64 host array. Nobody writes to it: while it is the same object, it is the same batch.
            seq_lens: Gives their lengths, likewise; asked for only when a plan has to be made.
            check: Raises where a plan contradicts the KV slots.
        """
        if not (self._used < self._good and self._reuse and self._stands(requests)):
            began = time.perf_counter_ns()
            self._make(requests, seq_lens())
            self._planning_ns += time.perf_counter_ns() - began
        if check is not None and not self._accepted(check):
            self._fall_back(seq_lens())
        self._used += 1
        if self._ahead and self._used == self._good:
            self._begin()
        return self._data

    def on_event(self, event: Event) -> None:
        """The scheduler took an event: if the next batch will be another one, begin to plan it."""
        self._prepare()

    def _prepare(self) -> None:
        if not self._ahead or self._data is None:
            return
        version = self._scheduler.version
        if version not in (self._version, self._prepared):
            self._prepared = version
            self._begin()

    def _begin(self) -> None:
        """Begin to plan ahead; where that cannot be (a container may have no more threads), every plan is made when its step comes."""
        try:
            self._scheduler.prepare(self._used)
        except Exception:
            self._ahead = False
            logger.warning("sglang-pat plans no longer ahead, but when a step begins", exc_info=True)

    @property
    def made(self) -> int:
        """Plans handed out so far: a new number is a new plan."""
        return self._counts.plans

    def counters(self) -> Counters:
        """Counts up to now."""
        totals = msgspec.structs.asdict(self._scheduler.totals(self._used))
        return msgspec.structs.replace(self._counts, **totals, planning_us=self._planning_ns // 1000)

    def _stands(self, requests: Any) -> bool:
        scheduler = self._scheduler
        if requests is self._requests and scheduler.epoch == self._epoch:
            return True
        if not scheduler.stands(requests):
            return False
        self._requests, self._epoch = requests, scheduler.epoch
        return True

    def _make(self, requests: Any, seq_lens: Any) -> None:
        scheduler = self._scheduler
        self._requests = requests
        try:
            index, good, ahead = scheduler.take(requests, seq_lens, self._used)
            self._epoch, self._version = scheduler.epoch, scheduler.version
        except Exception:
            self._report_failure()
            self._fall_back(seq_lens)
            return
        self._counts.plans_ahead += ahead
        self._hand_out(index, good, seq_lens, ahead=ahead)

    def _accepted(self, check: Callable[[list[WorkItem]], None]) -> bool:
        try:
            check(layout.work_items(self._data.numpy()))
        except Exception:
            self._report_failure()
            return False
        return True

    def _fall_back(self, seq_lens: Any) -> None:
        """One query per work item, for this step only."""
        index = self._scheduler.fall_back(seq_lens, self._used)
        self._counts.fallbacks += 1
        self._hand_out(index, 0, seq_lens, fallback=True)

    def _hand_out(self, index: int, good: int, seq_lens: Any, ahead: bool = False, fallback: bool = False) -> None:
        self._counts.plans += 1
        if self._on_plan is not None:
            kv_tokens, parts, _ = self._scheduler.current()
            self._on_plan(
                self._requests.tolist(),
                steps=self._used,
                seq_lens=seq_lens.tolist(),
                kv_tokens=kv_tokens,
                parts=parts,
                ahead=ahead,
                fallback=fallback,
            )
        self._data, self._used, self._good = self._scheduler.buffers[index], 0, -(-good // self._growth)

    def _report_failure(self) -> None:
        if not self._failed:
            self._failed = True
            logger.exception("planning failed: this step runs one query per work item (reported once, then counted)")
