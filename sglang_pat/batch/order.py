"""In which order requests run, so that a prefix that many share is computed once.

Sorted by what they begin with, requests stand as the leaves of their prefix tree. The first one below a node is its leader: the others
there wait until it has been answered, for then the prefix is in the cache. Requests of other nodes run meanwhile.

A rank is a request's place among all sorted ones. What two ranks begin with together is the least of what neighbours between them do.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Sequence
from itertools import pairwise

from sglang_pat.batch.lines import Json, Request

SHARED = 1024
"""Characters that two requests must begin with to wait for each other: about 250 tokens, whose prefill takes less than a step."""


def beginning(request: Request) -> str:
    """What a prompt is made of, in the order in which a chat template puts it together: requests whose prompts begin alike do so here too."""
    body = request.body
    if request.url == "/v1/completions":
        return _text(body.get("prompt"))
    messages = body.get("messages")
    parts = [_text(body.get("tools")), *map(_text, messages if isinstance(messages, list) else [])]
    return "\n".join(parts)


def _text(part: object) -> str:
    try:
        return _text_of(part)
    except (RecursionError, TypeError, ValueError):
        # Nested too deep, or no JSON: the engine will say so.
        return ""


def _text_of(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("content"), str):
        rest: Json = {name: value for name, value in part.items() if name not in ("role", "content")}
        return f"{part.get('role')}\n{part['content']}" + (json.dumps(rest) if rest else "")
    return "" if part is None else json.dumps(part)


def common(first: str, second: str) -> int:
    """Characters that two texts begin with."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Tree:
    """All requests of a job, sorted.

    Attributes:
        requests: By rank.
        common: Characters that each begins with as the one before it does; 0 for the first.
        sizes: Characters that each begins with.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        texts = [beginning(request) for request in requests]
        places = sorted(range(len(requests)), key=texts.__getitem__)
        self.requests = [requests[place] for place in places]
        self.sizes = [len(texts[place]) for place in places]
        self.common = [0] * len(places)
        for rank in range(1, len(places)):
            self.common[rank] = common(texts[places[rank - 1]], texts[places[rank]])

    def steps(self, ranks: Sequence[int]) -> list[int]:
        """The same as `common` for some ranks, in ascending order, as if there were no others."""
        return [0, *(min(self.common[before + 1 : rank + 1]) for before, rank in pairwise(ranks))] if ranks else []


class Order:
    """Hands out ranks that run on one cache.

    Attributes:
        waiting: What has not been handed out.
    """

    def __init__(self, tree: Tree, shared: int = SHARED) -> None:
        """
        Args:
            tree: All requests.
            shared: Characters, as SHARED.
        """
        self._tree, self._shared = tree, shared
        self.waiting: set[int] = set()
        self._followers: dict[int, list[int]] = {}  # by their leader
        self._ready: list[int] = []  # a heap

    def add(self, ranks: Sequence[int]) -> None:
        """Let these run here too.

        Args:
            ranks: In ascending order.
        """
        self.waiting.update(ranks)
        # Of the nodes above the request before: how long the prefix is, and who leads it.
        above: list[tuple[int, int]] = []
        before = -1
        for rank, length in zip(ranks, self._tree.steps(ranks), strict=True):
            leader = before
            while above and above[-1][0] > length:
                leader = above.pop()[1]
            if before >= 0 and length >= self._shared:
                if not above or above[-1][0] < length:
                    above.append((length, leader))
                self._followers.setdefault(above[-1][1], []).append(rank)
            else:
                heapq.heappush(self._ready, rank)
            before = rank

    def remove(self, ranks: Iterable[int]) -> None:
        """Hand them out no more."""
        self.waiting.difference_update(ranks)

    def take(self) -> int | None:
        """A rank that may run now; None while all that are left wait."""
        while self._ready:
            rank = heapq.heappop(self._ready)
            if rank in self.waiting:
                self.waiting.remove(rank)
                return rank
        return None

    def finish(self, rank: int) -> None:
        """A request has an answer, or never will have: who waited for it may run."""
        for follower in self._followers.pop(rank, ()):
            heapq.heappush(self._ready, follower)
