"""Short turns that arrive together on one long document, on each server in turn:

    python benchmarks/short_extends.py --model MODEL --dummy --backends pat fa3 flashinfer

The document is cached. Then 64 requests with a few new tokens each come in one call and answer one token: that is one extend. Printed and written
is the time until all are answered, the median of the rounds. It includes what a server does with 64 prompts of 8,192 numbers.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from typing import Any

import about
import msgspec
import serving

from sglang_pat.demo.server import Server

BENCHMARKS = {
    "short-extends": {
        "what": "short turns on one long document, server after server",
        "gpu": True,
        "inputs": "--model FOLDER",
        "results": "short-extends-h200.json",
    },
}
"""For run.py, which reads it without importing this file."""


class Record(msgspec.Struct):
    """One number of new tokens on one backend. `shared` is the extends that PAT ran with the document read once, of `rounds`."""

    backend: str
    requests: int
    document: int
    new: int
    rounds: int
    median_ms: float
    least_ms: float
    shared: int | None


def ask(server: Server, prompts: list[list[int]]) -> float:
    """Seconds until all are answered."""
    began = time.perf_counter()
    answers = server.post(
        "/generate", {"input_ids": prompts, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    )
    seconds = time.perf_counter() - began
    cached = min(answer["meta_info"]["cached_tokens"] for answer in answers)
    if cached < len(prompts[0]) // 2:
        raise RuntimeError(f"only {cached} tokens of a prompt were cached")
    return seconds


def measure(
    server: Server, backend: str, requests: int, document: int, new: int, rounds: int, vocabulary: int
) -> Record:
    numbers = random.Random(new)
    head = numbers.choices(range(1, vocabulary), k=document)
    server.post("/generate", {"input_ids": head, "sampling_params": {"max_new_tokens": 1}})
    times, before = [], 0
    for number in range(-3, rounds):
        if number == 0 and backend == "pat":
            before = server.counters()["extends_shared"]
        prompts = [head + numbers.choices(range(1, vocabulary), k=new) for _ in range(requests)]
        seconds = ask(server, prompts)
        if number >= 0:
            times.append(seconds * 1e3)
    shared = server.counters()["extends_shared"] - before if backend == "pat" else None
    return Record(
        backend, requests, document, new, rounds, round(statistics.median(times), 1), round(min(times), 1), shared
    )


def main() -> None:
    parser = serving.make_parser(__doc__, about.result_file("short-extends"))
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--document", type=int, default=8192, help="tokens")
    parser.add_argument(
        "--new", type=int, nargs="+", default=[4, 16], help="tokens of each request behind the document"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--on-cpu", action="store_true")
    options = parser.parse_args()
    vocabulary = min(1000, json.loads((options.model / "config.json").read_text())["vocab_size"])
    result: dict[str, Any] = {"device": about.gpu(), "model": options.model.name, "records": []}
    for backend in options.backends:
        log = serving.log_of(options, backend)
        with Server(options.model, backend, log, serving.sglang_flags(options), on_cpu=options.on_cpu) as server:
            server.wait()
            for new in options.new:
                record = measure(server, backend, options.requests, options.document, new, options.rounds, vocabulary)
                print(record, flush=True)
                result["records"].append(msgspec.structs.asdict(record))
                options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
