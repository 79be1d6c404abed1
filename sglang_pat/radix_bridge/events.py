"""Events: what happens to the part of SGLang's prefix tree that running requests use.

Node ids are SGLang's own. A node is announced when the first request is bound below it, and a split when the first request is bound to its other
side; before that neither matters to packing.

A request is identified by a number: its row of `req_to_token` in the lower 32 bits, and how often SGLang has handed out that row in the upper ones.
Ids that clients choose do not identify a request: two running requests may have the same.
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
"""The limits are for traces; in a server msgspec does not check them."""


class NodeInserted(msgspec.Struct, frozen=True, tag=True):
    """A node of `length` tokens below `parent`; `head`, 16 bytes, distinguishes it from its siblings."""

    node: NodeId
    parent: NodeId
    length: Tokens
    head: Head


class NodeSplit(msgspec.Struct, frozen=True, tag=True):
    """The first `length` tokens of `node` moved to the new node `upper`; `node` keeps the rest, and its id.

    `head` is the new head of `node`; `upper` has the old one.
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
    """The request's row holds the tree's own slots from the root to the end of `node`. ROOT means that it shares nothing, as far as is known.

    `length` is the request's length in its first decode step, or 0 while its prompt is incomplete. A request may be bound again: when its next
    chunk is prefilled, or when more of it is cached.
    """

    request: Request
    node: NodeId
    length: Tokens


class RequestsExpected(msgspec.Struct, frozen=True, tag=True):
    """These requests are being prefilled. Those whose prompts are complete decode next, with these lengths.

    With overlap scheduling they run their first decode step before SGLang hands them to its cache. `rids` are the clients' ids, for display only.
    """

    requests: list[Request]
    lengths: list[Tokens]
    rids: list[str]

    def __post_init__(self) -> None:
        if len(self.lengths) != len(self.requests):
            raise ValueError(f"{len(self.lengths)} lengths for {len(self.requests)} requests")


class RequestWithdrawn(msgspec.Struct, frozen=True, tag=True):
    """A request's last token is being computed: it is in no further batch, and gives its row back later."""

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
