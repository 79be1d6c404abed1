"""This checkout and others, by turns on one GPU: what a change of the planner, the prices or the kernels brings, before it is kept:

    git worktree add /tmp/before HEAD~1
    python benchmarks/turns.py /tmp/before --trees 200_333 32x512 --heads 8/1
    python benchmarks/turns.py /tmp/before --trees 200_333 256_1024 --heads 32/8 --tokens 4 --rounds 9
    cp tiles.json /tmp/priced/sglang_pat/packing/tables/h200-256.json       # or plans by another table
    python benchmarks/turns.py /tmp/priced --dim 256 --heads 16/2 32/2

Each checkout runs in a process of its own, by the benchmarks of this one; only one of them runs at a time. Prints for each case the bins and work items
of each plan, the median of the rounds' medians with a cold L2 cache, in microseconds, and this checkout's time over the other's. Last the geometric
mean of these, the greatest of them, and the greatest error against float64.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = {
    "turns": {"what": "this checkout and others, by turns", "gpu": True, "inputs": "CHECKOUT"},
}
"""For run.py, which reads it without importing this file."""

HERE = Path(__file__).resolve().parent.parent


def work(checkout: str) -> None:
    """A checkout's process: answers each line of the standard input, a case (what there is of its plan) or null (its time), with one."""
    sys.path.insert(0, checkout)
    answers, sys.stdout = sys.stdout, sys.stderr
    import kernels
    import torch

    import sglang_pat
    from sglang_pat.packing import layout

    assert Path(sglang_pat.__file__).is_relative_to(checkout), f"{sglang_pat.__file__} is not in {checkout}"
    pat: Any = None
    for line in sys.stdin:
        case = json.loads(line)
        answer: Any
        if case is None:
            answer = kernels.median_us(pat.run, cold=True)
        else:
            # The last case's memory is free before the next one's is taken.
            pat = None
            kv_dtype = None if case["kv"] is None else getattr(torch, case["kv"])
            problem = kernels.Problem(
                case["tree"], *case["heads"], case["page_size"], torch.bfloat16, False, kv_dtype, case["tokens"],
                tuple(case["dims"]),
            )  # fmt: skip
            pat = kernels.Pat(problem)
            pat.run()
            header = dict(zip(layout.HEADER, pat.plan[: len(layout.HEADER)].tolist(), strict=True))
            answer = {
                "bins": header["num_bins"], "items": header["num_items"], "floor_us": problem.floor_us,
                "error": problem.error(pat.out),
            }  # fmt: skip
        print(json.dumps(answer), file=answers, flush=True)


class Checkout:
    """A checkout's process."""

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--work", str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, what: Any) -> Any:
        """What it answers to a line (`work`)."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(what), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"a checkout's process ended with {self._process.wait()}")
        return json.loads(answer)


def main() -> None:
    import kernels
    import tables
    import trees
    from about import gpu

    from sglang_pat.kernels import capabilities

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="+", type=Path, help="folders of other checkouts")
    parser.add_argument("--trees", nargs="+", default=list(trees.PAPER), help="nodes per level _ tokens per node")
    parser.add_argument("--heads", nargs="+", default=["32/8"], help="query heads / KV heads")
    parser.add_argument("--page-sizes", nargs="+", type=int, default=[1])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1], help="of each request")
    parser.add_argument("--kv-cache-dtype", choices=["auto", *capabilities.FP8], default="auto")
    parser.add_argument("--dim", choices=kernels.DIMS, default=str(kernels.DIM))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="a JSON of all times, which grows with each case")
    options = parser.parse_args()
    others = {path.resolve().name: path.resolve() for path in options.checkouts}
    checkouts = {name: Checkout(path) for name, path in {"here": HERE, **others}.items()}
    records: list[dict[str, Any]] = []
    print(f"{'heads':>6}{'page':>5}{'tokens':>7} {'tree':42}" + "".join(f"{name:>26}" for name in checkouts))
    for heads, page_size, tokens, tree in itertools.product(
        options.heads, options.page_sizes, options.tokens, options.trees
    ):
        case = {
            "tree": tree, "heads": list(map(int, heads.split("/"))), "page_size": page_size, "tokens": tokens,
            "kv": capabilities.FP8.get(options.kv_cache_dtype), "dims": kernels.DIMS[options.dim],
        }  # fmt: skip
        plans = {name: checkout.ask(case) for name, checkout in checkouts.items()}
        # By turns, so that a GPU that grows warm or is shared slows all down.
        rounds = [{name: checkout.ask(None) for name, checkout in checkouts.items()} for _ in range(options.rounds)]
        times = {name: statistics.median(one[name] for one in rounds) for name in checkouts}
        records.append({**case, "plans": plans, "us": times})
        cells = "".join(
            f"{plans[name]['bins']:7} {plans[name]['items']:5}{us:8.1f}{times['here'] / us:5.2f}"
            for name, us in times.items()
        )
        print(f"{heads:>6}{page_size:>5}{tokens:>7} {tree:42}{cells}", flush=True)
        if options.output:
            options.output.write_text(json.dumps({"device": gpu(), "records": records}, indent=1) + "\n")
    for name in others:
        ratios = [record["us"]["here"] / record["us"][name] for record in records]
        error = max(record["plans"][name]["error"] for record in records)
        print(f"here / {name}: mean {tables.mean(ratios):.3f}, greatest {max(ratios):.3f}; its error {error:.1e}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2])
    else:
        main()
