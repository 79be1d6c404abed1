"""`sglang-pat top`: what packing does in a running server, live in a terminal."""

from __future__ import annotations

import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from http.client import HTTPException, responses
from typing import Annotated, Any, TypedDict

import msgspec
from msgspec import Meta

from sglang_pat.backend.metrics import new_by_size
from sglang_pat.cli.addresses import KEY_PROBLEM, is_address, is_in_the_clear, is_key
from sglang_pat.config import KEY
from sglang_pat.text import UNSHOWABLE, say

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


class SilenceError(TopError):
    """Nothing answers at the address."""


class Counters(TypedDict):
    """The counters in `/server_info` that are shown here, for one scheduler process with PAT."""

    steps: Count
    plans: Count
    plans_ahead: Count
    planning_us: Count
    work_items: Count
    parts: Count
    kv_bytes: Count
    kv_bytes_by_queries: dict[Annotated[int, Meta(ge=1, le=1 << 20)], Count]
    kv_bytes_unpacked: Count
    fallbacks: Count
    too_large: Count
    faults: Count
    bound: Count
    nodes: Count
    trace: Line
    unpacked_because: Line


class State(msgspec.Struct):
    """A scheduler process."""

    pat: Counters | None = None
    last_gen_throughput: Annotated[float, Meta(ge=0, le=1e9)] = 0.0


class ServerInfo(msgspec.Struct):
    """An answer of `/server_info`."""

    internal_states: list[State]


def fetch(url: str, key: str = "") -> list[dict[str, Any]]:
    """The counters of every scheduler process of a server, and `tokens_per_s`.

    Args:
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
    counters = [{**state.pat, "tokens_per_s": state.last_gen_throughput} for state in states if state.pat is not None]
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
        raise _other(url, "it does not speak HTTP") from None
    except (OSError, ValueError) as error:
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        raise _silence(url, getattr(cause, "strerror", None) or str(cause)) from None
    if len(body) > LARGEST:
        raise _other(url, f"it sends more than {LARGEST >> 20} MiB")
    return bytes(body)


def _silence(url: str, reason: str) -> SilenceError:
    return SilenceError(f"no SGLang server answers at {url} ({reason}): is it running there?")


def _other(url: str, reason: str) -> TopError:
    return TopError(f"something answers at {url}, but it is no SGLang server ({reason})")


def _refusal(url: str, error: urllib.error.HTTPError) -> TopError:
    """The error for an unsuccessful answer. Of the answer itself, only its status and new address are shown."""
    with error:
        answer = f"{error.code} {responses.get(error.code, '')}".strip()
        if error.code in (401, 403):
            return TopError(f"the server at {url} answers {answer}: give its key with --api-key or in {KEY}")
        if address := error.headers.get("Location"):
            place = ascii(address.partition("?")[0].removesuffix("/server_info")[:200])
            return TopError(f"the server at {url} answers {answer} to {place}: give that address with --url")
        if error.code == 404:
            return _other(url, "404 at /server_info")
        return _silence(url, answer)


def total(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sum of all processes' counters, and why the first of them that is unpacked is so."""
    reasons = filter(None, (state.get("unpacked_because") for state in states))
    result: dict[str, Any] = {"unpacked_because": next(reasons, "")}
    for state in states:
        for name, value in state.items():
            if isinstance(value, int | float):
                result[name] = result.get(name, 0) + value
            elif isinstance(value, dict):
                sums = result.setdefault(name, {})
                for size, count in value.items():
                    sums[size] = sums.get(size, 0) + count
    return result


class Picture(msgspec.Struct):
    """What happened in a time; with `--json` all of this is printed (docs/watch.md, "JSON", says what each is)."""

    seconds: float | None
    steps: int
    requests: int
    tokens_per_s: float
    kv_bytes: int
    kv_bytes_unpacked: int
    less_kv_read: float | None
    kv_by_requests: dict[int, float]
    plans: int
    plans_ahead: int
    planning_us: int
    work_items: int
    parts: int
    nodes: int
    fallbacks: int
    faults: int
    too_large: int
    unpacked_because: str

    def lines(self, verbose: bool = False) -> Iterator[str]:
        """The picture in a terminal."""
        rate = " since the server started" if self.seconds is None else f", {self.steps / self.seconds:,.0f} a second"
        if self.less_kv_read is None:
            yield "no KV was read"
        else:
            read, unpacked = (f"{number / 1e9:,.1f} GB" for number in (self.kv_bytes, self.kv_bytes_unpacked))
            yield f"{self.less_kv_read:,.1f} \N{MULTIPLICATION SIGN} less KV read: {read}, without packing {unpacked}"
        yield f"{self.requests:,} requests now, {self.tokens_per_s:,.0f} tokens a second; {self.steps:,} decode steps{rate}"
        if self.kv_by_requests:
            yield ""
            yield "KV read, by how many requests share it"
            for size, part in self.kv_by_requests.items():
                name = str(size) if size == 1 else f"{size}-{2 * size - 1}"
                yield f"{name:>9} {part:>5.0%} {'█' * round(WIDTH * part)}"
            yield ""
        if verbose and self.steps:
            yield (
                f"{self.plans:,} new plans, {self.plans_ahead:,} of them ahead of their step; "
                f"{self.planning_us / self.steps:.1f} us of planning a step"
            )
            items, parts = self.work_items / self.steps, self.parts / self.steps
            yield f"{items:,.0f} work items and {parts:,.0f} merged parts a step; {self.nodes:,} nodes in the tree"
        yield f"fallbacks {self.fallbacks:,}, faults {self.faults:,} since the start; both should be 0"
        if self.too_large:
            yield f"too large {self.too_large:,}: steps that packed less, as their plan did not fit its memory"
        if self.unpacked_because:
            yield f"unpacked: {self.unpacked_because}"


def picture(new: Mapping[str, Any], old: Mapping[str, Any] | None, seconds: float) -> Picture:
    """What happened in the last `seconds`, or since the server started if `old` is None."""
    before = old or {}
    names = ("steps", "kv_bytes", "kv_bytes_unpacked", "plans", "plans_ahead", "planning_us", "work_items", "parts")
    since = {name: max(0, new[name] - before.get(name, 0)) for name in names}
    read, unpacked = since["kv_bytes"], since["kv_bytes_unpacked"]
    by_size = new_by_size(new["kv_bytes_by_queries"], before.get("kv_bytes_by_queries", {}))
    whole = sum(by_size.values())
    return Picture(
        seconds=max(0.001, round(seconds, 3)) if old else None,
        requests=new["bound"],
        tokens_per_s=round(new.get("tokens_per_s", 0), 1),
        less_kv_read=unpacked / read if read else None,
        kv_by_requests={size: round(more / whole, 4) for size, more in by_size.items()} if whole else {},
        **since,
        **{name: new[name] for name in ("nodes", "fallbacks", "faults", "too_large")},
        unpacked_because=new.get("unpacked_because", ""),
    )


def top(url: str, interval: float, once: bool, key: str = "", as_json: bool = False, verbose: bool = False) -> None:
    """Show the counters until Ctrl-C; with `once`, one picture of everything since the server started. A server that stops answering is waited for.

    Raises:
        TopError: There is no server with PAT at `url`, or it needs another key.
    """

    def shown(found: Picture) -> str:
        return msgspec.json.encode(found).decode() if as_json else "\n".join(found.lines(verbose))

    new, began = total(fetch(url, key)), time.monotonic()
    if once:
        print(shown(picture(new, None, 1)))
        return
    head = f"sglang-pat top, {url}, every {interval:g} s; Ctrl-C ends"
    if key and is_in_the_clear(url):
        head += "; the API key is sent in the clear"  # where a terminal does not clear it away
    # In a file or a pipe pictures follow one another.
    clear = CLEAR if sys.stdout and sys.stdout.isatty() and not as_json else ""

    def show(text: str, note: str = "") -> None:
        print(text if as_json else clear + "\n".join([head, *filter(None, [note]), text, ""]), flush=True)

    try:
        last, moved = shown(picture(new, None, 1)), began
        show(last)
        old = new
        while True:
            time.sleep(interval)
            try:
                new, now = total(fetch(url, key)), time.monotonic()
            except TopError as error:
                # It is restarted, say.
                if as_json:
                    say(f"sglang-pat: {error}; trying again")
                else:
                    show(last, f"{error}; trying again. Before that:")
                continue
            restarted = new["steps"] < old["steps"]
            found = picture(new, None if restarted else old, max(now - began, 1e-9))
            if found.steps or as_json:
                last, moved = shown(found), now
                show(last, "the server was started again" if restarted else f"in the last {found.seconds:.3g} s")
            else:
                show(last, f"no decode step for {now - moved:,.0f} s. Before that:")
            old, began = new, now
    except KeyboardInterrupt:
        return
