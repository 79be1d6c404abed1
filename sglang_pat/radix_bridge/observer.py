"""Turns what SGLang's cache does to requests into events.

The only thing read from the tree is the path of a request that was just cached, which every implementation offers (Python or Rust, `RadixCache` or
`UnifiedRadixCache`). Two facts about radix trees turn paths into structure. First, siblings differ in their first page: if a path has an unknown
node where the mirror has another node with the same first page, then that node was split, and the unknown one is its upper half. Second, the lower
half of a split keeps the old id.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import sys
from array import array
from collections.abc import Callable, Iterator
from hashlib import blake2b
from typing import Any

from sglang_pat import compat
from sglang_pat.packing.native import NativeScheduler
from sglang_pat.packing.tree import InconsistentError
from sglang_pat.radix_bridge.events import (
    ROOT,
    Event,
    NodeEvicted,
    NodeInserted,
    NodeSplit,
    RequestBound,
    RequestReleased,
    RequestsExpected,
    RequestWithdrawn,
    TreeReset,
)
from sglang_pat.text import printable

logger = logging.getLogger(__name__)

ROW = (1 << 32) - 1
"""The bits of a request's number that are its row."""

TRIES = 8
"""After how many faults the observer gives up, if no path was followed yet, or since one was they were about no single request: enough that no few odd
requests, which a client may send first, decide for all."""

CHECKS = 8
"""How many pairs of requests are compared in SGLang's table before its paths are trusted. On a GPU each waits for the scheduler's stream."""

_SECRET = secrets.token_bytes(16)
"""Key of the digests of first pages, so that no client can craft a collision."""


class Observer:
    """Feeds events to the schedulers; `hooks` calls the methods named `on_*`.

    If something goes wrong with a request, that request alone is decoded unpacked.

    Attributes:
        scheduler: Mirrors the paths, and tracks the next batch.
        subscribers: Called with every event, after the schedulers.
        planners: Called when something has happened that may change the next batch: after each event, or once for what `hold` and `resume` enclose.
        nodes: How many nodes were announced so far.
        faults: How often the cache and the mirror disagreed.
        unpacked_because: Why every request is decoded unpacked; empty if none is for such a reason.
    """

    def __init__(self, scheduler: NativeScheduler, *others: NativeScheduler) -> None:
        """
        Args:
            others: Schedulers of other layer groups; they get the same events.
        """
        self.scheduler = scheduler
        self._others = others
        self.subscribers: list[Callable[[Event], None]] = []
        self.planners: list[Callable[[], None]] = []
        self.nodes = 0
        self.faults = 0
        self.unpacked_because = ""
        self._follows = False  # whether the path of any request was followed
        self._failures = 0  # unexpected exceptions that were about no single request, since a path was followed
        self._unchecked = CHECKS
        self._reqs: dict[int, Any] = {}  # by row: the `Req` that was bound last
        self._holds, self._changed = 0, False

    def hold(self) -> None:
        """More events follow that belong together, until `resume`: a plan for what lies between would be made in vain."""
        self._holds += 1

    def resume(self) -> None:
        """The events that belong together are complete."""
        self._holds = max(0, self._holds - 1)
        if self._changed and not self._holds:
            self._tell_planners()

    def on_prefill(self, requests: list[int], lengths: list[int], rids: list[str]) -> None:
        """`requests` are being prefilled up to these lengths; they decode next, one token longer."""
        self._emit(RequestsExpected(requests, [length + 1 for length in lengths], rids))

    def on_extending(self, cache: Any, reqs: list[Any]) -> None:
        """`reqs` are about to be extended; their rows hold the tree's slots for what is cached. Bound requests stay as they are."""
        if cache.disable or self.unpacked_because:
            return
        # The tree stays as it is meanwhile: where one request was bound, others with the same last node are too.
        bound: dict[tuple[Any, int], int] = {}
        with self._together():
            for req, request in zip(reqs, compat.requests.numbers_of(cache.req_to_token_pool, reqs), strict=True):
                if request is None or self.scheduler.binding(request) is not None:
                    continue
                self._follow(cache, req, request, bound=bound)

    def on_cached(self, cache: Any, req: Any, chunk: bool = False) -> None:
        """`req` was just cached, or a chunk of it: its row holds the tree's slots for its whole path."""
        if cache.disable or req.finished():
            return
        request = compat.requests.number(cache.req_to_token_pool, req)
        if request is None:
            return
        self._follow(cache, req, request, 0 if chunk else compat.requests.decode_len(req))

    def on_finishing(self, requests: list[int]) -> None:
        """The last tokens of `requests` are being computed; the next batch does not include them."""
        with self._together():
            for request in requests:
                self._emit(RequestWithdrawn(request))

    def on_released(self, request: int) -> None:
        """`request` gave its row back."""
        self._reqs.pop(request & ROW, None)
        self._emit(RequestReleased(request))

    def on_evicted(self, node: int) -> None:
        """The cache dropped node `node`."""
        try:
            self._emit(NodeEvicted(node))
        except InconsistentError as fault:
            self._count_fault("%s", fault)

    def on_reset(self) -> None:
        """The cache dropped everything."""
        self._emit(TreeReset())

    def on_fault(self) -> None:
        """An unexpected exception: forget all paths, so that running requests are decoded unpacked."""
        error = sys.exc_info()[1]
        self._count_fault("the prefix cache could not be followed: %r", error, exc_info=True)
        self._failures += 1
        if self._failures >= TRIES:
            self.give_up(f"the prefix cache could not be followed: {error!r}")
        self.on_reset()

    def give_up(self, reason: str) -> None:
        """Follow nothing from now on: every request is decoded unpacked."""
        if not self.unpacked_because:
            try:
                self.on_reset()
            finally:
                self.unpacked_because = printable(reason)[:500]  # a line of a log
                logger.warning("sglang-pat serves unpacked: %s", self.unpacked_because)

    def _count_fault(self, message: str, *details: Any, exc_info: bool = False) -> None:
        if self.faults == 0:
            logger.warning(message + " (reported once, then counted)", *details, exc_info=exc_info)
        self.faults += 1
        if not self._follows and self.faults >= TRIES:
            self.give_up(f"no path of a request could be followed: {details[-1]}")

    def _emit(self, event: Event) -> None:
        if self.unpacked_because and not isinstance(event, RequestReleased):
            return
        faults = []
        for scheduler in (self.scheduler, *self._others):
            try:
                apply(scheduler, event)
            except InconsistentError as fault:
                # An eviction takes effect all the same, and must do so in every scheduler.
                faults.append(fault)
        if not faults or isinstance(event, NodeEvicted):
            self.nodes += isinstance(event, NodeInserted | NodeSplit)
            for subscriber in self.subscribers:
                subscriber(event)
            self._changed = True
            if not self._holds:
                self._tell_planners()
        if faults:
            raise faults[0]

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        self.hold()
        try:
            yield
        finally:
            self.resume()

    def _tell_planners(self) -> None:
        self._changed = False
        for planner in self.planners:
            planner()

    def _follow(
        self, cache: Any, req: Any, request: int, decodes_with: int = 0, bound: dict[tuple[Any, int], int] | None = None
    ) -> None:
        """Bind `req`, whose number is `request`.

        Args:
            decodes_with: The `length` of RequestBound.
            bound: By last nodes of paths, and how many tokens these have: where requests were bound since the tree changed.
        """
        if self.unpacked_because:
            return
        self._reqs[request & ROW] = req
        try:
            tokens = compat.requests.protected_len(req)
            if bound is not None:
                end = compat.cache.last_node(cache, req), tokens
                if end in bound:
                    self._emit(RequestBound(request, bound[end], decodes_with))
                    return
            path = compat.cache.path(cache, req)
            sharer = self._sharer(request, path)
            node = self._bind(request, path, tokens, compat.cache.head_tokens(cache), decodes_with)
            if bound is not None:
                bound[end] = node
            if node != ROOT:
                self._check(cache, request, sharer)
        except Exception as fault:
            unforeseen = not isinstance(fault, InconsistentError)
            self._count_fault("a request is decoded unpacked: %s", fault, exc_info=unforeseen)
            self._emit(RequestBound(request, ROOT, 0))

    def _sharer(self, request: int, path: list[tuple[int, int]] | None) -> tuple[int, int] | None:
        """The row of another request that the mirror has on this path, and the tokens that they have in common; None if there is none, or after CHECKS of
        them."""
        if path is None or not self._unchecked:
            return None
        end = sum(length for _, length in path)
        for node, length in reversed(path):
            if self.scheduler.find(node) is not None:
                other = self.scheduler.any_request(node)
                return None if other == request else (other & ROW, end)
            end -= length
        return None

    def _check(self, cache: Any, request: int, sharer: tuple[int, int] | None) -> None:
        """Compare what the mirror says of two requests with SGLang's own table. If their KV slots differ, no path is to be trusted."""
        self._follows = True
        self._failures = 0
        if sharer is None:
            return
        self._unchecked -= 1
        (other, end), table = sharer, cache.req_to_token_pool.req_to_token
        if not table[request & ROW, :end].equal(table[other, :end]):
            self.faults += 1
            self.give_up("two requests on one path of the prefix cache have different KV slots")

    def _bind(self, request: int, path: list[tuple[int, int]] | None, tokens: int, head: int, decodes_with: int) -> int:
        """Bind a request along `path`, and return its last node. Its first `tokens` tokens are in the tree, which distinguishes siblings by `head`
        tokens."""
        if path is None:
            self._emit(RequestBound(request, ROOT, 0))
            return ROOT
        total = sum(length for _, length in path)
        if total != tokens:
            raise InconsistentError(f"its path has {total} tokens, of which {tokens} are its own")
        req = self._reqs[request & ROW]
        parent, start = ROOT, 0
        try:
            for node, length in path:
                self._announce(req, head, node, length, parent, start)
                parent, start = node, start + length
        finally:
            # In any case: announced nodes without a request would stay forever.
            self._emit(RequestBound(request, parent, decodes_with if start == tokens else 0))
        return parent

    def _announce(self, req: Any, tokens: int, node: int, length: int, parent: int, start: int) -> None:
        """Announce the next node of a path, below `parent`, with `length` tokens from position `start`, unless it is known."""
        known = self.scheduler.find(node)
        if known is None:
            head = _head(req, start, tokens)
            other = self.scheduler.child(parent, head)
            if other is None:
                self._emit(NodeInserted(node, parent, length, head))
            else:
                witness = self._reqs[self.scheduler.any_request(other) & ROW]
                self._emit(NodeSplit(other, node, length, _head(witness, start + length, tokens)))
        elif known != (parent, length):
            raise InconsistentError(f"node {node} is not where it was")


def apply(scheduler: NativeScheduler, event: Event) -> None:
    """Apply one event to `scheduler`. A request whose prompt is complete joins the next batch.

    Raises:
        InconsistentError: The event names an unknown node, or adds a known one.
    """
    match event:  # the most frequent first
        case RequestBound(request, node, length):
            scheduler.bind(request, node)
            if length > 0:
                scheduler.expect(request, length)
        case RequestReleased(request):
            scheduler.release(request)
        case NodeInserted(node, parent, length, head):
            scheduler.insert(node, parent, length, head)
        case NodeSplit(node, upper, length, head):
            scheduler.split(node, upper, length, head)
        case RequestWithdrawn(request):
            scheduler.withdraw(request)
        case RequestsExpected(requests, lengths):
            for request, length in zip(requests, lengths, strict=True):
                scheduler.expect(request, length)
        case NodeEvicted(node):
            scheduler.evict(node)
        case TreeReset():
            scheduler.reset()


def _head(req: Any, start: int, tokens: int) -> bytes:
    """A digest that distinguishes a node from its siblings: of its first tokens and, at the first level, its namespace."""
    digest = blake2b(
        array("q", compat.requests.tokens(req, start, start + tokens)).tobytes(), digest_size=16, key=_SECRET
    )
    if start == 0:
        digest.update(repr(compat.requests.namespace(req)).encode())
    return digest.digest()
