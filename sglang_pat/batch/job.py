"""Runs the requests of a job on the replicas of an engine, or on servers, some at a time."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from sglang_pat.batch.lines import BatchError, Failure, Json, Request, answer, check, number_of, refusal
from sglang_pat.batch.order import Tree
from sglang_pat.batch.shares import Shares

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine

IN_FLIGHT = 1024
"""Requests that a replica holds at a time: more than run on one GPU, so that some always wait, and few enough that their order counts."""

Ask = Callable[[Request], Awaitable[tuple[int, Json]]]
"""Gives the HTTP status and body of the answer to a request."""


class LostError(Exception):
    """A replica answers no more; the message says which, and why."""


def askers(engine: Engine) -> list[Ask]:
    """Asks an engine as SGLang's server would: chat template, tools, sampling parameters and all that follow from its flags.

    Args:
        engine: An `sglang.Engine`.

    Returns:
        One for each of its replicas (`--dp-size`), which SGLang would choose in turn otherwise.
    """
    from pydantic import ValidationError
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
    from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion

    tokens, templates = engine.tokenizer_manager, engine.template_manager
    handlers = {
        "/v1/chat/completions": (ChatCompletionRequest, tokens.serving_chat_class(tokens, templates)),
        "/v1/completions": (CompletionRequest, OpenAIServingCompletion(tokens, templates)),
    }

    async def ask(request: Request, route: Json) -> tuple[int, Json]:
        kind, handler = handlers[request.url]
        try:
            body = kind(**{**route, **request.body})
        except (ValidationError, TypeError) as error:
            response = handler.create_error_response(str(error))
        else:
            response = await handler.handle_request(body, None)
        if hasattr(response, "model_dump_json"):
            return 200, msgspec.json.decode(response.model_dump_json())
        return response.status_code, msgspec.json.decode(response.body)

    replicas: int = tokens.server_args.dp_size
    routes = [{"routed_dp_rank": rank} for rank in range(replicas)] if replicas > 1 else [{}]
    return [functools.partial(ask, route=route) for route in routes]


async def answer_all(
    requests: Sequence[Request], replicas: Sequence[Ask], write: Callable[[Json], None], in_flight: int = IN_FLIGHT,
    stopping: Callable[[], bool] = lambda: False, warn: Callable[[str], None] = lambda message: None,
) -> None:  # fmt: skip
    """Ask for all requests, ordered by what they share, and write each record as its answer comes.

    Args:
        requests: Of the job.
        replicas: Each with a cache of its own. What one raises becomes the record of that request, but for LostError.
        write: Told of each record; what it raises ends the job.
        in_flight: Requests that are asked at a time, of each replica.
        stopping: Whether no more shall be asked.
        warn: Told of replicas that are lost.

    Raises:
        BatchError: It was stopped before all were asked, or all replicas are lost.
    """
    tree = Tree(requests)
    shares = Shares(tree, len(replicas), in_flight)
    running: dict[asyncio.Future[tuple[int, Json]], tuple[int, int]] = {}
    finished: asyncio.Queue[asyncio.Future[tuple[int, Json]]] = asyncio.Queue()
    left = len(requests)
    try:
        while left:
            while not stopping() and (taken := shares.take()) is not None:
                asked: asyncio.Future[tuple[int, Json]] = asyncio.ensure_future(
                    replicas[taken[0]](tree.requests[taken[1]])
                )
                running[asked] = taken
                asked.add_done_callback(finished.put_nowait)
            if not running:
                raise BatchError(
                    f"the job was told to end, {left} requests before it was done: the same command goes on"
                )
            task = await finished.get()
            replica, rank = running.pop(task)
            error = None if task.cancelled() else task.exception()
            if replica not in shares.living:
                continue
            if isinstance(error, LostError):
                shares.lose(replica)
                for other, (asked_of, _) in running.items():
                    if asked_of == replica:
                        other.cancel()
                if not shares.living:
                    raise BatchError(f"{error}; {left} requests have no answer yet: the same command goes on")
                warn(f"{error}; its requests go to the others")
                continue
            shares.finish(replica, rank)
            left -= 1
            write(_record(tree.requests[rank], task))
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
        in_flight: Requests that it holds at a time, in each replica.

    Returns:
        Their records, as lines of a batch's output, in the order of the input.
    """
    found = [check(number, line) for number, line in enumerate(lines, 1)]
    records = {failure.number: refusal(failure) for failure in found if isinstance(failure, Failure)}
    requests = [request for request in found if isinstance(request, Request)]

    def keep(record: Json) -> None:
        records[number_of(record["id"])] = record

    engine.loop.run_until_complete(answer_all(requests, askers(engine), keep, in_flight))
    return [records[number] for number in sorted(records)]
