"""What the right answer is: that of a server to which the same request was sent alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .client import Client, Outcome
from .questions import GENERATE, LONGEST, Catalogue, Question

STEP = 32
"""Greedy answers are asked for in multiples of this, since a longer one begins with the shorter one."""


class OracleError(Exception):
    """The reference did not answer."""


@dataclass(frozen=True)
class Answer:
    """The right answer to a question.

    Attributes:
        ids: Output ids.
        text: The same as text.
        sure: Tokens (of OpenAI's API characters) before the first step at which two tokens are as good as equally likely: from there
            on rounding decides.
        logprobs: (log-probability or None, id) of the prompt's tokens.
        chosen: The same of the answer's.
        beams: Output ids of each beam.
    """

    ids: list[int]
    text: str
    sure: int
    logprobs: list[tuple[float | None, int]]
    chosen: list[tuple[float | None, int]]
    beams: list[list[int]]


class Oracle:
    """Asks one thing at a time, and everything once."""

    def __init__(self, client: Client, catalogue: Catalogue, close: float) -> None:
        """Log-probabilities are as good as equal where they differ by less than `close`."""
        self.close = close
        self._client, self._catalogue = client, catalogue
        self._alone = asyncio.Lock()
        self._answers: dict[Question, Answer] = {}
        self.frozen = False

    async def answer(self, question: Question, tokens: int = LONGEST) -> Answer | None:
        """The answer to a question, for a greedy one at least its first `tokens` tokens; None if it was to be learnt and was not.

        Raises:
            OracleError: The reference refuses the question.
        """
        async with self._alone:
            known = self._answers.get(question)
            if known is not None and (question.kind != "greedy" or len(known.ids) >= tokens or _ended(question, known)):
                return known
            if self.frozen:
                return known
            body = question.body
            if question.kind == "greedy":
                length = min(LONGEST, -(-max(1, tokens) // STEP) * STEP, self._catalogue.room(body["input_ids"]))
                body["sampling_params"]["max_new_tokens"] = length
            if question.path == GENERATE and question.kind != "beam":
                body |= {"return_logprob": True, "top_logprobs_num": 2}
            elif question.kind in MORE:
                body |= MORE[question.kind]
            outcome = await self._client.ask(question.path, body)
            if not outcome.complete:
                raise OracleError(f"{question.text[:200]}: {outcome.status} {outcome.reason} {outcome.error}")
            answer = self._answers[question] = self._read(outcome)
            return answer

    def _read(self, outcome: Outcome) -> Answer:
        ids = outcome.ids[0] if outcome.ids else []
        sure = len(ids) or len(outcome.texts[0])
        done = 0
        for size, likeliest in _steps(outcome.meta):
            if len(likeliest) > 1 and likeliest[0] - likeliest[1] < self.close:
                sure = done
                break
            done += size
        beams = [beam["output_ids"] for beam in outcome.meta.get("beam_results", [])]
        return Answer(
            ids, outcome.texts[0], sure, logprobs(outcome.meta, "input"), logprobs(outcome.meta, "output"), beams
        )


MORE = {"completion": {"logprobs": 2}, "chat": {"logprobs": True, "top_logprobs": 2}}
"""What to ask OpenAI's API for the likeliest tokens with."""


def _steps(meta: dict[str, Any]) -> Iterator[tuple[int, list[float]]]:
    """Of each step what it adds to `Answer.sure`, and the log-probabilities of the likeliest tokens, best first."""
    for likeliest in meta.get("output_top_logprobs") or []:
        yield 1, [entry[0] for entry in likeliest]
    found = meta.get("logprobs") or {}
    for token, alternatives in zip(found.get("tokens") or [], found.get("top_logprobs") or [], strict=True):
        yield len(token), sorted(alternatives.values(), reverse=True)
    for step in found.get("content") or []:
        yield len(step["token"]), sorted((other["logprob"] for other in step["top_logprobs"]), reverse=True)


def _ended(question: Question, answer: Answer) -> bool:
    """Whether the context limit ended an answer."""
    return len(answer.ids) % STEP != 0


def logprobs(meta: dict[str, Any], of: str) -> list[tuple[float | None, int]]:
    """The prompt's (`input`) or the answer's (`output`), as the server gave them."""
    return [(entry[0], entry[1]) for entry in meta.get(f"{of}_token_logprobs") or []]


def agrees(ids: list[int], answer: Answer) -> bool:
    """Whether greedy `ids` are the beginning of the answer, up to where rounding decides."""
    sure = min(len(ids), answer.sure)
    return ids[:sure] == answer.ids[:sure] and (len(ids) <= len(answer.ids) or answer.sure < len(answer.ids))


def same_logprobs(found: list[tuple[float | None, int]], right: list[tuple[float | None, int]], close: float) -> bool:
    """Whether log-probabilities are the same, up to `close`."""
    return len(found) == len(right) and all(
        token == other and ((a is None and b is None) or (a is not None and b is not None and abs(a - b) <= close))
        for (a, token), (b, other) in zip(found, right, strict=True)
    )


def interleaved(ids: list[int], own: list[int], other: list[int]) -> bool:
    """Whether `ids` are the beginning of `own` with a slice of `other` mixed in."""
    for begin in range(len(other)):
        # For each count of own tokens so far, whether the rest can be a slice of the other from `begin` on.
        reachable = {0}
        for position, token in enumerate(ids):
            following = set()
            for taken in reachable:
                if taken < len(own) and own[taken] == token:
                    following.add(taken + 1)
                index = begin + position - taken
                if index < len(other) and other[index] == token:
                    following.add(taken)
            reachable = following
            if not reachable:
                break
        if reachable:
            return True
    return False


def describe(question: Question, found: Any, right: Any) -> str:
    """A mismatch, in one line."""
    shown = {"question": question.text[:300], "found": found, "right": right}
    return f"{question.kind}: {json.dumps(shown)[:1500]}"
