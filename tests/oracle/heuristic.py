"""Packs: which queries read which KV positions together. Has the paper's TreeHeuristic, its two extremes, and the split of packs that are
too large for any tile (PAT §5.2)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import msgspec

from sglang_pat.packing.prices import PackConfig
from sglang_pat.packing.tree import Batch, Prefix

from . import pricing


class Pack(msgspec.Struct):
    """Queries that read KV positions [start, end) together; `end` is None for a query's open tail. `tails` says whether each query then reads its own
    tail in the same work item (`WorkItem.tails`); `rows` are as `WorkItem.rows`. In a bin, also whether it is run in slices (`pricing.in_row_slices`)."""

    start: int
    end: int | None
    queries: list[int]
    in_row_slices: bool = False
    tails: bool = False
    rows: list[tuple[int, int]] = []

    def tail_tokens(self, seq_lens: list[int]) -> int:
        """Tokens of the tails that follow."""
        return sum(seq_lens[query] - (self.end or 0) for query in self.queries) if self.tails else 0

    def split(self, pieces: int) -> list[Pack]:
        """So many packs of its queries, of even size."""
        size = len(self.queries)
        bounds = [size * i // pieces for i in range(pieces + 1)]
        return [msgspec.structs.replace(self, queries=self.queries[a:b]) for a, b in pairwise(bounds)]

    def split_rows(self, group: int, most: int) -> list[Pack]:
        """Packs of `most` of its queries' rows, `group` of each query; the last one of those that are left."""
        packs = []
        for begin in range(0, len(self.queries) * group, most):
            end = min(begin + most, len(self.queries) * group)
            members = range(begin // group, -(-end // group))
            rows = [(max(0, begin - i * group), min(group, end - i * group)) for i in members]
            whole = rows == [(0, group)]
            packs.append(
                msgspec.structs.replace(self, queries=[self.queries[i] for i in members], rows=[] if whole else rows)
            )
        return packs


class Choice(msgspec.Struct):
    """How the segment of a prefix is read: the prefix's own KV, and the KV that it took over from above.

    Attributes:
        joins: For each child, whether it reads the segment together with its own KV (the paper's scheme 2). Otherwise its queries read
            the segment in the segment's own pack (scheme 1).
        leaf_joins: The same for each leaf.
    """

    joins: list[bool]
    leaf_joins: list[bool]


WithTails = Callable[[Prefix, int], list[Pack]]
"""A function of (prefix, start of its segment): the packs of its leaves, all of which read the segment together with their tails."""

Choose = Callable[[int, int, bool], Choice]
"""A function of (prefix, start of its segment, whether its queries have a part above the segment)."""


def collect(prefixes: list[Prefix], choose: Choose, with_tails: WithTails | None = None) -> list[Pack]:
    """The packs that follow from the choices: for each prefix in order, its segment's own pack, then the tails of its leaves, which `with_tails` may put
    together."""
    packs: list[Pack] = []
    starts, above = [0] * len(prefixes), [False] * len(prefixes)
    for index, prefix in enumerate(prefixes):
        start = starts[index]
        choice = choose(index, start, above[index]) if index else join_all(prefix)
        stay = [query for query, joins in zip(prefix.leaves, choice.leaf_joins, strict=True) if not joins]
        for child, joins in zip(prefix.children, choice.joins, strict=True):
            starts[child], above[child] = (start, above[index]) if joins else (prefix.end, True)
            if not joins:
                stay += prefixes[child].queries
        if stay:
            packs.append(Pack(start, prefix.end, stay))
        if with_tails and start < prefix.end and prefix.leaves and all(choice.leaf_joins):
            packs += with_tails(prefix, start)
            continue
        for query, joins in zip(prefix.leaves, choice.leaf_joins, strict=True):
            packs.append(Pack(start if joins else prefix.end, None, [query]))
    return packs


def join_all(prefix: Prefix) -> Choice:
    """Make no pack for the segment."""
    return Choice([True] * len(prefix.children), [True] * len(prefix.leaves))


def pack_queries(prefixes: list[Prefix], batch: Batch, config: PackConfig) -> list[Pack]:
    """One pack per query, over all of its KV: one query per CTA."""
    return collect(prefixes, lambda index, start, above: join_all(prefixes[index]))


def pack_nodes(prefixes: list[Prefix], batch: Batch, config: PackConfig) -> list[Pack]:
    """A pack for every node that is not empty, and for every tail: the paper's PAT-naive (§8.5)."""

    def choose(index: int, start: int, above: bool) -> Choice:
        prefix = prefixes[index]
        empty = prefix.start == prefix.end
        return Choice([empty] * len(prefix.children), [empty] * len(prefix.leaves))

    return collect(prefixes, choose)


def pack_tree(prefixes: list[Prefix], batch: Batch, config: PackConfig) -> list[Pack]:
    """TreeHeuristic, the paper's Algorithm 1.

    A child reads the segment together with its own KV (scheme 2) if reading it again costs less than the extra parts of the child's queries.
    Otherwise its queries read the segment in the segment's own pack (scheme 1). Time is linear in nodes and queries.
    """
    cost = config.cost

    def choose(index: int, start: int, above: bool) -> Choice:
        prefix = prefixes[index]
        length = prefix.end - start
        joins = [length <= pricing.merge_tokens(cost, len(prefixes[child].queries)) for child in prefix.children]
        leaf_joins = [length <= pricing.merge_tokens(cost, 1)] * len(prefix.leaves)
        if joins.count(False) + leaf_joins.count(False) == 1:
            # Only one reader is left: a pack for it would only add parts.
            return join_all(prefix)
        return Choice(joins, leaf_joins)

    return collect(prefixes, choose)


def split_by_tile(packs: list[Pack], seq_lens: list[int], config: PackConfig) -> list[Pack]:
    """Split each pack into `pricing.items_of_pack` packs of even size; each is one work item until `balance` cuts it. Where queries may straddle work items,
    those of several are split into packs of as many rows as a tile has."""
    result = []
    for pack in packs:
        if config.straddled_rows and len(pack.queries) > 1:
            result += pack.split_rows(config.cost.group, config.straddled_rows)
            continue
        result += pack.split(
            1 if pack.tails else pricing.items_of_pack(config, len(pack.queries), kv_length(pack, seq_lens))
        )
    return result


def cut_at_pieces(packs: list[Pack], seq_lens: list[int], config: PackConfig) -> list[Pack]:
    """Cut packs, and what a window leaves of them, where positions are multiples of `config.piece`."""
    result = []
    for pack in packs:
        last = pack.start + kv_length(pack, seq_lens)
        unseen = min(seq_lens[query] for query in pack.queries) - config.window if config.window else 0
        start = max(pack.start, unseen)
        while start < last:
            end = min(last, start - start % config.piece + config.piece)
            result.append(msgspec.structs.replace(pack, start=start, end=pack.end if end == last else end))
            start = end
    return result


def kv_length(pack: Pack, seq_lens: list[int]) -> int:
    """KV positions of a pack at these lengths, without tails that follow; an open tail grows with its request."""
    return (seq_lens[pack.queries[0]] if pack.end is None else pack.end) - pack.start
