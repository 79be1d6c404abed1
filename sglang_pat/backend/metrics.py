"""Publishes the counters in SGLang's log and its `/metrics`."""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

COUNTERS = {
    "steps": "Decode steps, including those within mixed steps.",
    "mixed_steps": "Steps that decoded requests by plan and prefilled others (`--enable-mixed-chunk`), or extended some by one token.",
    "plans": "Plans made; the other steps reused one.",
    "plans_ahead": "Plans that were ready before their step.",
    "fallbacks": "Steps that ran one query per work item: their plan failed, or failed `SGLANG_PAT_VERIFY`.",
    "too_large": "Steps whose plan did not fit its memory: they packed fewer levels of the tree, or nothing. Prompts of many levels do that.",
    "unshared": "Steps that packed nothing, as no requests shared KV that they see; by the kind of layer that counts the fewest.",
    "unpaid": "Steps that packed nothing, as packing what was shared would have cost more; likewise.",
    "faults": "How often the cache and its mirror disagreed.",
    "requests": "Requests decoded.",
    "work_items": "Work items run: packs, or pieces of packs that were cut.",
    "parts": "Partial results merged.",
    "kv_bytes": "KV bytes read by decode attention. Within a plan, requests are counted as if they gained one token a step; with drafts they gain more.",
    "kv_bytes_unpacked": "KV bytes that would have been read without packing, by each request for itself; counted likewise.",
    "extends": "Extends (prefill) that PAT ran: on CPUs all, on GPUs short ones that share a prefix.",
    "extends_shared": "Extends in which several requests read a prefix together.",
    "deferred": "How often a request waited a step for a prefix that another one was computing.",
    "planning_us": "Microseconds that the scheduler process spent on plans.",
}
"""Counters in `/server_info`'s `pat` that `/metrics` shows as `sglang_pat:<name>_total`."""

GAUGES = {"bound": "Requests that are followed, whether or not they share anything."}
"""Gauges that `/metrics` shows as `sglang_pat:<name>`."""

BY_QUERIES = {
    "query_sizes": ("work_items_by_queries", "Work items by their number of queries, those counted too of which they have some rows only; in `/metrics` the number is rounded down to a power of two."),
    "kv_bytes_by_queries": ("kv_bytes_by_queries", "KV bytes read, by how many queries share the read; likewise."),
}  # fmt: skip
"""Counts in `/server_info` by a number of queries, and what `/metrics` shows as `sglang_pat:<name>_total{queries=…}`."""


def new_by_size(new: Mapping[str, int], old: Mapping[str, int]) -> dict[int, int]:
    """How much was added to counts by numbers of queries, these rounded down to powers of two, ascending; those without anything new are left out."""
    classes: collections.Counter[int] = collections.Counter()
    for size, count in new.items():
        more = count - old.get(size, 0)
        if more:
            classes[1 << int(size).bit_length() - 1] += more
    return dict(sorted(classes.items()))


class Metrics:
    """Publishes the counters of one scheduler process: at each call, what was added since the last one."""

    def __init__(self) -> None:
        self._logged: dict[str, int] = {}
        self._exported: dict[str, int] = {}
        self._exported_sizes: dict[str, dict[str, int]] = {name: {} for name in BY_QUERIES}

    def log(self, counts: Mapping[str, Any]) -> None:
        """Log a line, if there were steps."""
        new = _new(counts, self._logged)
        self._logged = {name: counts[name] for name in COUNTERS}
        if new["steps"]:
            logger.info("%s", line(new))

    def export(self, counts: Mapping[str, Any], labels: Mapping[str, str]) -> None:
        """Export to Prometheus."""
        exported, new = _exported(tuple(labels)), _new(counts, self._exported)
        self._exported = {name: counts[name] for name in COUNTERS}
        for name in COUNTERS:
            exported[name].labels(**labels).inc(new[name])
        for name in GAUGES:
            exported[name].labels(**labels).set(counts[name])
        for name in BY_QUERIES:
            for size, more in new_by_size(counts[name], self._exported_sizes[name]).items():
                exported[name].labels(**labels, queries=str(size)).inc(more)
            self._exported_sizes[name] = dict(counts[name])


def _new(counts: Mapping[str, Any], last: Mapping[str, int]) -> dict[str, int]:
    return {name: counts[name] - last.get(name, 0) for name in COUNTERS}


@functools.cache
def _exported(labels: tuple[str, ...]) -> dict[str, Any]:
    """This process's Prometheus metrics, by the names of the counters."""
    # Imported here: SGLang must have set PROMETHEUS_MULTIPROC_DIR before.
    from prometheus_client import Counter, Gauge

    exported: dict[str, Any] = {name: Counter(f"sglang_pat:{name}", text, labels) for name, text in COUNTERS.items()}
    exported |= {
        name: Gauge(f"sglang_pat:{name}", text, labels, multiprocess_mode="mostrecent") for name, text in GAUGES.items()
    }
    by_queries = {
        name: Counter(f"sglang_pat:{shown}", text, [*labels, "queries"]) for name, (shown, text) in BY_QUERIES.items()
    }
    return exported | by_queries


def line(new: Mapping[str, int]) -> str:
    """The log line for some steps."""
    read, unpacked = new["kv_bytes"], new["kv_bytes_unpacked"]
    text = (
        f"PAT: {new['steps']} steps, {new['plans']} plans ({new['plans_ahead']} ahead), "
        f"{new['work_items'] / new['steps']:.0f} work items a step, KV read {read / 1e9:.2f} GB"
    )
    if read:
        text += f", {unpacked / read:.2f} times as much unpacked"
    if new["fallbacks"] or new["faults"]:
        text += f", {new['fallbacks']} fallbacks, {new['faults']} faults"
    if new["too_large"]:
        text += f", {new['too_large']} plans too large"
    return text
