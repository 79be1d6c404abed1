"""Packing that moves the fewest bytes by the model, where the paper's heuristic decides for each child alone."""

from __future__ import annotations

import msgspec

from sglang_pat.packing.cost import CostModel
from sglang_pat.packing.heuristic import Pack, pack_unshared
from sglang_pat.packing.tree import Batch, Node, compact, leaf_queries

Choice = tuple[float, bool, list[bool], bool]
"""(bytes, whether the node has a pack, for each child whether it joins the node's segment, the same for leaves)."""


class _Entry(msgspec.Struct):
    """A node, the starts that its inherited segment may have, and the best choice for each of them.

    `best[i][above]`: the segment starts at `starts[i]`, and the queries have a part above it or not.
    """

    node: Node
    starts: list[int]
    children: list[_Entry]
    leaves: list[int]
    best: list[tuple[Choice, Choice]] = []


def pack_optimal(batch: Batch, cost: CostModel) -> list[Pack]:
    """Pack by a dynamic program over (node, start of its inherited segment, parts above or none).

    A query of k > 1 parts costs k parts, one of a single part none: hence the third coordinate. Time and memory are
    O(nodes x depth).
    """
    entries: list[_Entry] = []
    stack: list[tuple[Node, _Entry | None]] = [(root, None) for root in compact(batch.roots)]
    roots: list[_Entry] = []
    while stack:
        node, parent = stack.pop()
        entry = _Entry(node, [*(parent.starts if parent else []), node.start], [], leaf_queries(node))
        (parent.children if parent else roots).append(entry)
        entries.append(entry)
        stack.extend((child, entry) for child in node.children)
    for entry in reversed(entries):
        entry.best = [(_choose(entry, i, False, cost), _choose(entry, i, True, cost)) for i in range(len(entry.starts))]
    return _collect(roots) + pack_unshared(batch, [root.node for root in roots])


def _choose(entry: _Entry, i: int, above: bool, cost: CostModel) -> Choice:
    segment = (entry.node.end - entry.starts[i]) * cost.token_bytes
    part = cost.part_bytes
    joined = [child.best[i][above][0] for child in entry.children]
    split = [child.best[-1][True][0] + part * len(child.node.queries) for child in entry.children]
    leaf_joined, leaf_split = segment + part * above, 2 * part
    without_pack = sum(joined) + leaf_joined * len(entry.leaves)
    joins = [a <= b for a, b in zip(joined, split, strict=True)]
    leaves_join = leaf_joined <= leaf_split
    with_pack = segment + sum(map(min, joined, split)) + min(leaf_joined, leaf_split) * len(entry.leaves)
    if without_pack <= with_pack:
        return without_pack, False, [True] * len(joined), True
    return with_pack, True, joins, leaves_join


def _collect(roots: list[_Entry]) -> list[Pack]:
    packs = []
    stack = [(root, 0, False) for root in roots]
    while stack:
        entry, i, above = stack.pop()
        _, has_pack, joins, leaves_join = entry.best[i][above]
        start, end = entry.starts[i], entry.node.end
        stay: list[int] = []
        for child, join in zip(entry.children, joins, strict=True):
            if join:
                stack.append((child, i, above))
            else:
                stay += child.node.queries
                stack.append((child, len(child.starts) - 1, True))
        for query in entry.leaves:
            packs.append(Pack(start if leaves_join else end, None, [query]))
            if not leaves_join:
                stay.append(query)
        if has_pack:
            packs.append(Pack(start, end, stay))
    return packs
