"""The prefix tree of one decode batch (PAT §5.1, "tree structure block table")."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec


class Node(msgspec.Struct):
    """KV positions [start, end) that all of `queries` share.

    Attributes:
        start: First position; a child starts where its parent ends.
        end: One past the last position.
        queries: Batch positions of the requests whose path leads through this node (the paper's s is their
            number, its l is `end - start`).
        children: Nodes below; their queries are disjoint. A query that is in no child ends here: what
            follows for it is its leaf, the private tail [end, sequence length).
    """

    start: int
    end: int
    queries: list[int]
    children: list[Node] = []


class Batch(msgspec.Struct):
    """What a plan is made for.

    Attributes:
        seq_lens: Tokens of each request, the one being decoded included.
        roots: First-level prefixes; a request in none of them shares nothing.
    """

    seq_lens: list[int]
    roots: list[Node] = []


def walk(roots: list[Node]) -> Iterator[Node]:
    """Every node, parents before children, without recursion (a path may be thousands of nodes long)."""
    stack = list(reversed(roots))
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(node.children))


def leaf_queries(node: Node) -> list[int]:
    """The queries that end at `node`: those in none of its children."""
    below = {query for child in node.children for query in child.queries}
    return [query for query in node.queries if query not in below]


def check(batch: Batch) -> None:
    """Raise ValueError, naming the node, where `batch` is not a prefix tree."""
    for node in batch.roots:
        if node.start != 0:
            raise ValueError(f"a first-level prefix must start at position 0, not {node.start}")
    _check_disjoint(batch.roots, set(range(len(batch.seq_lens))), "the batch")
    for node in walk(batch.roots):
        name = f"node [{node.start}, {node.end})"
        if node.end <= node.start:
            raise ValueError(f"{name} is empty")
        for query in node.queries:
            if batch.seq_lens[query] < node.end:
                raise ValueError(f"{name} is longer than request {query}, which has {batch.seq_lens[query]} tokens")
        for child in node.children:
            if child.start != node.end:
                raise ValueError(f"a child of {name} starts at {child.start}")
        _check_disjoint(node.children, set(node.queries), name)


def _check_disjoint(nodes: list[Node], allowed: set[int], name: str) -> None:
    for node in nodes:
        if not node.queries or not allowed.issuperset(node.queries) or len(set(node.queries)) != len(node.queries):
            raise ValueError(f"below {name}: queries {node.queries} are repeated, foreign or none")
        allowed = allowed.difference(node.queries)


def compact(roots: list[Node]) -> list[Node]:
    """The same tree with only the nodes that matter for packing.

    A node with one query is part of that query's tail, and a node whose queries all continue into the same
    child is one prefix with it.
    """
    kept: list[Node] = []
    stack = [(node, node.start, kept) for node in reversed(roots)]
    while stack:
        node, start, siblings = stack.pop()
        while len(node.children) == 1 and len(node.children[0].queries) == len(node.queries):
            node = node.children[0]
        if len(node.queries) < 2:
            continue
        merged = Node(start, node.end, node.queries)
        merged.children = []
        siblings.append(merged)
        stack.extend((child, child.start, merged.children) for child in reversed(node.children))
    return kept
