"""What happens to the part of SGLang's prefix tree that running requests use.

Node ids are SGLang's own. A node is announced when a request is bound below it for the first time, and a split
when a request is bound on the other side of it: until then neither matters to packing.
"""

from __future__ import annotations

import msgspec

ROOT = -1
"""Parent of first-level nodes, whatever the cache calls its root."""


class NodeInserted(msgspec.Struct, frozen=True, tag=True):
    """A node of `length` tokens below `parent`; `head`, 16 bytes, tells it from its siblings."""

    node: int
    parent: int
    length: int
    head: bytes


class NodeSplit(msgspec.Struct, frozen=True, tag=True):
    """The first `length` tokens of `node` moved to the new node `upper`; `node` keeps the rest and its id.

    `head` is the new head of `node`; `upper` takes over the old one.
    """

    node: int
    upper: int
    length: int
    head: bytes


class NodeEvicted(msgspec.Struct, frozen=True, tag=True):
    """The cache dropped a node."""

    node: int


class TreeReset(msgspec.Struct, frozen=True, tag=True):
    """The cache dropped everything."""


class RequestBound(msgspec.Struct, frozen=True, tag=True):
    """The row `row` of `req_to_token` holds the tree's own slots from the root down to the end of `node`.

    `length` is how many tokens the request has when it starts to decode, 0 while more of its prompt is to come.
    """

    rid: str
    row: int
    node: int
    length: int


class RequestAdvanced(msgspec.Struct, frozen=True, tag=True):
    """A bound request now ends at another node: its next chunk was prefilled, or more of it was cached."""

    rid: str
    row: int
    node: int
    length: int


class RequestWithdrawn(msgspec.Struct, frozen=True, tag=True):
    """A request's last token is being computed: it is in no batch any more, and gives its row back later."""

    rid: str


class RequestReleased(msgspec.Struct, frozen=True, tag=True):
    """A request gave its row back: finished, aborted or retracted."""

    rid: str


Event = (
    NodeInserted
    | NodeSplit
    | NodeEvicted
    | TreeReset
    | RequestBound
    | RequestAdvanced
    | RequestWithdrawn
    | RequestReleased
)
