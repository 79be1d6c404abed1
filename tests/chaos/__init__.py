"""A server under everything that its API allows at once, for as long as one likes.

    python tests/chaos --url http://127.0.0.1:30000 --reference http://127.0.0.1:30001 --seconds 600 --seed 7

Clients reuse ids, leave in the middle, abort, hold sessions, ask for beams and samples, send nonsense; an operator pauses the
server, flushes its cache and loads its weights again. Prompts come from a small forest of nested prefixes, so that packing
matters. Every greedy answer has to be that of the reference, a server on the same weights with another attention backend, to
which the same prompt is sent alone. Between rounds nothing may be left behind.

Of a server with `--enable-deterministic-inference` answers that are sampled with a seed are compared too, unless it has drafts. With `--close 0`, and such a
server as the reference, every answer has to have the same bits, and every log-probability that was asked for; with drafts nothing is sampled then.

| module | what it has |
|---|---|
| `questions` | the forest, and what may be asked |
| `oracle` | the right answers |
| `client` | HTTP |
| `actions` | what clients and the operator do |
| `conversations` | sessions |
| `malformed` | nonsense |
| `judge` | comparisons |
| `report` | what was done and found |
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from sglang_pat.cli.top import total

from . import actions
from .client import Client, Outcome
from .conversations import SessionError
from .judge import Judge, Names
from .oracle import Oracle
from .questions import Catalogue, greedy
from .report import Report, our_tracebacks

__all__ = ["FEATURES", "Chaos", "Report", "our_tracebacks"]

FEATURES = frozenset(feature for _, _, feature in actions.ACTIONS.values()) | {
    "namespaces",
    "salts",
    "priorities",
    "memory",
}

ROUND = 12.0
"""Seconds after which the server is left to drain, and looked at."""

APART = ("beams", "pauses")
"""Never in the same round: 0.5.23 ends with "reqs changed while a beam tail was attached" (`strip_beam_tail`), or goes on with the
KV of other requests, where it is paused while it searches with beams. With any backend."""

PROBES, PROBE_TOKENS = 6, 24


@dataclass
class Chaos:
    """One run against one server.

    Attributes:
        server_url: The server that is tried.
        reference_url: Another one on the same weights, with the same context length and adapters; without it, answers are
            compared with the server's own, learnt before the chaos begins, and sessions are not compared.
        seed: Of everything that is chosen at random.
        seconds: How long it lasts; every action happens at least once, however long that takes.
        concurrency: Clients at a time.
        features: What is done, of `FEATURES`; None for all that the server can do.
        prompts: How many different ordinary prompts there are.
        branch: Tokens of the longest prefix that some share, beside those in front of it.
        close: Log-probabilities that differ by less may change places; 0: none may.
        patience: Seconds after which a request hangs.
        able: What is done in the end.
    """

    server_url: str
    reference_url: str | None = None
    seed: int = 0
    seconds: float = 60.0
    concurrency: int = 16
    features: Collection[str] | None = None
    prompts: int = 48
    branch: int = 60
    close: float = 1e-3
    patience: float = 180.0

    report: Report = field(init=False)
    able: frozenset[str] = field(init=False)
    _lost: bool = field(init=False, default=False)

    async def run(self) -> Report:
        """What was done, and what was found."""
        began = time.monotonic()
        self.report = Report(self.seed)
        self.client = Client(self.server_url, self.patience)
        self.names, self.operator = Names(), asyncio.Lock()
        self._chance = random.Random(f"chaos {self.seed}")
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.client.connected())
            reference = Client(self.reference_url or self.server_url, self.patience)
            await stack.enter_async_context(reference.connected())
            await self._look()
            self.oracle = Oracle(reference, self.catalogue, self.close)
            self.judge = Judge(self.oracle, self.names, self.report)
            judging = asyncio.create_task(self.judge.work())
            try:
                await self._run()
            except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
                self.report.problem(f"the server is gone or hangs: {error!r}")
            finally:
                judging.cancel()
        self.report.seconds = round(time.monotonic() - began, 1)
        return self.report

    async def _look(self) -> None:
        """Find out what the server can do."""
        info = await self.client.get("/server_info")
        release = tuple(map(int, info["version"].split(".")[:3]))
        able = FEATURES
        self.loras = {adapter["lora_name"]: adapter["lora_path"] for adapter in info.get("lora_paths") or []}
        now, tokenizer = release >= (0, 5, 23), not info["skip_tokenizer_init"]
        requirements = {
            "beams": now
            and info["page_size"] == 1
            and not (info["enable_hierarchical_cache"] or info["speculative_algorithm"]),
            "salts": now,
            "openai": tokenizer,
            # The detokenizer of 0.5.17 ends where one of two live requests with the same id finishes
            # (`DetokenizerManager._decode_batch_token_id_output`: "Decode status not found").
            "live ids": now or not tokenizer,
            "loras": bool(info.get("enable_lora") and self.loras),
            # 0.5.17 never unloads an adapter of which a request was aborted: `TokenizerManager._handle_abort_req` does not
            # release it, and everybody waits for `LoRARegistry.wait_for_unload`.
            "lora updates": now and bool(info.get("enable_lora") and self.loras),
            "streaming sessions": bool(info["enable_streaming_session"]),
            "priorities": bool(info["enable_priority_scheduling"]),
            "memory": bool(info["enable_memory_saver"]),
            # SGLang asks a draft model to load them too, which n-grams have not.
            "weights": info["speculative_algorithm"] != "NGRAM",
            # SGLang draws by where a verify step begins; and beside what is sampled, between tokens that are equally likely, for greedy
            # answers too (docs/rollouts.md, "What is not").
            "seeds": bool(info["enable_deterministic_inference"] and not info["speculative_algorithm"]),
            "sampling": self.close > 0 or not info["speculative_algorithm"],
        }
        able -= {feature for feature, met in requirements.items() if not met}
        self.able = frozenset(able if self.features is None else self.features)
        self.model = info["model_path"]
        longest = min(info["max_req_input_len"], info["max_total_num_tokens"] // 2) - 1
        context = info["max_req_input_len"] + 2
        loras = sorted(self.loras) if "loras" in self.able else []
        self.catalogue = Catalogue.write(
            self.seed, self.prompts, self.branch, context, longest, loras, self.able, tokenizer
        )

    async def _run(self) -> None:
        if self.reference_url is None:
            await self._learn()
        before = await self._probe()
        undone = {name for name, (_, _, feature) in actions.ACTIONS.items() if feature in self.able}
        end = time.monotonic() + self.seconds
        for left_out in itertools.cycle(APART):
            if self._lost or (time.monotonic() >= end and not undone):
                break
            features = self.able - {left_out} if self.able.issuperset(APART) else self.able
            weights = {name: weight for name, (_, weight, feature) in actions.ACTIONS.items() if feature in features}
            deck = sorted(undone & weights.keys())
            undone -= weights.keys()
            self._chance.shuffle(deck)
            round_end = min(time.monotonic() + ROUND, max(end, time.monotonic() + 1))
            await asyncio.gather(*(self._work(deck, weights, round_end) for _ in range(self.concurrency)))
            if not self._lost:
                await self._rest()
        if not self._lost:
            await self.judge.finish()
            if await self._probe() != before:
                self.report.problem("the probes are answered otherwise than before")

    async def _work(self, deck: list[str], weights: dict[str, int], end: float) -> None:
        """One client: act until the round ends, first what was not done yet."""
        chance = random.Random(self._chance.random())
        names = list(weights)
        while (deck or time.monotonic() < end) and not self._lost:
            name = deck.pop() if deck else chance.choices(names, list(weights.values()))[0]
            self.report.actions[name] += 1
            try:
                await actions.ACTIONS[name][0](self, chance)
            except (aiohttp.ClientError, asyncio.TimeoutError, OSError, SessionError) as error:
                self.report.problem(f"{name}: {error!r}")
                self._lost = not await self._alive()

    async def _alive(self) -> bool:
        try:
            await self.client.get("/server_info")
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError):
            return False
        return True

    async def _rest(self) -> None:
        """Wait until nothing runs, and look whether anything is left behind; then do what only an idle server does."""
        deadline = time.monotonic() + 60
        while (counters := await self._counters()).get("bound") and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        self.report.counters = counters
        for name in ("fallbacks", "faults", "bound"):
            if counters.get(name):
                self.report.problem(f"{name} is {counters[name]} while nothing runs")
        if self._chance.random() < 0.3:
            return
        self.report.actions["flush at rest"] += 1
        while (status := (await self.client.post("/flush_cache", query={"timeout": "10"}))[0]) != 200:
            if time.monotonic() > deadline:
                self.report.problem(f"/flush_cache where nothing runs: {status}")
                return
            await asyncio.sleep(0.5)
        if "weights" in self.able:
            await actions.quiet_weights(self, self._chance)
        if "memory" in self.able:
            await actions.quiet_memory(self, self._chance)

    async def _counters(self) -> dict[str, Any]:
        """sglang-pat's, the sum of all replicas'; without numbers for a server with another backend."""
        states = (await self.client.get("/server_info"))["internal_states"]
        return total([state["pat"] for state in states if "pat" in state])

    async def _probe(self) -> list[list[int]]:
        """Answers to some prompts, one after the other."""
        answers = []
        for prompt in self.catalogue.prompts[:PROBES]:
            question = greedy(prompt, PROBE_TOKENS)
            answers.append((await self.client.ask(question.path, question.body)).ids[0])
        return answers

    async def _learn(self) -> None:
        """Ask everything that there is to ask while nothing else runs."""
        catalogue = self.catalogue
        questions = [greedy(prompt) for prompt in catalogue.prompts + catalogue.huge] + catalogue.loras
        for question in [*questions, *(question for kind in catalogue.questions.values() for question in kind)]:
            await self.oracle.answer(question)
        self.oracle.frozen = True

    def note(self, kind: str, outcome: Outcome, allowed: tuple[str, ...]) -> None:
        """Count an outcome; an error that says none of `allowed` is a problem."""
        reason = outcome.meta.get("finish_reason") or {}
        if outcome.complete:
            result = "complete"
        elif outcome.left:
            result = "left"
        elif outcome.error or outcome.status != 200:
            result = f"refused: {outcome.status}"
            if not any(text in outcome.error for text in allowed):
                self.report.problem(f"{kind}: {outcome.status} {outcome.error}")
        elif outcome.reason == "abort":
            message = str(reason.get("message"))
            result = f"aborted: {message[:60]}"
        else:
            result = "ended early"
            self.report.problem(f"{kind}: ended without a reason: {outcome}")
        self.report.outcomes[result] += 1
