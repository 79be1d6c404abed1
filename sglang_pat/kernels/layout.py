"""A plan as the flat int32 tensors that kernels read."""

from __future__ import annotations

import msgspec
import torch

from sglang_pat.packing import Plan

COLUMNS = ("start", "end", "first_query", "num_queries", "tile_m", "tile_n")
"""Columns of `PlanTensors.items`; csrc/cpu/decode.cpp reads them in this order."""


class PlanTensors(msgspec.Struct):
    """A plan in memory; all tensors are int32.

    Attributes:
        items: [items, len(COLUMNS)], longest work item first. `end` is -1 for a tail.
        queries: Batch positions of all items' queries, one after the other; `first_query` indexes them.
        slots: For each of them where its part goes: a slot of the workspace, or -1 for a query with one part,
            which is written straight to the output.
        part_offsets: [batch + 1]; query q's parts are slots part_offsets[q] up to part_offsets[q + 1].
        num_slots: Workspace slots needed.
    """

    items: torch.Tensor
    queries: torch.Tensor
    slots: torch.Tensor
    part_offsets: torch.Tensor
    num_slots: int


def flatten(plan: Plan) -> PlanTensors:
    """Lay out `plan`."""
    offsets = [0]
    for parts in plan.num_parts:
        offsets.append(offsets[-1] + (parts if parts > 1 else 0))
    items: list[list[int]] = []
    queries: list[int] = []
    slots: list[int] = []
    for item in plan.items:
        items.append([item.start, item.end, len(queries), len(item.queries), item.tile.m, item.tile.n])
        queries += item.queries
        slots += [
            offsets[query] + part if plan.num_parts[query] > 1 else -1
            for query, part in zip(item.queries, item.parts, strict=True)
        ]

    def tensor(values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return PlanTensors(
        tensor(items).reshape(-1, len(COLUMNS)), tensor(queries), tensor(slots), tensor(offsets), offsets[-1]
    )
