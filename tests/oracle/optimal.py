"""The packing with the lowest price. (The paper's heuristic decides for each child separately.)"""

from __future__ import annotations

import math

import msgspec

from sglang_pat.packing.constants import MAX_DEPTH, MAX_SEGMENT, TAILS_ITEMS, TAILS_SHARE
from sglang_pat.packing.prices import PackConfig
from sglang_pat.packing.tree import Batch, Prefix, kv_minimum

from . import pricing
from .heuristic import Choice, Pack, collect, join_all, pack_tree


class Best(msgspec.Struct):
    """The cheapest way to read everything from a given start on, for the queries of a prefix."""

    price: float
    choice: Choice


def pack_optimal(prefixes: list[Prefix], batch: Batch, config: PackConfig) -> list[Pack]:
    """Pack by a dynamic program over (prefix, start of its segment, whether there are parts above).

    The third coordinate is needed because a query with k > 1 parts pays for k parts, but a query with one part pays for none. The lowest price
    is a sum over children as long as the segment's pack is one work item. If the largest tile forces several work items, three candidates
    compete at their true price: everything joins; each child decides as if the pack were free; each child decides as if it paid its share of a
    full work item. Time is O(prefixes x depth).
    """
    depths = [-1] * len(prefixes)
    for index, prefix in enumerate(prefixes[1:], 1):
        depths[index] = depths[prefix.parent] + 1
    if max(depths) >= MAX_DEPTH:
        return pack_tree(prefixes, batch, config)
    solver = _Solver(prefixes, batch, config)
    for index in range(len(prefixes) - 1, 0, -1):
        solver.solve(index)
    with_tails = solver.with_tails if config.tails_queries > 1 else None
    return collect(prefixes, lambda index, start, above: solver.best[index][start, above].choice, with_tails)


class _Solver:
    def __init__(self, prefixes: list[Prefix], batch: Batch, config: PackConfig) -> None:
        self.prefixes = prefixes
        self.config = config
        self.seq_lens = batch.seq_lens
        self.best: list[dict[tuple[int, bool], Best]] = [{} for _ in prefixes]
        self.part = float(config.cost.part_bytes)
        # The share of each query in the price of a full work item, per token and once.
        rows, most = (config.cost.group, config.straddled_rows) if config.straddled_rows else (1, config.max_queries)
        self.full_token = config.token_price(config.max_queries) * rows / most
        self.full_start = config.start_price(config.max_queries) * rows / most
        self.cut_token = 0.0
        heads, workers = config.cost.runs, config.workers
        minimum = kv_minimum(prefixes, batch.seq_lens)
        if workers > heads:
            # Bins end wherever they are full: expect one cut per fair share of a pack's length; each cut adds a part to each of its queries.
            share = max(float(config.tiles.kv_tile), minimum * heads / workers)
            self.cut_token = self.part / share
        enough = len(batch.seq_lens) * heads >= TAILS_ITEMS * config.tails_queries * workers
        self.most_tails = minimum * heads // (TAILS_SHARE * workers) if enough and config.tails_queries > 1 else 0

    def solve(self, index: int) -> None:
        prefix, ancestor = self.prefixes[index], index
        starts: list[int] = []
        while ancestor > 0 and len(starts) < MAX_SEGMENT:
            starts.append(self.prefixes[ancestor].start)
            ancestor = self.prefixes[ancestor].parent
        for start in starts:
            for above in (False, True):
                self.best[index][start, above] = self._choose(prefix, start, above)

    def _choose(self, prefix: Prefix, start: int, above: bool) -> Best:
        tokens = prefix.end - start
        stay = self.part + tokens * self.cut_token
        share = tokens * self.full_token + self.full_start
        leaf = self._leaf_price(prefix, tokens) + self.part * above
        best = Best(math.inf, join_all(prefix))
        for candidate in range(3):
            extra = share if candidate == 2 else 0.0
            total, staying, joins = 0.0, 0, []
            # Backwards, like the native scheduler: the last bit of a sum may decide a tie.
            for child in reversed(prefix.children):
                queries = len(self.prefixes[child].queries)
                joined = self.best[child].get((start, above))
                joined_price = joined.price if joined else math.inf
                split_price = self.best[child][prefix.end, True].price + queries * stay
                joins.append(candidate == 0 or joined_price <= split_price + queries * extra)
                total += joined_price if joins[-1] else split_price
                staying += 0 if joins[-1] else queries
            leaf_joins = candidate == 0 or leaf <= stay + self.part + extra
            total += len(prefix.leaves) * (leaf if leaf_joins else stay + self.part)
            staying += 0 if leaf_joins else len(prefix.leaves)
            total += pricing.pack_price(self.config, staying, tokens)
            if total < best.price:
                best = Best(total, Choice(joins[::-1], [leaf_joins] * len(prefix.leaves)))
        return best

    def _leaf_price(self, prefix: Prefix, tokens: int) -> float:
        """The price of reading `tokens` more in a tail of mean length; a tail that was run in slices may become too long for that."""
        if size := self._together(prefix):
            items = -(-len(prefix.leaves) // size)
            return tokens * (items * self.config.token_price(size) / len(prefix.leaves) + self.cut_token)
        if self.config.slices_tokens < 0 or not prefix.leaves:
            return tokens * (self.config.token_price(1) + self.cut_token)
        tail = self._mean_tail(prefix)
        more = pricing.uncut_price(self.config, 1, tail + tokens) - pricing.uncut_price(self.config, 1, tail)
        return more + tokens * self.cut_token

    def _mean_tail(self, prefix: Prefix) -> int:
        return sum(self.seq_lens[query] - prefix.end for query in prefix.leaves) // len(prefix.leaves)

    def _together(self, prefix: Prefix) -> int:
        """How many leaves read a segment together, and then their tails, in a work item each of which has as many as may be; 0 if each is alone."""
        count = len(prefix.leaves)
        if self.most_tails == 0 or count < 2:
            return 0
        size = -(-count // -(-count // self.config.tails_queries))
        return size if size * self._mean_tail(prefix) <= self.most_tails else 0

    def with_tails(self, prefix: Prefix, start: int) -> list[Pack]:
        """The packs of leaves that read a segment with their tails: tails of as many tiles side by side, and no more of them than `most_tails`."""
        if not self._together(prefix):
            return [Pack(start, None, [query]) for query in prefix.leaves]
        n, count = self.config.tiles.kv_tile, len(prefix.leaves)
        leaves = sorted(prefix.leaves, key=lambda query: -(-(self.seq_lens[query] - prefix.end) // n))
        pieces = -(-count // self.config.tails_queries)
        packs = []
        for i in range(pieces):
            queries = leaves[count * i // pieces : count * (i + 1) // pieces]
            pack = Pack(start, prefix.end, queries, tails=True)
            if len(queries) > 1 and pack.tail_tokens(self.seq_lens) <= self.most_tails:
                packs.append(pack)
            elif len(queries) > 1 and self._parts_pay(pack):
                packs += [Pack(start, prefix.end, queries), *(Pack(prefix.end, None, [query]) for query in queries)]
            else:
                packs += [Pack(start, None, [query]) for query in queries]
        return packs

    def _parts_pay(self, pack: Pack) -> bool:
        """Whether queries whose tails are too long for one work item read the segment together even so, and their tails as parts."""
        config, tokens = self.config, (pack.end or 0) - pack.start
        tails = [self.seq_lens[query] - (pack.end or 0) for query in pack.queries]
        alone = sum(pricing.uncut_price(config, 1, tokens + tail) for tail in tails)
        parts = len(tails) * config.cost.part_bytes * (1 if pack.start > 0 else 2)
        return (
            pricing.pack_price(config, len(tails), tokens)
            + sum(pricing.uncut_price(config, 1, tail) for tail in tails)
            + parts
            < alone
        )
