"""The prefix tree of one decode batch (PAT §5.1, "tree structure block table")."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

ROOT = -1
"""The parent of first-level nodes, whatever id the cache gives its root."""


class InconsistentError(Exception):
    """An event contradicts the mirror; the request that it is about is served unpacked."""


class Node(msgspec.Struct):
    """KV positions [start, end) that all of `queries` share.

    Attributes:
        start: First position; a child starts where its parent ends.
        end: One past the last position.
        queries: Batch positions of the requests whose path passes through this node. (The paper's s is their number, its l is
            `end - start`.)
        children: Nodes below, with disjoint queries. A query in no child is a leaf: its private tail is [end, sequence length).
    """

    start: int
    end: int
    queries: list[int]
    children: list[Node] = []


class Batch(msgspec.Struct):
    """The requests of a step, and their prefix tree.

    Attributes:
        seq_lens: Tokens of each request, the one being decoded included.
        roots: First-level nodes; a request in none of them shares nothing.
    """

    seq_lens: list[int]
    roots: list[Node] = []


class Prefix(msgspec.Struct):
    """A node of the compact tree: at least two queries share [start, end) and diverge at `end`.

    Attributes:
        start, end: KV positions.
        parent: Index of the parent in `compact`'s list; -1 for the root.
        leaves: Queries in no child, ascending.
        children: Indices of the children, ordered by their second queries: the order in which the native scheduler finds them.
        queries: All queries: the leaves, then those of each child.
    """

    start: int
    end: int
    parent: int
    leaves: list[int]
    children: list[int] = []
    queries: list[int] = []


def walk(roots: list[Node]) -> Iterator[Node]:
    """Every node, parents before children, without recursion (a path may be thousands of nodes long)."""
    stack = list(reversed(roots))
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(node.children))


def in_windows(batch: Batch, window: int) -> Batch:
    """The batch to plan if a query sees only its last `window` tokens; 0 for all.

    A longer request is planned as if these tokens were all it had: it shares nothing, and its positions count from the start of its window.
    Shorter requests share as before.
    """
    beyond = {query for query, length in enumerate(batch.seq_lens) if 0 < window < length}
    if not beyond:
        return batch
    roots: list[Node] = []
    stack = [(node, roots) for node in reversed(batch.roots)]
    while stack:
        node, siblings = stack.pop()
        queries = [query for query in node.queries if query not in beyond]
        if queries:
            siblings.append(Node(node.start, node.end, queries, []))
            stack.extend((child, siblings[-1].children) for child in reversed(node.children))
    return Batch([min(length, window) for length in batch.seq_lens], roots)


def compact(batch: Batch) -> list[Prefix]:
    """The nodes that matter for packing, parents before children; the first one is the root, which is empty.

    A node with one query becomes a part of that query's tail. A node whose queries all continue into the same child is joined with it.
    Queries that share nothing are leaves of the root.
    """
    prefixes: list[Prefix] = []
    stack = [(Node(0, 0, list(range(len(batch.seq_lens))), batch.roots), 0, -1)]
    while stack:
        node, start, parent = stack.pop()
        while parent >= 0 and len(node.children) == 1 and len(node.children[0].queries) == len(node.queries):
            node = node.children[0]
        shared = [child for child in node.children if len(child.queries) > 1]
        shared.sort(key=lambda child: sorted(child.queries)[1], reverse=True)
        below = {query for child in shared for query in child.queries}
        if parent >= 0:
            prefixes[parent].children.append(len(prefixes))
        stack.extend((child, child.start, len(prefixes)) for child in shared)
        prefixes.append(Prefix(start, node.end, parent, sorted(set(node.queries).difference(below))))
    for prefix in reversed(prefixes):
        prefix.queries = prefix.leaves + [query for child in prefix.children for query in prefixes[child].queries]
    return prefixes


def kv_minimum(prefixes: list[Prefix], seq_lens: list[int]) -> int:
    """KV tokens of a step that reads each token once: the minimum for any packing."""
    shared = sum(prefix.end - prefix.start for prefix in prefixes)
    return shared + sum(seq_lens[query] - prefix.end for prefix in prefixes for query in prefix.leaves)
