"""Replays coding agents' sessions (sglang_pat/estimate/agentic.py says how their file is written), so many at once, with each attention backend in turn:

    python benchmarks/agentic.py --model MODEL --dummy --trace agentic.jsonl.xz --sessions 8 32 --backends pat fa3
    python benchmarks/agentic.py --url http://127.0.0.1:30000 --trace agentic.jsonl.xz    # with a server that runs

Each session sends a turn when the one before it is answered and the user has thought, and when it ends another one begins; sub-agents run beside it.
The seed draws their order and the turn at which each begins, so that they are as long as at any time of a day; with `--from-start` it is the first.
Turns that do not fit the context are left out. Answers have the length that the file says.

There is no text in the file. Tokens are drawn for what it says is shared, and for what is new, so that equal prefixes are just what it says. An
answer does not come back in the next prompt, of which the file does not say where it is: its tokens are new there, and prefilled.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
from about import gpu, result_file
from serving import client_session, generate, log_of, make_parser, sglang_flags
from tqdm import tqdm

from sglang_pat.cli.addresses import is_address
from sglang_pat.cli.top import picture, total
from sglang_pat.demo.server import Server
from sglang_pat.estimate import EstimateError
from sglang_pat.estimate.agentic import Session
from sglang_pat.estimate.prompts import Sessions, lines_of, object_in
from sglang_pat.text import printable

BENCHMARKS = {
    "agentic": {
        "what": "coding agents' sessions, backend after backend",
        "gpu": True,
        "inputs": "--model FOLDER --trace FILE",
        "results": "agentic-h200.json",
    },
}
"""For run.py, which reads it without importing this file."""

TOKEN_IDS = (1, 500)
"""Token ids from the first to below the second are in every vocabulary, the demo's too."""
SHOWN = 10
"""The most failures that are printed."""
PATIENCE = 60
"""Seconds in which a server has to be idle before a run."""
LONGEST_WARM_UP = 600
"""Seconds after which a run begins though some session has no answer, unless more were asked for."""
FAILURES = (aiohttp.ClientError, OSError, asyncio.TimeoutError, RuntimeError)
"""What a run may end with."""


class Load(msgspec.Struct, frozen=True):
    """What is asked of a server.

    Attributes:
        sessions: How many run at once, their sub-agents beside them.
        seconds: How long it is measured; requests that run at the end do not count.
        warm_up: Seconds in front of that, or more if some session has no answer by then: all begin at once, with an empty cache. Requests that were
            sent then do not count. In a record what it took.
        think_factor: What the file's seconds between turns are divided by.
        longest_think: The most of what is left of them.
        context: Tokens of prompt and answer; None for all that the server takes.
        seed: Of the order, of where sessions begin, and of tokens.
        same_tools: Whether all sessions have the tools of one version, as far as they are long.
        from_start: Whether sessions begin with their first turn.
    """

    sessions: int
    seconds: float = 600
    think_factor: float = 10
    longest_think: float = 30
    context: int | None = None
    seed: int = 0
    same_tools: bool = False
    from_start: bool = False
    warm_up: float = 0


class Record(Load, kw_only=True, frozen=True):
    """One run; times in milliseconds, rates in tokens a second, `null` where there is nothing to measure.

    Attributes:
        run: Its number among those that differ in the seed alone.
        seconds: How long it took.
        turns, failed, left_out: Turns that were answered; sessions that ended with a failure; turns that did not fit.
        cached_tokens: Of the prompts, what was in the cache.
        mean_tpot_ms, median_tpot_ms, p90_tpot_ms: Of the answers' times per token, each answer once.
        output_tps: Of all tokens that came, those of turns that still ran at the end too: the slower a backend, the more of them there are.
        step_ms: The median time between what came of an answer and what came next: one decode step if no prompt was computed in between.
        steps: Decode steps by PAT.
        kv_saved, kv_bytes_saved: KV that decode steps would have read without packing, and did not: its part, and bytes.
    """

    model: str
    backend: str
    run: int
    release: str
    gpu: str
    turns: int
    failed: int
    left_out: int
    prompt_tokens: int
    cached_tokens: int
    ttft_ms: float
    median_ttft_ms: float
    mean_tpot_ms: float | None
    median_tpot_ms: float | None
    p90_tpot_ms: float | None
    output_tps: float
    step_ms: float | None
    steps: int | None = None
    kv_saved: float | None = None
    kv_bytes_saved: int | None = None
    unpacked_because: str = ""


class Info(msgspec.Struct):
    """What a server says of itself."""

    max_req_input_len: int
    model_path: str
    version: str
    internal_states: list[dict[str, Any]]
    attention_backend: str | None = None
    decode_attention_backend: str | None = None


def said(error: BaseException) -> str:
    """An error in a line."""
    return printable(str(error) or type(error).__name__)[:200]


def rounded(of: Callable[[Sequence[float]], float], milliseconds: Sequence[float]) -> float | None:
    return round(of(milliseconds), 2) if milliseconds else None


def read(path: Path) -> list[Session]:
    """The sessions of a file.

    Raises:
        SystemExit: It has none, or a line that is none.
    """
    sessions, found = Sessions(), []
    try:
        for number, line in lines_of(path):
            try:
                found.append(sessions.read(object_in(line)))
            except (EstimateError, RecursionError) as error:
                raise EstimateError(f"{path}, line {number}: {error}") from None
    except EstimateError as error:
        raise SystemExit(str(error)) from None
    if not found:
        raise SystemExit(f"{path} has no session")
    return found


def tokens(key: tuple[Any, ...], count: int) -> list[int]:
    """Always the same of a key, and fewer are the first of more."""
    stream = np.random.default_rng(list(hashlib.sha256(repr(key).encode()).digest()))
    return stream.integers(*TOKEN_IDS, count).tolist()


def prompt_of(session: Session, number: int, load: Load) -> list[int]:
    prompt: list[int] = []
    for key, count in session.pieces(number):
        prompt += tokens((load.seed, *(("tools",) if load.same_tools and key[0] == "tools" else key)), count)
    return prompt


class Replay:
    """Sessions that one server answers.

    Attributes:
        times: Of each turn that was answered: when it was sent and when each token came.
        streamed: Tokens that came, of turns that were not answered in full too.
    """

    def __init__(self, http: aiohttp.ClientSession, url: str, sessions: Sequence[Session], load: Load) -> None:
        self._http, self._url, self._load = http, url, load
        roots = [one for one in sessions if one.parent is None]
        self._roots = random.Random(load.seed).sample(roots, len(roots))
        self._children: dict[tuple[int, int], list[Session]] = defaultdict(list)
        for one in sessions:
            if one.parent is not None:
                self._children[one.parent, one.after_turn].append(one)
        self._tasks: list[asyncio.Task[Any]] = []
        self._begin()

    def _begin(self) -> None:
        """Count from now on."""
        self._began = time.perf_counter()
        self.times: list[list[float]] = []
        self.failed = self.left_out = self.prompt_tokens = self.cached_tokens = self.streamed = 0

    async def info(self) -> Info:
        """
        Raises:
            RuntimeError: It is no SGLang server.
        """
        try:
            return msgspec.json.decode(await self._call("GET", "/server_info"), type=Info)
        except msgspec.DecodeError as error:
            raise RuntimeError(f"no SGLang server answers: {error}") from None

    async def _call(self, method: str, path: str) -> bytes:
        """
        Raises:
            RuntimeError: There is no answer in time.
            aiohttp.ClientError: There is none, or it is an error.
        """
        limit = aiohttp.ClientTimeout(total=2 * PATIENCE)
        try:
            async with self._http.request(method, self._url + path, timeout=limit) as response:
                response.raise_for_status()
                return await response.read()
        except asyncio.TimeoutError:
            raise RuntimeError(f"{path} was not answered in {2 * PATIENCE} s") from None

    async def run(self, number: int) -> Record:
        """
        Raises:
            RuntimeError: Nothing was answered.
            aiohttp.ClientError: The server does not say what it is, or cannot empty its cache.
        """
        load, before = self._load, await self.info()
        self._limit = min(before.max_req_input_len, load.context or before.max_req_input_len)
        # Not before what an earlier run left is aborted.
        await self._call("POST", f"/flush_cache?timeout={PATIENCE}")
        waiting = iter(self._roots)
        self._begin()
        with tqdm(
            total=load.seconds,
            unit="s",
            bar_format="{percentage:3.0f}%|{bar}| {n:.0f} of {total:.0f} s{postfix}",
            disable=None,
        ) as self._bar:
            answered = [asyncio.Event() for _ in range(load.sessions)]
            running = [self._start(self._in_turn(waiting, one)) for one in answered]
            try:
                if load.warm_up:
                    await asyncio.wait(running, timeout=load.warm_up)
                    await self._wait_for_answers(answered)
                    # A busy server answers late.
                    before = await self.info()
                    self._load = msgspec.structs.replace(load, warm_up=round(time.perf_counter() - self._began, 1))
                    self._begin()
                done, _ = await asyncio.wait(running, timeout=load.seconds)
                after = await self.info()
                seconds = time.perf_counter() - self._began
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
        for task in done:
            task.result()
        if done:
            print(f"the file has no more sessions: fewer than {load.sessions} ran at once at the end", flush=True)
        if not self.times:
            raise RuntimeError("no turn was answered")
        return self._record(number, seconds, before, after)

    def _start(self, what: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        self._tasks.append(asyncio.create_task(what))
        return self._tasks[-1]

    async def _wait_for_answers(self, answered: Sequence[asyncio.Event]) -> None:
        """Wait until each session has one, but not forever."""
        left = max(0, LONGEST_WARM_UP - (time.perf_counter() - self._began))
        await asyncio.wait([self._start(one.wait()) for one in answered], timeout=left)
        if late := sum(not one.is_set() for one in answered):
            seconds = time.perf_counter() - self._began
            print(f"{late} of {len(answered)} sessions had no answer in {seconds:.1f} s: the run begins", flush=True)

    async def _in_turn(self, waiting: Iterator[Session], answered: asyncio.Event) -> None:
        for session in waiting:
            draw = random.Random(f"{self._load.seed} {session.session}")
            await self._play(session, 0 if self._load.from_start else draw.randrange(len(session.turns)), answered)
        answered.set()

    async def _play(self, session: Session, first: int, answered: asyncio.Event) -> None:
        """A session from its turn `first` on, and its sub-agents; `answered` is set when a turn was."""
        load, agents = self._load, []
        try:
            for number in range(first, len(session.turns) + 1):
                agents += [
                    self._start(self._play(one, 0, answered))
                    for one in self._children.get((session.session, number), ())
                ]
                if number == len(session.turns):
                    break
                turn = session.turns[number]
                if turn.tokens + turn.out > self._limit:
                    self.left_out += 1
                    continue
                if number > first:
                    await asyncio.sleep(min(turn.think_s / load.think_factor, load.longest_think))
                await self._ask(session, number)
                answered.set()
        except Exception as error:  # whatever a server does costs this session alone
            self.failed += 1
            if self.failed <= SHOWN:
                what = "" if isinstance(error, FAILURES) else f"{type(error).__name__}: "
                tqdm.write(f"session {session.session} ended at turn {number}: {what}{said(error)}")
        if agents:  # `gather` would pass on that it is cancelled, through agents of agents of any depth
            await asyncio.wait(agents)

    async def _ask(self, session: Session, number: int) -> None:
        """
        Raises:
            RuntimeError: The answer is not as long as it should be.
        """
        # Beside the others' answers: hundred thousands of tokens take tens of milliseconds.
        prompt = await asyncio.to_thread(prompt_of, session, number, self._load)
        count = max(1, session.turns[number].out)
        times: list[float] = []
        try:
            _, meta = await generate(self._http, self._url, prompt, count, times)
        finally:
            self.streamed += sum(at >= self._began for at in times[1:])
        if len(times) - 1 != count:
            raise RuntimeError(f"{len(times) - 1} of {count} tokens were answered: {meta.get('finish_reason')}")
        if times[0] < self._began:
            return
        self.cached_tokens += meta.get("cached_tokens", 0)
        self.prompt_tokens += len(prompt)
        self.times.append(times)
        self._bar.n = min(self._bar.total, time.perf_counter() - self._began)
        self._bar.set_postfix_str(f"{len(self.times)} turns, {self.failed} failures")

    def _record(self, number: int, seconds: float, before: Info, after: Info) -> Record:
        first = [(times[1] - times[0]) * 1e3 for times in self.times]
        per_token = [(times[-1] - times[1]) / (len(times) - 2) * 1e3 for times in self.times if len(times) > 2]
        gaps = [(b - a) * 1e3 for times in self.times for a, b in itertools.pairwise(times[1:]) if b > a]
        old, new = ([state["pat"] for state in one.internal_states if state.get("pat")] for one in (before, after))
        found = picture(total(new), total(old), seconds) if old and new else None
        saved = found.kv_bytes_unpacked - found.kv_bytes if found else None
        return Record(
            **msgspec.structs.asdict(self._load) | {"seconds": round(seconds, 1), "context": self._limit},
            model=Path(before.model_path).name,
            backend=before.decode_attention_backend or before.attention_backend or "",
            run=number,
            release=before.version,
            gpu=gpu()["name"],
            turns=len(self.times),
            failed=self.failed,
            left_out=self.left_out,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            ttft_ms=round(statistics.mean(first), 2),
            median_ttft_ms=round(statistics.median(first), 2),
            mean_tpot_ms=rounded(statistics.mean, per_token),
            median_tpot_ms=rounded(statistics.median, per_token),
            p90_tpot_ms=rounded(lambda times: sorted(times)[int(len(times) * 0.9)], per_token),
            output_tps=round(self.streamed / seconds, 1),
            step_ms=rounded(statistics.median, gaps),
            steps=found and found.steps,
            kv_saved=round(saved / found.kv_bytes_unpacked, 4) if found and found.kv_bytes_unpacked else None,
            kv_bytes_saved=saved,
            unpacked_because=found.unpacked_because if found else "",
        )


async def replay(url: str, sessions: Sequence[Session], load: Load, run: int = 1) -> Record:
    """One run against a server.

    Raises:
        RuntimeError: Nothing was answered.
        aiohttp.ClientError: The server does not say what it is, or cannot empty its cache.
    """
    async with client_session(read_bufsize=1 << 24) as http:
        return await Replay(http, url, sessions, load).run(run)


def main() -> None:
    parser = make_parser(__doc__, result_file("agentic"), model=False)
    parser.add_argument("--url", help="of a server that runs, in place of one for each backend")
    parser.add_argument("--trace", type=Path, required=True, help="the sessions, packed with xz or not")
    parser.add_argument("--sessions", type=int, nargs="+", default=[8, 32], help="at once")
    parser.add_argument("--runs", type=int, default=1, help="of each, with seeds one after the other")
    parser.add_argument("--minutes", type=float, default=10, help="of each run")
    parser.add_argument(
        "--warm-up",
        type=float,
        default=2,
        help="minutes in front of that, which do not count; more until each session has an answer",
    )
    parser.add_argument("--think-factor", type=float, default=10, help="divides the seconds that users think")
    parser.add_argument("--longest-think", type=float, default=30, help="seconds, after that")
    parser.add_argument("--context", type=int, help="tokens that a turn may have; all that the server takes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--same-tools", action="store_true", help="one version of the tools for all sessions")
    parser.add_argument("--from-start", action="store_true", help="sessions begin with their first turns")
    options = parser.parse_args()
    if (options.model is None) == (options.url is None):
        parser.error("give --model, or --url")
    above = (
        *options.sessions,
        options.runs,
        options.minutes,
        options.think_factor,
        1 if options.context is None else options.context,
    )
    if not all(0 < number < math.inf for number in above):
        parser.error("--sessions, --runs, --minutes, --think-factor and --context must be above 0, and finite")
    if not options.longest_think >= 0 or not 0 <= options.warm_up < math.inf:
        parser.error("--longest-think and --warm-up must be 0 or more")
    if options.url is not None:
        options.url = options.url.rstrip("/")
        if not is_address(options.url):
            parser.error("--url must be like http://127.0.0.1:30000, without user, query or fragment")
    if not options.output.parent.is_dir():
        parser.error(f"--output: there is no folder {options.output.parent}")
    sessions, records = read(options.trace), []
    if (most := max(options.sessions)) > (roots := sum(one.parent is None for one in sessions)):
        parser.error(f"--sessions {most}: {options.trace} has {roots}, sub-agents aside")

    def measure(url: str) -> None:
        for count, run in itertools.product(options.sessions, range(options.runs)):
            load = Load(
                count, options.minutes * 60, options.think_factor, options.longest_think, options.context,
                options.seed + run, options.same_tools, options.from_start, options.warm_up * 60,
            )  # fmt: skip
            record = asyncio.run(replay(url, sessions, load, run + 1))
            print(record, flush=True)
            records.append(msgspec.to_builtins(record))
            document = {"device": gpu(), "model": record.model, "records": records}
            options.output.write_text(json.dumps(document, indent=1) + "\n")

    if options.url is not None:
        try:
            return measure(options.url)
        except FAILURES as error:
            raise SystemExit(f"{options.url}: {said(error)}") from None
    for backend in options.backends:
        log = log_of(options, backend)
        try:
            # SGLang's own first request is text, of which some shapes make no token (shapes.py). Here runs warm up.
            flags = ["--skip-server-warmup", *sglang_flags(options)]
            with Server(options.model, backend, log, flags, on_cpu=False) as server:
                measure(server.wait().url)
        except FAILURES as error:  # the others' numbers count all the same
            print(f"{backend} failed: {str(error)[:300]}; see {log}", flush=True)
    if not records:
        raise SystemExit("nothing was measured")


if __name__ == "__main__":
    main()
