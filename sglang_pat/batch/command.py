"""`sglang-pat batch`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sglang_pat import compat
from sglang_pat.batch import job, servers
from sglang_pat.batch.lengths import usage_of
from sglang_pat.batch.lines import BatchError, Failure, Json, Output, Request, Source, refusal
from sglang_pat.cli.addresses import KEY_PROBLEM, is_key
from sglang_pat.cli.parser import Parser
from sglang_pat.text import printable, say

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

DEFAULTS = {"--attention-backend": "pat", "--log-level": "warning"}
"""Flags of SGLang's server that a job has if neither flags nor a `--config` file say otherwise."""


def engine(flags: Sequence[str]) -> Engine:
    """An engine with flags of SGLang's server, and with those of DEFAULTS where it is not told otherwise.

    Raises:
        BatchError: There is no such model, or it is not served with these flags.
        SystemExit: There is no such flag.
    """
    import sglang
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    load_plugins()
    logging.getLogger("sglang.srt.entrypoints.engine").addFilter(_says_more_than_our_handler)
    # SGLang's own parser would also print all flags that there are.
    parser = Parser(prog="sglang-pat batch", add_help=False)
    ServerArgs.add_cli_args(parser)
    words = [word for flag in flags for word in (flag.split("=", 1) if flag.startswith("--config=") else [flag])]
    defaults = [word for default in DEFAULTS.items() for word in default]
    try:
        # Of two flags the later one holds.
        words = [*defaults, *compat.arguments.with_config_file(parser, words)]
        parser.parse_args(words)
        arguments = prepare_server_args(words)
        job.check_answers(arguments)
        signal.signal(signal.SIGTERM, _on_told_to_end)  # until SGLang handles it
        compat.arguments.handle_failed_start(arguments, _on_failed_start)
        return sglang.Engine(server_args=arguments)
    except Exception as error:
        # SGLang refuses some arguments by assertions, and reports processes that were killed as RuntimeError.
        _failures.append(error)
        _end_children()
        if _signalled:
            raise _signalled[0] from None
        says = str(error) and isinstance(error, OSError | ValueError | RuntimeError | AssertionError)
        why = " ".join((str(error) if says else repr(error)).split())
        raise BatchError(f"the engine does not start: {why}") from None


_failures: list[Exception] = []
"""Kept, with what an engine had made so far, until the process ends: 0.5.23's sockets, collected earlier, would wait for somebody who reads them."""

_signalled: list[BatchError] = []
"""What a signal said before there was an engine. Raised in the midst of whatever ran, it may have been caught there."""


def _on_failed_start(signum: int, frame: Any) -> None:
    """One of the engine's processes has failed. SGLang's own handler would kill this process too."""
    _end_start("the engine does not start: one of its processes has ended, and said why above unless it was killed")


def _on_told_to_end(signum: int, frame: Any) -> None:
    """SIGTERM, before there is an engine."""
    _end_start("the job was told to end before its engine had started")


def _end_start(why: str) -> NoReturn:
    _signalled.append(BatchError(why))
    _end_children()
    raise _signalled[0]


def _says_more_than_our_handler(record: logging.LogRecord) -> bool:
    """Whether a line of SGLang's log is not that of a handler for SIGQUIT, an error to SGLang."""
    return not record.getMessage().startswith("Using custom SIGQUIT handler")


def _end_children() -> None:
    """Kill all child processes; none of them is waited for or told of any more."""
    from sglang.srt.utils import kill_process_tree

    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    kill_process_tree(os.getpid(), include_parent=False)
    _leave_tracker()


def _leave_tracker() -> None:
    # Python's resource tracker is killed like all child processes. Locks of libraries would start another one at exit, which prints a traceback for
    # each, as it does not know them.
    setattr(resource_tracker._resource_tracker, "_send", lambda *message: None)  # noqa: B010


class Progress(contextlib.AbstractContextManager["Progress"]):
    """Writes records, and draws a bar of them; tokens a second, and what prefixes saved, beside it."""

    def __init__(self, output: Output, total: int, done: int) -> None:
        from tqdm import tqdm

        self._output = output
        self._bar: Any = None  # where nothing can be drawn
        if sys.stderr is not None:
            with contextlib.suppress(OSError):
                self._bar = tqdm(total=total, initial=done, unit="req", dynamic_ncols=True, file=sys.stderr)
        self._began = time.monotonic()
        self._prompt = self._cached = self._answers = 0

    def keep(self, record: Json) -> None:
        """Write a record."""
        self._output.write(record)
        usage = usage_of(record["response"]["body"] if record["response"] else {})
        self._answers += usage.completion_tokens
        self._prompt += usage.prompt_tokens
        self._cached += usage.cached
        said = self._speed()
        self._draw(lambda bar: (bar.set_postfix_str(said, refresh=False), bar.update()))

    def _speed(self) -> str:
        seconds = max(1e-9, time.monotonic() - self._began)
        # Servers say nothing of it without --enable-cache-report.
        saved = f", {self._cached / self._prompt:.0%} of prefill saved" if self._cached and self._prompt else ""
        return f"{self._answers / seconds:.0f} tokens/s{saved}"

    def summary(self) -> str:
        """How long answers took, without the start of an engine, and what came of it."""
        return f"{spoken(time.monotonic() - self._began)}, {self._speed()}"

    def warn(self, message: str) -> None:
        """Write a line above the bar."""
        self._draw(lambda bar: bar.write(f"sglang-pat: {message}", file=sys.stderr))

    def _draw(self, draw: Callable[[Any], object]) -> None:
        """A job does not end because nobody sees how far it is: once stderr is closed or full, nothing more is drawn."""
        if self._bar is None:
            return
        try:
            draw(self._bar)
        except OSError:
            self._bar.disable = True
            self._bar = None

    def __exit__(self, *_: object) -> None:
        self._draw(lambda bar: bar.close())


NAMES_A_MODEL = ("--model-path", "--model", "--config")
"""Flags of SGLang's server, one of which an engine needs."""


@dataclass(frozen=True)
class Place:
    """Where a job runs.

    Attributes:
        flags: Of SGLang's server, `--model-path` among them, for an engine of the job's own; or
        urls: servers that run.
        key: Theirs.
        in_flight: Requests that the engine, each replica of it, or each server holds at a time, at most.
        patience: Seconds that an answer may take.
    """

    flags: Sequence[str]
    urls: Sequence[str]
    key: str
    in_flight: int
    patience: float


def batch(source: Path, target: Path, place: Place) -> int:
    """Answer what is not answered yet; how many of all records are errors.

    Raises:
        BatchError: A file cannot be read or written, or belongs to another job; a server cannot be asked, or none is left.
    """
    if target.exists() and source.exists() and target.samefile(source):
        raise BatchError(f"{target} is the input: name another file")
    place = checked(place)
    # Before the output is made: a wrong name must not leave one.
    with Source(source) as requests, Output(target) as output:
        refused: list[Failure] = []
        total = known = 0
        for one in requests.lines():
            total += 1
            if one.number in output.done:
                known += output.done[one.number] == one.custom_id
            elif isinstance(one, Failure):
                refused.append(one)
            else:
                requests.keep()
        if known < len(output.done):
            raise BatchError(
                f"{target} has answers to another input than {source}: name another file, or delete the records of lines that you have corrected"
            )
        for failure in refused:
            output.write(refusal(failure))
        said = ""
        if requests and place.urls:
            with Progress(output, total, total - len(requests)) as progress:
                asyncio.run(_on_servers(requests, place, progress))
                said = progress.summary()
        elif requests:
            said = _on_engine(requests, total, output, place)
        ending = f"; {said}" if said else ""
        if reason := output.first_error():
            ending += f"; the first error: {printable(reason)}"
        say(f"{printable(str(target))}: all {total} records are there, {output.failed} of them errors{ending}")
        return output.failed


def spoken(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def checked(place: Place) -> Place:
    """The place, with the whole addresses of its servers.

    Raises:
        BatchError: Nothing was named, or both an engine and servers; the key or an address is wrong.
    """
    if not place.urls:
        if not any(flag.split("=")[0] in NAMES_A_MODEL for flag in place.flags):
            raise BatchError(
                "nothing was named to answer the requests: give --model-path, or --url for running servers"
            )
        return place
    if place.flags:
        raise BatchError(
            f"{place.flags[0]} is none of this command's flags, and an engine of the job's own, which it may be for, is not started with --url"
        )
    if not is_key(place.key):
        raise BatchError(KEY_PROBLEM)
    return replace(place, urls=servers.addresses(place.urls))


async def _on_servers(requests: Sequence[Request], place: Place, progress: Progress) -> None:
    most = servers.in_flight_at_most(place.in_flight, len(place.urls))
    if most < place.in_flight:
        wanted = servers.SPARE_FILES + place.in_flight * len(place.urls)
        progress.warn(f"at most {most} in flight at each server: raise `ulimit -n` to {wanted} for {place.in_flight}")
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    async with servers.connect(place.urls, place.key, told.is_set) as found:
        rooms = await asyncio.gather(*(server.room() for server in found))
        replicas = [job.in_time(server, place.patience, url) for server, url in zip(found, place.urls, strict=True)]
        await job.answer_all(requests, replicas, progress.keep, most, told.is_set, progress.warn, rooms)


async def _while_it_runs(tokens: TokenizerManager, asked: Coroutine[Any, Any, None]) -> None:
    """Await what is asked of an engine. BatchError if one of its processes ends: SGLang then kills all of them, this one too."""
    asking = asyncio.ensure_future(asked)
    ended = asyncio.Event()

    def end() -> None:
        ended.set()
        asking.cancel()

    tokens.auto_create_handle_loop()  # which would take the signal later
    asyncio.get_running_loop().add_signal_handler(signal.SIGQUIT, end)
    try:
        await asking
    except asyncio.CancelledError:
        if not ended.is_set():
            raise
        raise BatchError("the engine has ended, and said why above") from None


def _on_engine(requests: Sequence[Request], total: int, output: Output, place: Place) -> str:
    """Answer on an engine of the job's own; what `Progress.summary` says."""
    say("sglang-pat: loading the model")
    running = engine(["--enable-cache-report", *place.flags])
    try:
        room = job.room_of(running.get_server_info())
        replicas = [job.in_time(ask, place.patience, "the engine") for ask in job.askers(running)]
        with Progress(output, total, total - len(requests)) as progress:
            told = running.tokenizer_manager
            asked = job.answer_all(
                requests, replicas, progress.keep, place.in_flight, lambda: told.gracefully_exit, progress.warn,
                [room] * len(replicas),
            )  # fmt: skip
            running.loop.run_until_complete(_while_it_runs(told, asked))
            return progress.summary()
    finally:
        running.shutdown()
        _leave_tracker()
