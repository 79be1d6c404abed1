"""Sessions: conversations whose earlier turns the server keeps.

What a turn's prompt is follows from the turns before it, so a right answer is that to the whole prompt, asked at once.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import dataclass, field
from typing import Any

from .client import Client, Outcome
from .oracle import Oracle
from .questions import GENERATE, Ids, greedy, sampling

RETRIES = 40
"""Times that a turn is sent again while the turn before it, whose client left, is still being aborted."""

BUSY = ("already has an active request", "hasn't finished")
"""What SGLang says to a turn that comes too early (`Session.create_req` in session_controller.py)."""

CLOSED = ("does not exist", "close was requested", "Invalid request session id")
"""What SGLang says where a session was closed, or the turn that is to be continued was forgotten."""

_numbers = itertools.count()


class SessionError(Exception):
    """A session is not what it should be."""


@dataclass
class Turn:
    """What one turn of a conversation came to.

    Attributes:
        prompt: All that the server had before it when it answered; None where it cannot be known.
        tokens: How many were asked for.
        rid: Its request's.
    """

    outcome: Outcome
    prompt: Ids | None
    tokens: int
    rid: str


@dataclass
class Conversation:
    """One session, from its opening to its close.

    Attributes:
        streaming: Whether the server keeps the session's KV between turns (a "streaming session"), else its tokens only.
    """

    client: Client
    chance: random.Random
    streaming: bool
    id: str = ""
    _rid: str = ""
    contexts: dict[str, tuple[Ids, Ids]] = field(default_factory=dict)

    async def open(self) -> None:
        """Raises SessionError where the server refuses."""
        body: dict[str, Any] = {"capacity_of_str_len": 100_000} | ({"streaming": True} if self.streaming else {})
        if self.chance.random() < 0.5:
            body["session_id"] = f"session-{next(_numbers)}-{self.chance.randrange(10**9)}"
        status, text = await self.client.post("/open_session", body)
        if status != 200:
            raise SessionError(f"/open_session: {status} {text[:200]}")
        self.id = text.strip().strip('"')

    async def abort(self) -> None:
        """Abort the turn that runs."""
        await self.client.post("/abort_request", {"rid": self._rid})

    async def close(self) -> None:
        await self.client.post("/close_session", {"session_id": self.id})

    async def say(self, tokens: Ids, length: int, leave_after: float | None, stream: bool) -> Turn:
        """Take a turn; sent again while the server is still busy with one that was left."""
        return await (self._append if self.streaming else self._branch)(tokens, length, leave_after, stream)

    async def _append(self, tokens: Ids, length: int, leave_after: float | None, stream: bool) -> Turn:
        """A turn of a streaming session, which has one branch; a turn that was left may have happened or not."""
        outcome, rid = await self._send({"id": self.id}, tokens, length, leave_after, stream)
        prompts = [(*prompt, *answer, *tokens) for prompt, answer in self.contexts.values()] or [tokens]
        seen = outcome.meta.get("prompt_tokens")
        fitting = [prompt for prompt in prompts if len(prompt) == seen] if seen is not None else prompts
        if outcome.complete and not fitting:
            raise SessionError(
                f"a turn of {self.id} had a prompt of {seen} tokens, not one of {sorted(map(len, prompts))}"
            )
        prompt = fitting[0] if len(fitting) == 1 else None
        return Turn(outcome, prompt, length, rid)

    async def settle(self, turn: Turn, oracle: Oracle) -> bool:
        """Take in what a turn came to; false if nothing can follow it any more.

        A streaming session goes on from its last turn that was not aborted, or from as much of an aborted one as there was when
        SGLang retracted it, for it takes a retracted turn to have finished (`StreamingSession.try_cache_finished_req`).

        No turn follows one that was left: it may still run, and then SGLang refuses the next one and with that forgets that
        one is running (`StreamingSession.find_active_slot` calls `Session.abort_req`), so that the next but one runs on the
        same row of `req_to_token`.
        """
        if turn.prompt is None or turn.outcome.left:
            return False
        if turn.outcome.complete:
            known = {} if self.streaming else self.contexts
            self.contexts = known | {turn.rid: (turn.prompt, tuple(turn.outcome.ids[0]))}
        elif self.streaming and turn.outcome.reason == "abort":
            answer = await oracle.answer(greedy(turn.prompt), turn.tokens)
            if answer is None or answer.sure < turn.tokens:
                return False
            parts = {f"{turn.rid} {i}": (turn.prompt, tuple(answer.ids[:i])) for i in range(turn.tokens + 1)}
            self.contexts = (self.contexts or {"": ((), ())}) | parts
        return True

    async def _branch(self, tokens: Ids, length: int, leave_after: float | None, stream: bool) -> Turn:
        """A turn of an ordinary session: follows any turn, or replaces what followed it."""
        parameters: dict[str, Any] = {"id": self.id}
        prompt = tokens
        if self.contexts and self.chance.random() < 0.9:
            parent = self.chance.choice(list(self.contexts))
            before, answer = self.contexts[parent]
            parameters["rid"] = parent
            prompt = (*before, *answer)
            kind = self.chance.choice(["append", "append", "append", "replace", "drop", "offset"])
            if kind == "replace":
                parameters["replace"] = True
                self.contexts = {parent: self.contexts[parent]}
            elif kind == "drop":
                parameters["drop_previous_output"] = True
                prompt = before
            elif kind == "offset":
                parameters["offset"] = self.chance.randint(1, len(prompt))
                prompt = prompt[: parameters["offset"]]
            prompt += tokens
        outcome, rid = await self._send(parameters, tokens, length, leave_after, stream)
        seen = outcome.meta.get("prompt_tokens")
        if outcome.complete and seen != len(prompt):
            raise SessionError(f"a turn of {self.id} had a prompt of {seen} tokens, not {len(prompt)}")
        # Seen once with 0.5.23: a turn that was aborted amid its answer had been given its own tokens only, without its parent's.
        known = seen in (None, len(prompt))
        return Turn(outcome, prompt if known else None, length, rid)

    async def _send(
        self, parameters: dict[str, Any], tokens: Ids, length: int, leave_after: float | None, stream: bool
    ) -> tuple[Outcome, str]:
        for _ in range(RETRIES):
            self._rid = rid = f"turn-{next(_numbers)}-{self.chance.randrange(10**9)}"
            body: dict[str, Any] = {
                "input_ids": tokens,
                "rid": rid,
                "session_params": parameters,
                "sampling_params": sampling(length),
            }
            body |= {"stream": stream}
            outcome = await self.client.ask(GENERATE, body, leave_after)
            said = f"{outcome.error} {outcome.meta.get('finish_reason')}"
            if not any(busy in said for busy in BUSY):
                break
            await asyncio.sleep(0.2)
        return outcome, rid
