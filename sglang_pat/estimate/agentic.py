"""Sessions of coding agents, one a line: how long their prompts are, and what these share.

`tool_tokens`, `system_tokens`: what the first prompt begins with. Sessions with equal `tool_tokens` have the same tools, with both equal the same
system prompt too. `turns`, one after the other: `in` tokens of a prompt, `out` of its answer, `think_s` seconds before it; its first `keep_blocks`
blocks of 64 tokens are those of turn `like`, and all after them is new. `parent`, `after_turn`: a sub-agent that starts when the session `parent` has
had so many turns; in the file it comes after that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from sglang_pat.estimate.errors import EstimateError, fault

KEPT_BLOCK = 64
"""Tokens in one of `keep_blocks`."""
LONGEST_PROMPT = 1 << 24
"""The most tokens of a prompt or an answer: sixteen times the longest context of a model."""
MOST_TURNS = 1 << 16
"""A hundred times those of the longest session that was published."""

Tokens = Annotated[int, Meta(ge=0, le=LONGEST_PROMPT)]
Number = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Piece = tuple[tuple[Any, ...], int]


class Turn(msgspec.Struct, rename={"tokens": "in"}):
    """A prompt of `tokens`, and its answer of `out`, after `think_s` seconds; what it keeps of turn `like`."""

    tokens: Annotated[int, Meta(ge=1, le=LONGEST_PROMPT)]
    out: Tokens
    think_s: Annotated[float, Meta(ge=0, le=1e9)] = 0
    like: Number | None = None
    keep_blocks: Number = 0


class Session(msgspec.Struct):
    """A line of the file."""

    session: Number
    tool_tokens: Tokens
    system_tokens: Tokens
    turns: Annotated[list[Turn], Meta(max_length=MOST_TURNS)]
    parent: Number | None = None
    after_turn: Number = 0

    def kept(self, number: int) -> int:
        """Tokens of a turn's prompt that are not new. A later turn that is like none shares nothing, though it may have tools."""
        turn = self.turns[number]
        if turn.like is not None:
            return turn.keep_blocks * KEPT_BLOCK
        return 0 if number else min(turn.tokens, self.tool_tokens + self.system_tokens)

    def pieces(self, number: int) -> list[Piece]:
        """A turn's prompt as (key, tokens) in order: where keys are equal, tokens are, from the first one on."""
        found: list[Piece] = []
        left = self.turns[number].tokens
        while True:
            kept = min(left, self.kept(number))
            found.append(((self.session, number), left - kept))
            left, like = kept, self.turns[number].like
            if like is None:
                break
            number = like
        tools = min(left, self.tool_tokens)
        system = (("system", self.tool_tokens, self.system_tokens), left - tools)
        return [piece for piece in ((("tools", self.tool_tokens), tools), system, *reversed(found)) if piece[1]]


def session_of(row: Any, before: Mapping[int, int]) -> Session:
    """A line's session.

    Args:
        row: Its JSON.
        before: The number of turns of each session in the lines before.

    Raises:
        EstimateError: It is none.
    """
    try:
        found = msgspec.convert(row, Session)
    except msgspec.ValidationError as error:
        raise EstimateError(fault(error, "it")) from None
    if not found.turns:
        raise EstimateError("it has no turns")
    if found.session in before:
        raise EstimateError(f"there is a session {found.session} before it")
    if found.parent is not None and before.get(found.parent, -1) < found.after_turn:
        raise EstimateError(f"no session {found.parent} with {found.after_turn:,} turns is before it")
    for number, turn in enumerate(found.turns):
        if turn.like is not None and turn.like >= number:
            raise EstimateError(f"turn {number} is like turn {turn.like}, which is not before it")
        if turn.like is not None and found.kept(number) > min(turn.tokens, found.turns[turn.like].tokens):
            raise EstimateError(
                f"turn {number} keeps {turn.keep_blocks:,} blocks of turn {turn.like}: one of them is shorter"
            )
    return found
