"""Serves with each attention backend in turn and measures what a user sees (PAT §8.4, figure 11):

    python benchmarks/serving.py --model MODEL --dummy --backends pat flashinfer triton
    python benchmarks/serving.py --model MODEL --workloads gsp-8x32x2048 random-128 --server=--sampling-backend=pytorch
    python benchmarks/serving.py --model MODEL --workloads trace --trace conversation_trace.jsonl --rates 0.5 1

`gsp-GxPxL` is `bench_serving`'s generated-shared-prefix: G groups of P prompts with a system prompt of L tokens, 128 more
of their own and 256 to generate, all at once. `random-N` is N prompts of 1,024 random tokens and 256 to generate, `long-N` of 32,768 and
2,048. They are sent as text, of which the model's tokenizer may make other numbers of tokens. `trace` replays a Mooncake trace, sped up or slowed down to
a rate of requests a second; equal hash ids become equal tokens, and each prompt follows a system prompt of three levels,
of 46, 348 and 2,123 tokens, of which 1, 4 and 16 exist (§8.1).
`agreement` decodes the same prompts greedily and writes the tokens; the table at the end says how many agree.

Every workload but `long-N` runs twice, the second run counts: the first compiles and fills caches, which are emptied in between. Before `long-N`
runs, two of its prompts do.

`--kv` names formats of the KV cache, each with a server of its own: SGLang's, or PAT's `int4` and `int2`.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import combinations, islice, pairwise
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import traces
from about import gpu, result_file

from sglang_pat.demo.server import Server
from sglang_pat.estimate.prompts import TRACE_BLOCK

BENCHMARKS = {
    "serving": {
        "what": "whole servers, backend after backend",
        "minutes": 3.5,
        "gpu": True,
        "inputs": "--model FOLDER",
        "results": "serving-h200.json",
    },
}
"""For run.py, which reads it without importing this file."""

WORKLOADS = ("gsp-8x32x2048", "random-128", "agreement")
SYSTEM = ((46, 1), (348, 4), (2123, 16))
LOW_BIT = ("int4", "int2")
VOCABULARY = 1000
"""Token ids below this are in every vocabulary."""


class Record(msgspec.Struct):
    """One workload on one backend; times in milliseconds, rate in requests a second (infinite where it is null).

    `mean_tpot_ms` has each request once, those of three tokens too, `mean_itl_ms` each token. `step_ms` is what decode steps
    took at the end of the run, by the server's own log, while nothing was prefilled and as many requests ran as ever.
    `kv` is the format of the KV cache if one was named, `pool` how many tokens it holds, `running` the most requests that ran at once.
    `date`, `machine`, `server` (SGLang's flags), `model`: a file may have runs of several days, hosts and models. `drafts`: SGLang's name of their
    algorithm; empty without.
    """

    workload: str
    rate: float | None
    backend: str
    median_itl_ms: float
    mean_tpot_ms: float
    p99_tpot_ms: float
    mean_ttft_ms: float
    output_tps: float
    mean_itl_ms: float | None = None
    step_ms: list[float] = []
    kv: str | None = None
    pool: int | None = None
    running: int | None = None
    date: str = msgspec.field(default_factory=lambda: str(datetime.date.today()))
    model: str = ""
    drafts: str = ""
    machine: str = ""
    server: list[str] = []


def bench_serving(
    url: str, backend: str, workload: str, requests: int, arguments: list[str], warm_up: list[str] | None = None
) -> Record:
    """`warm_up`: what runs first in place of the same."""
    # Another benchmark may run beside this one, on another GPU.
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.jsonl"
        command = [
            sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", url, "--flush-cache",
            "--disable-tqdm", "--output-file", str(output), "--num-prompts", str(requests), *arguments,
        ]  # fmt: skip
        for more in (warm_up or [], []):
            subprocess.run([*command, *more], check=True, stdout=subprocess.DEVNULL)
        result = json.loads(output.read_text().splitlines()[-1])
    if result["completed"] != requests:
        raise RuntimeError(f"{workload}: {result['completed']} of {requests} requests were answered")
    names = ("median_itl_ms", "mean_tpot_ms", "p99_tpot_ms", "mean_ttft_ms")
    times = [round(result[name], 2) for name in names]
    throughput = round(result["output_throughput"], 1)
    return Record(workload, None, backend, *times, throughput, round(result["mean_itl_ms"], 2))


def logged_steps(log: str) -> list[float]:
    """Milliseconds of a step, one for each line that SGLang logs, after the last prefill."""
    rows = re.findall(
        r"Decode batch, #running-req: (\d+),.*?gen throughput \(token/s\): ([\d.]+)", log.rpartition("Prefill batch")[2]
    )
    most = max((int(running) for running, _ in rows), default=0)
    # The first line counts the time of the prefill too.
    return [
        round(most / float(rate) * 1e3, 2) for running, rate in rows[1:] if int(running) == most and float(rate) > 0
    ]


def tokens(key: object, count: int) -> list[int]:
    """Always the same for a key."""
    return random.Random(str(key)).choices(range(VOCABULARY), k=count)


def trace_prompts(path: Path, count: int, context: int) -> list[tuple[float, list[int], int]]:
    """(seconds after the first, prompt, tokens to generate) of the trace's first requests that fit `context` tokens."""
    prompts = []
    system = sum(length for length, _ in SYSTEM)
    fitting = (row for row in traces.rows(path) if system + row["input_length"] + row["output_length"] < context)
    for number, row in enumerate(islice(fitting, count)):
        prompt: list[int] = []
        for level, (length, variants) in enumerate(SYSTEM):
            prompt += tokens((level, random.Random(number).randrange(variants)), length)
        own = [token for block in row["hash_ids"] for token in tokens(block, TRACE_BLOCK)][: row["input_length"]]
        prompts.append((row["timestamp"] / 1000, prompt + own, row["output_length"]))
    return prompts


async def generate(
    session: aiohttp.ClientSession, url: str, prompt: list[int], count: int, times: list[float] | None = None
) -> tuple[list[float], dict[str, Any]]:
    """When the request was sent and when each token came, which `times` has already before all came; and what SGLang says of it with the last one.

    Raises:
        RuntimeError: The server refuses it.
    """
    body = {
        "input_ids": prompt, "stream": True,
        "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True},
    }  # fmt: skip
    encoded = msgspec.json.encode(body)
    times, meta = [] if times is None else times, {"completion_tokens": 0}
    times.append(time.perf_counter())
    async with session.post(f"{url}/generate", data=encoded, headers={"Content-Type": "application/json"}) as response:
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {(await response.text())[:200]}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                found = json.loads(line[6:])
                if "error" in found:
                    raise RuntimeError(str(found["error"])[:200])
                times += [time.perf_counter()] * (found["meta_info"]["completion_tokens"] - meta["completion_tokens"])
                meta = found["meta_info"]
    return times, meta


def client_session(**options: Any) -> aiohttp.ClientSession:
    """For any number of requests of any length."""
    # The server closes connections that were idle, sometimes just as the next request is sent.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=connector, **options)


async def replay(url: str, prompts: list[tuple[float, list[int], int]], rate: float) -> tuple[list[list[float]], float]:
    pace = (len(prompts) - 1) / rate / max(1e-9, prompts[-1][0] - prompts[0][0])
    async with client_session(read_bufsize=1 << 24) as session:
        began = time.perf_counter()

        async def one(at: float, prompt: list[int], count: int) -> list[float]:
            await asyncio.sleep(max(0, began + at * pace - time.perf_counter()))
            return (await generate(session, url, prompt, count))[0]

        results = await asyncio.gather(*(one(*prompt) for prompt in prompts))
        return results, time.perf_counter() - began


def run_trace(server: Server, backend: str, prompts: list[tuple[float, list[int], int]], rate: float) -> Record:
    server.post("/flush_cache")
    results, seconds = asyncio.run(replay(server.url, prompts, rate))
    tpot = sorted((times[-1] - times[1]) / (len(times) - 2) * 1e3 for times in results if len(times) > 2)
    gaps = [(after - before) * 1e3 for times in results for before, after in pairwise(times[1:])]
    return Record(
        "trace", rate, backend, round(statistics.median(gaps), 2), round(statistics.mean(tpot), 2),
        round(tpot[int(len(tpot) * 0.99)], 2),
        round(statistics.mean((times[1] - times[0]) * 1e3 for times in results), 2),
        round(sum(len(times) - 1 for times in results) / seconds, 1), round(statistics.mean(gaps), 2),
    )  # fmt: skip


def agreement(server: Server, requests: int = 64, count: int = 64) -> list[list[int]]:
    """Greedy continuations of prompts that share prefixes, decoded side by side."""
    prompts = [tokens(("group", i % 4), 1500) + tokens(("own", i), 20 + 7 * i) for i in range(requests)]
    body = {"input_ids": prompts, "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}}
    for _ in range(2):  # The second time prefixes come from the cache, as they do in service.
        results = server.post("/generate", body)
    return [result["output_ids"] for result in results]


def compare(streams: dict[str, list[list[int]]]) -> list[dict[str, Any]]:
    """For each two backends: tokens up to the first that differs, over all tokens."""
    rows = []
    for one, other in combinations(streams, 2):
        same = total = whole = 0
        for a, b in zip(streams[one], streams[other], strict=True):
            first = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
            same, total, whole = same + first, total + len(a), whole + (first == len(a))
        rows.append({"backends": [one, other], "tokens": same / total, "streams": whole / len(streams[one])})
        print(f"{one} and {other}: {same / total:.1%} of tokens before the first difference, {whole} whole streams")
    return rows


def run(server: Server, backend: str, workload: str, arguments: argparse.Namespace) -> Iterator[Record]:
    if workload == "trace":
        context = json.loads((arguments.model / "config.json").read_text())["max_position_embeddings"]
        prompts = trace_prompts(arguments.trace, arguments.requests, context)
        for rate in arguments.rates:
            yield run_trace(server, backend, prompts, rate)
        return
    warm_up: list[str] | None = None
    if shape := re.fullmatch(r"gsp-(\d+)x(\d+)x(\d+)", workload):
        groups, prompts, length = shape.groups()
        requests = int(groups) * int(prompts)
        options = [
            "--dataset-name", "generated-shared-prefix", "--gsp-num-groups", groups, "--gsp-prompts-per-group", prompts,
            "--gsp-system-prompt-len", length, "--gsp-question-len", "128", "--gsp-output-len", "256",
        ]  # fmt: skip
    elif shape := re.fullmatch(r"(random|long)-(\d+)", workload):
        requests = int(shape[2])
        prompt, answer = ("1024", "256") if shape[1] == "random" else ("32768", "2048")
        options = [
            "--dataset-name", "random-ids", "--random-input-len", prompt, "--random-output-len", answer,
            "--random-range-ratio", "1",
        ]  # fmt: skip
        if shape[1] == "long":
            warm_up = ["--num-prompts", "2", "--random-output-len", "64"]
    else:
        raise SystemExit(f"--workloads: {workload} is none of gsp-GxPxL, random-N, long-N, trace, agreement")
    record = bench_serving(server.url, backend, workload, requests, options, warm_up)
    log = server.log.read_text(errors="replace")
    record.step_ms = logged_steps(log)
    record.running = max(map(int, re.findall(r"Decode batch, #running-req: (\d+),", log)), default=None)
    yield record


def make_parser(description: str | None, output: Path | None = None, model: bool = True) -> argparse.ArgumentParser:
    """What a benchmark is told that runs SGLang with each backend in turn, as steps.py and soak.py do too.

    `model`: whether there must be one. SIGTERM, such as `timeout` sends, then stops its servers as Ctrl-C does: one that is left behind holds the GPU's memory.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=model, help="a model's folder")
    parser.add_argument(
        "--dummy", action="store_true", help="random weights: the folder needs config and tokenizer only"
    )
    parser.add_argument("--backends", nargs="+", default=["pat", "fa3", "flashinfer", "triton"])
    parser.add_argument("--server", action="append", default=[], help="another argument for SGLang")
    parser.add_argument("--output", type=Path, default=output)
    return parser


def add_kv(parser: argparse.ArgumentParser) -> None:
    """`--kv`, for benchmarks that compare formats."""
    parser.add_argument(
        "--kv",
        nargs="+",
        default=[None],
        metavar="FORMAT",
        help="formats of the KV cache, SGLang's or PAT's int4, int2",
    )


def settings(options: argparse.Namespace) -> list[tuple[str, str | None]]:
    """Each backend with each format that it has."""
    return [(backend, kv) for kv in options.kv for backend in options.backends if backend == "pat" or kv not in LOW_BIT]


def log_of(options: argparse.Namespace, backend: str, kv: str | None = None) -> Path:
    """Where a backend's log goes: beside the output, by its name, as another benchmark may run on another GPU."""
    output: Path = options.output
    return output.with_name("-".join([output.stem, backend, *([kv] if kv else [])]) + ".log")


def sglang_flags(options: argparse.Namespace, kv: str | None = None) -> list[str]:
    """What such options say to SGLang."""
    dtype = [] if kv is None or kv in LOW_BIT else ["--kv-cache-dtype", kv]
    return [*(["--load-format", "dummy"] if options.dummy else []), *dtype, *options.server]


def drafts_of(flags: list[str]) -> str:
    """SGLang's name of what makes drafts, by the server's flags; empty if nothing does."""
    flag = "--speculative-algorithm"
    named = [given.removeprefix(f"{flag}=") for given in flags if given.startswith(f"{flag}=")]
    return next(iter(named), "") if flag not in flags else flags[flags.index(flag) + 1]


def environment(kv: str | None) -> dict[str, str]:
    """What says to PAT that KV has this format."""
    return {"SGLANG_PAT_KV": kv} if kv in LOW_BIT else {}


def main() -> None:
    parser = make_parser(__doc__, result_file("serving"))
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--trace", type=Path, help="a Mooncake trace, for the workload `trace`")
    parser.add_argument("--requests", type=int, default=60, help="of the trace")
    add_kv(parser)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0], help="requests a second of the trace")
    arguments = parser.parse_args()
    if "trace" in arguments.workloads and arguments.trace is None:
        raise SystemExit("the workload trace needs --trace")
    result: dict[str, Any] = {"device": gpu(), "model": arguments.model.name, "records": [], "packing": {}}
    streams: dict[str, list[list[int]]] = {}
    for backend, kv in settings(arguments):
        log = log_of(arguments, backend, kv)
        server = Server(arguments.model, backend, log, sglang_flags(arguments, kv), environment(kv), on_cpu=False)
        try:
            server.wait()
            for workload in arguments.workloads:
                if workload == "agreement":
                    streams[backend] = agreement(server)
                    continue
                for record in run(server, backend, workload, arguments):
                    record.kv, record.pool, record.model = kv, server.pool(), arguments.model.name
                    record.drafts, record.server = drafts_of(arguments.server), arguments.server
                    record.machine = result["device"]["machine"]
                    result["records"].append(msgspec.to_builtins(record))
                    print(record, flush=True)
                    # After each one: a run that is cut short keeps what it has.
                    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
            if backend == "pat":
                result["packing"] = server.counters()
        except Exception as error:  # the others' numbers count all the same
            print(f"{backend} failed: {str(error)[:300]}; see {log}", flush=True)
        finally:
            server.stop()
        result["agreement"] = compare(streams)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
