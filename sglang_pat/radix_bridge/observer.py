"""Turns what SGLang's cache does to requests into events.

Nothing is read from inside the tree but the path of a request that was just cached, which every implementation can
tell (Python or Rust, `RadixCache` or `UnifiedRadixCache`). Two facts about radix trees turn paths into structure:
siblings differ in their first page, so a path that meets an unknown node where the mirror has another one with the
same first page has met the upper half of a split; and a split leaves the old id with the lower half.
"""

from __future__ import annotations

import logging
import secrets
from array import array
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from sglang_pat import compat
from sglang_pat.kernels.scheduler import NativeScheduler
from sglang_pat.packing.tree import InconsistentError
from sglang_pat.radix_bridge.events import (
    ROOT,
    Event,
    NodeEvicted,
    NodeInserted,
    NodeSplit,
    RequestAdvanced,
    RequestBound,
    RequestReleased,
    RequestWithdrawn,
    TreeReset,
)

logger = logging.getLogger(__name__)

_SECRET = secrets.token_bytes(16)
"""Keys the digests of first pages: no prompt can be made to look like the beginning of another."""


class Observer:
    """Feeds the scheduler; the methods named `on_*` are what `hooks` calls.

    Attributes:
        scheduler: Mirrors the paths and expects the batch.
        subscribers: Called with every event after the scheduler has taken it.
        nodes: Nodes announced so far.
        faults: Times that the cache and the mirror disagreed; the request concerned is then served unpacked.
    """

    def __init__(self, scheduler: NativeScheduler) -> None:
        self.scheduler = scheduler
        self.subscribers: list[Callable[[Event], None]] = []
        self.nodes = 0
        self.faults = 0
        self._requests: dict[str, Any] = {}

    def on_cached(self, cache: Any, req: Any) -> None:
        """`req` was just cached: its row holds the tree's slots for the whole of its path."""
        if cache.disable or req.finished():
            return
        try:
            self._bind(cache, req)
        except InconsistentError as fault:
            self._count_fault("request %s is decoded unpacked: %s", req.rid, fault)
            self.on_released(req)

    def on_finishing(self, reqs: list[Any]) -> None:
        """The batch that comes next is without `reqs`, whose last tokens are being computed."""
        for req in reqs:
            self._emit(RequestWithdrawn(req.rid))

    def on_released(self, req: Any) -> None:
        """`req` gave its row back."""
        self._requests.pop(req.rid, None)
        self._emit(RequestReleased(req.rid))

    def on_evicted(self, node: int) -> None:
        """The cache dropped node `node`."""
        try:
            self._emit(NodeEvicted(node))
        except InconsistentError as fault:
            self._count_fault("%s", fault)

    def on_reset(self) -> None:
        """The cache dropped everything."""
        self._requests.clear()
        self._emit(TreeReset())

    def on_fault(self) -> None:
        """Something unforeseen was raised: forget every path, so that what runs now is decoded unpacked."""
        self._count_fault("the prefix cache could not be followed", exc_info=True)
        self.on_reset()

    def _count_fault(self, message: str, *details: Any, exc_info: bool = False) -> None:
        if self.faults == 0:
            logger.warning(message + " (reported once, then counted)", *details, exc_info=exc_info)
        self.faults += 1

    def _emit(self, event: Event) -> None:
        apply(self.scheduler, event)
        self.nodes += isinstance(event, NodeInserted | NodeSplit)
        for subscriber in self.subscribers:
            subscriber(event)

    def _bind(self, cache: Any, req: Any) -> None:
        path = compat.path(cache, req)
        length = sum(length for _, length in path)
        if length != compat.protected_len(req):
            raise InconsistentError(f"its path has {length} tokens, of which {compat.protected_len(req)} are its own")
        parent, start = ROOT, 0
        try:
            for node, length in path:
                self._announce(req, cache.page_size, node, length, parent, start)
                parent, start = node, start + length
        except InconsistentError:
            self.scheduler.prune(parent)
            raise
        self._requests[req.rid] = req
        event = RequestAdvanced if req.rid in self.scheduler else RequestBound
        self._emit(event(req.rid, compat.row(req), parent, compat.decode_len(req)))

    def _announce(self, req: Any, page: int, node: int, length: int, parent: int, start: int) -> None:
        """Make the mirror know the next node of a path, `length` tokens from `start` on, below `parent`."""
        known = self.scheduler.find(node)
        if known is None:
            head = _head(req, start, page)
            other = self.scheduler.child(parent, head)
            if other is None:
                self._emit(NodeInserted(node, parent, length, head))
            else:
                witness = self._requests[self.scheduler.any_request(other)]
                self._emit(NodeSplit(other, node, length, _head(witness, start + length, page)))
        elif known != (parent, length):
            raise InconsistentError(f"node {node} is not where it was")


def apply(scheduler: NativeScheduler, event: Event) -> None:
    """Tell `scheduler` one event; a request whose prompt is complete is expected in the next batch.

    Raises:
        InconsistentError: The event names a node or request that is not there, or is there already.
    """
    match event:
        case NodeInserted(node, parent, length, head):
            scheduler.insert(node, parent, length, head)
        case NodeSplit(node, upper, length, head):
            scheduler.split(node, upper, length, head)
        case NodeEvicted(node):
            scheduler.evict(node)
        case TreeReset():
            scheduler.reset()
        case RequestBound(rid, row, node, length) | RequestAdvanced(rid, row, node, length):
            scheduler.bind(rid, row, node)
            if length > 0:
                scheduler.join(rid, length)
        case RequestWithdrawn(rid):
            scheduler.withdraw(rid)
        case RequestReleased(rid):
            scheduler.release(rid)


def _head(req: Any, start: int, page: int) -> bytes:
    """What tells a node from its siblings: its first page, and at the first level its namespace."""
    digest = blake2b(array("q", compat.tokens(req, start, start + page)).tobytes(), digest_size=16, key=_SECRET)
    if start == 0:
        digest.update(repr(compat.namespace(req)).encode())
    return digest.digest()
