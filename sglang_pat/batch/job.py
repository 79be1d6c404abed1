"""Runs the requests of a job on an engine, some at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from sglang_pat.batch.lines import BatchError, Failure, Json, Request, answer, check, number_of, refusal
from sglang_pat.batch.order import Order

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine

IN_FLIGHT = 1024
"""Requests that an engine holds at a time: more than run on one GPU, so that some always wait, and few enough that their order counts."""

Ask = Callable[[Request], Awaitable[tuple[int, Json]]]
"""Gives the HTTP status and body of the answer to a request."""


def asker(engine: Engine) -> Ask:
    """Asks an engine as SGLang's server would: chat template, tools, sampling parameters and all that follow from its flags.

    Args:
        engine: An `sglang.Engine`.
    """
    from pydantic import ValidationError
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
    from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion

    tokens, templates = engine.tokenizer_manager, engine.template_manager
    handlers = {
        "/v1/chat/completions": (ChatCompletionRequest, tokens.serving_chat_class(tokens, templates)),
        "/v1/completions": (CompletionRequest, OpenAIServingCompletion(tokens, templates)),
    }

    async def ask(request: Request) -> tuple[int, Json]:
        kind, handler = handlers[request.url]
        try:
            body = kind(**request.body)
        except (ValidationError, TypeError) as error:
            response = handler.create_error_response(str(error))
        else:
            response = await handler.handle_request(body, None)
        if hasattr(response, "model_dump_json"):
            return 200, msgspec.json.decode(response.model_dump_json())
        return response.status_code, msgspec.json.decode(response.body)

    return ask


async def answer_all(
    requests: Sequence[Request], ask: Ask, write: Callable[[Json], None], in_flight: int = IN_FLIGHT,
    stopping: Callable[[], bool] = lambda: False,
) -> None:  # fmt: skip
    """Ask for all requests, ordered by what they share, and write each record as its answer comes.

    Args:
        requests: Of the job.
        ask: As `asker`; what it raises becomes the record of that request.
        write: Told of each record; what it raises ends the job.
        in_flight: Requests that are asked at a time.
        stopping: Whether no more shall be asked.

    Raises:
        BatchError: It was stopped before all were asked.
    """
    order = Order(requests)
    running: dict[asyncio.Future[tuple[int, Json]], int] = {}
    finished: asyncio.Queue[asyncio.Future[tuple[int, Json]]] = asyncio.Queue()
    left = len(requests)
    try:
        while left:
            while len(running) < in_flight and not stopping() and (place := order.take()) is not None:
                asked: asyncio.Future[tuple[int, Json]] = asyncio.ensure_future(ask(requests[place]))
                running[asked] = place
                asked.add_done_callback(finished.put_nowait)
            if not running:
                raise BatchError(
                    f"the job was told to end, {left} requests before it was done: the same command goes on"
                )
            task = await finished.get()
            place = running.pop(task)
            order.finish(place)
            left -= 1
            write(_record(requests[place], task))
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _record(request: Request, task: asyncio.Future[tuple[int, Json]]) -> Json:
    error = asyncio.CancelledError() if task.cancelled() else task.exception()
    if error is None:
        return answer(request, *task.result())
    reason = f"line {request.number}: {type(error).__name__}: {error}"
    return refusal(Failure(request.number, request.custom_id, "server_error", reason))


def run(lines: Iterable[Json], engine: Engine, in_flight: int = IN_FLIGHT) -> list[Json]:
    """Answer requests in OpenAI's batch format.

    Args:
        lines: Each as a line of a batch's input, decoded.
        engine: An `sglang.Engine`, made with any flags.
        in_flight: Requests that it holds at a time.

    Returns:
        Their records, as lines of a batch's output, in the order of the input.
    """
    found = [check(number, line) for number, line in enumerate(lines, 1)]
    records = {failure.number: refusal(failure) for failure in found if isinstance(failure, Failure)}
    requests = [request for request in found if isinstance(request, Request)]

    def keep(record: Json) -> None:
        records[number_of(record["id"])] = record

    engine.loop.run_until_complete(answer_all(requests, asker(engine), keep, in_flight))
    return [records[number] for number in sorted(records)]
