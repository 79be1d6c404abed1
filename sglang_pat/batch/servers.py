"""Asks SGLang's servers, or whatever has their OpenAI API, such as its router."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import resource
import time
from collections.abc import AsyncIterator, Callable, Sequence
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import aiohttp
import msgspec

from sglang_pat.batch.job import (
    BUSY,
    PAUSES,
    PROBE,
    PROBES,
    LostError,
    asks_for_patience,
    begin,
    is_aborted,
    rest,
    room_of,
)  # fmt: skip
from sglang_pat.batch.lines import LONGEST, BatchError, Json, Request
from sglang_pat.batch.order import Room
from sglang_pat.cli.addresses import is_address
from sglang_pat.config import KEY

PATIENCE = 30
"""Seconds in which a server has to connect, and to say that it is well."""

WATCH = 10
"""Seconds between two questions whether it is well."""

SICK = 3
"""Times in a row that it may not be: SGLang's own check fails while a prefill takes longer than 20 s (`HEALTH_CHECK_TIMEOUT`)."""

FULL = 600
"""Seconds in which a queue may be full with no request of the job answered: the answers before it may be long."""

LONGEST_PAUSE = 60
"""Seconds that a server may ask for before the next try: a queue is seldom full for longer, and its `Retry-After` is a guess too."""

LATER = BUSY | {413, 425}
"""Statuses below 500 of which `Retry-After` says that the same request may get another answer then: it was too much for now (RFC 9110), or came too early
(RFC 8470). To a key or a body that is refused waiting changes nothing."""

UNSURE = frozenset((502, 504))
"""Statuses of a proxy whose server ended or took too long, perhaps by what it was asked."""

REFUSALS = frozenset((401, 403, 404, 405))
"""Statuses below 500 that a server may have for every request: a key or a path that it does not know."""

OURS = frozenset((errno.EMFILE, errno.ENFILE))
"""Errors of a connection that say nothing about a server: too many files are open here."""

SPARE_FILES = 128
"""Files that a job may open besides a connection for each request in flight: its own, SGLang's libraries', and /health of each server."""

FAILURES = (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError)
"""What a connection may end with."""


def addresses(urls: Sequence[str]) -> list[str]:
    """Servers' addresses, without what OpenAI's clients have behind them.

    Raises:
        BatchError: One is no address, or given twice. It is not shown: it may have a password in it.
    """
    found = []
    for number, url in enumerate(urls, 1):
        if not is_address(url, ("", "/v1")):
            raise BatchError(
                f"--url must be like http://127.0.0.1:30000, without user, path or query: number {number} is not"
            )
        parts = urlsplit(url)
        found.append(f"{parts.scheme}://{parts.netloc.lower()}")
    if len(set(found)) < len(found):
        raise BatchError("a server is named twice with --url: name each once")
    return found


class _Model(msgspec.Struct):
    id: str = ""


class _Models(msgspec.Struct):
    data: list[_Model]


class _NoAnswerError(Exception):
    """Nothing came that is an answer of an OpenAI-compatible server; the message says what did."""


class Server:
    """A server that is asked; called with a request, it gives the HTTP status and body of its answer, or raises LostError."""

    def __init__(self, session: aiohttp.ClientSession, url: str, stopping: Callable[[], bool] = lambda: False) -> None:
        self._session, self._url, self._stopping = session, url, stopping
        self._answered = 0  # requests of the job
        self._taken = 0  # these, and probes: they tell whether it takes any, not whether its queue moves
        self._model = ""
        self._probing = asyncio.Lock()
        self._known = asyncio.Event()
        self._watcher: asyncio.Task[str] | None = None

    async def __call__(self, request: Request) -> tuple[int, Json]:
        if self._watcher is None:
            self._watcher = asyncio.ensure_future(self._watch())
        asked = begin(self._ask(request))
        try:
            await asyncio.wait((asked, self._watcher), return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
            raise self._lost(self._watcher.result())
        finally:
            asked.cancel()

    async def room(self) -> Room:
        """What it has room for, as SGLang's servers say."""
        try:
            status, text, _ = await asyncio.wait_for(self._fetch("GET", "/server_info"), PATIENCE)
            return room_of(msgspec.json.decode(text)) if status == 200 else Room()
        except (*FAILURES, _NoAnswerError, RecursionError):
            return Room()

    def close(self) -> None:
        """Ask it no more."""
        if self._watcher is not None:
            self._watcher.cancel()

    def _lost(self, reason: str) -> LostError:
        return LostError(f"{self._url} is lost: {reason}")

    async def _ask(self, request: Request) -> tuple[int, Json]:
        """
        Raises:
            LostError: The server answers nobody.
            RuntimeError: It answers others, but not this request.
            StoppedError: No more shall be asked, and it has not taken this request.
        """
        await self._known.wait()
        body = msgspec.json.encode(request.body)
        tries = 0  # since the queue moved
        failed, failed_at = 0, 0  # times in a row, and what was taken at the first
        answered, refused_at, since, last = -1, 0, 0.0, False
        while True:
            try:
                status, found, wanted = await self._once(request.url, body, failed < len(PAUSES))
                if wanted is None or last:
                    return status, found
                patience = asks_for_patience(status, found)
            except _NoAnswerError as error:
                if failed == len(PAUSES):
                    if await self._refusal(request.url, failed_at):
                        raise self._lost(str(error)) from None
                    raise RuntimeError(f"{self._url}: {error}") from None
                patience, wanted = False, 0
            if not patience:
                failed_at = failed_at if failed else self._taken
                failed += 1
            elif self._answered > answered:
                answered, refused_at, since = self._answered, self._taken, time.monotonic()
                failed = tries = 0
            elif time.monotonic() - since > FULL:
                reason = await self._refusal(request.url, refused_at)
                if reason or self._taken == refused_at:
                    raise self._lost(reason or _says(status))
                last = True  # others are taken
                continue
            else:
                failed = 0
            await rest(max(PAUSES[min(tries, len(PAUSES) - 1)], min(wanted, LONGEST_PAUSE)), self._stopping)
            tries += 1

    async def _once(self, url: str, body: bytes, again: bool) -> tuple[int, Json, float | None]:
        """The status and body of an answer, and, if it asks for patience, for how many seconds.

        Args:
            again: Whether a `Retry-After` counts with any error: it may come with what is refused for good, such as a proxy's 413.

        Raises:
            LostError: The server answers nobody.
            _NoAnswerError: It has none for this request, this time.
        """
        try:
            status, text, wanted = await self._fetch("POST", url, body)
        except FAILURES as error:
            # A connection that was kept open may end just when it is used again.
            if problem := await self._sick():
                raise self._lost(problem) from None
            raise _NoAnswerError(_words(error)) from None
        if status in UNSURE:
            raise _NoAnswerError(_says(status))
        found = _decode(status, text)
        if is_aborted(found):
            raise _NoAnswerError("an answer was aborted")
        if asks_for_patience(status, found) or (again and wanted is not None and (status >= 500 or status in LATER)):
            return status, found, wanted or 0
        if _refused(status) and status not in BUSY:
            # This request alone, or whatever it will be asked.
            if problem := await self._sick() or await self._refusal(url, self._taken):
                raise self._lost(problem)
        else:
            self._answered += 1
            self._taken += 1
        return status, found, None

    async def _refusal(self, url: str, seen: int) -> str:
        """Why a request that failed is not the reason; empty if it is, since others are answered.

        Args:
            url: Where it was asked.
            seen: What had been taken when it failed. If nothing was since, one token is asked for.
        """
        async with self._probing:
            if self._taken > seen:
                return ""
            body = {"max_tokens": 1, **PROBES[url]} | ({"model": self._model} if self._model else {})
            try:
                status, text, _ = await asyncio.wait_for(self._fetch("POST", url, msgspec.json.encode(body)), PROBE)
                if status in BUSY or _refused(status):
                    return "" if status in BUSY else _says(status)
                _decode(status, text)
            except (*FAILURES, _NoAnswerError) as error:
                if self._taken > seen or _is_ours(error):
                    return ""
                late = isinstance(error, asyncio.TimeoutError) and not isinstance(error, aiohttp.ClientError)
                return f"no answer to a request for one token within {PROBE} s" if late else _words(error)
            self._taken += 1
            return ""

    async def _watch(self) -> str:
        """Ask again and again whether it is well: a machine that is switched off ends no connection. Gives the reason when it is not."""
        if reason := await self._stranger():
            return reason
        self._known.set()
        times = 0
        while times < SICK:
            await asyncio.sleep(WATCH)
            reason = await self._sick()
            times = times + 1 if reason else 0
        return reason

    async def _sick(self) -> str:
        """Why it cannot be asked; empty if it can. One that is being stopped says 503, and would never end while it is asked more."""
        try:
            status, *_ = await asyncio.wait_for(self._fetch("GET", "/health"), PATIENCE)
        except (*FAILURES, _NoAnswerError) as error:
            return "" if _is_ours(error) else _words(error)
        return f"its /health says {status}" if status >= 500 else ""

    async def _stranger(self) -> str:
        """Why it is no server that can be asked; empty if it is one."""
        try:
            status, text, _ = await asyncio.wait_for(self._fetch("GET", "/v1/models"), PATIENCE)
        except (*FAILURES, _NoAnswerError) as error:
            return _words(error)
        if status in (401, 403):
            return f"it wants another API key: give it with --api-key or in {KEY}"
        try:
            found = msgspec.json.decode(text, type=_Models) if status == 200 else None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            found = None
        if found is None:
            return f"its /v1/models, with status {status}, is not that of an OpenAI-compatible server"
        self._model = found.data[0].id if found.data else ""
        return ""

    async def _fetch(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes, float | None]:
        """The status, the body, and in how many seconds it may be asked again, if that is said."""
        # A redirection could take the key elsewhere.
        async with self._session.request(method, self._url + path, data=body, allow_redirects=False) as response:
            text = bytearray()
            async for part in response.content.iter_any():
                text += part
                if len(text) > LONGEST:
                    raise _NoAnswerError(f"an answer is longer than {LONGEST >> 20} MiB")
            return response.status, bytes(text), _seconds(response.headers.get("Retry-After"))


def _is_ours(error: Exception) -> bool:
    return getattr(error, "errno", None) in OURS


def _seconds(retry_after: str | None) -> float | None:
    """Until the time that a `Retry-After` names, by seconds or by its date; None if it names none."""
    if retry_after is None or re.fullmatch("[0-9]{1,9}", retry_after):
        return None if retry_after is None else float(retry_after)
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def _refused(status: int) -> bool:
    return status in REFUSALS or status >= 500


def _says(status: int) -> str:
    return f"it says {status} to requests"


def _decode(status: int, text: bytes) -> Json:
    """The body of an answer."""
    try:
        found = msgspec.json.decode(text, type=Json)
        msgspec.json.encode([[[found]]])  # as deep as in a record
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        if 400 <= status < 600:
            # Of a proxy, perhaps, to which a request is too large.
            return {"error": {"message": text[:1000].decode(errors="replace"), "code": status}}
        what = "a redirection" if 300 <= status < 400 else f"no JSON object: {error}"
        raise _NoAnswerError(f"an answer with status {status} is {what}") from None
    if not 400 <= status < 600 and not (status == 200 and isinstance(found.get("choices"), list)):
        raise _NoAnswerError(f"an answer with status {status} has no choices")
    return found


def _words(error: Exception) -> str:
    """Of an error, which may have none of its own."""
    if isinstance(error, asyncio.TimeoutError):
        return f"no answer within {PATIENCE} s"
    if isinstance(error, aiohttp.ClientResponseError):
        return "what it sends is no HTTP"
    # aiohttp's own words for these have an address and `ssl:default` in them; names that are unknown have no number.
    number = error.errno if isinstance(error, aiohttp.ClientConnectorError) else None
    if number is not None and number > 0:
        return os.strerror(number)
    return " ".join(str(error).split()) or type(error).__name__


def raise_file_limit() -> int:
    """Let this process open as many files as it may; how many these are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # the system may allow fewer than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return soft


def in_flight_at_most(wanted: int, servers: int) -> int:
    """How many requests each server may hold at a time: `wanted`, or as many as this process may have connections for.

    Raises:
        BatchError: There are hardly any files that it may open.
    """
    soft = raise_file_limit()
    most = wanted if soft == resource.RLIM_INFINITY else (soft - SPARE_FILES) // servers
    if most < 1:
        raise BatchError(
            f"this process may open {soft} files only: raise `ulimit -n` to {SPARE_FILES + wanted * servers}"
        )
    return min(wanted, most)


@contextlib.asynccontextmanager
async def connect(
    urls: Sequence[str], key: str, stopping: Callable[[], bool] = lambda: False
) -> AsyncIterator[list[Server]]:
    """Servers to be asked, until the context is left."""
    raise_file_limit()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    # An answer may take hours.
    times = aiohttp.ClientTimeout(total=None, sock_connect=PATIENCE)
    # SGLang closes idle connections after 5 s: a request must not be on its way then.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    async with aiohttp.ClientSession(
        headers=headers, timeout=times, connector=connector, cookie_jar=aiohttp.DummyCookieJar()
    ) as session:
        servers = [Server(session, url, stopping) for url in urls]
        try:
            yield servers
        finally:
            for server in servers:
                server.close()
