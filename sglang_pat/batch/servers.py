"""Asks SGLang's servers, or whatever has their OpenAI API, such as its router."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
from collections.abc import AsyncIterator, Sequence
from urllib.parse import urlsplit

import aiohttp
import msgspec

from sglang_pat.batch.job import LostError
from sglang_pat.batch.lines import LONGEST, BatchError, Json, Request

PATIENCE = 30
"""Seconds in which a server has to connect, and to say that it is well."""

WATCH = 10
"""Seconds between two questions whether it is well."""

SICK = 3
"""Times in a row that it may not be: SGLang's own check fails while a prefill takes longer than 20 s (`HEALTH_CHECK_TIMEOUT`)."""

PAUSES = (0.2, 1, 2, 4, 8)
"""Seconds before a request is asked once more."""

BUSY = frozenset((429, 503))
"""Statuses that say nothing about a request: a queue is full, or nobody is there to answer."""

UNSURE = frozenset((502, 504))
"""Statuses of a proxy whose server ended or took too long, perhaps by what it was asked."""

FAILURES = (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError)
"""What a connection may end with."""


def addresses(urls: Sequence[str]) -> list[str]:
    """Servers' addresses, without what OpenAI's clients have behind them.

    Raises:
        BatchError: One is no address, or given twice. It is not shown: it may have a password in it.
    """
    found = []
    for number, url in enumerate(urls, 1):
        try:
            parts = urlsplit(url)
            whole = parts.scheme in ("http", "https") and bool((parts.hostname or "").encode("idna"))
            whole = whole and parts.port != 0 and parts.path.rstrip("/") in ("", "/v1")
        except ValueError:
            whole = False
        if not whole or not url.isprintable() or set("@?# ") & set(url):
            raise BatchError(
                f"--url must be like http://127.0.0.1:30000, without user, path or query: number {number} is not"
            )
        found.append(f"{parts.scheme}://{parts.netloc.lower()}")
    if len(set(found)) < len(found):
        raise BatchError("a server is named twice with --url: name each once")
    return found


def check_key(key: str) -> None:
    """
    Raises:
        BatchError: An API key cannot be sent.
    """
    if not (key.isascii() and key.isprintable()):
        raise BatchError(
            "an API key has printable ASCII characters only: give another one with --api-key or in OPENAI_API_KEY"
        )


class _GarbageError(Exception):
    """What came is no answer of an OpenAI-compatible server; the message says what it is."""


class Server:
    """A server that is asked; called with a request, it gives the HTTP status and body of its answer, or raises LostError."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        """
        Args:
            session: As `connect` makes it.
            url: Its address, without a path.
        """
        self._session, self._url = session, url
        self._answered = 0
        self._known = asyncio.Event()
        self._watcher: asyncio.Task[str] | None = None

    async def __call__(self, request: Request) -> tuple[int, Json]:
        if self._watcher is None:
            self._watcher = asyncio.ensure_future(self._watch())
        asked = asyncio.ensure_future(self._ask(request))
        try:
            await asyncio.wait((asked, self._watcher), return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
            raise self._lost(self._watcher.result())
        finally:
            asked.cancel()

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
        """
        await self._known.wait()
        body = msgspec.json.encode(request.body)
        began = seen = self._answered
        tries = 0
        while True:
            status = 0
            try:
                status, text = await self._fetch("POST", request.url, body)
                reason = f"it says {status} to requests"
                if status not in BUSY | UNSURE:
                    found = _decode(status, text)
                    if status < 500:
                        self._answered += 1
                        return status, found
                    # Of this request alone, or of whatever it will be asked.
                    if problem := await self._sick():
                        raise self._lost(problem)
                    return status, found
            except _GarbageError as error:
                reason = str(error)
            except FAILURES as error:
                reason = _words(error)
                # A connection that was kept open may end just when it is used again.
                if problem := await self._sick():
                    raise self._lost(problem) from None
            if status in BUSY and self._answered > seen:
                seen, tries = self._answered, 0
            if tries == len(PAUSES):
                if status in BUSY or self._answered == began:
                    raise self._lost(reason)
                raise RuntimeError(f"{self._url}: {reason}")
            await asyncio.sleep(PAUSES[tries])
            tries += 1

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
            status, _ = await asyncio.wait_for(self._fetch("GET", "/health"), PATIENCE)
        except (*FAILURES, _GarbageError) as error:
            return _words(error)
        return f"its /health says {status}" if status >= 500 else ""

    async def _stranger(self) -> str:
        """Why it is no server that can be asked; empty if it is one."""
        try:
            status, text = await asyncio.wait_for(self._fetch("GET", "/v1/models"), PATIENCE)
        except (*FAILURES, _GarbageError) as error:
            return _words(error)
        if status in (401, 403):
            return "it wants another API key: give it with --api-key or in OPENAI_API_KEY"
        try:
            known = status == 200 and "data" in msgspec.json.decode(text, type=Json)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            known = False
        return "" if known else f"its /v1/models, with status {status}, is not that of an OpenAI-compatible server"

    async def _fetch(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        # A redirection could take the key elsewhere.
        async with self._session.request(method, self._url + path, data=body, allow_redirects=False) as response:
            text = bytearray()
            async for part in response.content.iter_any():
                text += part
                if len(text) > LONGEST:
                    raise _GarbageError(f"an answer is longer than {LONGEST >> 20} MiB")
            return response.status, bytes(text)


def _decode(status: int, text: bytes) -> Json:
    """The body of an answer.

    Raises:
        _GarbageError: It is none that such a server gives.
    """
    try:
        found = msgspec.json.decode(text, type=Json)
        msgspec.json.encode([[[found]]])  # as deep as in a record
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        if 400 <= status < 600:
            # Of a proxy, perhaps, to which a request is too large.
            return {"error": {"message": text[:1000].decode(errors="replace"), "code": status}}
        raise _GarbageError(f"an answer with status {status} is no JSON object: {error}") from None
    if not 400 <= status < 600 and not (status == 200 and isinstance(found.get("choices"), list)):
        raise _GarbageError(f"an answer with status {status} has no choices")
    return found


def _words(error: Exception) -> str:
    """Of an error, which may have none of its own."""
    if isinstance(error, asyncio.TimeoutError):
        return f"no answer within {PATIENCE} s"
    # aiohttp's own words for these have an address and `ssl:default` in them; names that are unknown have no number.
    number = error.errno if isinstance(error, aiohttp.ClientConnectorError) else None
    if number is not None and number > 0:
        return os.strerror(number)
    return str(error) or type(error).__name__


@contextlib.asynccontextmanager
async def connect(urls: Sequence[str], key: str) -> AsyncIterator[list[Server]]:
    """Servers to be asked, until the context is left.

    Args:
        urls: Their addresses, as of `addresses`.
        key: The API key that they were started with; none if empty.
    """
    # Each request in flight has a connection.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    # An answer may take hours.
    times = aiohttp.ClientTimeout(total=None, sock_connect=PATIENCE)
    # SGLang closes idle connections after 5 s: a request must not be on its way then.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    async with aiohttp.ClientSession(
        headers=headers, timeout=times, connector=connector, cookie_jar=aiohttp.DummyCookieJar()
    ) as session:
        servers = [Server(session, url) for url in urls]
        try:
            yield servers
        finally:
            for server in servers:
                server.close()
