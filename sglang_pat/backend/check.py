"""`SGLANG_PAT_VERIFY`: checks a plan against the slots in `req_to_token`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch

from sglang_pat.packing import WorkItem


def check_plan(
    req_to_token: torch.Tensor,
    items: list[WorkItem],
    rows: torch.Tensor,
    seq_lens: Callable[[], torch.Tensor],
    window: int,
    hides: bool = False,
) -> None:
    """Raise AssertionError unless each row of a query reads exactly what the query sees, once, and the queries of a work item have the same slots.

    Args:
        req_to_token: [requests, context], int32: the slot of each position of each request.
        items: The plan's work items.
        rows: [batch], int64: each query's row of `req_to_token`.
        seq_lens: Returns [batch], int64: tokens up to each query's own.
        window: How many of the last of these a query sees; 0 for all.
        hides: Whether kernels hide from a query what it does not see, so that the plan may have more.
    """
    lengths = seq_lens().tolist()
    read = [0] * len(lengths)  # by all rows of a query
    by_rows: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)  # and tokens that rows [first, end) read
    for item in items:
        for i, query in enumerate(item.queries):
            start, end = item.seen(query, lengths)
            if hides:
                start, end = max(start, lengths[query] - window if window else 0), min(end, lengths[query])
            if item.rows:
                by_rows[query].append((*item.rows[i], max(0, end - start)))
            else:
                read[query] += max(0, end - start)
        if len(item.queries) > 1:
            start, end = item.span(lengths)
            slots = req_to_token[rows[item.queries], start:end]
            if not (slots == slots[0]).all():
                raise AssertionError(f"queries {item.queries} do not share the KV of [{start}, {end})")
    for query, (tokens, length) in enumerate(zip(read, lengths, strict=True)):
        seen = min(length, window or length)
        parts = by_rows[query]
        # What rows read changes where a part of them begins or ends.
        last = max((end for _, end, _ in parts), default=1)
        for row in {0, *(first for first, _, _ in parts), *(end for _, end, _ in parts)} - {last}:
            of_row = tokens + sum(some for first, end, some in parts if first <= row < end)
            if of_row != seen:
                raise AssertionError(f"query {query} reads {of_row} tokens and sees {seen}")
