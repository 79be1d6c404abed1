"""Lazy update (PAT §5.1): when a plan may be used again, when the next one is started, and what happens if planning fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from sglang_pat.packing import WorkItem, layout
from sglang_pat.packing.constants import LEAST_STEPS
from sglang_pat.packing.native import NativeScheduler, PlanTooLargeError, Totals

logger = logging.getLogger(__name__)

CAUTION = 0.8
"""With drafts, a plan is made ahead for requests that gain in a step so much of what the slowest of them gained before. It is not used if one gains
less, nor if they gain much more."""


class Counters(Totals):
    """Counters of one scheduler process: those of `Totals`, and these (`metrics.COUNTERS` says what they count)."""

    plans: int = 0
    plans_ahead: int = 0
    fallbacks: int = 0
    too_large: int = 0
    planning_us: int = 0

    def report(self, layer_token_bytes: int) -> dict[str, Any]:
        """For `/server_info`: the counters, and bytes of KV, of which one token takes `layer_token_bytes`."""
        counts = msgspec.structs.asdict(self)
        del counts["kv_by_queries"]
        return {
            **counts,
            "query_sizes": {str(size): count for size, count in sorted(self.query_sizes.items())},
            "kv_bytes_by_queries": {
                str(size): tokens * layer_token_bytes for size, tokens in sorted(self.kv_by_queries.items())
            },
            "kv_bytes": self.kv_tokens * layer_token_bytes,
            "kv_bytes_unpacked": self.kv_tokens_unpacked * layer_token_bytes,
        }


class Planner:
    """Hands out plans for the batches of one scheduler process.

    A plan does not depend on how long tails are, and names requests by batch position, not by row. So it stays valid as long as the
    batch has the same requests in the same order, their paths in the tree stay the same, and none of them outgrows a window. Each plan
    says for how many steps it is good; that ends before any request outgrows its window.

    Attributes:
        on_plan: Called with every plan made (`TraceWriter.on_plan`); None for nobody.
    """

    def __init__(
        self,
        scheduler: NativeScheduler,
        reuse: bool = True,
        ahead: bool = True,
        growth: int = 1,
        watch: bool = False,
    ) -> None:
        """
        Args:
            scheduler: Hears of every radix-tree event before `on_change` is called.
            reuse: Keep a plan while it is good; otherwise plan every step.
            ahead: Let the scheduler's own thread plan the next batch as soon as it is known.
            growth: How many tokens a request may gain in a step: with drafts several. The scheduler counts steps of one token.
            watch: Requests may gain tokens in steps that are not planned here, and have windows or are cut in pieces, which they then outgrow earlier
                than the steps say: look at all lengths before a plan is used again.
        """
        self._scheduler = scheduler
        self._reuse = reuse
        self._ahead = ahead
        self.on_plan: Callable[..., None] | None = None
        self._growth = growth
        self._watch = watch
        self._lengths: Any = None  # when the plan was made, where they are watched
        self._data: Any = None
        self._requests: Any = None
        self._used = self._good = 0
        self._epoch = self._version = self._prepared = -1
        self._counts = Counters()
        self._planning_ns = 0
        self._failed = self._fell_back = self._too_large = False
        self._decodes = False  # whether a batch was planned that decodes
        self._since_told = 0  # steps of the next batch since the scheduler was told its lengths
        self._gain = 1.0  # tokens that each of its requests surely gains in a step
        self._beside = False  # whether this step is not one of that batch

    def plan(
        self,
        requests: Any,
        seq_lens: Callable[[], Any],
        check: Callable[[list[WorkItem]], None] | None = None,
        aside: bool = False,
    ) -> Any:
        """The plan for the next decode step, one of the scheduler's buffers; it counts as a step run.

        Args:
            requests: In batch order, an int64 host array. Do not write to it: the same object means the same batch.
            seq_lens: Returns their lengths, likewise; called only when a plan has to be made, or with `watch`.
            check: Raises if a plan contradicts the KV slots.
            aside: These are not the requests that decode: they have one token of their prompts left. The next batch stays what it was.
        """
        keeps = self._used < self._good and self._reuse and self._stands(requests)
        if not keeps or (self._watch and self._gained(seq_lens()) > self._used * self._growth):
            began = time.perf_counter_ns()
            self._make(requests, seq_lens(), aside)
            self._planning_ns += time.perf_counter_ns() - began
        if check is not None and not self._accepted(check):
            self._fall_back(seq_lens(), stands=False)
        self._used += 1
        self._since_told += not self._beside
        if self._too_large:
            if not self._counts.too_large:
                logger.warning("a plan did not fit its memory: such steps pack less (reported once, then counted)")
            self._counts.too_large += 1
        elif self._fell_back:
            self._counts.fallbacks += 1
        self._decodes |= not aside
        if self._ahead and self._used == self._good:
            self._begin()
        return self._data

    def on_change(self) -> None:
        """The scheduler took events: if they change the next batch, start to plan it."""
        if not self._ahead or not self._decodes:
            return
        version = self._scheduler.version
        if version not in (self._version, self._prepared):
            self._prepared = version
            self._begin()

    def _begin(self) -> None:
        """Start to plan ahead. If no thread can be started (containers limit them), make every plan when its step comes."""
        try:
            self._scheduler.prepare(int(self._since_told * self._gain), LEAST_STEPS * self._growth)
        except Exception:
            self._ahead = False
            logger.warning("sglang-pat no longer plans ahead: each plan is made when its step begins", exc_info=True)

    @property
    def made(self) -> int:
        """Plans handed out so far; a new number means a new plan."""
        return self._counts.plans

    @property
    def used(self) -> int:
        """Steps that the newest plan has run."""
        return self._used

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

    def _gained(self, seq_lens: Any) -> int:
        """The most tokens that a request has gained since the plan was made for this very batch."""
        return int((seq_lens - self._lengths).max()) if len(seq_lens) else 0

    def _make(self, requests: Any, seq_lens: Any, aside: bool) -> None:
        scheduler = self._scheduler
        self._requests, self._beside, self._too_large = requests, aside, False
        try:
            index, good, ahead = scheduler.take(requests, seq_lens, self._used, aside)
            self._epoch, self._version = scheduler.epoch, scheduler.version
        except Exception as failure:
            self._too_large = isinstance(failure, PlanTooLargeError)
            if not self._too_large:
                self._report_failure()
            # What is too large will be so in the next step too. Its lengths are told by then.
            stands = self._too_large and not aside
            if stands:
                self._since_told = 0
            self._fall_back(seq_lens, stands)
            return
        self._beside = aside and good == 0
        if not self._beside:
            if self._growth > 1 and scheduler.gained and self._since_told:
                self._gain = max(1.0, CAUTION * scheduler.gained / self._since_told)
            self._since_told = 0
        self._counts.plans_ahead += ahead
        self._too_large = scheduler.levels is not None
        self._hand_out(index, good, seq_lens, ahead=ahead)

    def _accepted(self, check: Callable[[list[WorkItem]], None]) -> bool:
        try:
            check(layout.work_items(self._data.numpy()))
        except Exception:
            self._too_large = False
            self._report_failure()
            return False
        return True

    def _fall_back(self, seq_lens: Any, stands: bool) -> None:
        """Hand out a plan of one query per work item: for this step only, unless it `stands`."""
        index, good = self._scheduler.fall_back(seq_lens, self._used, stands)
        self._epoch, self._version = self._scheduler.epoch, self._scheduler.version
        self._hand_out(index, good, seq_lens, fallback=True)

    def _hand_out(self, index: int, good: int, seq_lens: Any, ahead: bool = False, fallback: bool = False) -> None:
        self._counts.plans += 1
        if self.on_plan is not None:
            kv_tokens, parts, _ = self._scheduler.current()
            self.on_plan(
                self._requests.tolist(),
                steps=self._used,
                seq_lens=seq_lens.tolist(),
                kv_tokens=kv_tokens,
                parts=parts,
                ahead=ahead,
                fallback=fallback or self._too_large,
                aside=self._beside,
            )
        self._data, self._used, self._good = self._scheduler.buffers[index], 0, -(-good // self._growth)
        self._fell_back = fallback
        if self._watch:
            self._lengths = seq_lens

    def _report_failure(self) -> None:
        if not self._failed:
            self._failed = True
            logger.exception("planning failed: such steps run one query per work item (reported once, then counted)")
