"""Requests that wait for a prefix which another one is computing, in place of computing it again (BatchLLM, section 4, for requests that come
one by one).

SGLang forms a batch before the last one's result is in the tree, and matches a request with the tree alone: siblings in one batch, or in
two that follow each other, all compute the prefix that they share. Here the first of them is the leader; the others stay in SGLang's
waiting queue until the tree has what they share, which is one step later, or until the leader is gone.

Everything follows from the order of SGLang's calls, so that the ranks of a replica decide alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

from sglang_pat import compat

BLOCK = 256
"""Tokens to be computed that a request must have in common with a leader: as many as `batch.order.SHARED` characters are. Not tuned on a GPU."""

TOKEN = 8
"""Bytes of a token, as SGLang keeps them (`array("q")`)."""

STEPS = 16
"""Steps that a request is put off at most. A leader takes two with overlap scheduling, and one more for each further stage of a pipeline;
so this is enough for prefixes of several levels, and the most that leaders which vanish again and again can cost."""

LOOKS = 256
"""Requests that are put off in one step, at most: SGLang matches each with the tree before. The question here takes 6 to 31 us
(`python benchmarks/siblings.py`, one core, 2026-11-24)."""


class _Leader:
    """What a request is computing: its tokens, TOKEN bytes each, of which the first BLOCK name its bucket; and since which step."""

    __slots__ = ("bucket", "step", "tokens")

    def __init__(self, bucket: Hashable, tokens: bytes, step: int) -> None:
        self.bucket, self.tokens, self.step = bucket, tokens, step


class Siblings:
    """Decides for one scheduler; hooks.py calls it.

    Attributes:
        deferred: How often a request was put off, by a step each time.
    """

    def __init__(self) -> None:
        self.deferred = 0
        self._leaders: dict[Any, _Leader] = {}  # SGLang's requests that are being computed, the oldest first
        self._buckets: dict[Hashable, dict[Any, _Leader]] = {}
        self._waited: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._adder: weakref.ref[Any] | None = None
        self._step = 0
        self._looks = 0

    def defer(self, adder: Any, req: Any) -> Any:
        """Put `req` off, if a leader computes what comes next in it.

        Args:
            adder: SGLang's `PrefillAdder`, which collects a step's requests; each step has its own.
            req: Just matched with the tree.

        Returns:
            None if it shall be computed in this step; otherwise what `add_one_req` shall return: whether others still can be.
        """
        if self._adder is None or self._adder() is not adder:
            self._begin(adder)
        # Who was to make room has been sent away for this request: it must come now.
        if not self._leaders or adder.preempt_list or not _shares(adder, req):
            return None
        end = compat.requests.cached_tokens(req) + BLOCK
        end += -end % adder.page_size
        if end > compat.requests.reusable_tokens(req) or self._waited.get(req, 0) >= STEPS:
            return None
        # Bytes: those of one block are compared in a fraction of a microsecond.
        tokens = memoryview(req.full_untruncated_fill_ids).cast("B")
        head, block = tokens[: TOKEN * end], bytes(tokens[TOKEN * (end - BLOCK) : TOKEN * end])
        for leader in self._buckets.get(_bucket(req, tokens), {}).values():
            if leader.tokens[TOKEN * (end - BLOCK) : TOKEN * end] == block and leader.tokens[: TOKEN * end] == head:
                self._waited[req] = self._waited.get(req, 0) + 1
                self.deferred += 1
                self._looks += 1
                return adder.budget_state() if self._looks < LOOKS else compat.requests.no_more_requests()
        return None

    def computes(self, adder: Any, req: Any) -> None:
        """`req` is computed in this step: the whole of it, or one chunk, with the others to follow."""
        if not _shares(adder, req):
            return
        # A copy: SGLang extends the array in place, which it cannot while somebody looks into it.
        tokens = req.full_untruncated_fill_ids.tobytes()
        if len(tokens) // TOKEN - compat.requests.cached_tokens(req) >= BLOCK:
            leader = _Leader(_bucket(req, tokens), tokens, self._step)
            self._leaders[req] = leader
            self._buckets.setdefault(leader.bucket, {})[req] = leader

    def ended(self, req: Any) -> None:
        """What `req` computed is in the tree, or never will be: it was aborted, has failed, or is retracted."""
        leader = self._leaders.pop(req, None)
        if leader is not None:
            bucket = self._buckets[leader.bucket]
            del bucket[req]
            if not bucket:
                del self._buckets[leader.bucket]

    def _begin(self, adder: Any) -> None:
        self._adder = weakref.ref(adder)
        self._step += 1
        self._looks = 0
        # None is as old as that, unless SGLang has a way to end a request that hooks.py does not know.
        for req in [req for req, leader in self._leaders.items() if self._step - leader.step > STEPS]:
            self.ended(req)


def _shares(adder: Any, req: Any) -> bool:
    """Whether what this request computes is found by others, and the other way round."""
    return compat.cache.finds_prefixes(adder.tree_cache) and compat.requests.is_named_by_tokens(req)


def _bucket(req: Any, tokens: bytes | memoryview) -> Hashable:
    """Requests of different buckets have no BLOCK in common."""
    return compat.requests.namespace(req), bytes(tokens[: TOKEN * BLOCK])
