"""Load balance: packs are cut and laid out in bins of equal price, as csrc/packing/balance.h explains."""

from __future__ import annotations

import operator

import msgspec

from sglang_pat.packing.constants import LEAST_STEPS, PASSES, SLACK, SPLIT_GAIN, TOO_LONG, UNEVEN
from sglang_pat.packing.prices import ALWAYS, PackConfig

from . import pricing
from .heuristic import Pack, kv_length


class _Queue(msgspec.Struct):
    """Packs waiting for a bin. The KV of the first one before `begin` is already in a bin."""

    packs: list[Pack]  # with whether they are run in slices
    index: int = 0
    begin: int = 0

    def __bool__(self) -> bool:
        return self.index < len(self.packs)

    def start(self) -> int:
        return max(self.begin, self.packs[self.index].start)

    def size(self) -> int:
        return len(self.packs[self.index].queries)

    def tail_tokens(self, seq_lens: list[int]) -> int:
        return self.packs[self.index].tail_tokens(seq_lens)

    def in_row_slices(self) -> bool:
        return self.packs[self.index].in_row_slices

    def take(self) -> Pack:
        piece = msgspec.structs.replace(self.packs[self.index], start=self.start())
        self.index, self.begin = self.index + 1, 0
        return piece

    def cut(self, tokens: int) -> Pack:
        start = self.start()
        self.begin = start + tokens
        return msgspec.structs.replace(self.packs[self.index], start=start, end=self.begin, tails=False)


def balance(packs: list[Pack], seq_lens: list[int], config: PackConfig) -> list[list[Pack]]:
    """Lay out packs in bins. Every KV head runs all bins; one worker runs a bin from first to last.

    Args:
        packs: Packs of at most `config.max_queries` queries.
        seq_lens: Tokens of each request.
        config: Device and model.
    """
    bins_config = config.for_bins
    shared, single = (
        [_as_item(pack, seq_lens, config) for pack in packs if (len(pack.queries) > 1) == several]
        for several in (True, False)
    )
    prices = [pricing.item_price(bins_config, *_measures(pack, seq_lens)) for pack in shared + single]
    count = _count(shared + single, prices, bins_config)
    best = _fill_evenly(shared, single, seq_lens, bins_config, count)
    mean = -(-sum(prices) // count)
    most = bins_config.rebalance_queries
    if most == 0 or best.longest() <= mean + mean // TOO_LONG or not _are_few(shared, single, count):
        return best.bins
    pieces = [_as_item(pack, seq_lens, config) for pack in _split(shared, most)]
    if len(shared) < len(pieces) <= count:
        filled = _fill_evenly(pieces, single, seq_lens, bins_config, count)
        if filled.longest() + best.longest() // SPLIT_GAIN <= best.longest():
            return filled.bins
    return best.bins


def _are_few(shared: list[Pack], single: list[Pack], count: int) -> bool:
    """Whether some bins cannot be filled without a cut: with eight packs per bin, nearly every one can."""
    return len(shared) + len(single) < 8 * count


def _as_item(pack: Pack, seq_lens: list[int], config: PackConfig) -> Pack:
    """A pack that knows how it is run."""
    in_row_slices = pricing.in_row_slices(config, len(pack.queries), kv_length(pack, seq_lens))
    return msgspec.structs.replace(pack, in_row_slices=in_row_slices)


def _split(packs: list[Pack], most: int) -> list[Pack]:
    """All packs, split into as few as have at most so many queries, of even size; those with tails as they are. A pack of one query remains beside those of several."""
    return [piece for pack in packs for piece in pack.split(1 if pack.tails else -(-len(pack.queries) // most))]


def _fill_evenly(
    shared: list[Pack], single: list[Pack], seq_lens: list[int], config: PackConfig, count: int
) -> _Filled:
    """Fill `count` bins so that the longest is short.

    Looks for the least capacity with which they are enough, as MULTIFIT does (Coffman, Garey and Johnson 1978): above `least`, and first at the average
    of bins with what cuts and turns have added.
    """
    work = sum(pricing.item_price(config, *_measures(pack, seq_lens)) for pack in shared + single)
    best = _fill(shared, single, seq_lens, config, work, count)
    least, capacity = -(-work // count), -(-sum(best.loads) // count)
    if best.longest() <= capacity + capacity // SLACK:
        return best
    for _ in range(1, PASSES):
        filled = _fill(shared, single, seq_lens, config, work, count, capacity)
        shorter = filled.longest() < best.longest()
        if shorter:
            best = filled
        left_over = filled.loads[-1] - capacity
        if left_over > 0:
            least = capacity
            capacity = min((least + best.longest()) // 2, capacity - (-left_over // count))
        elif shorter:
            capacity = (least + capacity) // 2
        else:
            break
        if best.longest() <= least + least // SLACK:
            break
    return best


class _Filled(msgspec.Struct):
    """Bins with their prices."""

    bins: list[list[Pack]]
    loads: list[int]

    def longest(self) -> int:
        return max(self.loads)


def _fill(
    shared_packs: list[Pack],
    single_packs: list[Pack],
    seq_lens: list[int],
    config: PackConfig,
    remaining: int,
    count: int,
    capacity: int | None = None,
) -> _Filled:
    """Fill `count` bins with packs whose price is `remaining`: each but the last, which takes the rest, up to `capacity`, or else to what remains on average."""
    shared, single = _Queue(shared_packs), _Queue(single_packs)
    filled = _Filled([], [])
    bins = filled.bins
    cuts = int(_are_few(shared_packs, single_packs, count))
    turns = 0
    for left in range(count, 0, -1):
        target, slack = capacity, 0
        if target is None:
            # Cuts to come will add work items, and bins with both kinds of items will have to switch between them: assume as many of both per bin
            # as there were so far.
            ahead = config.start_price(1) * (left - 1) * cuts // (len(bins) + 1)
            if shared:
                ahead += config.turn_price * (left - 1) * turns // (len(bins) + 1)
            target = -(-(remaining + ahead) // left)
            slack = target // SLACK
        load = 0
        members: list[Pack] = []
        kinds: set[bool] = set()  # of its work items: whether single warps run them
        while (shared or single) and (load < target or left == 1):
            gap = target - load
            queue = shared if shared else single
            turn, price = _turn(queue, kinds, config), _price(queue, seq_lens, config)
            if queue is shared and single and load > 0 and not _fits(turn + price, gap, slack, left):
                queue = single
                turn, price = _turn(queue, kinds, config), _price(queue, seq_lens, config)
            whole = _fits(turn + price, gap, slack, left)
            # Leave a gap that is smaller than the start of another work item. In an empty bin, read for at least as long as the start takes.
            start = pricing.fixed_price(config, queue.size(), queue.in_row_slices()) + turn
            room = max(gap - start, start) if load == 0 else gap - start
            cut = not whole and not config.piece and (load == 0 or gap > max(slack, start))
            if cut and (tokens := _cut_tokens(queue, room, seq_lens, config)):
                piece = queue.cut(tokens)
                cuts, remaining = cuts + 1, remaining + start
                load += pricing.item_price(config, len(piece.queries), tokens, piece.in_row_slices) + turn
            elif whole or load == 0:
                piece = queue.take()
                remaining += turn
                load += turn + price
            else:
                break
            members.append(piece)
            kinds.add(pricing.by_warps(config, len(piece.queries), piece.in_row_slices))
            if not whole:
                break
        turns += len(kinds) == 2
        remaining -= load
        bins.append(members)
        filled.loads.append(load)
    return filled


def _count(packs: list[Pack], prices: list[int], config: PackConfig) -> int:
    """The number of bins for packs with these prices."""
    work = sum(prices)
    least = config.tiles.kv_tile * config.cost.token_bytes + config.start_price(1)
    limit = max(1, work // least)
    # By measured prices only.
    if (
        packs
        and config.wave_price > 0
        and all(len(pack.queries) == 1 and not pricing.by_warps(config, 1, pack.in_row_slices) for pack in packs)
    ):
        alike = max(prices) - min(prices) <= max(prices) // SLACK
        return pricing.num_bins_of_single(config, limit, len(packs), work, alike)
    # Estimate how many queries a cut affects: the mean over packs, weighted by work. Packs shorter than a bin count as one query: they go
    # into a bin whole, and the cut falls on a pack of one query beside them.
    share = work * config.cost.runs // (2 * config.workers)
    weights = [len(pack.queries) if price > share else 1 for pack, price in zip(packs, prices, strict=True)]
    queries = sum(map(operator.mul, weights, prices)) / max(1, work)
    narrow = all(len(pack.queries) <= config.warp_queries for pack in packs)
    return pricing.num_bins(config, limit, float(work), queries * config.cost.part_bytes, narrow)


def even_steps(bins: list[list[Pack]], seq_lens: list[int], config: PackConfig, growing: list[bool]) -> int:
    """For how many decode steps the bins stay even while tails grow by a token per step.

    Args:
        bins: As `balance` made them.
        seq_lens: Tokens that each query sees now.
        config: Device and model.
        growing: For each query, whether it will see more.
    """
    config = config.for_bins
    growths = [sum(_growth(pack, config, growing) for pack in members) for members in bins]
    excess = max(growths) * len(bins) - sum(growths)
    if excess == 0:
        return ALWAYS
    work = sum(pricing.bin_price(config, [_measures(pack, seq_lens) for pack in members]) for members in bins)
    allowed = max(work // UNEVEN, len(bins) * config.tiles.kv_tile * config.token_price(1))
    return max(LEAST_STEPS, allowed // excess)


def _measures(pack: Pack, seq_lens: list[int]) -> tuple[int, int, bool, int]:
    """A pack as `pricing.item_price` wants it."""
    return len(pack.queries), kv_length(pack, seq_lens), pack.in_row_slices, pack.tail_tokens(seq_lens)


def _growth(pack: Pack, config: PackConfig, growing: list[bool]) -> int:
    """By how much a step makes a pack dearer."""
    if pack.tails:
        return len(pack.queries) * config.token_price(1)
    grows = pack.end is None and growing[pack.queries[0]]
    return pricing.growth_price(config, len(pack.queries), pack.in_row_slices) if grows else 0


def _fits(price: int, gap: int, slack: int, left: int) -> bool:
    """Whether a pack goes whole into a bin with `gap` to fill. The last bin takes everything; a nearly full one takes a pack that leaves it closer
    to even."""
    return left == 1 or (price <= gap + slack and (gap > slack or price <= 2 * gap))


def _tokens(queue: _Queue, seq_lens: list[int]) -> int:
    pack = queue.packs[queue.index]
    return kv_length(pack, seq_lens) - (queue.start() - pack.start)


def _price(queue: _Queue, seq_lens: list[int], config: PackConfig) -> int:
    return pricing.item_price(
        config, queue.size(), _tokens(queue, seq_lens), queue.in_row_slices(), queue.tail_tokens(seq_lens)
    )


def _turn(queue: _Queue, kinds: set[bool], config: PackConfig) -> int:
    """The price of switching that the queue's first pack adds to a bin with work items of these kinds."""
    return config.turn_price if kinds == {not pricing.by_warps(config, queue.size(), queue.in_row_slices())} else 0


def _cut_tokens(queue: _Queue, gap: int, seq_lens: list[int], config: PackConfig) -> int:
    """How many tokens of the queue's first pack fill `gap`, to the nearest grain; 0 if that is nothing or everything."""
    price = pricing.growth_price(config, queue.size(), queue.in_row_slices())
    grains = (max(0, gap) + price * config.grain // 2) // (price * config.grain)
    tokens = int(grains) * config.grain
    return tokens if tokens < _tokens(queue, seq_lens) else 0
