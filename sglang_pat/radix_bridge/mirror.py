"""The mirror: the paths of the running requests, rebuilt from events alone."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from sglang_pat.packing import tree
from sglang_pat.radix_bridge.events import (
    ROOT,
    Event,
    NodeEvicted,
    NodeInserted,
    NodeSplit,
    RequestAdvanced,
    RequestBound,
    RequestReleased,
    TreeReset,
)


class InconsistentError(Exception):
    """An event does not fit what the mirror knows; the request concerned is served unpacked."""


class MirrorNode:
    """A shared stretch of KV: `length` tokens from position `start`, and the requests that end here."""

    __slots__ = ("children", "head", "id", "length", "parent", "requests", "start")

    def __init__(self, id: int, parent: MirrorNode | None, start: int, length: int, head: Hashable) -> None:
        self.id = id
        self.parent = parent
        self.start = start
        self.length = length
        self.head = head
        self.children: dict[Hashable, MirrorNode] = {}
        self.requests: dict[str, None] = {}

    @property
    def end(self) -> int:
        return self.start + self.length


class Mirror:
    """Nodes and bindings of running requests.

    Attributes:
        epoch: Changes whenever a binding does, so that an unchanged epoch means unchanged paths.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._clear()

    def _clear(self) -> None:
        self.root = MirrorNode(ROOT, None, 0, 0, None)
        self.nodes: dict[int, MirrorNode] = {ROOT: self.root}
        self.bindings: dict[str, tuple[MirrorNode, int]] = {}

    def apply(self, event: Event) -> None:
        """Apply one event.

        Raises:
            InconsistentError: The event names a node or request that is not there, or is there already.
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
                self.epoch += 1
            case RequestBound():
                self._bind(event.rid, event.row, event.node)
            case RequestAdvanced():
                if event.rid not in self.bindings:
                    raise InconsistentError(f"request {event.rid} advanced without being bound")
                self._bind(event.rid, self.bindings[event.rid][1], event.node)
            case RequestReleased():
                self._release(event.rid)

    def child(self, parent: int, head: Hashable) -> MirrorNode | None:
        """The node below `parent` that starts with `head`."""
        return self.nodes[parent].children.get(head)

    def any_request(self, node: MirrorNode) -> str:
        """A request whose path leads through `node`."""
        while not node.requests:
            node = next(iter(node.children.values()))
        return next(iter(node.requests))

    def prune(self, node: MirrorNode | None) -> None:
        """Forget `node` and its ancestors as far as no request uses them."""
        while node is not None and node.parent is not None and not node.requests and not node.children:
            del node.parent.children[node.head]
            del self.nodes[node.id]
            node = node.parent

    def paths(self, rids: Sequence[str]) -> list[tuple[int, int]]:
        """(node id, end) of each request's binding, (ROOT, 0) for one that is not bound: a batch's signature."""
        unbound = (self.root, -1)
        return [((node := self.bindings.get(rid, unbound)[0]).id, node.end) for rid in rids]

    def batch_tree(self, rids: Sequence[str]) -> list[tree.Node]:
        """The prefix tree of a batch: its first-level nodes, whose queries are positions in `rids`."""
        made: dict[int, tree.Node] = {}
        roots: list[tree.Node] = []
        for query, rid in enumerate(rids):
            node, below = self.bindings.get(rid, (self.root, -1))[0], None
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
        return roots

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
        # SGLang locks the nodes of running requests, so this is a fault there or here: whoever runs through the
        # node is unbound, that is served right but unpacked.
        stack = [node]
        while stack:
            below = stack.pop()
            stack.extend(below.children.values())
            for rid in list(below.requests):
                self._release(rid)
        raise InconsistentError(f"node {id} was evicted while requests were running on it")

    def _bind(self, rid: str, row: int, id: int) -> None:
        node = self._node(id)
        previous = self.bindings.get(rid)
        node.requests[rid] = None
        self.bindings[rid] = (node, row)
        self.epoch += 1
        if previous is not None and previous[0] is not node:
            del previous[0].requests[rid]
            self.prune(previous[0])

    def _release(self, rid: str) -> None:
        # Counted for unbound requests too: the batch is no longer what it was.
        self.epoch += 1
        binding = self.bindings.pop(rid, None)
        if binding is not None:
            del binding[0].requests[rid]
            self.prune(binding[0])

    def _node(self, id: int) -> MirrorNode:
        node = self.nodes.get(id)
        if node is None:
            raise InconsistentError(f"node {id} is not known")
        return node
