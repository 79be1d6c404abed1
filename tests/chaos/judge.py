"""Compares what came of requests with the right answers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import aiohttp

from .client import Outcome
from .oracle import Answer, Oracle, OracleError, agrees, describe, interleaved, logprobs, same_logprobs
from .questions import Question
from .report import Report

LINGER = 10.0
"""Seconds for which a request may go on in the server after its client left it, or after its abort."""


@dataclass(eq=False)
class Use:
    """One request's time with an id that other requests have too."""

    rid: str
    question: Question
    begin: float = field(default_factory=time.monotonic)
    end: float = float("inf")


class Names:
    """Who had which id when."""

    def __init__(self) -> None:
        self._uses: dict[str, list[Use]] = {}

    def begin(self, rid: str, question: Question) -> Use:
        use = Use(rid, question)
        uses = self._uses.setdefault(rid, [])
        uses[:] = [other for other in uses if other.end > use.begin - 10 * LINGER]
        uses.append(use)
        return use

    def end(self, use: Use, outcome: Outcome) -> None:
        use.end = time.monotonic() + (0 if outcome.complete else LINGER)
        if outcome.status == 400:
            self._uses[use.rid].remove(use)  # it never began

    def beside(self, use: Use) -> list[Use]:
        """Those whose tokens SGLang may have handed to this one: it finds a request by its id alone
        (`TokenizerManager._handle_batch_output`), and 0.5.17 lets an id be used again while its first request, whose client
        left, is still running (`_discard_pending_req_states`)."""
        return [
            other
            for other in self._uses[use.rid]
            if other is not use and other.begin < use.end and use.begin < other.end
        ]


@dataclass
class Case:
    """An outcome that is to be judged.

    Attributes:
        tokens: How many were asked for; for greedy questions only.
        use: Of an id that others have too.
        samples: How many answers were asked for.
        about: What it is counted as; the question's kind if empty.
    """

    question: Question
    outcome: Outcome
    tokens: int = 0
    use: Use | None = None
    samples: int = 1
    about: str = ""


class Judge:
    """Judges case after case, while the chaos goes on or after it."""

    def __init__(self, oracle: Oracle, names: Names, report: Report) -> None:
        self._oracle, self._names, self._report = oracle, names, report
        self._cases: asyncio.Queue[Case] = asyncio.Queue()

    def submit(self, case: Case) -> None:
        self._cases.put_nowait(case)

    async def work(self) -> None:
        """Judge for ever."""
        while True:
            case = await self._cases.get()
            try:
                await self._judge(case)
            finally:
                self._cases.task_done()

    async def finish(self) -> None:
        """Wait until everything that was submitted is judged."""
        await self._cases.join()

    async def _judge(self, case: Case) -> None:
        outcome = case.outcome
        # What SGLang refuses may still generate a token, from a prompt of one token that is 0 (`Req.set_finish_with_abort`).
        refused = (outcome.meta.get("finish_reason") or {}).get("status_code") is not None
        # Aborted meanwhile it says no more that it was refused.
        single = outcome.meta.get("prompt_tokens") == 1 and all(len(ids) == 1 for ids in outcome.ids)
        refused |= not outcome.complete and single
        # Of a request for no token, SGLang samples none, and shows the place-holder of one if it is aborted (`is_prefill_only`, tp_worker.py).
        refused |= case.question.kind == "greedy" and case.tokens == 0 and not outcome.complete
        if refused or (not outcome.ids and not outcome.texts):
            return
        try:
            wrong = await self._wrong(case)
        except (OracleError, aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            wrong = f"the reference failed: {error!r}"
        except Exception as error:
            # Whoever waits for the end of this queue must not wait for ever.
            wrong = f"{outcome} cannot be judged: {error!r}"
        if wrong is None:
            self._report.compared[(case.about or case.question.kind) if outcome.complete else "partial"] += 1
            self._report.compared["retracted"] += bool(outcome.meta.get("num_retractions"))
        elif wrong:
            self._report.problem(wrong)

    async def _wrong(self, case: Case) -> str | None:
        """What is wrong; None if nothing is, empty if it cannot be known."""
        question, outcome = case.question, case.outcome
        most = max(map(len, outcome.ids), default=0)
        answer = await self._oracle.answer(question, max(most, case.tokens))
        if answer is None:
            self._report.compared["unknown"] += 1
            return ""
        if question.kind == "beam":
            return self._beams(question, outcome, answer)
        if question.kind in ("completion", "chat"):
            return self._texts(question, outcome, answer)
        if outcome.complete and len(outcome.ids) != case.samples:
            return describe(question, len(outcome.ids), case.samples)
        for ids in outcome.ids:
            right = answer.ids[: case.tokens] if question.kind == "greedy" else answer.ids
            whole = not outcome.complete or len(ids) == len(right) or answer.sure < len(right)
            if not (whole and agrees(ids, answer)):
                if await self._mixed(case, ids, answer):
                    self._report.compared["mixed up by SGLang"] += 1
                    return ""
                return describe(
                    question, {"ids": ids, "tokens": case.tokens, "meta": _short(outcome)}, answer.ids[:most]
                )
        chosen = logprobs(outcome.meta, "output")
        if not outcome.complete or (question.kind not in ("logprobs", "seeded") and not chosen):
            return None
        # SGLang 0.5.17 loses a step's log-probabilities of some requests that it retracted.
        lost = bool(outcome.meta.get("num_retractions")) and len(chosen) < len(outcome.ids[0])
        sure = 0 if lost else min(answer.sure, most)
        for found, right in (
            (logprobs(outcome.meta, "input"), answer.logprobs),
            (chosen[:sure], answer.chosen[:sure]),
        ):
            if not same_logprobs(found, right, self._oracle.close):
                return describe(question, {"logprobs": found, "meta": _short(outcome)}, right)
        return None

    def _beams(self, question: Question, outcome: Outcome, answer: Answer) -> str | None:
        if not outcome.complete:
            return ""
        beams = [beam["output_ids"] for beam in outcome.meta.get("beam_results", [])]
        return None if beams == answer.beams else describe(question, beams, answer.beams)

    def _texts(self, question: Question, outcome: Outcome, answer: Answer) -> str | None:
        text = outcome.texts[0]
        whole = not outcome.complete or len(text) == len(answer.text) or answer.sure < len(answer.text)
        if whole and text[: answer.sure] == answer.text[: answer.sure][: len(text)]:
            return None
        return describe(question, text, answer.text)

    async def _mixed(self, case: Case, ids: list[int], answer: Answer) -> bool:
        """Whether SGLang gave this request tokens of one that had its id at the same time."""
        if case.use is None:
            return False
        for other in self._names.beside(case.use):
            other_answer = await self._oracle.answer(other.question)
            if other_answer is not None and (
                ids == other_answer.ids[: len(ids)] or interleaved(ids, answer.ids, other_answer.ids)
            ):
                return True
        return False


def _short(outcome: Outcome) -> dict[str, object]:
    return {
        key: outcome.meta.get(key)
        for key in ("id", "finish_reason", "cached_tokens", "num_retractions", "prompt_tokens")
    }
