"""A server at full load for as many requests as a trace has in half an hour:

    python benchmarks/soak.py --model MODEL --dummy --trace conversation_trace.jsonl

Prompts and answers keep their order and what they share, and are shorter by a divisor each, so that all of them take minutes.
As many requests are in flight as the server runs at once and half as many more; the pool is too small for them, so that nodes are
evicted and requests retracted; one in twenty is aborted; ten times the server is drained and its cache flushed. Fails unless
every other request gets all of its tokens, nothing fell back, nothing is left behind, no logit was NaN, and some prompts get the
answers afterwards that they got before.

    python benchmarks/soak.py --model MODEL --chaos 300

instead does everything at once that the API allows, for so many seconds, to a server with a tiny model and a small pool, and compares
its answers with those of SGLang's Triton backend beside it (tests/chaos).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import serving
import traces
from about import gpu, result_file

from sglang_pat.demo import tiny_model
from sglang_pat.demo.server import Server
from sglang_pat.estimate.prompts import TRACE_BLOCK

BENCHMARKS = {
    "soak": {
        "what": "half an hour of requests at full load",
        "minutes": 3.5,
        "gpu": True,
        "inputs": "--model FOLDER --trace FILE",
        "results": "soak-h200.json",
    },
    "chaos": {
        "arguments": ["--chaos", "120", "--seed", "1"],
        "what": "everything at once that the API allows",
        "minutes": 2.5,
        "gpu": True,
        "inputs": "--model FOLDER",
        "results": "chaos-h200.json",
    },
}
"""For run.py, which reads it without importing this file."""

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

ROUNDS = 10
ABORTED = 0.05
PROBES, PROBE_TOKENS = 16, 64
CHECKED = {"SGLANG_ENABLE_ASYNC_ASSERT": "1"}
"""SGLang ends where a logit is NaN or a slot is none of the pool's."""


def requests_of(trace: Path, minutes: int, divide_prompt: int, divide_answer: int) -> list[tuple[list[int], int]]:
    """(prompt, tokens to generate) of every request of the trace's first minutes."""
    requests = []
    block = TRACE_BLOCK // divide_prompt
    for row in traces.rows(trace):
        if row["timestamp"] >= minutes * 60_000:
            break
        own = [token for key in row["hash_ids"] for token in serving.tokens(key, block)]
        length = max(1, row["input_length"] // divide_prompt)
        requests.append((own[:length], max(1, row["output_length"] // divide_answer)))
    return requests


class Client:
    """Sends requests and counts what came of them."""

    def __init__(self, session: aiohttp.ClientSession, url: str, concurrency: int) -> None:
        self._session, self._url = session, url
        self._slots = asyncio.Semaphore(concurrency)
        self.finished = self.aborted = self.tokens = self.prompt_tokens = self.cached_tokens = 0
        self.wrong: list[str] = []

    async def post(self, path: str, body: dict[str, Any]) -> str:
        async with self._session.post(f"{self._url}{path}", json=body) as response:
            return await response.text()

    async def generate(self, prompt: list[int], count: int, **options: str) -> dict[str, Any]:
        sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
        return json.loads(await self.post("/generate", {"input_ids": prompt, "sampling_params": sampling, **options}))

    async def send(self, number: int, prompt: list[int], count: int) -> None:
        rid = f"soak-{number}"
        chance = random.Random(number)
        async with self._slots:
            answer = asyncio.create_task(self.generate(prompt, count, rid=rid))
            if chance.random() < ABORTED:
                await asyncio.sleep(chance.uniform(0, 2))
                await self.post("/abort_request", {"rid": rid})
            result = await answer
        meta = result.get("meta_info", {})
        done = meta.get("completion_tokens", 0)
        reason = (meta.get("finish_reason") or {}).get("type", str(result)[:200])
        if reason == "abort":
            self.aborted += 1
        elif done == count:
            self.finished += 1
        else:
            self.wrong.append(f"{rid}: {done} of {count} tokens, {reason}")
        self.tokens += done
        self.prompt_tokens += meta.get("prompt_tokens", 0)
        self.cached_tokens += meta.get("cached_tokens", 0)

    async def probe(self) -> list[list[int]]:
        """Greedy answers, one request after the other, from an empty cache."""
        await self.post("/flush_cache", {})
        answers = []
        for i in range(PROBES):
            prompt = serving.tokens(("probe", i % 4), 700) + serving.tokens(("own probe", i), 20 + 7 * i)
            answers.append((await self.generate(prompt, PROBE_TOKENS))["output_ids"])
        return answers


def gpu_mib() -> int:
    """Memory in use on the server's GPU."""
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={device}"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


async def soak(server: Server, requests: list[tuple[list[int], int]], concurrency: int) -> dict[str, Any]:
    async with serving.client_session() as session:
        client = Client(session, server.url, concurrency)
        before = await client.probe()
        memory = gpu_mib()
        flushed = 0
        began = time.monotonic()
        for i in range(ROUNDS):
            begin, end = (len(requests) * j // ROUNDS for j in (i, i + 1))
            await asyncio.gather(*(client.send(n, *requests[n]) for n in range(begin, end)))
            flushed += "flushed" in (await client.post("/flush_cache", {})).lower()
            print(
                f"  {end} of {len(requests)} requests, {client.tokens:,} tokens, {time.monotonic() - began:.0f} s",
                flush=True,
            )
        seconds = time.monotonic() - began
        after = await client.probe()
    return {
        "requests": len(requests), "finished": client.finished, "aborted": client.aborted, "wrong": client.wrong[:10],
        "seconds": round(seconds, 1), "prompt_tokens": client.prompt_tokens, "cached_tokens": client.cached_tokens,
        "output_tokens": client.tokens, "flushed": flushed, "same_probes": sum(a == b for a, b in zip(before, after, strict=True)),
        "probes": PROBES, "gpu_mib_before": memory, "gpu_mib_after": gpu_mib(),
    }  # fmt: skip


CLOSE = 0.03
"""Log-probabilities that differ by less may change places: what rounding to float16 does, ten times over (tests/test_gpu_server.py)."""


def chaos(backend: str, seconds: float, seed: int, log: Path) -> dict[str, Any]:
    """What `tests/chaos` did to a server on this GPU, and found."""
    from chaos import Chaos, adapters, our_tracebacks

    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = tiny_model.write(folder / "model", head_dim=64)
        loras = [f"{lora}={adapters.write(folder / lora, number, head_dim=64)}" for number, lora in enumerate("ab")]
        flags = [
            "--dtype", "float16", "--mem-fraction-static", "0.2", "--context-length", "1024", "--chunked-prefill-size", "128",
            "--max-running-requests", "96", "--enable-streaming-session", "--enable-priority-scheduling", "--enable-memory-saver",
            "--enable-lora", "--max-lora-rank", str(adapters.RANK), "--lora-target-modules", *adapters.TARGETS,
            "--max-loras-per-batch", "2", "--lora-paths", *loras,
            # FlashInfer compiles what it needs when it first needs it, half a minute each, while everybody waits.
            "--sampling-backend", "pytorch", "--prefill-attention-backend", "triton", "--max-total-tokens",
        ]  # fmt: skip
        reference = stack.enter_context(
            Server(model, "triton", log.with_name(f"{log.stem}-reference.log"), [*flags, "20000"], on_cpu=False)
        )
        small = [*flags, "3000", "--schedule-conservativeness", "0.1"]
        tried = stack.enter_context(Server(model, backend, log, small, {"SGLANG_PAT_VERIFY": "1"}, on_cpu=False))
        tried.wait()
        reference.wait()
        report = asyncio.run(Chaos(tried.url, reference.url, seed, seconds, 32, close=CLOSE, patience=60).run())
    found = {
        name: getattr(report, name) for name in ("seconds", "actions", "outcomes", "compared", "counters", "problems")
    }
    ours = our_tracebacks(log.read_text(errors="replace"))
    return {
        "backend": backend,
        "chaos": seconds,
        "seed": seed,
        **found,
        "tracebacks": ours,
        "sound": not report.problems and not ours,
    }


def write(options: argparse.Namespace, model: str, records: list[dict[str, Any]]) -> None:
    """Write the results, and end with an error unless all of them are sound."""
    document = {"device": gpu(), "model": model, "records": records}
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    if not all(record["sound"] for record in records):
        raise SystemExit("the soak is not sound")


def main() -> None:
    parser = serving.make_parser(__doc__)
    parser.set_defaults(backends=["pat"])
    kinds = parser.add_mutually_exclusive_group(required=True)
    kinds.add_argument("--trace", type=Path, help="a Mooncake trace")
    kinds.add_argument("--chaos", type=float, metavar="SECONDS", help="do everything at once for so long")
    parser.add_argument("--seed", type=int, default=0, help="of the chaos")
    parser.add_argument("--minutes", type=int, default=30, help="of the trace")
    parser.add_argument("--divide-prompt", type=int, default=16)
    parser.add_argument("--divide-answer", type=int, default=2)
    parser.add_argument("--running", type=int, default=256, help="requests that the server runs at once")
    parser.add_argument("--pool", type=int, default=150_000, help="tokens that its KV pool holds")
    options = parser.parse_args()
    if options.output is None:
        options.output = result_file("soak" if options.chaos is None else "chaos")
    if options.chaos is not None:
        records = []
        for backend in options.backends:
            records.append(chaos(backend, options.chaos, options.seed, serving.log_of(options, f"chaos-{backend}")))
            print(json.dumps(records[-1]), flush=True)
        write(options, "tiny", records)
        return
    requests = requests_of(options.trace, options.minutes, options.divide_prompt, options.divide_answer)
    flags = [
        "--schedule-conservativeness", "0.1", "--max-total-tokens", str(options.pool),
        "--max-running-requests", str(options.running), *serving.sglang_flags(options),
    ]  # fmt: skip
    results = []
    for backend in options.backends:
        log = serving.log_of(options, backend)
        with Server(options.model, backend, log, flags, CHECKED, on_cpu=False) as server:
            server.wait()
            result = asyncio.run(soak(server, requests, options.running * 3 // 2))
            counters = server.counters() if backend == "pat" else {}
        text = log.read_text(errors="replace")
        retracted = sum(map(int, re.findall(r"#retracted_reqs: (\d+)", text)))
        said = {
            name: getattr(options, name) for name in ("minutes", "divide_prompt", "divide_answer", "running", "pool")
        }
        result |= said | {"backend": backend, "retracted": retracted, "counters": counters}
        result["sound"] = (
            result["finished"] + result["aborted"] == len(requests)
            and result["same_probes"] == PROBES
            and not any(counters.get(name) for name in ("fallbacks", "faults", "bound"))
        )
        results.append(result)
        print(result, flush=True)
    write(options, options.model.name, results)


if __name__ == "__main__":
    main()
