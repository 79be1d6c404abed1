"""Which replica answers what: each has a cache of its own, so requests that begin alike stay together.

Replicas get equal shares of the prefix tree's leaves, by tokens, cut where neighbours have least in common. Who has nothing left to start
gets half of what waits where most does, cut likewise: lengths of answers are guesses, and servers differ. The share of a replica that is
lost is shared out again.
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_pat.batch.lines import Request
from sglang_pat.batch.order import SHARED, Order, Tree

CHARACTERS = 4
"""Of a token, about, in English and in code."""

ANSWER = {"/v1/chat/completions": 256, "/v1/completions": 16}
"""Tokens of an answer where a request sets no limit: a guess, as of `sglang-pat estimate`, and SGLang's limit."""

LONGEST_ANSWER = 4096
"""Tokens that an answer counts at most: limits far above are meant to be none."""

SLACK = 1 / 8
"""Part of a share by which another may be larger, so that a cut separates less."""


def tokens(request: Request, characters: int) -> int:
    """What a request costs, roughly, in tokens that are computed.

    Args:
        request: What is asked.
        characters: Of its prompt, those that are not in the cache.
    """
    limits = (request.body.get(name) for name in ("max_completion_tokens", "max_tokens"))
    limit = next((one for one in limits if isinstance(one, int)), ANSWER[request.url])
    several = request.body.get("n")
    answers = min(several, LONGEST_ANSWER) if isinstance(several, int) else 1
    return 1 + characters // CHARACTERS + max(1, answers) * max(0, min(limit, LONGEST_ANSWER))


def cut(steps: Sequence[int], costs: Sequence[int], aim: float, slack: float) -> int:
    """Where to divide requests in two.

    Args:
        steps: Characters that each begins with as the one before it does.
        costs: Of each, in tokens.
        aim: Tokens in front of the cut.
        slack: How far it may be from that for nothing, in tokens.

    Returns:
        The first request behind the cut: where least is lost, which is what they share in front of it and behind it, and is computed
        twice, and how far it is from its aim.
    """
    best, found = (max(0.0, aim - slack), aim), 0
    front = 0
    for place in range(1, len(costs) + 1):
        front += costs[place - 1]
        off = abs(front - aim)
        twice = steps[place] / CHARACTERS if place < len(costs) else 0
        loss = (twice + max(0.0, off - slack), off)
        if loss < best:
            best, found = loss, place
    return found


class Shares:
    """Hands out ranks with the replica that each shall run on.

    Attributes:
        living: The replicas that are not lost.
    """

    def __init__(self, tree: Tree, replicas: int, window: int, shared: int = SHARED) -> None:
        """
        Args:
            tree: All requests.
            replicas: At least one.
            window: Requests that a replica holds at a time.
            shared: Characters, as `order.SHARED`.
        """
        self._tree, self._window = tree, window
        pairs = zip(tree.requests, tree.sizes, tree.common, strict=True)
        self._costs = [tokens(request, size - known) for request, size, known in pairs]
        self._orders = [Order(tree, shared) for _ in range(replicas)]
        self._running: list[set[int]] = [set() for _ in range(replicas)]
        self._left = [0] * replicas  # tokens that wait
        self.living = list(range(replicas))
        self._share(range(len(tree.requests)))

    def take(self) -> tuple[int, int] | None:
        """A replica and a rank that may run there now; None while windows are full or all that are left wait."""
        free = [one for one in self.living if len(self._running[one]) < self._window]
        for replica in sorted(free, key=lambda one: len(self._running[one])):
            if not self._orders[replica].waiting:
                self._relieve(replica)
            rank = self._orders[replica].take()
            if rank is not None:
                self._running[replica].add(rank)
                self._left[replica] -= self._costs[rank]
                return replica, rank
        return None

    def finish(self, replica: int, rank: int) -> None:
        """A request has an answer, or never will have."""
        self._running[replica].remove(rank)
        self._orders[replica].finish(rank)

    def lose(self, replica: int) -> None:
        """A replica answers no more: the others get its share, also what runs there."""
        self.living.remove(replica)
        order = self._orders[replica]
        moved = sorted(order.waiting | self._running[replica])
        order.waiting.clear()
        self._running[replica].clear()
        self._left[replica] = 0
        if self.living:
            self._share(moved)

    def _share(self, ranks: Sequence[int]) -> None:
        """Give each replica its part."""
        # Who has most to do gets the last part, which may be none.
        living = sorted(self.living, key=self._left.__getitem__)
        steps, costs = self._tree.steps(ranks), [self._costs[rank] for rank in ranks]
        begin, left = 0, sum(costs)
        for others, replica in zip(range(len(living) - 1, -1, -1), living, strict=True):
            aim = left / (others + 1)
            end = begin + cut(steps[begin:], costs[begin:], aim, aim * SLACK) if others else len(ranks)
            self._give(replica, ranks[begin:end])
            left -= sum(costs[begin:end])
            begin = end

    def _give(self, replica: int, ranks: Sequence[int]) -> None:
        self._orders[replica].add(ranks)
        self._left[replica] += sum(self._costs[rank] for rank in ranks)

    def _relieve(self, replica: int) -> None:
        """Give a replica that has nothing to start half of what waits elsewhere, if that saves time."""
        # Where a window has room, what waits does so for a prefix that is being computed there.
        full = [one for one in self.living if len(self._running[one]) >= self._window]
        busiest = max(full, key=self._left.__getitem__, default=replica)
        half = self._left[busiest] / 2
        if not half:
            return
        ranks = sorted(self._orders[busiest].waiting)
        steps = self._tree.steps(ranks)
        place = cut(steps, [self._costs[rank] for rank in ranks], half, half / 2)
        moved = ranks[place:]
        gain = sum(self._costs[rank] for rank in moved)
        # What they share with those that stay is computed once more.
        if moved and gain > self._tree.common[moved[0]] / CHARACTERS:
            self._orders[busiest].remove(moved)
            self._left[busiest] -= gain
            self._give(replica, moved)
