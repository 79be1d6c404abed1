"""What clients do."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from . import malformed
from .client import Outcome
from .conversations import BUSY, CLOSED, Conversation
from .judge import Case
from .questions import GENERATE, Ids, Question, greedy, sampling

if TYPE_CHECKING:
    from . import Chaos

SHARED_IDS = ("shared-0", "shared-1", "shared-2", "shared", "s")
"""Ids that many requests have; an abort of one aborts those that begin with it too (`Scheduler.abort_request`)."""

ABORTED = ("abort", "Abort", "disconnected")
TAKEN = ("Duplicate request ID",)
UNLOADED = ("never been loaded", "not loaded", "has been unloaded", "was not found", "not found in")

Action = Callable[["Chaos", random.Random], Awaitable[None]]

ACTIONS: dict[str, tuple[Action, int, str]] = {}
"""By name: what is done, how often beside others, and the feature that it needs."""

_numbers = itertools.count()


def action(name: str, weight: int, feature: str = "requests") -> Callable[[Action], Action]:
    def register(do: Action) -> Action:
        ACTIONS[name] = (do, weight, feature)
        return do

    return register


def _dressed(chaos: Chaos, chance: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """A body with what does not change its answer: whether it streams, its namespace, its priority."""
    if chance.random() < 0.5:
        body["stream"] = True
    if "namespaces" in chaos.able and chance.random() < 0.25:
        body["extra_key"] = chance.choice("ab")
    if "salts" in chaos.able and chance.random() < 0.15:
        body["cache_salt"] = chance.choice("ab")
    if "priorities" in chaos.able and chance.random() < 0.5:
        body["priority"] = chance.randint(-2, 3)
    return body


async def _send(
    chaos: Chaos,
    chance: random.Random,
    question: Question,
    tokens: int = 0,
    *,
    samples: int = 1,
    about: str = "",
    rid: str | None = None,
    leave_after: float | None = None,
    allowed: tuple[str, ...] = (),
) -> Outcome:
    """Ask a question and have the outcome judged; errors that say one of `allowed` are no problem."""
    body = _dressed(chaos, chance, question.body)
    if question.kind == "greedy":
        tokens = min(tokens, chaos.catalogue.room(body["input_ids"]))
        body["sampling_params"] |= {"max_new_tokens": tokens, "n": samples}
        # Not always: SGLang mixes requests without them only.
        if chaos.close == 0 and samples == 1 and chance.random() < 0.5:
            body["return_logprob"] = True
    use = None
    if rid is not None:
        body["rid"] = rid
        use = chaos.names.begin(rid, question)
    outcome = await chaos.client.ask(question.path, body, leave_after)
    if use is not None:
        chaos.names.end(use, outcome)
    chaos.note(question.kind, outcome, (*ABORTED, *allowed))
    chaos.judge.submit(Case(question, outcome, tokens, use, samples, about))
    return outcome


def _prompt(chaos: Chaos, chance: random.Random) -> Ids:
    return chance.choice(chaos.catalogue.prompts)


def _soon(chance: random.Random) -> float:
    """A time after which to leave or to abort: often at once, seldom after the answer."""
    return chance.choice([0.0, chance.uniform(0, 0.05), chance.uniform(0, 0.3), chance.uniform(0, 1.5)])


@action("plain", 30)
async def plain(chaos: Chaos, chance: random.Random) -> None:
    await _send(chaos, chance, greedy(_prompt(chaos, chance)), chance.randint(2, 40))


@action("burst", 8)
async def burst(chaos: Chaos, chance: random.Random) -> None:
    """Many at once that share a prefix."""
    first = _prompt(chaos, chance)
    near = sorted(chaos.catalogue.prompts, key=lambda prompt: prompt[:20] != first[:20])[:8]
    await asyncio.gather(*(_send(chaos, chance, greedy(prompt), chance.randint(1, 30)) for prompt in near))


@action("no token", 1)
async def no_token(chaos: Chaos, chance: random.Random) -> None:
    await _send(chaos, chance, greedy(_prompt(chaos, chance)), 0)


@action("one token", 3)
async def one_token(chaos: Chaos, chance: random.Random) -> None:
    await _send(chaos, chance, greedy(_prompt(chaos, chance)), 1)


@action("huge prompt", 2)
async def huge(chaos: Chaos, chance: random.Random) -> None:
    leave_after = _soon(chance) if chance.random() < 0.4 else None
    await _send(
        chaos, chance, greedy(chance.choice(chaos.catalogue.huge)), chance.randint(1, 40), leave_after=leave_after
    )


@action("left", 8, "disconnects")
async def left(chaos: Chaos, chance: random.Random) -> None:
    await _send(chaos, chance, greedy(_prompt(chaos, chance)), 128, leave_after=_soon(chance))


@action("left in prefill", 2, "disconnects")
async def left_in_prefill(chaos: Chaos, chance: random.Random) -> None:
    """A disconnect while the prompt waits behind long ones."""
    long = [_send(chaos, chance, greedy(prompt), 2) for prompt in chance.sample(chaos.catalogue.huge, 2)]
    short = _send(chaos, chance, greedy(_prompt(chaos, chance)), 30, leave_after=chance.uniform(0.01, 0.4))
    await asyncio.gather(*long, short)


async def _after(delay: float, do: Awaitable[Any]) -> None:
    await asyncio.sleep(delay)
    await do


@action("aborted", 5, "aborts")
async def aborted(chaos: Chaos, chance: random.Random) -> None:
    rid = f"aborted-{next(_numbers)}"
    samples = 2 if "samples" in chaos.able and chance.random() < 0.2 else 1
    sent = _send(chaos, chance, greedy(_prompt(chaos, chance)), 128, rid=rid, samples=samples)
    await asyncio.gather(sent, _after(_soon(chance), chaos.client.post("/abort_request", {"rid": rid})))


@action("abort all", 1, "aborts")
async def abort_all(chaos: Chaos, chance: random.Random) -> None:
    if chance.random() < 0.5:
        await asyncio.sleep(chance.uniform(0, 2))
    await chaos.client.post("/abort_request", {"rid": "", "abort_all": True})


@action("shared id", 6, "live ids")
async def shared_id(chaos: Chaos, chance: random.Random) -> None:
    """An id that another request may have now. Left in time, as SGLang may never answer (`Names.beside`)."""
    rid = chance.choice(SHARED_IDS)
    await _send(
        chaos, chance, greedy(_prompt(chaos, chance)), chance.randint(1, 60), rid=rid, leave_after=30, allowed=TAKEN
    )


@action("id of one that left", 8, "live ids")
async def id_of_one_that_left(chaos: Chaos, chance: random.Random) -> None:
    """Ask, leave, and ask something else with the same id, at once or a little later, several times."""
    rid = f"left-{next(_numbers)}"
    for _ in range(chance.randint(1, 3)):
        await _send(
            chaos, chance, greedy(_prompt(chaos, chance)), 128, rid=rid, leave_after=_soon(chance), allowed=TAKEN
        )
        await asyncio.sleep(chance.choice([0.0, 0.0, chance.uniform(0, 0.1), chance.uniform(0, 3)]))
    await _send(
        chaos, chance, greedy(_prompt(chaos, chance)), chance.randint(2, 60), rid=rid, leave_after=30, allowed=TAKEN
    )


@action("id of one that finished", 3, "ids")
async def id_of_one_that_finished(chaos: Chaos, chance: random.Random) -> None:
    """The second may be aborted: SGLang aborts the id of a stream two seconds after its end (`create_abort_task`)."""
    rid = f"finished-{next(_numbers)}"
    for _ in range(3):
        await _send(
            chaos, chance, greedy(_prompt(chaos, chance)), chance.randint(1, 20), rid=rid, leave_after=30, allowed=TAKEN
        )


@action("samples", 8, "samples")
async def samples(chaos: Chaos, chance: random.Random) -> None:
    leave_after = _soon(chance) if chance.random() < 0.3 else None
    prompt, count = _prompt(chaos, chance), chance.randint(2, 5)
    await _send(
        chaos, chance, greedy(prompt), chance.randint(1, 30), samples=count, about="samples", leave_after=leave_after
    )


@action("sampled", 3, "sampling")
async def sampled(chaos: Chaos, chance: random.Random) -> None:
    """Answers that nothing is known of, in the same batches."""
    parameters = sampling(chance.randint(1, 40)) | {"temperature": 1.2, "top_p": 0.9, "frequency_penalty": 0.5}
    body = _dressed(chaos, chance, {"input_ids": _prompt(chaos, chance), "sampling_params": parameters})
    chaos.note("sampled", await chaos.client.ask(GENERATE, body), ABORTED)


async def _question(chaos: Chaos, chance: random.Random, kind: str) -> None:
    leave_after = _soon(chance) if "disconnects" in chaos.able and chance.random() < 0.25 else None
    await _send(chaos, chance, chance.choice(chaos.catalogue.questions[kind]), leave_after=leave_after)


def _asks(kind: str, weight: int, feature: str) -> None:
    async def ask(chaos: Chaos, chance: random.Random) -> None:
        await _question(chaos, chance, kind)

    action(kind, weight, feature)(ask)


_asks("beam", 8, "beams")
_asks("stop", 5, "stops")
_asks("logprobs", 6, "logprobs")
_asks("seeded", 20, "seeds")
_asks("completion", 3, "openai")
_asks("chat", 3, "openai")


@action("lora", 8, "loras")
async def lora(chaos: Chaos, chance: random.Random) -> None:
    await _send(
        chaos, chance, chance.choice(chaos.catalogue.loras), chance.randint(1, 30), about="lora", allowed=UNLOADED
    )


@action("lora loaded again", 1, "lora updates")
async def lora_loaded_again(chaos: Chaos, chance: random.Random) -> None:
    async with chaos.operator:
        name, path = chance.choice(sorted(chaos.loras.items()))
        if (await chaos.client.post("/unload_lora_adapter", {"lora_name": name}))[0] != 200:
            return
        await asyncio.sleep(chance.uniform(0, 0.2))
        status, text = await chaos.client.post("/load_lora_adapter", {"lora_name": name, "lora_path": path})
        # A request that asked for it in between has it loaded.
        if status != 200 and "already loaded" not in text:
            chaos.report.problem(f"/load_lora_adapter: {status} {text[:300]}")


async def _converse(chaos: Chaos, chance: random.Random, streaming: bool) -> None:
    """A conversation, some of whose turns are aborted, and whose last one may be left or closed while it runs."""
    script = chance.choice(chaos.catalogue.scripts)
    conversation = Conversation(chaos.client, chance, streaming)
    await conversation.open()
    allowed = (*ABORTED, *BUSY, *CLOSED)
    ending = chance.choice(["closed", "closed", "closed in flight", "left"])
    last = chance.randint(1, len(script.turns)) - 1
    for i, (own, length) in enumerate(zip(script.turns, script.tokens, strict=False)):
        tokens = script.begin + own if i == 0 else own
        beside: list[Awaitable[None]] = []
        leave_after = None
        if i == last and ending == "closed in flight":
            beside.append(_after(_soon(chance), conversation.close()))
        elif i == last and ending == "left" and "disconnects" in chaos.able:
            leave_after = _soon(chance)
        elif chance.random() < 0.2 and "aborts" in chaos.able:
            beside.append(_after(_soon(chance), conversation.abort()))
        others = asyncio.gather(*beside)
        try:
            turn = await conversation.say(tokens, length, leave_after, chance.random() < 0.5)
        finally:
            await others
        chaos.note("turn", turn.outcome, allowed)
        if turn.prompt is not None:
            chaos.judge.submit(
                Case(greedy(turn.prompt), turn.outcome, length, about="streaming session" if streaming else "session")
            )
        if not await conversation.settle(turn, chaos.oracle) or i == last:
            break
        if chance.random() < 0.3:
            await asyncio.sleep(chance.uniform(0, 0.5))
    await conversation.close()


@action("session", 5, "sessions")
async def session(chaos: Chaos, chance: random.Random) -> None:
    await _converse(chaos, chance, streaming=False)


@action("streaming session", 10, "streaming sessions")
async def streaming_session(chaos: Chaos, chance: random.Random) -> None:
    await _converse(chaos, chance, streaming=True)


@action("malformed", 5, "malformed")
async def malformed_request(chaos: Chaos, chance: random.Random) -> None:
    path, body = malformed.request(chance)
    try:
        status, _ = await asyncio.wait_for(chaos.client.post(path, body), 10)
    except asyncio.TimeoutError:
        status = 0
    chaos.report.outcomes[f"malformed: {status}"] += 1


@action("body that never ends", 1, "malformed")
async def body_that_never_ends(chaos: Chaos, chance: random.Random) -> None:
    body = greedy(_prompt(chaos, chance), 30).text.encode()
    await chaos.client.send_raw(GENERATE, body, len(body) + 1000, chance.uniform(0, 1))


@action("slow body", 1, "malformed")
async def slow_body(chaos: Chaos, chance: random.Random) -> None:
    body = greedy(_prompt(chaos, chance), 30).text.encode()
    await chaos.client.send_raw(GENERATE, body, len(body), chance.uniform(0, 2))


@action("flush", 1, "flushes")
async def flush(chaos: Chaos, chance: random.Random) -> None:
    """Refused while requests run."""
    await chaos.client.post("/flush_cache")


@action("health", 1)
async def health(chaos: Chaos, chance: random.Random) -> None:
    """SGLang generates a token for this, and waits for it while it is paused."""
    async with chaos.operator:
        await chaos.client.get("/health_generate")


async def _paused(chaos: Chaos, chance: random.Random, mode: str) -> None:
    async with chaos.operator:
        try:
            await chaos.client.post("/pause_generation", {"mode": mode})
            await asyncio.sleep(chance.uniform(0, 0.5))
            if "flushes" in chaos.able and chance.random() < 0.5:
                await chaos.client.post("/flush_cache")
            if "weights" in chaos.able and chance.random() < 0.3:
                await _update_weights(chaos, chance, flush_cache=False)
        finally:
            await chaos.client.post("/continue_generation")


@action("pause: abort", 1, "pauses")
async def pause_abort(chaos: Chaos, chance: random.Random) -> None:
    await _paused(chaos, chance, "abort")


@action("pause: in place", 1, "pauses")
async def pause_in_place(chaos: Chaos, chance: random.Random) -> None:
    await _paused(chaos, chance, "in_place")


@action("pause: retract", 2, "pauses")
async def pause_retract(chaos: Chaos, chance: random.Random) -> None:
    await _paused(chaos, chance, "retract")


async def _update_weights(chaos: Chaos, chance: random.Random, flush_cache: bool, abort: bool = False) -> None:
    body = {"model_path": chaos.model, "flush_cache": flush_cache, "abort_all_requests": abort}
    status, text = await chaos.client.post("/update_weights_from_disk", body)
    if status != 200:
        chaos.report.problem(f"/update_weights_from_disk: {status} {text[:300]}")


@action("weights", 1, "weights")
async def weights(chaos: Chaos, chance: random.Random) -> None:
    """The same ones again, without a flush: 0.5.17 fails where it cannot flush (`flush_cache_after_weight_update`)."""
    async with chaos.operator:
        await _update_weights(chaos, chance, flush_cache=False, abort=chance.random() < 0.3)


async def quiet_weights(chaos: Chaos, chance: random.Random) -> None:
    """The same ones again with a flush, while nothing runs."""
    chaos.report.actions["weights and flush"] += 1
    await _update_weights(chaos, chance, flush_cache=True)


async def quiet_memory(chaos: Chaos, chance: random.Random) -> None:
    """Release the GPU's memory and take it back, while nothing runs; what was in it is gone, so the weights are loaded again."""
    chaos.report.actions["memory"] += 1
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        status, text = await chaos.client.post(path, {})
        if status != 200:
            chaos.report.problem(f"{path}: {status} {text[:300]}")
    await _update_weights(chaos, chance, flush_cache=True)
