"""Runs the requests of a job on the replicas of an engine, or on servers, some at a time."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from sglang_pat.batch.lengths import Usage, usage_of
from sglang_pat.batch.lines import BatchError, Failure, Json, Request, answer, check, number_of, refusal
from sglang_pat.batch.order import Room
from sglang_pat.batch.shares import Shares
from sglang_pat.batch.tree import Tree

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine

IN_FLIGHT = 1024
"""Requests that a replica holds at a time, at most: more than run on one GPU, so that some always wait, and few enough that their order counts."""

TIMEOUT = 7200
"""Seconds that an answer may take: one of 32,768 tokens takes less at 10 tokens a second, and the others of its window run beside it."""

PROBE = 600
"""Seconds in which a replica that has answered nobody for so long has to answer one token."""

PROBES: dict[str, Json] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/completions": {"prompt": "Hello"},
}
"""Requests that no server would refuse, by URL."""

PAUSES = (0.2, 1, 2, 4, 8)
"""Seconds before a request is asked once more."""

BUSY = frozenset((408, 429, 503, 529))
"""Statuses that ask for patience: a queue is full, a request has waited in it for long, a limit is reached, or nobody is there to answer."""

FOR_GOOD = ("Using priority is disabled", "Request running timeout reached")
"""What SGLang says with such a status to a request that it would treat so again (scheduler.py: `--abort-on-priority-when-disabled`, and
`SGLANG_REQ_RUNNING_TIMEOUT`)."""

Ask = Callable[[Request], Awaitable[tuple[int, Json]]]
"""Gives the HTTP status and body of the answer to a request."""


class StoppedError(Exception):
    """The job shall end, and no server has this request: it was to be asked once more."""


class LostError(Exception):
    """A replica answers no more; the message says which, and why."""


class LateError(Exception):
    """A request has no answer in time, where others have."""


class WouldEndError(Exception):
    """A request that would end SGLang's engine, which does not look; the message says why."""


def begin(answer: Awaitable[tuple[int, Json]]) -> asyncio.Future[tuple[int, Json]]:
    """Begin to get an answer. Where nobody waits for it any more, asyncio does not print what it failed with."""
    task = asyncio.ensure_future(answer)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    return task


async def _within(answer: Awaitable[tuple[int, Json]], seconds: float) -> tuple[int, Json]:
    """`asyncio.wait_for`, which leaves what is raised while it is cancelled to nobody."""
    return await asyncio.wait_for(begin(answer), seconds)


def in_time(ask: Ask, seconds: float, name: str) -> Ask:
    """The same replica, given up where an answer takes too long.

    Args:
        ask: A replica.
        seconds: That an answer may take, from when it is asked for.
        name: What to call the replica.

    Returns:
        One that raises LateError for a request that takes longer, and LostError if the replica has answered no other since and does
        not answer one token either.
    """
    answered = 0
    probing = asyncio.Lock()

    async def asked(request: Request) -> tuple[int, Json]:
        nonlocal answered
        seen = answered
        try:
            found = await _within(ask(request), seconds)
        except asyncio.TimeoutError:
            async with probing:
                if answered == seen:
                    await probe(request)
            raise LateError(f"no answer within {seconds:g} s") from None
        answered += 1
        return found

    async def probe(request: Request) -> None:
        nonlocal answered
        model = {"model": request.body["model"]} if "model" in request.body else {}
        short = Request(
            request.number, request.custom_id, request.url, {**PROBES[request.url], "max_tokens": 1, **model}
        )
        try:
            await _within(ask(short), min(seconds, PROBE))
        except asyncio.TimeoutError:
            raise LostError(f"{name} is lost: it has answered nothing for {seconds:g} s") from None
        except LostError:
            raise
        except Exception:
            # It answers, if by an error.
            pass
        answered += 1

    return asked


def asks_for_patience(status: int, body: Json) -> bool:
    """Whether an answer says that the same request may get another one later."""
    return status in BUSY and not any(words in str(body) for words in FOR_GOOD)


def is_aborted(body: Json) -> bool:
    """Whether an answer, or one of several, is what there was when somebody aborted it: an operator who pauses a server or loads weights, above all."""
    choices = body.get("choices")
    return isinstance(choices, list) and any(
        isinstance(one, dict) and one.get("finish_reason") == "abort" for one in choices
    )


async def rest(seconds: float, stopping: Callable[[], bool]) -> None:
    """Wait before a request is asked once more.

    Raises:
        StoppedError: No more shall be asked.
    """
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if stopping():
            raise StoppedError
        await asyncio.sleep(min(left, 1))


async def patiently(
    ask: Callable[[], Awaitable[tuple[int, Json]]], alone: Callable[[], bool], stopping: Callable[[], bool]
) -> tuple[int, Json]:
    """Ask an engine until it takes the request.

    Args:
        ask: Gives the HTTP status and body of its answer.
        alone: Whether it has no other request. One that is refused even so, in all tries of PAUSES, is refused for good: more prompts than its
            queue is long, perhaps.
        stopping: Whether no more shall be asked.

    Raises:
        RuntimeError: The answer is aborted each time.
        StoppedError: No more shall be asked, and it has not taken this request.
    """
    refused = aborted = lonely = 0
    while True:
        status, body = await ask()
        if asks_for_patience(status, body):
            lonely = lonely + 1 if alone() else 0
            if lonely > len(PAUSES):
                return status, body
            pause = PAUSES[min(refused, len(PAUSES) - 1)]
            refused += 1
        elif is_aborted(body):
            if aborted == len(PAUSES):
                raise RuntimeError(f"its answer was aborted {aborted + 1} times")
            pause = PAUSES[aborted]
            aborted += 1
        else:
            return status, body
        await rest(pause, stopping)


class _Client:
    """Who asks an engine for one answer, as far as SGLang looks: until it is gone, when SGLang aborts what nobody waits for."""

    def __init__(self) -> None:
        self.gone = False

    def request(self) -> Any:
        """SGLang's view of it."""
        from starlette.requests import Request as HttpRequest

        return HttpRequest({"type": "http", "headers": []}, self._receive)

    async def _receive(self) -> dict[str, str]:
        while not self.gone:
            await asyncio.sleep(1)
        return {"type": "http.disconnect"}


def check_answers(server_args: Any) -> None:
    """
    Raises:
        BatchError: An engine with these arguments answers no requests.
    """
    from sglang_pat import compat

    if reason := compat.arguments.why_no_answers(server_args):
        raise BatchError(f"no engine answers a job with {reason}")


def askers(engine: Engine) -> list[Ask]:
    """Asks an engine as SGLang's server would: chat template, tools, sampling parameters and all that follow from its flags.

    Args:
        engine: An `sglang.Engine`.

    Returns:
        One for each of its replicas (`--dp-size`), which SGLang would choose in turn otherwise.

    Raises:
        BatchError: It answers no requests.
    """
    check_answers(engine.server_args)
    from pydantic import ValidationError
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
    from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion

    tokens, templates = engine.tokenizer_manager, engine.template_manager
    handlers = {
        "/v1/chat/completions": (ChatCompletionRequest, tokens.serving_chat_class(tokens, templates)),
        "/v1/completions": (CompletionRequest, OpenAIServingCompletion(tokens, templates)),
    }
    vocabulary: int = tokens.model_config.vocab_size
    handled: set[asyncio.Future[Any]] = set()

    async def once(request: Request, route: Json) -> tuple[int, Json]:
        kind, handler = handlers[request.url]
        try:
            body = kind(**{**route, **request.body})
            check_sound(body, vocabulary)
        except (ValidationError, TypeError, WouldEndError) as error:
            response = handler.create_error_response(str(error))
        else:
            client = _Client()
            task: asyncio.Future[Any] = asyncio.ensure_future(handler.handle_request(body, client.request()))
            handled.add(task)
            task.add_done_callback(handled.discard)
            try:
                # SGLang would never hear of it if this were cancelled in the midst.
                response = await asyncio.shield(task)
            except asyncio.CancelledError:
                client.gone = True
                raise
        if hasattr(response, "model_dump_json"):
            return 200, msgspec.json.decode(response.model_dump_json())
        return response.status_code, msgspec.json.decode(response.body)

    async def ask(request: Request, route: Json) -> tuple[int, Json]:
        return await patiently(lambda: once(request, route), lambda: not handled, lambda: tokens.gracefully_exit)

    replicas: int = tokens.server_args.dp_size
    routes = [{"routed_dp_rank": rank} for rank in range(replicas)] if replicas > 1 else [{}]
    return [functools.partial(ask, route=route) for route in routes]


def check_sound(body: object, vocabulary: int) -> None:
    """Check that a model has all tokens that a request names, and as many as it wants to see at a time, and that of several prompts none is empty.

    Raises:
        WouldEndError: It is not so.
    """

    def check_tokens(tokens: object, where: str = "") -> None:
        if isinstance(tokens, list):
            for token in tokens:
                check_tokens(token, where)
        elif isinstance(tokens, int) and not 0 <= tokens < vocabulary:
            raise WouldEndError(f"{where}token {tokens} is none of the model's {vocabulary:,}")

    for name in ("prompt", "input_ids"):
        prompt = getattr(body, name, None)
        check_tokens(prompt)
        if isinstance(prompt, list) and any(isinstance(one, str | list) and not one for one in prompt):
            raise WouldEndError("one of the prompts is empty")
    for name in ("logprobs", "top_logprobs"):
        wanted = getattr(body, name, None)
        if isinstance(wanted, int) and wanted > vocabulary:
            raise WouldEndError(f"{name}: the model has {vocabulary:,} tokens, not {wanted}")
    if getattr(body, "min_tokens", 0):  # they may not end an answer until it has so many
        check_tokens(getattr(body, "stop_token_ids", None), "stop_token_ids: ")


def room_of(info: object) -> Room:
    """What a server says of itself at `/server_info`; nothing is known of one that says something else."""
    try:
        found = msgspec.convert(info, _Info)
    except msgspec.ValidationError:
        return Room()
    state = found.internal_states[0] if found.internal_states else _State()
    tokens = found.max_total_num_tokens or (state.memory_usage.token_capacity if state.memory_usage else None)
    # -1 is prefill in one step, of whatever length.
    chunk = found.chunked_prefill_size or 0
    return Room(
        tokens or Room.tokens,
        state.effective_max_running_requests_per_dp or Room.requests,
        chunk if chunk > 0 else Room.chunk,
        state.pat is not None and state.pat.defers,
    )


_Size = Annotated[int, msgspec.Meta(ge=1)]


class _Memory(msgspec.Struct):
    token_capacity: _Size | None = None


class _Pat(msgspec.Struct):
    defers: bool = False


class _State(msgspec.Struct):
    pat: _Pat | None = None
    memory_usage: _Memory | None = None
    effective_max_running_requests_per_dp: _Size | None = None


class _Info(msgspec.Struct):
    max_total_num_tokens: _Size | None = None
    chunked_prefill_size: int | None = None
    internal_states: list[_State] = []


async def answer_all(
    requests: Sequence[Request], replicas: Sequence[Ask], write: Callable[[Json], None], in_flight: int = IN_FLIGHT,
    stopping: Callable[[], bool] = lambda: False, warn: Callable[[str], None] = lambda message: None,
    rooms: Sequence[Room] = (),
) -> None:  # fmt: skip
    """Ask for all requests, ordered by what they share, and write each record as its answer comes.

    Args:
        requests: Of the job; gone through once, then taken as they are asked.
        replicas: Each with a cache of its own. What one raises becomes the record of that request, but for LostError.
        write: Told of each record; what it raises ends the job.
        in_flight: Requests that are asked at a time, of each replica.
        stopping: Whether no more shall be asked.
        warn: Told of replicas that are lost.
        rooms: Of each replica, if known.

    Raises:
        BatchError: It was stopped before all were asked, or all replicas are lost.
    """
    tree = Tree(requests)
    shares = Shares(tree, rooms or [Room()] * len(replicas), in_flight)
    running: dict[asyncio.Future[tuple[int, Json]], tuple[int, int, Request]] = {}
    finished: asyncio.Queue[asyncio.Future[tuple[int, Json]]] = asyncio.Queue()
    left = len(requests)
    try:
        while left:
            while not stopping() and (taken := shares.take()) is not None:
                replica, rank = taken
                request = requests[int(tree.origin[rank])]
                asked: asyncio.Future[tuple[int, Json]] = asyncio.ensure_future(replicas[replica](request))
                running[asked] = replica, rank, request
                asked.add_done_callback(finished.put_nowait)
            if not running:
                raise BatchError(
                    f"the job was told to end, {left} requests before it was done: run the same command to go on"
                )
            task = await finished.get()
            replica, rank, request = running.pop(task)
            error = None if task.cancelled() else task.exception()
            if replica not in shares.living:
                continue
            if isinstance(error, LostError):
                shares.lose(replica)
                for other, (asked_of, *_) in running.items():
                    if asked_of == replica:
                        other.cancel()
                if not shares.living:
                    raise BatchError(f"{error}; {left} requests have no answer yet: run the same command to go on")
                warn(f"{error}; its requests go to the others")
                continue
            if isinstance(error, StoppedError):
                continue
            record = _record(request, task)
            shares.finish(replica, rank, usage_of(record["response"]["body"]) if record["response"] else Usage())
            left -= 1
            write(record)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _record(request: Request, task: asyncio.Future[tuple[int, Json]]) -> Json:
    error = asyncio.CancelledError() if task.cancelled() else task.exception()
    if error is None:
        return answer(request, *task.result())
    if isinstance(error, LateError):
        return refusal(Failure(request.number, request.custom_id, "timeout", f"line {request.number}: {error}"))
    reason = f"line {request.number}: {type(error).__name__}: {error}"
    return refusal(Failure(request.number, request.custom_id, "server_error", reason))


def run(lines: Iterable[Json], engine: Engine, in_flight: int = IN_FLIGHT) -> list[Json]:
    """Answer requests in OpenAI's batch format.

    Args:
        lines: Each as a line of a batch's input, decoded.
        engine: An `sglang.Engine`, made with any flags.
        in_flight: Requests that it holds at a time, in each replica.

    Returns:
        Their records, as lines of a batch's output, in the order of the input.

    Raises:
        BatchError: It answers no requests.
    """
    found = [check(number, line) for number, line in enumerate(lines, 1)]
    records = {failure.number: refusal(failure) for failure in found if isinstance(failure, Failure)}
    requests = [request for request in found if isinstance(request, Request)]

    def keep(record: Json) -> None:
        records[number_of(record["id"])] = record

    replicas = [in_time(ask, TIMEOUT, "the engine") for ask in askers(engine)]
    rooms = [room_of(engine.get_server_info())] * len(replicas)
    engine.loop.run_until_complete(answer_all(requests, replicas, keep, in_flight, rooms=rooms))
    return [records[number] for number in sorted(records)]
