"""The layout of a plan: one int32 array that kernels read. csrc/packing/write_plan.h writes it, by the names in csrc/packing/layout.h.

The array is the header (`HEADER`), then the sections without gaps, so that one copy moves a plan:

- bins [num_bins + 1]: items bins[i] up to bins[i + 1] are run by one worker.
- items [num_items, len(COLUMNS)], bin after bin. `start` and `end` are bounds (`plan.position`). `query` and `slot` repeat the item's first
  query, because most items have one query only: the kernel then needs no second lookup. `tails` is 1 if each query's tail follows (`plan.WorkItem`), else 0.
  Above the lowest FIRST_ROW_SHIFT bits of `tile_m` is the first query's first row that the item computes; it goes on to the last row of the last query, or of the tile.
- queries [num_queries]: the batch positions of all items' queries; `first_query` of an item indexes them.
- slots [num_queries]: where the part of each of these queries goes: a slot of the workspace, or -1 for a query with a single part, which is
  written directly to the output, unless requests are cut into pieces (`PackConfig.piece`).
- part_offsets [batch + 1]: the parts of query q are the slots part_offsets[q] up to part_offsets[q + 1].
  Where queries may straddle items (`PackConfig.straddled_rows`), [num_slots] follow: of each part the first of its query's rows that it has, and
  above PART_END_SHIFT bits the end of these; ALL_ROWS for all rows.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np

from sglang_pat.packing import PackConfig, Plan, WorkItem

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
    "narrow_first",
)
"""Counts; the offset of each section; how many ints are used; how many steps the plan is good for; `Plan.narrow_first`."""

COLUMNS = ("start", "end", "first_query", "item_queries", "tile_m", "query", "slot", "tails")

DIRECT = -1
"""The slot of a query with a single part, which is written directly to the output."""

FIRST_ROW_SHIFT, PART_END_SHIFT = 8, 16
"""No tile of a GPU has 256 rows; no query has 65,536."""

ALL_ROWS = 0x7FFF << PART_END_SHIFT


class Sections(msgspec.Struct):
    """A plan's header and views of its sections; `part_rows` is empty where no query may straddle items."""

    header: dict[str, int]
    bins: np.ndarray
    items: np.ndarray
    queries: np.ndarray
    slots: np.ndarray
    part_offsets: np.ndarray
    part_rows: np.ndarray


def capacity(config: PackConfig, max_batch: int, context: int = 0) -> int:
    """How many ints hold any sensible plan of `max_batch` requests; with `PackConfig.piece`, any plan of requests of up to `context` tokens.

    A compact tree has fewer prefixes than requests, so there are at most two packs per request, plus those from splits by the query limit and
    cuts at the ends of bins. 16 parts per query are more than ten levels of prefixes ever made. Of a batch whose plan does not fit fewer
    levels are packed (`constants.LEVELS`). With pieces a request has as many parts as pieces, whatever is shared, and each may be a work item.
    """
    bins = config.max_bins
    items, queries = 3 * max_batch + 2 * bins, 16 * max_batch + bins * config.max_queries
    if config.piece:
        items = queries = max_batch * -(-context // config.piece)
    lists = 3 if config.straddled_rows else 2
    return len(HEADER) + items * len(COLUMNS) + lists * queries + max_batch + bins + 2


def flatten(plan: Plan, merge_all: bool = False) -> np.ndarray:
    """The array of a plan. `merge_all`: a query with a single part goes through the workspace too, as with `PackConfig.piece`."""
    least = 0 if merge_all else 1
    offsets = [0]
    for count in plan.num_parts:
        offsets.append(offsets[-1] + (count if count > least else 0))
    items: list[int] = []
    queries: list[int] = []
    slots: list[int] = []
    rows = [ALL_ROWS] * (offsets[-1] if plan.straddles else 0)
    for item in plan.items:
        targets = [
            offsets[query] + part if plan.num_parts[query] > least else DIRECT
            for query, part in zip(item.queries, item.parts, strict=True)
        ]
        items += [
            item.start, item.end, len(queries), len(item.queries),
            item.m | (item.rows[0][0] << FIRST_ROW_SHIFT if item.rows else 0), item.queries[0], targets[0],
            int(item.tails),
        ]  # fmt: skip
        for target, (first, end) in zip(targets, item.rows, strict=False):
            rows[target] = first | end << PART_END_SHIFT
        queries += item.queries
        slots += targets
    counts = [len(plan.items), len(queries), offsets[-1], len(plan.bins) - 1, len(plan.num_parts)]
    lists = [plan.bins, items, queries, slots, offsets + rows]
    begins = np.cumsum([len(HEADER), *map(len, lists)]).tolist()
    body = [value for values in lists for value in values]
    return np.array([*counts, *begins, plan.steps, int(plan.narrow_first), *body], dtype=np.int32)


def num_slots(data: np.ndarray) -> int:
    """How many slots of the workspace a plan needs."""
    return int(data[HEADER.index("num_slots")])


def sections(data: np.ndarray) -> Sections:
    """Views of a plan's sections."""
    header = dict(zip(HEADER, data[: len(HEADER)].tolist(), strict=True))
    names = [*HEADER[5:10], "size"]
    views = [data[header[first] : header[second]] for first, second in pairwise(names)]
    offsets, rows = np.split(views[4], [header["batch"] + 1])
    return Sections(header, views[0], views[1].reshape(-1, len(COLUMNS)), views[2], views[3], offsets, rows)


def read(data: np.ndarray, kv_tokens: int) -> Plan:
    """The `Plan` in an array; `kv_tokens` is what its first step reads."""
    plan = sections(data)
    parts = [max(1, last - first) for first, last in pairwise(plan.part_offsets.tolist())]
    return Plan(
        work_items(data),
        plan.bins.tolist(),
        parts,
        plan.header["steps"],
        kv_tokens,
        bool(plan.header["narrow_first"]),
        len(plan.part_rows) > 0,
    )


def work_items(data: np.ndarray) -> list[WorkItem]:
    """The work items in an array."""
    plan = sections(data)
    items = []
    for start, end, first, count, tile, _, _, tails in plan.items.tolist():
        queries = plan.queries[first : first + count].tolist()
        slots = plan.slots[first : first + count].tolist()
        parts = [slot - int(plan.part_offsets[q]) if slot >= 0 else 0 for q, slot in zip(queries, slots, strict=True)]
        found = plan.part_rows[slots].tolist() if len(plan.part_rows) and slots[0] >= 0 else []
        rows = [(one % (1 << PART_END_SHIFT), one >> PART_END_SHIFT) for one in found if one != ALL_ROWS]
        items.append(WorkItem(start, end, queries, parts, tile % (1 << FIRST_ROW_SHIFT), bool(tails), rows))
    return items
