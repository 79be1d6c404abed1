"""The mirror in Python: the oracle of csrc/packing/mirror.h."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_pat.packing import tree
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


class MirrorNode:
    """A node: `length` tokens from position `start`, and the requests whose paths end here."""

    __slots__ = ("children", "head", "id", "length", "parent", "requests", "start")

    def __init__(self, id: int, parent: MirrorNode | None, start: int, length: int, head: bytes) -> None:
        self.id = id
        self.parent = parent
        self.start = start
        self.length = length
        self.head = head
        self.children: dict[bytes, MirrorNode] = {}
        self.requests: dict[int, None] = {}

    @property
    def end(self) -> int:
        return self.start + self.length


class Mirror:
    """The nodes on the paths of requests, and where each path ends."""

    def __init__(self) -> None:
        self.bindings: dict[int, MirrorNode] = {}
        self._by_row: dict[int, int] = {}
        self._clear()

    def _clear(self) -> None:
        self.root = MirrorNode(ROOT, None, 0, 0, b"")
        self.nodes: dict[int, MirrorNode] = {ROOT: self.root}
        self.bindings = dict.fromkeys(self.bindings, self.root)
        self.root.requests = dict.fromkeys(self.bindings)

    def apply(self, event: Event) -> None:
        """Apply one event.

        Raises:
            InconsistentError: The event names an unknown node, or adds a known one.
        """
        match event:
            case NodeInserted():
                self._insert(event)
            case NodeSplit():
                self._split(event)
            case NodeEvicted():
                self._evict(event.node)
            case TreeReset():
                self._clear()
            case RequestBound():
                self._bind(event.request, self._node(event.node))
            case RequestsExpected():
                for request in event.requests:
                    self._bind(request, self.bindings.get(request, self.root))
            case RequestWithdrawn():
                pass  # its path stays
            case RequestReleased():
                self._release(event.request)

    def batch(self, requests: Sequence[int], seq_lens: list[int]) -> tree.Batch:
        """A batch with its prefix tree.

        A request that is shorter than its path shares nothing. If a request occurs twice, the second occurrence shares nothing.
        """
        made: dict[int, tree.Node] = {}
        roots: list[tree.Node] = []
        seen: set[int] = set()
        for query, request in enumerate(requests):
            node, below = self.bindings.get(request, self.root), None
            again = request in seen
            seen.add(request)
            if again or node.end > seq_lens[query]:
                continue
            while node.parent is not None:
                copy = made.get(node.id)
                is_new = copy is None
                if copy is None:
                    copy = made[node.id] = tree.Node(node.start, node.end, [], [])
                    if node.parent is self.root:
                        roots.append(copy)
                copy.queries.append(query)
                if below is not None:
                    copy.children.append(below)
                below = copy if is_new else None
                node = node.parent
        return tree.Batch(seq_lens, roots)

    def _insert(self, event: NodeInserted) -> None:
        parent = self._node(event.parent)
        if event.node in self.nodes or event.head in parent.children or event.length <= 0:
            raise InconsistentError(f"node {event.node} inserted below {event.parent} twice or empty")
        node = MirrorNode(event.node, parent, parent.end, event.length, event.head)
        parent.children[event.head] = self.nodes[event.node] = node

    def _split(self, event: NodeSplit) -> None:
        node = self._node(event.node)
        if event.upper in self.nodes or not 0 < event.length < node.length or node.parent is None:
            raise InconsistentError(f"node {event.node} of {node.length} tokens split at {event.length}")
        upper = MirrorNode(event.upper, node.parent, node.start, event.length, node.head)
        node.parent.children[node.head] = self.nodes[event.upper] = upper
        upper.children[event.head] = node
        node.parent, node.head = upper, event.head
        node.start, node.length = upper.end, node.length - event.length

    def _evict(self, id: int) -> None:
        node = self.nodes.get(id)
        if node is None or node is self.root:
            return
        # SGLang locks the nodes of running requests, so something is wrong there or here. Unbind every request that passes through the node:
        # it is served correctly, but unpacked.
        stack = [node]
        while stack:
            below = stack.pop()
            stack.extend(below.children.values())
            for request in list(below.requests):
                self._move(request, self.root)
        raise InconsistentError(f"node {id} was evicted while requests were running on it")

    def _bind(self, request: int, node: MirrorNode) -> None:
        self._move(request, node)
        # A row has one request. Release the old one last: some nodes above may have been on its path only.
        other = self._by_row.get(request % (1 << 32), request)
        self._by_row[request % (1 << 32)] = request
        if other != request:
            self._release(other)

    def _move(self, request: int, node: MirrorNode) -> None:
        before = self.bindings.get(request, node)
        before.requests.pop(request, None)
        node.requests[request] = None
        self.bindings[request] = node
        if before is not node:
            self._prune(before)

    def _release(self, request: int) -> None:
        if request in self.bindings:
            self._move(request, self.root)
            del self.bindings[request], self.root.requests[request]
            if self._by_row[request % (1 << 32)] == request:
                del self._by_row[request % (1 << 32)]

    def _prune(self, node: MirrorNode | None) -> None:
        """Remove `node` and its ancestors, up to the first one that a request uses."""
        while node is not None and node.parent is not None and not node.requests and not node.children:
            del node.parent.children[node.head]
            del self.nodes[node.id]
            node = node.parent

    def _node(self, id: int) -> MirrorNode:
        node = self.nodes.get(id)
        if node is None:
            raise InconsistentError(f"node {id} is not known")
        return node
