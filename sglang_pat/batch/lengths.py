"""What requests will take: known limits and guesses at first, what was measured as answers come (BatchLLM, section 4.2, takes all
answers to be equally long)."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from sglang_pat.batch.lines import Json
from sglang_pat.batch.tree import BYTES, Floats, Tree

CAREFUL = 0.5
"""Tokens of a byte of text, as long as nobody knows: twice as many as of English, so that prefixes do not drive each other out at once."""

CLASSES = 32
"""Limits of answers are put together by their power of two."""

_Tokens = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
"""What a server counts of one answer: others are no counts."""


class _Details(msgspec.Struct):
    cached_tokens: _Tokens = 0


class Usage(msgspec.Struct):
    """What a server says that an answer took."""

    prompt_tokens: _Tokens = 0
    completion_tokens: _Tokens = 0
    prompt_tokens_details: _Details | None = None

    @property
    def cached(self) -> int:
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else 0


def usage_of(body: Json) -> Usage:
    """Of an answer; nothing where it says none, or nonsense."""
    try:
        return msgspec.convert(body.get("usage") or {}, Usage)
    except msgspec.ValidationError:
        return Usage()


class Lengths:
    """A running estimate of a job's lengths, in tokens."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._classes = np.log2(tree.limits).astype(np.int64)
        self._answers, self._counts = np.zeros(CLASSES), np.zeros(CLASSES)
        self._text_tokens = self._text_bytes = 0

    @property
    def of_a_byte(self) -> float:
        """Tokens of a byte of text."""
        return self._text_tokens / self._text_bytes if self._text_bytes else CAREFUL

    def learn(self, rank: int, usage: Usage) -> None:
        """A request has an answer."""
        if not usage.prompt_tokens:
            return
        if not self._tree.tokens[rank]:
            self._text_tokens += usage.prompt_tokens
            self._text_bytes += int(self._tree.sizes[rank]) or 1
        self._answers[self._classes[rank]] += usage.completion_tokens
        self._counts[self._classes[rank]] += 1

    def answer(self, rank: int) -> float:
        """How long the answer to a request will be: its limit counts as one answer among those to requests of like limits."""
        kind = self._classes[rank]
        return float((self._answers[kind] + self._tree.limits[rank]) / (self._counts[kind] + 1))

    def answers(self) -> Floats:
        """The same, by rank."""
        found: Floats = (self._answers[self._classes] + self._tree.limits) / (self._counts[self._classes] + 1)
        return found

    def scale(self, rank: int) -> float:
        """Tokens of a byte of a prompt."""
        return 1 / BYTES if self._tree.tokens[rank] else self.of_a_byte

    def scales(self, of_a_byte: float | None = None) -> Floats:
        """The same, by rank."""
        return np.where(self._tree.tokens, 1 / BYTES, self.of_a_byte if of_a_byte is None else of_a_byte)
