"""What packing did since the last time, for SGLang's log and its `/metrics`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

COUNTERS = {
    "steps": "Decode steps, those beside an extend too.",
    "mixed_steps": "Extends beside which requests were decoded (`--enable-mixed-chunk`), by a plan of theirs.",
    "plans": "Plans made; the other steps reused one.",
    "plans_ahead": "Plans that were ready before their step.",
    "fallbacks": "Steps that ran one query per work item because planning failed.",
    "faults": "Times that the cache and its mirror disagreed.",
    "requests": "Requests decoded.",
    "work_items": "Packs run, pieces of cut ones counted each.",
    "parts": "Partial results merged.",
    "kv_bytes": "KV bytes read by decode attention.",
    "kv_bytes_unpacked": "KV bytes that one query per CTA would have read.",
    "extends": "Extends (prefill) that PAT ran: all on CPUs, on GPUs short ones that share.",
    "extends_shared": "Extends in which several requests read a prefix together.",
    "deferred": "Times that a request waited a step for a prefix that another one was computing.",
    "planning_us": "Microseconds of the engine's thread spent on plans.",
}
"""Counts of `/server_info`'s `pat` that `/metrics` shows as `sglang_pat:<name>_total`."""

GAUGES = {"bound": "Requests whose path in the prefix tree is followed."}
"""The same, as `sglang_pat:<name>`."""

PACKS = "Packs run with so many queries, rounded down to a power of two."


def size_class(queries: int) -> int:
    """A number of queries, rounded down to a power of two."""
    return 1 << queries.bit_length() - 1


def packs_since(new: Mapping[str, int], old: Mapping[str, int]) -> dict[int, int]:
    """Packs of each size class by which `query_sizes` grew; ascending, without those that did not."""
    classes: dict[int, int] = {}
    for size, count in new.items():
        more = count - old.get(size, 0)
        if more:
            classes[size_class(int(size))] = classes.get(size_class(int(size)), 0) + more
    return dict(sorted(classes.items()))


class Metrics:
    """Publishes counts of one scheduler process, always those since the last call."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._last_sizes: dict[str, int] = {}

    def publish(self, counts: Mapping[str, Any], labels: Mapping[str, str] | None) -> None:
        """Log a line, and add to Prometheus's metrics where `labels` are given.

        Args:
            counts: What `/server_info` shows.
            labels: Of SGLang's own metrics.
        """
        new = {name: counts[name] - self._last.get(name, 0) for name in COUNTERS}
        self._last = {name: counts[name] for name in COUNTERS}
        if labels is not None:
            self._export(new, counts, labels)
        if new["steps"]:
            logger.info("%s", line(new))

    def _export(self, new: Mapping[str, int], counts: Mapping[str, Any], labels: Mapping[str, str]) -> None:
        exported = _exported(tuple(labels))
        for name in COUNTERS:
            exported[name].labels(**labels).inc(new[name])
        for name in GAUGES:
            exported[name].labels(**labels).set(counts[name])
        for size, more in packs_since(counts["query_sizes"], self._last_sizes).items():
            exported["packs"].labels(**labels, queries=str(size)).inc(more)
        self._last_sizes = dict(counts["query_sizes"])


@functools.cache
def _exported(labels: tuple[str, ...]) -> dict[str, Any]:
    """This process's metrics, by their names in `counts`."""
    # Imported here: SGLang must have set PROMETHEUS_MULTIPROC_DIR before.
    from prometheus_client import Counter, Gauge

    exported: dict[str, Any] = {name: Counter(f"sglang_pat:{name}", text, labels) for name, text in COUNTERS.items()}
    exported |= {
        name: Gauge(f"sglang_pat:{name}", text, labels, multiprocess_mode="mostrecent") for name, text in GAUGES.items()
    }
    return exported | {"packs": Counter("sglang_pat:packs", PACKS, [*labels, "queries"])}


def line(new: Mapping[str, int]) -> str:
    """The counts of some steps, for people."""
    read, unpacked = new["kv_bytes"], new["kv_bytes_unpacked"]
    text = (
        f"PAT: {new['steps']} steps, {new['plans']} plans ({new['plans_ahead']} ahead), "
        f"{new['work_items'] / new['steps']:.0f} packs a step, KV read {read / 1e9:.2f} GB"
    )
    if read:
        text += f", {unpacked / read:.2f} times as much unpacked"
    if new["fallbacks"] or new["faults"]:
        text += f", {new['fallbacks']} fallbacks, {new['faults']} faults"
    return text
