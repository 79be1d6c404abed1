"""In which order requests run, so that a prefix that many share is computed once.

Sorted by what they begin with, requests stand as the leaves of their prefix tree. The first one below a node is its leader: the others
there wait until it has been answered, for then the prefix is in the cache. Requests of other nodes run meanwhile.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence

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


class Order:
    """Hands requests out, by number of their place in `requests`."""

    def __init__(self, requests: Sequence[Request], shared: int = SHARED) -> None:
        """
        Args:
            requests: All of the job's.
            shared: Characters, as SHARED.
        """
        texts = [beginning(request) for request in requests]
        places = sorted(range(len(requests)), key=texts.__getitem__)
        self._places = places
        self._followers: dict[int, list[int]] = {}  # ranks, by the leader's place
        self._ready: list[int] = []  # a heap of ranks, which sorted numbers are
        # Of the nodes above the request before: how long the prefix is, and who leads it.
        above: list[tuple[int, int]] = []
        for rank, place in enumerate(places):
            length = common(texts[places[rank - 1]], texts[place]) if rank else 0
            leader = places[rank - 1] if rank else place
            while above and above[-1][0] > length:
                leader = above.pop()[1]
            if length >= shared:
                if not above or above[-1][0] < length:
                    above.append((length, leader))
                self._followers.setdefault(above[-1][1], []).append(rank)
            else:
                self._ready.append(rank)

    def take(self) -> int | None:
        """A request that may run now; None while all that are left wait."""
        return self._places[heapq.heappop(self._ready)] if self._ready else None

    def finish(self, place: int) -> None:
        """A request has an answer, or never will have: who waited for it may run."""
        for follower in self._followers.pop(place, ()):
            heapq.heappush(self._ready, follower)
