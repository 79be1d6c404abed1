"""`sglang-pat top`: what packing does in a running server, live in a terminal."""

from __future__ import annotations

import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent import futures
from http.client import HTTPException, responses
from typing import Annotated, Any, TypedDict

import msgspec
from msgspec import Meta

from sglang_pat.backend.metrics import new_by_size
from sglang_pat.cli.addresses import KEY_PROBLEM, is_address, is_in_the_clear, is_key
from sglang_pat.config import KEY
from sglang_pat.text import UNSHOWABLE

CLEAR = "\x1b[H\x1b[2J"
WIDTH = 40
"""Length of the longest bar, in characters."""
PATIENCE = 10
"""How many seconds a server has for its whole answer."""
LARGEST = 1 << 24
"""The most bytes of an answer; SGLang's has about ten thousand per process."""

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Line = Annotated[str, Meta(pattern=rf"^[^{UNSHOWABLE}]*\Z")]
"""Without them, because it is shown in a terminal."""


class TopError(Exception):
    """There is no server with PAT; the message says what was found instead."""


class Counters(TypedDict):
    """The counters in `/server_info` that are shown here, for one scheduler process with PAT."""

    steps: Count
    plans: Count
    plans_ahead: Count
    planning_us: Count
    work_items: Count
    parts: Count
    kv_bytes: Count
    kv_bytes_unpacked: Count
    fallbacks: Count
    too_large: Count
    faults: Count
    bound: Count
    nodes: Count
    query_sizes: dict[Annotated[int, Meta(ge=1, le=1 << 20)], Count]
    trace: Line
    unpacked_because: Line


class State(msgspec.Struct):
    """A scheduler process."""

    pat: Counters | None = None


class ServerInfo(msgspec.Struct):
    """An answer of `/server_info`."""

    internal_states: list[State]


def fetch(url: str, key: str = "") -> list[Counters]:
    """The counters of every scheduler process of a server.

    Args:
        url: Its address.
        key: Its API key; empty for none.

    Raises:
        TopError: No server answers, or it runs another attention backend, or it needs another key.
    """
    # urllib sends nothing else than ASCII.
    if not (is_address(url) and url.isascii()):
        raise TopError("--url must be like http://127.0.0.1:30000, in ASCII, without user, query or fragment")
    if not is_key(key):
        raise TopError(KEY_PROBLEM)
    try:
        states = msgspec.json.decode(_get_in_time(url, key), type=ServerInfo).internal_states
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TopError(f"what answers at {url} is not an SGLang server that this sglang-pat knows: {error}") from None
    counters = [state.pat for state in states if state.pat is not None]
    if not counters:
        raise TopError(f"the server at {url} decodes with another backend: start it with --attention-backend pat")
    return counters


def _get_in_time(url: str, key: str) -> bytes:
    """`_get` with a time limit. A socket's own limit starts again with every byte, and there is none for DNS lookups."""
    answer: futures.Future[bytes] = futures.Future()

    def get() -> None:
        try:
            answer.set_result(_get(url, key))
        except TopError as error:
            answer.set_exception(error)

    threading.Thread(target=get, daemon=True).start()
    try:
        return answer.result(PATIENCE)
    except futures.TimeoutError:
        raise _silence(url, f"not within {PATIENCE} s") from None


def _get(url: str, key: str) -> bytes:
    """The answer of `/server_info`. Redirects are not followed: they could lead to files, or send the key elsewhere. Nor is a proxy asked, which would
    see the key too.

    Raises:
        TopError: There is none.
    """
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPErrorProcessor,
    ):
        opener.add_handler(handler())
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{url.rstrip('/')}/server_info", headers=headers)
    body = bytearray()
    try:
        # The time limit ends this thread when nobody waits for it any more.
        with opener.open(request, timeout=2 * PATIENCE) as response:
            while len(body) <= LARGEST and (piece := response.read1(1 << 16)):
                body += piece
    except urllib.error.HTTPError as error:
        raise _refusal(url, error) from None
    except HTTPException:
        raise _silence(url, "what is there does not speak HTTP") from None
    except (OSError, ValueError) as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        raise _silence(url, getattr(cause, "strerror", None) or str(cause)) from None
    if len(body) > LARGEST:
        raise _silence(url, f"what is there sends more than {LARGEST >> 20} MiB")
    return bytes(body)


def _silence(url: str, reason: str) -> TopError:
    return TopError(f"no SGLang server answers at {url} ({reason}): give its address with --url")


def _refusal(url: str, error: urllib.error.HTTPError) -> TopError:
    """The error for an unsuccessful answer. Of the answer itself, only its status and new address are shown."""
    with error:
        answer = f"{error.code} {responses.get(error.code, '')}".strip()
        if error.code in (401, 403):
            return TopError(f"the server at {url} answers {answer}: give its key with --api-key or in {KEY}")
        if address := error.headers.get("Location"):
            place = ascii(address.partition("?")[0].removesuffix("/server_info")[:200])
            return TopError(f"the server at {url} answers {answer} to {place}: give that address with --url")
        return _silence(url, answer)


def total(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sum of all processes' counters, and why the first of them that is unpacked is so."""
    reasons = filter(None, (state.get("unpacked_because") for state in states))
    result: dict[str, Any] = {"query_sizes": {}, "unpacked_because": next(reasons, "")}
    for state in states:
        for name, value in state.items():
            if isinstance(value, int):
                result[name] = result.get(name, 0) + value
        for size, count in state["query_sizes"].items():
            result["query_sizes"][size] = result["query_sizes"].get(size, 0) + count
    return result


def render(new: Mapping[str, Any], old: Mapping[str, Any] | None, seconds: float) -> list[str]:
    """The lines of one picture: what happened in the last `seconds`, or since the server started if `old` is None."""
    before = old or {"query_sizes": {}}
    delta = {name: value - before.get(name, 0) for name, value in new.items() if isinstance(value, int)}
    steps = delta["steps"]
    pace = f"{steps / seconds:,.0f} a second" + ("" if steps else "; --once shows all steps since the start")
    lines = [
        f"requests followed {new['bound']:>8,}    nodes so far {new['nodes']:>8,}",
        f"steps by PAT      {steps:>8,}    {pace if old else 'since the server started'}",
    ]
    if steps:
        read, unpacked = delta["kv_bytes"], delta["kv_bytes_unpacked"]
        lines += [
            f"new plans         {delta['plans']:>8,}    {delta['plans_ahead']:,} of them ahead of their step, "
            f"{delta['planning_us'] / steps:.1f} us a step",
            f"work items a step {delta['work_items'] / steps:>8,.0f}    parts merged {delta['parts'] / steps:,.0f}",
            f"KV read           {read / 1e9:>8,.1f} GB {bar(read, max(read, unpacked))}",
            f"  unpacked        {unpacked / 1e9:>8,.1f} GB {bar(unpacked, max(read, unpacked))}",
            f"  saved           {1 - read / unpacked if unpacked else 0:>8.0%}",
        ]
    lines.append(f"fallbacks {new['fallbacks']:,}, faults {new['faults']:,} since the start; both should be 0")
    if new["too_large"]:
        lines.append(f"too large {new['too_large']:,}: steps that packed less, as their plan did not fit its memory")
    if new.get("unpacked_because"):
        lines.append(f"unpacked: {new['unpacked_because']}")
    items = new_by_size(new["query_sizes"], before["query_sizes"])
    if items:
        lines += ["", "queries in a work item"]
        most = max(items.values())
        for size, count in items.items():
            name = str(size) if size == 1 else f"{size}-{2 * size - 1}"
            lines.append(f"{name:>9} {count:>12,} {bar(count, most)}")
    return lines


def bar(value: float, most: float) -> str:
    return "█" * round(WIDTH * min(1, value / most)) if most > 0 else ""


def top(url: str, interval: float, once: bool, key: str = "") -> None:
    """Show the counters until Ctrl-C; with `once`, one picture of everything since the server started.

    Raises:
        TopError: There is no server with PAT at `url`, or it needs another key.
    """
    if once:
        print("\n".join(render(total(fetch(url, key)), None, 1)))
        return
    head = f"sglang-pat top, {url}, every {interval:g} s; Ctrl-C ends"
    if key and is_in_the_clear(url):
        head += "; the API key is sent in the clear"  # where a terminal does not clear it away
    # In a file or a pipe pictures follow one another.
    clear = CLEAR if sys.stdout and sys.stdout.isatty() else ""
    old, began = None, time.monotonic()
    try:
        while True:
            new, now = total(fetch(url, key)), time.monotonic()
            if old and new["steps"] < old["steps"]:
                old = None  # the server was restarted
            picture = render(new, old, max(now - began, 1e-9))
            print(clear + "\n".join([head, "", *picture, ""]), flush=True)
            old, began = new, now
            time.sleep(interval)
    except KeyboardInterrupt:
        return
