"""A plan as the one int32 array that kernels read; csrc/packing/write_plan.h writes the same, with the names of csrc/packing/layout.h.

The array is the header, `HEADER`, and then the sections without gaps, so that one copy moves a plan:

- bins [num_bins + 1]: items bins[i] up to bins[i + 1] are for one worker.
- items [num_items, len(COLUMNS)], bin after bin. `start` and `end` are bounds as of `plan.position`; `query` and `slot` are those of
  its first query, which most items have only: a kernel then finds them without another look.
- queries [num_queries]: batch positions of all items' queries, one after the other; `first_query` indexes them.
- slots [num_queries]: for each of them where its part goes: a slot of the workspace, or -1 for a query with one part,
  which is written straight to the output.
- part_offsets [batch + 1]: query q's parts are slots part_offsets[q] up to part_offsets[q + 1].
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np

from sglang_pat.packing import OPEN, PackConfig, Plan, Tile, WorkItem

HEADER = (
    "num_items",
    "num_queries",
    "num_slots",
    "num_bins",
    "batch",
    "bins",
    "items",
    "queries",
    "slots",
    "part_offsets",
    "size",
    "steps",
)
"""Counts, then where the sections begin, then the ints in use and the steps for which the plan stays good."""

COLUMNS = ("start", "end", "first_query", "item_queries", "tile_m", "tile_n", "query", "slot")

DIRECT = -1
"""Slot of a query with one part, which is written straight to the output."""


class Sections(msgspec.Struct):
    """A plan's header and views of its sections."""

    header: dict[str, int]
    bins: np.ndarray
    items: np.ndarray
    queries: np.ndarray
    slots: np.ndarray
    part_offsets: np.ndarray


def capacity(config: PackConfig, max_batch: int) -> int:
    """Ints that hold any sensible plan of `max_batch` requests.

    A compact tree has fewer prefixes than requests, so packs are at most two per request; splits by the query limit and
    cuts at the ends of bins add to them; 16 parts per query are more than ten levels of prefixes ever made. What does
    not fit is decoded unpacked.
    """
    bins = config.max_bins
    items, queries = 3 * max_batch + 2 * bins, 16 * max_batch + bins * config.max_queries
    return len(HEADER) + items * len(COLUMNS) + 2 * queries + max_batch + bins + 2


def flatten(plan: Plan) -> np.ndarray:
    """Lay out `plan`."""
    offsets = [0]
    for count in plan.num_parts:
        offsets.append(offsets[-1] + (count if count > 1 else 0))
    items: list[int] = []
    queries: list[int] = []
    slots: list[int] = []
    for item in plan.items:
        targets = [
            offsets[query] + part if plan.num_parts[query] > 1 else DIRECT
            for query, part in zip(item.queries, item.parts, strict=True)
        ]
        items += [
            item.start, item.end, len(queries), len(item.queries), item.tile.m, item.tile.n, item.queries[0], targets[0]
        ]  # fmt: skip
        queries += item.queries
        slots += targets
    counts = [len(plan.items), len(queries), offsets[-1], len(plan.bins) - 1, len(plan.num_parts)]
    lists = [plan.bins, items, queries, slots, offsets]
    begins = np.cumsum([len(HEADER), *map(len, lists)]).tolist()
    body = [value for values in lists for value in values]
    return np.array([*counts, *begins, plan.steps, *body], dtype=np.int32)


def num_slots(data: np.ndarray) -> int:
    """Slots of the workspace that a laid out plan needs."""
    return int(data[HEADER.index("num_slots")])


def size(data: np.ndarray) -> int:
    """Ints of a laid out plan that are in use."""
    return int(data[HEADER.index("size")])


def sections(data: np.ndarray) -> Sections:
    """Views of a laid out plan."""
    header = dict(zip(HEADER, data[: len(HEADER)].tolist(), strict=True))
    names = [*HEADER[5:10], "size"]
    views = [data[header[first] : header[second]] for first, second in pairwise(names)]
    return Sections(header, views[0], views[1].reshape(-1, len(COLUMNS)), *views[2:])


def read(data: np.ndarray, kv_tokens: int) -> Plan:
    """A laid out plan, which reads `kv_tokens` tokens in its first step."""
    plan = sections(data)
    parts = [max(1, last - first) for first, last in pairwise(plan.part_offsets.tolist())]
    items = work_items(data)
    # A tail whose span begins at a position grows; a window moves.
    open_items = sum(item.start >= 0 and item.end == OPEN for item in items)
    return Plan(items, plan.bins.tolist(), parts, plan.header["steps"], kv_tokens, open_items)


def work_items(data: np.ndarray) -> list[WorkItem]:
    """The work items of a laid out plan."""
    plan = sections(data)
    items = []
    for start, end, first, count, m, n, _, _ in plan.items.tolist():
        queries = plan.queries[first : first + count].tolist()
        slots = plan.slots[first : first + count].tolist()
        parts = [slot - int(plan.part_offsets[q]) if slot >= 0 else 0 for q, slot in zip(queries, slots, strict=True)]
        items.append(WorkItem(start, end, queries, parts, Tile(m, n)))
    return items
