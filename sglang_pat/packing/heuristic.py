"""TreeHeuristic, the paper's Algorithm 1: which queries are packed over which KV positions."""

from __future__ import annotations

import msgspec

from sglang_pat.packing.cost import CostModel
from sglang_pat.packing.tree import Batch, Node, compact, leaf_queries, walk


class Pack(msgspec.Struct):
    """Queries that read KV positions [start, end) together; `end` is None for a query's open tail."""

    start: int
    end: int | None
    queries: list[int]


def pack_queries(batch: Batch) -> list[Pack]:
    """One pack per query over all of its KV: one-query-per-CTA."""
    return pack_unshared(batch, [])


def pack_unshared(batch: Batch, roots: list[Node]) -> list[Pack]:
    """One pack per query that is in none of `roots`, over all of its KV."""
    shared = {query for root in roots for query in root.queries}
    return [Pack(0, None, [query]) for query in range(len(batch.seq_lens)) if query not in shared]


def pack_nodes(batch: Batch) -> list[Pack]:
    """Every node of the tree a pack, every tail another: the paper's PAT-naive (§8.5)."""
    packs = []
    tails = [0] * len(batch.seq_lens)
    for node in walk(compact(batch.roots)):
        packs.append(Pack(node.start, node.end, node.queries))
        for query in node.queries:
            tails[query] = node.end
    return packs + [Pack(tail, None, [query]) for query, tail in enumerate(tails)]


def pack_tree(batch: Batch, cost: CostModel) -> list[Pack]:
    """Pack by shared prefixes.

    Each node is visited with the position where the KV that it inherited from merged ancestors starts. A child
    joins that segment with its own (scheme 2) where re-reading it costs less than the parts that splitting
    would make of the child's queries; else the child stands alone (scheme 1) and its queries stay in the
    node's own pack. Time is linear in nodes and queries.
    """
    roots = compact(batch.roots)
    packs = pack_unshared(batch, roots)
    stack = [(root, root.start) for root in reversed(roots)]
    while stack:
        node, start = stack.pop()
        length = node.end - start
        split: list[Node] = []
        remaining: list[int] = []
        for child in _children_and_leaves(node):
            if length > cost.merge_tokens(len(child.queries)):
                split.append(child)
                remaining += child.queries
            else:
                _descend(child, start, stack, packs)
        if len(split) == 1:
            # Nobody else reads the segment: a pack of its own would only add parts.
            _descend(split[0], start, stack, packs)
            continue
        for child in split:
            _descend(child, node.end, stack, packs)
        if remaining:
            packs.append(Pack(start, node.end, remaining))
    return packs


def _children_and_leaves(node: Node) -> list[Node]:
    return node.children + [Node(node.end, node.end, [query]) for query in leaf_queries(node)]


def _descend(child: Node, start: int, stack: list[tuple[Node, int]], packs: list[Pack]) -> None:
    if len(child.queries) == 1:
        packs.append(Pack(start, None, child.queries))
    else:
        stack.append((child, start))
