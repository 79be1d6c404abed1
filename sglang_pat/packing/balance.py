"""Even work: packs cut and laid out in bins of equal price (PAT §6 "long KV split", PackInfer §3.1's groups).

The paper cuts what is longer than the mean into equal parts. That neither makes the device's last SM finish with the
first nor spares short batches needless parts. Here bins are filled one after the other up to the average of what is
left, and a pack is cut only where a bin would overflow (McNaughton's wrap-around rule); packs of one query go last
into each bin, so that the cut falls on them while there are any: a cut of theirs makes one part, not one per query.
"""

from __future__ import annotations

import operator

import msgspec

from sglang_pat.packing.heuristic import Pack, kv_length
from sglang_pat.packing.prices import ALWAYS, PackConfig

GRAIN = 8
"""KV positions between possible cuts. 16 missed the even share of small batches by up to 7 %, 8 stays within 5 % wherever
a worker has two KV tiles to do (`python benchmarks/policies.py --random 200`)."""

SLACK = 64
"""A bin may miss the average by its 1/SLACK-th before a pack is cut for it; with 32 the same run missed 5 % at times."""

UNEVEN = 32
"""Tails grow, and one bin has more of them than another: when that alone has made one longer than the average by the
1/UNEVEN-th of it, and by a KV tile, another plan is due. Beside plans of the same lengths, those that had outlived this
took 1.1 to 1.4 times as long on an H200 (benchmarks/NOTES.md, 2026-11-22)."""

LEAST_STEPS = 8
"""A plan stays good for so many steps at least: one is handed out in tens of microseconds, a step takes milliseconds."""


class _Queue(msgspec.Struct):
    """Packs that wait for a bin; of the first one, the KV before `begin` is already laid out."""

    packs: list[Pack]
    index: int = 0
    begin: int = 0

    def __bool__(self) -> bool:
        return self.index < len(self.packs)

    def start(self) -> int:
        return max(self.begin, self.packs[self.index].start)

    def size(self) -> int:
        return len(self.packs[self.index].queries)

    def take(self) -> Pack:
        pack = self.packs[self.index]
        piece = Pack(self.start(), pack.end, pack.queries)
        self.index, self.begin = self.index + 1, 0
        return piece

    def cut(self, tokens: int) -> Pack:
        start = self.start()
        self.begin = start + tokens
        return Pack(start, self.begin, self.packs[self.index].queries)


def balance(packs: list[Pack], seq_lens: list[int], config: PackConfig) -> list[list[Pack]]:
    """Bins of packs; every KV head runs all of them, each on one worker from first to last.

    Args:
        packs: Packs of at most `config.max_queries` queries.
        seq_lens: Tokens of each request.
        config: Device and model.
    """
    prices = [config.item_price(len(pack.queries), kv_length(pack, seq_lens)) for pack in packs]
    remaining = sum(prices)
    # The end of a bin falls into a pack with as many queries as are usual, weighted by work. Of packs that are shorter
    # than a bin it finds one with few: they are laid out whole, with those of one query around them.
    share = remaining * config.cost.runs // (2 * config.workers)
    weights = [len(pack.queries) if price > share else 1 for pack, price in zip(packs, prices, strict=True)]
    queries = sum(map(operator.mul, weights, prices)) / max(1, remaining)
    least = config.tiles.kv_tiles[-1] * config.cost.token_bytes + config.start_price(1)
    narrow = all(len(pack.queries) <= config.warp_queries for pack in packs)
    count = config.bins(max(1, remaining // least), float(remaining), queries * config.cost.part_bytes, narrow)
    shared, single = _Queue([p for p in packs if len(p.queries) > 1]), _Queue([p for p in packs if len(p.queries) == 1])
    bins: list[list[Pack]] = []
    # With eight packs for a bin, nearly every bin can be filled without a cut.
    cuts = int(len(packs) < 8 * count)
    turns = 0
    for left in range(count, 0, -1):
        # The cuts to come will make work items of their own; as many for each bin as there were so far. So will bins with
        # two kinds of them cost what it takes to go from one to the other.
        ahead = config.start_price(1) * (left - 1) * cuts // (len(bins) + 1)
        if shared:
            ahead += config.turn_price * (left - 1) * turns // (len(bins) + 1)
        target = -(-(remaining + ahead) // left)
        slack = target // SLACK
        load = 0
        members: list[Pack] = []
        kinds: set[bool] = set()  # of its work items: whether a single warp runs them
        while (shared or single) and (load < target or left == 1):
            gap = target - load
            queue = shared if shared else single
            turn, price = _turn(queue, kinds, seq_lens, config), _price(queue, seq_lens, config)
            if queue is shared and single and load > 0 and not _fits(turn + price, gap, slack, left):
                queue = single
                turn, price = _turn(queue, kinds, seq_lens, config), _price(queue, seq_lens, config)
            whole = _fits(turn + price, gap, slack, left)
            # A gap that is smaller than the start of one more work item is better left. An empty bin reads for as long as it
            # takes to start.
            start = config.start_price(queue.size()) + turn
            room = max(gap - start, start) if load == 0 else gap - start
            cut = not whole and (load == 0 or gap > max(slack, start))
            if cut and (tokens := _cut_tokens(queue, room, seq_lens, config)):
                piece = queue.cut(tokens)
                cuts, remaining = cuts + 1, remaining + start
                turn = _turn_to(config.by_warps(len(piece.queries), tokens), kinds, config)
                load += config.item_price(len(piece.queries), tokens) + turn
            elif whole or load == 0:
                piece = queue.take()
                remaining += turn
                load += turn + price
            else:
                break
            members.append(piece)
            kinds.add(config.by_warps(len(piece.queries), kv_length(piece, seq_lens)))
            if not whole:
                break
        turns += len(kinds) == 2
        remaining -= load
        bins.append(members)
    return bins


def even_steps(bins: list[list[Pack]], seq_lens: list[int], config: PackConfig, growing: list[bool]) -> int:
    """Decode steps for which bins stay even while tails grow by a token a step.

    Args:
        bins: As `balance` made them.
        seq_lens: Tokens that each query sees at that time.
        config: Device and model.
        growing: For each query whether it will see more of them.
    """
    growths = [
        sum(
            config.growth_price(len(pack.queries), kv_length(pack, seq_lens))
            for pack in members
            if pack.end is None and growing[pack.queries[0]]
        )
        for members in bins
    ]
    excess = max(growths) * len(bins) - sum(growths)
    if excess == 0:
        return ALWAYS
    work = sum(config.bin_price((len(pack.queries), kv_length(pack, seq_lens)) for pack in members) for members in bins)
    allowed = max(work // UNEVEN, len(bins) * config.tiles.kv_tiles[-1] * config.token_price(1))
    return max(LEAST_STEPS, allowed // excess)


def _fits(price: int, gap: int, slack: int, left: int) -> bool:
    """Whether a pack goes whole into a bin that lacks `gap`: the last one takes all, a nearly full one what helps."""
    return left == 1 or (price <= gap + slack and (gap > slack or price <= 2 * gap))


def _tokens(queue: _Queue, seq_lens: list[int]) -> int:
    pack = queue.packs[queue.index]
    return kv_length(pack, seq_lens) - (queue.start() - pack.start)


def _price(queue: _Queue, seq_lens: list[int], config: PackConfig) -> int:
    return config.item_price(queue.size(), _tokens(queue, seq_lens))


def _turn(queue: _Queue, kinds: set[bool], seq_lens: list[int], config: PackConfig) -> int:
    """What a bin with work items of these kinds costs besides when the queue's first pack comes into it."""
    return _turn_to(config.by_warps(queue.size(), _tokens(queue, seq_lens)), kinds, config)


def _turn_to(kind: bool, kinds: set[bool], config: PackConfig) -> int:
    return config.turn_price if kinds == {not kind} else 0


def _cut_tokens(queue: _Queue, gap: int, seq_lens: list[int], config: PackConfig) -> int:
    """How much of the queue's first pack fills `gap`, to the nearest grain; 0 where that is nothing or everything."""
    price = config.token_price(queue.size())
    grains = (max(0, gap) + price * GRAIN // 2) // (price * GRAIN)
    tokens = int(grains) * GRAIN
    return tokens if tokens < _tokens(queue, seq_lens) else 0
