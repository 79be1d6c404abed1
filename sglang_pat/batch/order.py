"""In which order requests run on one cache, so that each prefix is computed once (BatchLLM, sections 4.2 and 4.3).

The first request below a node is its leader. Others there wait until the prefix is in the cache: until the leader has been answered, or
so much else was handed out after it that SGLang, which takes requests as they come, has computed it. If a replica lets siblings wait itself, they
are handed out as soon as nothing else can be. Meanwhile requests of other nodes run,
as many as the KV pool has room for: a node counts from its first request to its last one, so that it is in the pool when they come.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sglang_pat.batch.lengths import Lengths
from sglang_pat.batch.tree import Ints, Tree

QUEUED = 64
"""Requests that a replica has beyond those that its pool has room for: they wait there for nothing but room, which comes sooner than was
guessed where answers end early."""

CHUNK = 8192
"""Tokens that a replica prefills in a step, where it does not say: the most that SGLang has by itself on common GPUs."""


@dataclass(frozen=True)
class Room:
    """What a replica has room for, as far as it says.

    Attributes:
        tokens: Of its KV pool.
        requests: That it runs at a time.
        chunk: Tokens that it prefills in a step.
        defers: Whether requests wait there for what others compute (radix_bridge/siblings.py).
    """

    tokens: float = math.inf
    requests: float = math.inf
    chunk: float = CHUNK
    defers: bool = False

    @property
    def spacing(self) -> float:
        """Tokens of other prompts behind a leader's, after which its prefix is in the cache: SGLang forms a step's batch before the
        one ahead of it has ended, so that leader and follower must be two apart."""
        return 2 * self.chunk


class Order:
    """Hands out ranks that run on one cache.

    Attributes:
        waiting: What has not been handed out.
        running: What has been, and has no answer yet, with the tokens that each takes beside its nodes.
        full: Whether nothing more was handed out because there is no room.
        used: Tokens of the pool that are needed for what runs, and for those who will share its nodes.
    """

    def __init__(self, tree: Tree, lengths: Lengths, places: Ints, room: Room) -> None:
        self._tree, self._lengths, self.room = tree, lengths, room
        self.waiting: set[int] = set()
        self.running: dict[int, float] = {}
        self.full = False
        self.used = 0.0
        self._places = places
        self._ready: list[tuple[int, int]] = []  # a heap of places and ranks
        self._unfinished: dict[int, int] = {}  # ranks below a node
        self._nodes: dict[int, float] = {}  # tokens of what is in the cache or being computed
        self._leaders: dict[int, int] = {}  # of what is being computed
        self._led: dict[int, list[int]] = {}  # the same by leader
        self._followers: dict[int, list[int]] = {}  # who waits for a node
        self._spaced: deque[tuple[float, int]] = deque()
        self._ahead: set[int] = set()  # those that are only queued, as far as is known
        self._given = 0.0  # tokens to be prefilled, of all that was handed out

    def add(self, ranks: Iterable[int]) -> None:
        """Let these run here too."""
        for rank in ranks:
            self.waiting.add(rank)
            self._ready.append((int(self._places[rank]), rank))
            for node in self._tree.path(rank):
                self._unfinished[node] = self._unfinished.get(node, 0) + 1
        heapq.heapify(self._ready)

    def arrange(self, places: Ints) -> None:
        """Take what waits by other places."""
        self._places = places
        self._followers.clear()
        self._ready = [(int(places[rank]), rank) for rank in self.waiting]
        heapq.heapify(self._ready)

    def remove(self, ranks: Iterable[int]) -> None:
        """Hand them out no more."""
        for rank in ranks:
            self.waiting.remove(rank)
            self._leave(rank)

    def drop(self) -> list[int]:
        """Hand out nothing more; gives what waited and ran."""
        left = sorted(self.waiting.union(self.running))
        self.waiting.clear()
        return left

    def take(self) -> int | None:
        """A rank that may run now; None while all that are left wait."""
        self.full = False
        while self._some_ready():
            _, rank = self._ready[0]
            if rank not in self.waiting:
                heapq.heappop(self._ready)
                continue
            path = list(self._tree.path(rank))
            computed = next((node for node in path if node in self._leaders), None)
            if computed is not None:
                heapq.heappop(self._ready)
                self._followers.setdefault(computed, []).append(rank)
                continue
            if not self._fits(rank, path):
                self.full = True
                return None
            heapq.heappop(self._ready)
            self.waiting.remove(rank)
            self._hand_out(rank, path)
            return rank
        return None

    def _some_ready(self) -> bool:
        """Whether a rank may be ready. If all wait, and the replica lets siblings wait itself, they wait there: it has nothing else to do."""
        while not self._ready and self._spaced and self.room.defers:
            self._computed(self._spaced.popleft()[1])
        return bool(self._ready)

    def _own(self, rank: int, path: Sequence[int]) -> float:
        """Tokens of a prompt that it shares with nobody."""
        known = self._tree.depth[path[0]] if path else 0
        return float(self._tree.sizes[rank] - known) * self._lengths.scale(rank)

    def _edge(self, node: int) -> int:
        """Bytes of a node that are not those of the one above it."""
        parent = self._tree.parent[node]
        return int(self._tree.depth[node] - (self._tree.depth[parent] if parent >= 0 else 0))

    def _need(self, rank: int, path: Sequence[int]) -> float:
        # Answers grow: those that run are half as long in the mean.
        return self._own(rank, path) + self._lengths.answer(rank) / 2

    def _fits(self, rank: int, path: Sequence[int]) -> bool:
        if not self.running:
            return True
        if len(self.running) >= self.room.requests + QUEUED:
            return False
        new = sum(self._edge(node) for node in path if node not in self._nodes) * self._lengths.scale(rank)
        if self.used + new + self._need(rank, path) <= self.room.tokens:
            return True
        # What opens a node would drive another one out of the pool.
        return not new and len(self._ahead) < QUEUED

    def _hand_out(self, rank: int, path: Sequence[int]) -> None:
        scale = self._lengths.scale(rank)
        own, need = self._own(rank, path), self._need(rank, path)
        led = [node for node in path if node not in self._nodes]
        for node in led:
            self._nodes[node] = self._edge(node) * scale
            self._leaders[node] = rank
        new = sum(self._nodes[node] for node in led)
        if self.used + new + need > self.room.tokens:
            self._ahead.add(rank)
        self.running[rank] = need
        self.used += new + need
        self._given += new + own
        if led:
            self._led[rank] = led
            self._spaced.append((self._given + self.room.spacing, rank))
        while self._spaced and self._spaced[0][0] <= self._given:
            self._computed(self._spaced.popleft()[1])

    def _computed(self, leader: int) -> None:
        """What a leader computes is in the cache, or never will be by it."""
        for node in self._led.pop(leader, ()):
            self._leaders.pop(node, None)
            for rank in self._followers.pop(node, ()):
                heapq.heappush(self._ready, (int(self._places[rank]), rank))

    def finish(self, rank: int) -> None:
        """A request has an answer, or never will have: who waited for it may run."""
        self.used -= self.running.pop(rank)
        self._ahead.discard(rank)
        self._computed(rank)
        self._leave(rank)

    def _leave(self, rank: int) -> None:
        for node in self._tree.path(rank):
            self._unfinished[node] -= 1
            if not self._unfinished[node]:
                del self._unfinished[node]
                self.used -= self._nodes.pop(node, 0)
