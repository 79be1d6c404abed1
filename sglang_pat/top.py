"""`sglang-pat top`: what packing does in a running server, live in a terminal."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from sglang_pat.backend.metrics import packs_since

CLEAR = "\x1b[H\x1b[2J"
WIDTH = 40
"""Characters of the longest bar."""


class TopError(Exception):
    """There is no server with PAT there; the message says what was found."""


def fetch(url: str) -> list[dict[str, Any]]:
    """The counters of every scheduler process of a server.

    Raises:
        TopError: Nothing answers there, or a server with another attention backend.
    """
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/server_info", timeout=10) as response:
            states = json.load(response)["internal_states"]
    except (OSError, ValueError, KeyError, urllib.error.URLError) as error:
        raise TopError(f"no SGLang server answers at {url} ({error}): give its address with --url") from error
    counters = [state["pat"] for state in states if "pat" in state]
    if not counters:
        raise TopError(f"the server at {url} decodes with another backend: start it with --attention-backend pat")
    return counters


def total(states: list[dict[str, Any]]) -> dict[str, Any]:
    """The counters of all processes together."""
    result: dict[str, Any] = {"query_sizes": {}}
    for state in states:
        for name, value in state.items():
            if isinstance(value, int):
                result[name] = result.get(name, 0) + value
        for size, count in state["query_sizes"].items():
            result["query_sizes"][size] = result["query_sizes"].get(size, 0) + count
    return result


def render(new: Mapping[str, Any], old: Mapping[str, Any] | None, seconds: float) -> list[str]:
    """The lines of one picture: what happened in the last `seconds`, since the server started where `old` is None."""
    before = old or {"query_sizes": {}}
    delta = {name: value - before.get(name, 0) for name, value in new.items() if isinstance(value, int)}
    steps = delta["steps"]
    lines = [
        f"requests followed {new['bound']:>8,}    nodes so far {new['nodes']:>8,}",
        f"decode steps      {steps:>8,}    "
        + (f"{steps / seconds:,.0f} a second" if old else "since the server started"),
    ]
    if steps:
        read, unpacked = delta["kv_bytes"], delta["kv_bytes_unpacked"]
        lines += [
            f"new plans         {delta['plans']:>8,}    {delta['plans_ahead']:,} of them ahead of their step, "
            f"{delta['planning_us'] / steps:.1f} us a step",
            f"packs a step      {delta['work_items'] / steps:>8,.0f}    parts merged {delta['parts'] / steps:,.0f}",
            f"KV read           {read / 1e9:>8,.1f} GB {bar(read, max(read, unpacked))}",
            f"  unpacked        {unpacked / 1e9:>8,.1f} GB {bar(unpacked, max(read, unpacked))}",
            f"  saved           {1 - read / unpacked if unpacked else 0:>8.0%}",
        ]
    lines.append(f"fallbacks {new['fallbacks']:,}, faults {new['faults']:,} since the start; both should be 0")
    packs = packs_since(new["query_sizes"], before["query_sizes"])
    if packs:
        lines += ["", "queries in a pack"]
        most = max(packs.values())
        for size, count in packs.items():
            name = str(size) if size == 1 else f"{size}-{2 * size - 1}"
            lines.append(f"{name:>9} {count:>12,} {bar(count, most)}")
    return lines


def bar(value: float, most: float) -> str:
    return "█" * round(WIDTH * value / most) if most else ""


def top(url: str, interval: float, once: bool) -> None:
    """Show it until interrupted; one picture since the server started if `once`.

    Raises:
        TopError: There is no server with PAT at `url`.
    """
    old, began = None, time.monotonic()
    while True:
        new, now = total(fetch(url)), time.monotonic()
        picture = render(new, old, max(now - began, 1e-9))
        if once:
            print("\n".join(picture))
            return
        head = f"sglang-pat top, {url}, every {interval:g} s; Ctrl-C ends"
        print(CLEAR + "\n".join([head, "", *picture]), flush=True)
        old, began = new, now
        time.sleep(interval)
