"""Decode attention whose bits do not depend on the batch, on a GPU, beside others' and beside our own without that promise, in the same run:

    python benchmarks/deterministic.py                                  # the paper's trees and unshared cells
    python benchmarks/deterministic.py --trees 8x32768 --heads 32/8 --append

Times as in kernels.py, with a cold L2 cache. Others are FA3 without splits and SGLang's Triton kernel with splits of 256 tokens, which is how their
backends call them with `--enable-deterministic-inference`. Ours cuts requests into pieces of `--piece` tokens: as servers do, unless many long
requests need longer ones (docs/rollouts.md).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from pathlib import Path

import kernels
import msgspec
import rivals
import torch
import trees
from about import gpu, kept, result_file
from tables import mean

from sglang_pat.backend.executors import LEAST_PIECE

BENCHMARKS = {
    "deterministic": {
        "what": "decode attention with the same bits in any batch",
        "minutes": 1.5,
        "gpu": True,
        "results": "deterministic-h200.json",
    },
}
"""For run.py, which reads it without importing this file."""

UNSHARED = ("1x4096", "8x4096", "32x4096", "128x4096", "8x32768")
"""Beside the paper's trees: requests x tokens."""
RIVALS = (rivals.AlikeFa3, rivals.AlikeTriton)


class Record(msgspec.Struct):
    """One case; times in microseconds, `free_us` without the promise."""

    tree: str
    shared: bool
    heads: str
    page_size: int
    piece: int
    pat_us: float
    free_us: float
    rivals: dict[str, float]
    floor_us: float
    pat_error: float
    rival_errors: dict[str, float]


def measure(problem: kernels.Problem, piece: int) -> Record:
    ours = kernels.Pat(problem, piece=piece)
    us = kernels.median_us(ours.run, cold=True)
    free_us = kernels.median_us(kernels.Pat(problem).run, cold=True)
    others = kernels.beside(problem, RIVALS)
    return Record(
        problem.tree, any(len(queries) > 1 for _, _, queries in trees.pieces(problem.batch)),
        f"{problem.heads}/{problem.kv_heads}", problem.page_size, piece, round(us, 2), round(free_us, 2), others.us,
        round(problem.floor_us, 2), problem.error(ours.out), others.errors,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--trees", nargs="+", default=[*trees.PAPER, *UNSHARED], help="nodes per level _ tokens per node"
    )
    parser.add_argument("--heads", nargs="+", default=list(kernels.HEADS), help="query heads / KV heads")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--piece", type=int, default=LEAST_PIECE, help="tokens")
    parser.add_argument("--append", action="store_true", help="keep the cases that the output has")
    parser.add_argument("--output", type=Path, default=result_file("deterministic"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/deterministic.py needs a CUDA device")
    device = {**gpu(), **kernels.bandwidth()}
    records = msgspec.convert(kept(options.output, options.append), list[Record])
    print(f"{'heads':>6} {'tree':42}{'floor':>8}{'pat':>8}{'free':>8}{'/free':>6}   others, best / PAT")
    for heads, tree in itertools.product(options.heads, options.trees):
        problem = kernels.Problem(tree, *map(int, heads.split("/")), options.page_size, torch.bfloat16)
        record = measure(problem, options.piece)
        records.append(record)
        best = min(record.rivals.values(), default=math.nan)
        print(
            f"{heads:>6} {tree:42}{record.floor_us:8.1f}{record.pat_us:8.1f}{record.free_us:8.1f}{record.pat_us / record.free_us:6.2f}   "
            f"{' '.join(f'{name} {us:.1f}' for name, us in record.rivals.items())}, {best / record.pat_us:.2f} error {record.pat_error:.1e}",
            flush=True,
        )
        del problem
        options.output.write_text(
            json.dumps({"device": device, "records": msgspec.to_builtins(records)}, indent=1) + "\n"
        )
    for shared in (True, False):
        some = [record for record in records if record.shared == shared and record.rivals]
        if some:
            cost = mean([one.pat_us / one.free_us for one in some])
            gain = mean([min(one.rivals.values()) / one.pat_us for one in some])
            print(
                f"{'shared' if shared else 'unshared'}: {len(some)} cases, {cost:.3f} x free, best other / PAT {gain:.2f}"
            )


if __name__ == "__main__":
    main()
