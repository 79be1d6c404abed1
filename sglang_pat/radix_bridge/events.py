"""What happens to the part of SGLang's prefix tree that running requests use.

Node ids are SGLang's own. A node is announced when a request is bound below it for the first time, and a split
when a request is bound on the other side of it: until then neither matters to packing.

A request is a number: its row of `req_to_token` in the lower 32 bits, above them how often SGLang had handed out that row. The id that
its client chose says nothing: two requests that live at the same time may have the same.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sglang_pat.packing.tree import ROOT

NodeId = Annotated[int, Meta(ge=ROOT, le=2**62)]
Tokens = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Request = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Head = Annotated[bytes, Meta(min_length=16, max_length=16)]
"""What a trace may hold; in a server msgspec checks nothing."""


class NodeInserted(msgspec.Struct, frozen=True, tag=True):
    """A node of `length` tokens below `parent`; `head`, 16 bytes, tells it from its siblings."""

    node: NodeId
    parent: NodeId
    length: Tokens
    head: Head


class NodeSplit(msgspec.Struct, frozen=True, tag=True):
    """The first `length` tokens of `node` moved to the new node `upper`; `node` keeps the rest and its id.

    `head` is the new head of `node`; `upper` takes over the old one.
    """

    node: NodeId
    upper: NodeId
    length: Tokens
    head: Head


class NodeEvicted(msgspec.Struct, frozen=True, tag=True):
    """The cache dropped a node."""

    node: NodeId


class TreeReset(msgspec.Struct, frozen=True, tag=True):
    """The cache dropped everything."""


class RequestBound(msgspec.Struct, frozen=True, tag=True):
    """The request's row holds the tree's own slots from the root down to the end of `node`; with ROOT nothing is known of what it shares.

    `length` is how many tokens the request has when it starts to decode, 0 while more of its prompt is to come. It may be bound already:
    its next chunk was prefilled, or more of it was cached.
    """

    request: Request
    node: NodeId
    length: Tokens


class RequestsExpected(msgspec.Struct, frozen=True, tag=True):
    """Requests are being prefilled; they decode next, if more of their prompts is not to come, with so many tokens. With overlap
    scheduling they decode their first step before SGLang hands them to its cache. `rids` are what their clients call them, for people."""

    requests: list[Request]
    lengths: list[Tokens]
    rids: list[str]


class RequestWithdrawn(msgspec.Struct, frozen=True, tag=True):
    """A request's last token is being computed: it is in no batch any more, and gives its row back later."""

    request: Request


class RequestReleased(msgspec.Struct, frozen=True, tag=True):
    """A request gave its row back: finished, aborted or retracted."""

    request: Request


Event = (
    NodeInserted
    | NodeSplit
    | NodeEvicted
    | TreeReset
    | RequestBound
    | RequestsExpected
    | RequestWithdrawn
    | RequestReleased
)
