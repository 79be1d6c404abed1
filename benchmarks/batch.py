"""Answers a file of requests whose prefixes are shared, by each server in turn (BatchLLM, section 6):

    python benchmarks/batch.py --model MODEL --dummy --settings fa3 flashinfer/dfs-weight pat pat//0
    python benchmarks/batch.py --model MODEL --shapes 2000/200x16 200/2000x16:640 --settings pat --requests 6400 --answer 100

A setting is `BACKEND/POLICY/DEFER`: what goes to `--attention-backend` and `--schedule-policy` (fcfs), and whether requests wait for each
other's prefixes (1; SGLANG_PAT_DEFER, which other backends than `pat` know nothing of). A shape is PREFIX/OWNxDEGREE: tokens that so many
requests share, and tokens of each; behind a colon, how many requests there are if not `--requests`.

All requests are sent at once, from a file that is sorted by prefix and from one that is shuffled. To `pat` they are also sent as
`sglang-pat batch --url` does, and so again without each part of that which `--without` names. Caches are flushed in between. The output is
written after each run, so that what was measured stays if time ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import time
import urllib.error
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from about import gpu, result_file
from serving import make_parser, sglang_flags

from sglang_pat.batch import job, servers
from sglang_pat.batch.lines import Json, Request
from sglang_pat.batch.order import Room
from sglang_pat.demo.server import Server

BENCHMARKS = {
    "batch": {
        "what": "a file of requests that share prefixes, server after server",
        "gpu": True,
        "inputs": "--model FOLDER",
        "results": "batch-h200.json",
    },
}
"""For run.py, which reads it without importing this file."""

SHAPES = ["2000/200x16", "2000/200x4", "1000/1000x16", "1000/1000x4", "200/2000x16", "200/2000x4", "1100/400x7"]
"""The paper's: table 2, and case 1 of section 6."""

PARTS = {
    "spacing": "followers wait until so much else was handed out that their leader's prefix is in the cache",
    "memory": "no more nodes than the server's pool has room for",
    "window": "the server holds some of the requests, not all",
}
"""Of the order in which `sglang-pat batch` sends requests (sglang_pat/batch/order.py)."""

VOCABULARY = 500
"""Token ids below this are in every vocabulary, the tiny model's too."""


class Record(msgspec.Struct):
    """One job on one server. `prefill_saved` is the share of all prompts' tokens that came from the cache, `saved_at_most` what a cache
    without end would have saved; `batch` says whether `sglang-pat batch` sent the requests; `pool` is the tokens that the server's KV has room for,
    and `without` the part of `batch` that was switched off."""

    shape: str
    degree: int
    order: str
    policy: str
    backend: str
    batch: bool
    defer: bool
    requests: int
    answer: int
    requests_per_s: float
    output_tps: float
    prefill_saved: float
    saved_at_most: float
    pool: int
    without: str = ""


async def pool_of(url: str) -> int:
    """Tokens that a server's KV has room for."""
    async with servers.connect([url], "") as (server,):
        return int((await server.room()).tokens)


def requests_of(shape: str, count: int, answer: int) -> tuple[list[Request], float]:
    """A job of `count` requests, or as many as its shape says, sorted by prefix, and the share of its prefill that can be saved.

    Raises:
        SystemExit: There is no such shape.
    """
    found = re.fullmatch(r"(\d+)/(\d+)x(\d+)(?::(\d+))?", shape)
    if found is None:
        raise SystemExit(f"--shapes: {shape} is not PREFIX/OWNxDEGREE, nor PREFIX/OWNxDEGREE:REQUESTS")
    prefix, own, degree = map(int, found.groups()[:3])
    count = int(found.group(4) or count)
    numbers = random.Random(shape)
    requests = []
    head: list[int] = []
    for number in range(count):
        if number % degree == 0:
            head = numbers.choices(range(1, VOCABULARY), k=prefix)
        prompt = head + numbers.choices(range(1, VOCABULARY), k=own)
        body = {"model": "m", "prompt": prompt, "max_tokens": answer, "ignore_eos": True, "temperature": 0}
        requests.append(Request(number + 1, str(number), "/v1/completions", body))
    groups = -(-count // degree)
    return requests, 1 - (groups * prefix + count * own) / (count * (prefix + own))


def room_without(part: str, room: Room) -> Room:
    """What a server has room for, as `batch` would take it if it did not know of a part."""
    if part == "spacing":
        return replace(room, chunk=0)
    if part == "memory":
        return replace(room, tokens=Room.tokens, requests=Room.requests)
    return room


async def answers(url: str, requests: Sequence[Request], batch: bool, without: str = "") -> list[Json]:
    """The bodies of all answers.

    Raises:
        RuntimeError: A request failed.
    """
    records: list[Json] = []
    async with servers.connect([url], "") as (server,):
        if batch:
            in_flight = len(requests) if without == "window" else job.IN_FLIGHT
            rooms = [room_without(without, await server.room())]
            await job.answer_all(requests, [server], records.append, in_flight, rooms=rooms)
            found = [(one["response"] or {"status_code": one["error"], "body": {}}) for one in records]
            pairs = [(one["status_code"], one["body"]) for one in found]
        else:
            pairs = list(await asyncio.gather(*(server(request) for request in requests)))
    failed = [pair for pair in pairs if pair[0] != 200]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(requests)} requests failed: {failed[0]}")
    return [body for _, body in pairs]


def run(
    url: str, shape: str, order: str, batch: bool, setting: tuple[str, str, bool], count: int, answer: int, pool: int,
    without: str = "",
) -> Record:  # fmt: skip
    requests, at_most = requests_of(shape, count, answer)
    count = len(requests)
    if order == "shuffled":
        random.Random(0).shuffle(requests)
    began = time.perf_counter()
    bodies = asyncio.run(answers(url, requests, batch, without))
    seconds = time.perf_counter() - began
    usage = [body["usage"] for body in bodies]
    prompt = sum(one["prompt_tokens"] for one in usage)
    cached = sum((one["prompt_tokens_details"] or {}).get("cached_tokens", 0) for one in usage)
    backend, policy, defer = setting
    sizes, degree = shape.partition(":")[0].split("x")
    return Record(
        sizes, int(degree), order, policy, backend, batch, defer and backend == "pat",
        count, answer, round(count / seconds, 2), round(sum(one["completion_tokens"] for one in usage) / seconds, 1),
        round(cached / prompt, 4), round(at_most, 4), pool, without,
    )  # fmt: skip


def flush(server: Server) -> None:
    """Empty the cache: SGLang refuses while the last request is being taken off.

    Raises:
        RuntimeError: It is never done.
    """
    for _ in range(50):
        with contextlib.suppress(urllib.error.HTTPError):
            server.post("/flush_cache")
            return
        time.sleep(0.2)
    raise RuntimeError("the cache cannot be emptied: requests still run")


def parse(setting: str) -> tuple[str, str, bool]:
    backend, policy, defer = [*setting.split("/"), "", ""][:3]
    return backend, policy or "fcfs", defer != "0"


def main() -> None:
    parser = make_parser(__doc__, result_file("batch"))
    parser.add_argument(
        "--settings", nargs="+", default=["pat", "pat//0", "fa3", "flashinfer", "fa3/lpm", "fa3/dfs-weight"]
    )
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--orders", nargs="+", default=["sorted", "shuffled"], choices=["sorted", "shuffled"])
    parts = "; ".join(f"{name}: {what}" for name, what in PARTS.items())
    parser.add_argument(
        "--without", nargs="*", default=[], choices=list(PARTS), help=f"of batch, one at a time ({parts})"
    )
    parser.add_argument("--requests", type=int, default=6400)
    parser.add_argument("--answer", type=int, default=100, help="tokens of an answer")
    parser.add_argument("--on-cpu", action="store_true")
    options: argparse.Namespace = parser.parse_args()
    result: dict[str, Any] = {"device": gpu(), "model": options.model.name, "server": options.server, "records": []}
    for setting in map(parse, options.settings):
        backend, policy, defer = setting
        log = options.output.with_name(f"{options.output.stem}-{backend}-{policy}-{int(defer)}.log")
        flags = ["--schedule-policy", policy, "--enable-cache-report", *sglang_flags(options)]
        environment = {} if defer or backend != "pat" else {"SGLANG_PAT_DEFER": "0"}
        with Server(options.model, backend, log, flags, environment, on_cpu=options.on_cpu) as server:
            server.wait()
            # What compiles or fills with the first requests.
            asyncio.run(answers(server.url, requests_of("300/30x4", 64, 8)[0], False))
            pool = asyncio.run(pool_of(server.url))
            for shape in options.shapes:
                runs = [(order, False, "") for order in options.orders]
                if backend == "pat":
                    runs += [("shuffled", True, part) for part in ["", *options.without]]
                for order, batch, part in runs:
                    flush(server)
                    record = run(server.url, shape, order, batch, setting, options.requests, options.answer, pool, part)
                    result["records"].append(msgspec.structs.asdict(record))
                    print(record, flush=True)
                    options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
