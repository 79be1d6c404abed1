"""Which replica answers what: each has a cache of its own, so requests that begin alike stay together.

Replicas get equal shares of the prefix tree's leaves, by tokens, cut where neighbours have least in common. Who has nothing left to start
gets half of what waits where most does, cut likewise: lengths of answers are guesses, and servers differ. The share of a replica that is
lost is shared out again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_pat.batch.lengths import Lengths, Usage
from sglang_pat.batch.order import Order, Room
from sglang_pat.batch.tree import BYTES, Tree

SLACK = 1 / 8
"""Part of a share by which another may be larger, so that a cut separates less."""

FIRST = 64
"""Answers after which requests are arranged by how long answers are; then whenever twice as many are there."""


def cut(steps: Sequence[int], costs: Sequence[int], aim: float, slack: float) -> int:
    """Where to divide requests in two.

    Args:
        steps: Bytes that each begins with as the one before it does.
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
        twice = steps[place] / BYTES if place < len(costs) else 0
        loss = (twice + max(0.0, off - slack), off)
        if loss < best:
            best, found = loss, place
    return found


class Shares:
    """Hands out ranks with the replica that each shall run on.

    Attributes:
        living: The replicas that are not lost.
    """

    def __init__(self, tree: Tree, rooms: Sequence[Room], window: int) -> None:
        self._tree, self._window = tree, window
        self._lengths = Lengths(tree)
        # Guesses alone: shares are as even as they can be now.
        scales = self._lengths.scales(1 / BYTES)
        answers = self._lengths.answers()
        self._costs: list[int] = (1 + (tree.sizes - tree.common) * scales + answers).astype(np.int64).tolist()
        places = tree.arrange(answers, scales)
        self._orders = [Order(tree, self._lengths, places, room) for room in rooms]
        self._answered, self._due = 0, FIRST
        self._left = [0] * len(rooms)  # tokens that wait
        self.living = list(range(len(rooms)))
        self._share(range(len(tree)))

    def take(self) -> tuple[int, int] | None:
        """A replica and a rank that may run there now; None while windows are full or all that are left wait."""
        free = [one for one in self.living if len(self._orders[one].running) < self._window]
        for replica in sorted(free, key=lambda one: len(self._orders[one].running)):
            if not self._orders[replica].waiting:
                self._relieve(replica)
            rank = self._orders[replica].take()
            if rank is not None:
                self._left[replica] -= self._costs[rank]
                return replica, rank
        return None

    def finish(self, replica: int, rank: int, usage: Usage) -> None:
        """A request has an answer, or never will have."""
        self._orders[replica].finish(rank)
        self._lengths.learn(rank, usage)
        self._answered += 1
        if self._answered >= self._due:
            self._due = 2 * self._answered
            places = self._tree.arrange(self._lengths.answers(), self._lengths.scales())
            for one in self.living:
                self._orders[one].arrange(places)

    def lose(self, replica: int) -> None:
        """A replica answers no more: the others get its share, also what runs there."""
        self.living.remove(replica)
        moved = self._orders[replica].drop()
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
        # Where there is room for more, what waits does so for a prefix that is being computed there.
        orders = self._orders
        full = [one for one in self.living if orders[one].full or len(orders[one].running) >= self._window]
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
        if moved and gain > self._tree.common[moved[0]] / BYTES:
            self._orders[busiest].remove(moved)
            self._left[busiest] -= gain
            self._give(replica, moved)
