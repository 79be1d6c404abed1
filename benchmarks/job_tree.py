"""How long it takes to read and order a large job, and how much memory (sglang_pat/batch): no model runs.

    python benchmarks/job_tree.py --requests 1000000 --prefix 1000 --own 1000 --degree 16

Writes a shuffled file of completions (with `--tokens` their prompts are token ids, otherwise text of four characters a token) and goes
through it as `sglang-pat batch` does: lines are read and checked, then read again, sorted, made a tree and arranged, then handed out to
two replicas in a pool of 600,000 tokens each, as if the oldest request ended each time. Prints seconds and the peak of memory after each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from sglang_pat.batch.lengths import Usage
from sglang_pat.batch.lines import Request, Source
from sglang_pat.batch.order import Room
from sglang_pat.batch.shares import Shares
from sglang_pat.batch.tree import BYTES, Tree

BENCHMARKS = {
    "job-tree": {"what": "reading and ordering a large job"},
}
"""For run.py, which reads it without importing this file."""

VOCABULARY = 150_000
"""Token ids, as in Qwen's."""

REPLICAS, POOL, WINDOW, ANSWER = 2, 600_000, 1024, 100


def write(path: Path, options: argparse.Namespace) -> None:
    random = np.random.default_rng(0)
    places = random.permutation(options.requests)
    text = random.bytes(1 << 23).hex()
    words = list(map(str, random.integers(VOCABULARY, size=1 << 22).tolist()))

    def part(number: int, tokens: int) -> str:
        """Begins with what no other part has, and goes on anywhere."""
        place = number * 7919 % (len(words) - tokens)
        if options.tokens:
            return ", ".join((str(number), *words[place : place + tokens - 1]))
        return f"{number:08x}" + text[place : place + BYTES * tokens - 8]

    with path.open("w") as file:
        for place in places.tolist():
            prefix, own = part(place // options.degree, options.prefix), part(options.requests + place, options.own)
            prompt = f"[{prefix}, {own}]" if options.tokens else json.dumps(prefix + own)
            file.write(
                f'{{"custom_id": "{place}", "method": "POST", "url": "/v1/completions", '
                f'"body": {{"model": "m", "prompt": {prompt}, "max_tokens": {ANSWER}}}}}\n'
            )


@contextmanager
def measured(name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{name}: {time.perf_counter() - began:.1f} s, at most {peak:.2f} GiB so far", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--prefix", type=int, default=1000, help="tokens that are shared")
    parser.add_argument("--own", type=int, default=1000)
    parser.add_argument("--degree", type=int, default=16, help="requests that share a prefix")
    parser.add_argument("--tokens", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "in"
        with measured("writing the file"):
            # Elsewhere, for what it takes is not the job's.
            writer = multiprocessing.Process(target=write, args=(path, options))
            writer.start()
            writer.join()
        print(f"{path.stat().st_size / 2**30:.2f} GiB")
        source = Source(path)
        with measured("reading"):
            for line in source.lines():
                assert isinstance(line, Request)
                source.keep()
        with measured("the tree"):
            tree = Tree(source)
        with measured("shares"):
            shares = Shares(tree, [Room(POOL)] * REPLICAS, WINDOW)
        usage = Usage(options.prefix + options.own, ANSWER)
        with measured("handing out"):
            running: list[tuple[int, int]] = []
            first = 0
            while True:
                while (taken := shares.take()) is not None:
                    running.append(taken)
                if first == len(running):
                    break
                shares.finish(*running[first], usage)
                first += 1
        assert first == options.requests
        print(f"{len(tree.depth)} nodes")


if __name__ == "__main__":
    main()
