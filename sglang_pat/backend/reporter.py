"""What a server tells of itself: in `/server_info`, in SGLang's log and in its `/metrics`."""

from __future__ import annotations

from typing import Any

from sglang_pat.backend.extends.low_bit_prefill import LowBitPrefill
from sglang_pat.backend.extends.prefill import Prefill
from sglang_pat.backend.groups import LayerGroups
from sglang_pat.backend.metrics import Metrics
from sglang_pat.radix_bridge import Observer, hooks
from sglang_pat.radix_bridge.trace import TraceWriter


class Reporter:
    """The counters of a backend with these groups, observer, prefill and trace (`PatAttnBackend`)."""

    def __init__(
        self,
        groups: LayerGroups,
        observer: Observer,
        prefill: Prefill | LowBitPrefill | None,
        writer: TraceWriter | None,
    ) -> None:
        self._groups, self._observer, self._prefill, self._writer = groups, observer, prefill, writer
        self._metrics = Metrics()
        self._exported_at: tuple[int, ...] = ()  # what had happened when the counters were last exported

    def counters(self) -> dict[str, Any]:
        """What `/server_info` shows (docs/settings.md)."""
        prefill, observer = self._prefill, self._observer
        extend = prefill.extend if prefill else None
        return {
            **self._groups.report(),
            "mixed_steps": prefill.mixed_steps if prefill else 0,
            "extends": extend.count if extend else 0,
            "extends_shared": extend.shared if extend else 0,
            "deferred": hooks.deferred(),
            "nodes": observer.nodes,
            "faults": observer.faults,
            "bound": len(observer.scheduler),
            "trace": self._writer.recording if self._writer else "",
            "unpacked_because": observer.unpacked_because,
        }

    def publish(self, labels: dict[str, str] | None) -> None:
        """Log the counters, and export them if there are labels."""
        counts = self.counters()
        self._metrics.log(counts)
        if labels is not None:
            self._export(counts, labels)

    def rest(self, labels: dict[str, str]) -> None:
        """Export the counters, if something has happened since they were last exported."""
        if self._exported_at != self._happened():
            self._export(self.counters(), labels)

    def _export(self, counts: dict[str, Any], labels: dict[str, str]) -> None:
        self._metrics.export(counts, labels)
        self._exported_at = self._happened()

    def _happened(self) -> tuple[int, ...]:
        """Numbers of which one changes with every step, and when requests come and go. An idle server asks for them all the time."""
        prefill, observer = self._prefill, self._observer
        extends = (prefill.mixed_steps, prefill.extend.count if prefill.extend else 0) if prefill else ()
        steps = (number for group in self._groups.everyone for number in (group.planner.made, group.planner.used))
        return (len(observer.scheduler), observer.nodes, observer.faults, hooks.deferred(), *extends, *steps)
