"""Siblings: requests wait for a prefix that another request is computing, instead of computing it again (BatchLLM, section 4, for requests that
arrive one by one).

SGLang forms a batch before the previous batch's result is in the tree, and matches requests with the tree only. So siblings in one batch, or in two
consecutive batches, all compute the prefix that they share. Here the first of them is the leader. The others stay in SGLang's waiting queue until
the tree has the prefix, which is one step later, or until the leader is gone.

All decisions depend only on the order of SGLang's calls, so the ranks of a replica decide alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from typing import Any

from sglang_pat import compat

BLOCK = 128
"""A request waits if it would compute at least so many tokens that a leader is computing. With 256, jobs with BatchLLM's shortest prefixes (200
tokens, table 2) saved 88 to 98 % of what they could, now all (benchmarks/notes/offline-batches.md, "Jobs on H200s"). SGLang's lpm puts those behind that share 32."""

TOKEN = 8
"""Bytes of a token in SGLang's `array("q")`."""

STEPS = 16
"""The most steps that a request waits. A leader takes two steps with overlap scheduling, and one more per further pipeline stage. So this is enough
for prefixes of several levels, and limits the delay if leaders keep vanishing."""

LOOKS = 256
"""The most requests that are deferred in one step, because SGLang matches each with the tree first. The check here takes 5 to 27 us
(`python benchmarks/siblings.py`, one core, 2026-11-26)."""

COMPARED = 1 << 24
"""Tokens compared in one step, beyond which nobody is deferred: 5 to 11 ms, about what LOOKS questions take, at 0.3 to
0.65 ns a token (one core, 2026-11-29; 0.7 to 1 ns on a busy machine; `python benchmarks/siblings.py MODEL --rounds 0`).
Only cached tokens are many, and they are not compared where requests end at the same node. But clients can send prompts that differ late: 128 beside 128 leaders of 100,000 tokens took half a second."""

LEADER = 512
"""A comparison counts as so many tokens more: it takes 0.2 to 0.35 us where the block is another one (likewise, 64 leaders against 1)."""


class _Leader:
    """A request that is being computed: its tokens, TOKEN bytes each (the first BLOCK tokens name its bucket), the step in which it started, how many
    of its tokens were cached then, and the node of the tree where these end."""

    __slots__ = ("bucket", "cached", "node", "step", "tokens")

    def __init__(self, bucket: Hashable, tokens: bytes, step: int, cached: int, node: Any) -> None:
        self.bucket, self.tokens, self.step, self.cached, self.node = bucket, tokens, step, cached, node


class Siblings:
    """Decides which requests wait, for one scheduler; hooks.py calls it.

    Attributes:
        deferred: How often a request was deferred by a step.
    """

    def __init__(self) -> None:
        self.deferred = 0
        self._leaders: dict[Any, _Leader] = {}  # requests that are being computed
        self._buckets: dict[Hashable, dict[Any, _Leader]] = {}
        self._waited: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._adder: weakref.ref[Any] | None = None
        self._step = 0
        self._looks = self._compared = 0

    def defer(self, adder: Any, req: Any) -> Any:
        """Defer `req` if a leader is computing what comes next in it.

        Args:
            adder: SGLang's `PrefillAdder`, which collects the requests of one step; each step has its own.
            req: A request that was just matched with the tree.

        Returns:
            None if `req` should be computed in this step; otherwise what `add_one_req` should return: whether other requests may still be added.
        """
        if self._adder is None or self._adder() is not adder:
            self._begin(adder)
        # Others were preempted to make room for this request, so it must run now.
        if not self._leaders or adder.preempt_list or not _shares(adder, req):
            return None
        cached, node = compat.requests.cached_tokens(req), compat.requests.node(req)
        end = cached + BLOCK
        end += -end % adder.page_size
        if end > compat.requests.reusable_tokens(req) or self._waited.get(req, 0) >= STEPS:
            return None
        # As bytes, one block is compared in a fraction of a microsecond.
        tokens = memoryview(req.full_untruncated_fill_ids).cast("B")
        block = tokens[TOKEN * (end - BLOCK) : TOKEN * end]
        for leader in self._buckets.get(_bucket(req, tokens), {}).values():
            if self._compared >= COMPARED:
                break
            self._compared += LEADER
            # Not by `==`, which compares a memoryview number by number.
            if not leader.tokens.startswith(block, TOKEN * (end - BLOCK)):
                continue
            # Who ends at the same node of the tree has the same tokens up to there: a long document need not be compared.
            known = TOKEN * cached if node is not None and leader.node == node and leader.cached == cached else 0
            self._compared += end - known // TOKEN
            if leader.tokens.startswith(tokens[known : TOKEN * end], known):
                self._waited[req] = self._waited.get(req, 0) + 1
                self.deferred += 1
                self._looks += 1
                return adder.budget_state() if self._looks < LOOKS else compat.requests.no_more_requests()
        return None

    def computes(self, adder: Any, req: Any) -> None:
        """`req` is computed in this step: the whole prompt, or one chunk of it."""
        cached = compat.requests.present_tokens(req)
        if not _shares(adder, req) or len(req.full_untruncated_fill_ids) - cached < BLOCK:
            return
        # A copy: SGLang extends the array in place, which fails while a memoryview of it exists.
        tokens = req.full_untruncated_fill_ids.tobytes()
        leader = _Leader(_bucket(req, tokens), tokens, self._step, cached, compat.requests.node(req))
        self._leaders[req] = leader
        self._buckets.setdefault(leader.bucket, {})[req] = leader

    def ended(self, req: Any) -> None:
        """What `req` computed is in the tree, or never will be (aborted, failed, retracted)."""
        leader = self._leaders.pop(req, None)
        if leader is not None:
            bucket = self._buckets[leader.bucket]
            del bucket[req]
            if not bucket:
                del self._buckets[leader.bucket]

    def _begin(self, adder: Any) -> None:
        self._adder = weakref.ref(adder)
        self._step += 1
        self._looks = self._compared = 0
        # No leader should be that old, unless SGLang ends requests in a way that hooks.py does not know.
        for req in [req for req, leader in self._leaders.items() if self._step - leader.step > STEPS]:
            self.ended(req)


def _shares(adder: Any, req: Any) -> bool:
    """Whether this request and others find each other's prefixes in the cache."""
    return compat.cache.finds_prefixes(adder.tree_cache) and compat.requests.is_named_by_tokens(req)


def _bucket(req: Any, tokens: bytes | memoryview) -> Hashable:
    """The bucket of a request. Requests in different buckets share no block."""
    return compat.requests.namespace(req), bytes(tokens[: TOKEN * BLOCK])
