"""What it brings and costs that requests wait for a prefix which another one computes (radix_bridge/siblings.py):

    python benchmarks/siblings.py MODEL

On a CPU, with two servers side by side that differ in SGLANG_PAT_DEFER: 16 requests sent at once, with a prefix of 700 tokens and 50 of
their own, and 16 that share nothing; each round asks both servers, by turns. Prints tokens that were prefilled, the median over the rounds
of the mean time to the first token, the median of the rounds' ratios of that and of CPU time, and their
quartiles; then what a step costs in which nobody waits, and what it takes to ask whether one of many waiting requests has to wait.
With `--rounds 0` these two alone.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import tempfile
import time
from array import array
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from serving import client_session, generate

from sglang_pat.demo.server import Server

BENCHMARKS = {
    "siblings": {"what": "waiting for a prefix that another request computes", "inputs": "MODEL"},
}
"""For run.py, which reads it without importing this file."""

SIBLINGS, PREFIX, OWN = 16, 700, 50
FLAGS = ["--dtype", "float32", "--max-total-tokens", "40000", "--enable-cache-report", "--chunked-prefill-size", "8192"]


def prompts(seed: int, shared: int) -> list[list[int]]:
    numbers = random.Random(seed)
    prefix = numbers.choices(range(40, 120), k=shared)
    return [prefix + numbers.choices(range(40, 120), k=PREFIX + OWN - shared) for _ in range(SIBLINGS)]


async def first_tokens(url: str, asked: list[list[int]]) -> list[float]:
    """Milliseconds until each has its first one."""
    async with client_session() as session:
        answers = await asyncio.gather(*(generate(session, url, prompt, 4) for prompt in asked))
    return [(first - sent) * 1e3 for (sent, first, *_), _ in answers]


def prefilled(server: Server, asked: list[list[int]]) -> int:
    body = {"input_ids": asked, "sampling_params": {"max_new_tokens": 1}}
    found = [one["meta_info"] for one in server.post("/generate", body)]
    return sum(one["prompt_tokens"] - one["cached_tokens"] for one in found)


def cpu_seconds(server: Server) -> float:
    """Of all processes of a server; other work on the machine changes it little."""
    own = psutil.Process(server._process.pid)
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(one.user + one.system for one in times)


class _Adder:
    """As much of SGLang's `PrefillAdder` as is looked at."""

    def __init__(self, cache: Any) -> None:
        self.preempt_list: list[Any] = []
        self.page_size, self.tree_cache = 1, cache

    def budget_state(self) -> str:
        return "others may be added"


def request(rid: str, tokens: list[int], cached: int, node: int | None = None) -> Any:
    """One of SGLang's, just matched with its tree, down to a node."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    found = array("q", tokens)
    req = Req(rid, "", found, SamplingParams())
    req.full_untruncated_fill_ids = found
    req.prefix_indices, req.prefix_len, req.last_node = found[:cached], cached, node
    return req


def question(leaders: int, waiting: int, cached: int, length: int, wait: bool, apart: bool = False) -> float:
    """Microseconds of CPU time to ask for one request whether it has to wait. All begin with the same cached tokens; those that need not `wait` differ
    where it is looked at last. `apart`, they end at nodes of their own, and cached tokens are compared too."""
    from sglang.srt.mem_cache.radix_cache import RadixCache

    from sglang_pat.radix_bridge.siblings import BLOCK, Siblings

    numbers, nodes = random.Random(0), itertools.count(1000)
    prefix = numbers.choices(range(1000), k=length)

    def one(rid: str) -> Any:
        tokens = prefix if wait else prefix[:cached] + numbers.choices(range(1000), k=length - cached)
        # The worst that can be: the last token that is looked at first is the same.
        tokens[cached + BLOCK - 1] = 7
        # An id, as of `UnifiedRadixCache`: another object each time.
        return request(rid, tokens, cached, next(nodes) if apart else int("1000"))

    adder = _Adder(RadixCache.create_simulated())
    siblings = Siblings()
    # The step begins with the first question.
    siblings.defer(adder, one("first"))
    for number in range(leaders):
        siblings.computes(adder, one(f"leader {number}"))
    reqs = [one(str(number)) for number in range(waiting)]
    began = time.thread_time()
    for req in reqs:
        siblings.defer(adder, req)
    return (time.thread_time() - began) / waiting * 1e6


def unshared() -> float:
    """Microseconds that a step of SIBLINGS requests which share nothing costs in all, from the question to the end."""
    from sglang.srt.mem_cache.radix_cache import RadixCache

    from sglang_pat.radix_bridge.siblings import Siblings

    cache, siblings, times = RadixCache.create_simulated(), Siblings(), []
    for seed in range(50):
        adder = _Adder(cache)
        reqs = [request(str(number), prompt, 0) for number, prompt in enumerate(prompts(seed, 0))]
        began = time.perf_counter()
        for req in reqs:
            siblings.defer(adder, req)
            siblings.computes(adder, req)
        for req in reqs:
            siblings.ended(req)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--shared", type=int, nargs="+", default=[PREFIX, 0], help="tokens")
    options = parser.parse_args()
    model, rounds = options.model, options.rounds
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers: dict[str, Server] = (
            {}
            if not rounds
            else {
                defer: stack.enter_context(
                    Server(
                        model, "pat", Path(folder) / defer, FLAGS, {"SGLANG_PAT_DEFER": defer, "OMP_NUM_THREADS": "1"}
                    )
                )
                for defer in "01"
            }
        )
        for server in servers.values():
            server.wait()
        for shared in options.shared if rounds else ():
            for server in servers.values():
                asyncio.run(first_tokens(server.url, prompts(-1, shared)))
            means: dict[str, list[float]] = {"0": [], "1": []}
            seconds: dict[str, list[float]] = {"0": [], "1": []}
            for seed in range(rounds):
                # By turns, for the machine is not as fast all the time; and none is always the first.
                for defer in "01" if seed % 2 else "10":
                    before = cpu_seconds(servers[defer])
                    times = asyncio.run(first_tokens(servers[defer].url, prompts(seed, shared)))
                    means[defer].append(statistics.mean(times))
                    seconds[defer].append(cpu_seconds(servers[defer]) - before)
            for defer, server in servers.items():
                print(
                    f"{shared} tokens shared, SGLANG_PAT_DEFER={defer}: {prefilled(server, prompts(rounds, shared))} tokens prefilled, "
                    f"first token after {statistics.median(means[defer]):.0f} ms"
                )
            for name, found in (("first token", means), ("CPU", seconds)):
                ratios = sorted(after / before for before, after in zip(found["0"], found["1"], strict=True))
                low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
                middle = statistics.median(ratios)
                print(
                    f"{shared} tokens shared, {name}, 1 against 0: {middle:.3f}, half of the rounds {low:.3f} to {high:.3f}"
                )
    print(f"a step of {SIBLINGS} requests that share nothing: {unshared():.0f} us in all")
    for length in (2_000, 20_000):
        # So few that they stay below COMPARED.
        one, many = (question(leaders, 250, length // 2, length, wait=False) for leaders in (1, 64))
        print(
            f"prompts of {length} tokens, half of them cached: {one:.1f} us a question with 1 leader, {many:.1f} with 64, "
            f"{(many - one) / 63:.2f} for each whose block is another one"
        )
    for length in (2_000, 20_000, 128_000):
        took = question(1, 250, length - 600, length, wait=True)
        print(f"who waits, with prompts of {length} tokens, all but 600 of them cached: {took:.1f} us a question")
    shorter, longer = (question(1, 100, length - 600, length, wait=True, apart=True) for length in (20_000, 100_000))
    print(f"where cached tokens are compared too: {(longer - shorter) / 80:.2f} ns each")


if __name__ == "__main__":
    main()
