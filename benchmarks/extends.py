"""Attention of extends behind long cached contexts, on a GPU, by FA3 and FlashInfer, of which one prefills for PAT:

    python benchmarks/extends.py                                        # as coding agents send them
    python benchmarks/extends.py --cases 1_8192+64 --dims 128 --append

A case is a tree of cached tokens, in trees.py's notation, and how many new ones each request has; pages of 64 tokens, bfloat16 and e4m3. FlashInfer is its
fa2 kernel in one causal call; SGLang's backend has pages of one token and two calls, one for what is cached and one for what is new. Times and the
floor as in kernels.py, with a cold L2 cache; the floor's arithmetic is of 16 bits, and FA3's with e4m3 is faster. PAT is not timed: it plans extends of
a few tokens only (docs/how-it-works.md, "Extends").
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from pathlib import Path

import kernels
import msgspec
import rivals
import torch
from about import gpu, kept, result_file

BENCHMARKS = {
    "extends": {
        "what": "attention of extends by FA3 and FlashInfer",
        "gpu": True,
        "results": "extends-h200.json",
    },
}
"""For run.py, which reads it without importing this file."""

CASES = (
    "1_104000+64",
    "1_104000+256",
    "1_104000+704",
    "1_104000+2048",
    "8_104000+64",
    "8_104000+704",
    "1,8_32000,72000+704",
    "1_8192+704",
)
"""A session alone, several that prefill together, and several that share. In coding agents' sessions the median has 712 new tokens behind 101,952 cached
ones (docs/coding_agents.md)."""
HEADS = {128: "32/8", 256: "16/2"}
"""Of Qwen3 8B, and of Qwen3.5 35B-A3B."""
PAGE = 64
KINDS = {"bfloat16": None, "float8_e4m3fn": torch.float8_e4m3fn}


class Record(msgspec.Struct):
    """One case; times in microseconds. `missing` says why one has none."""

    tree: str
    new: int
    heads: str
    dim: int
    kv: str
    rivals: dict[str, float]
    rival_errors: dict[str, float]
    missing: dict[str, str]
    floor_us: float


def problem_of(case: str, dim: int, kind: str) -> kernels.Problem:
    """The new tokens are the last of each request.

    Raises:
        SystemExit: It is no case.
    """
    tree, _, new = case.partition("+")
    if not new.isdecimal() or int(new) % PAGE:
        raise SystemExit(f"--cases: {case} must be like 1_8192+64, cached tokens and new ones in pages of {PAGE}")
    both = re.sub(r"\d+$", lambda own: str(int(own[0]) + int(new)), tree)
    heads = map(int, HEADS[dim].split("/"))
    return kernels.Problem(both, *heads, PAGE, torch.bfloat16, kv_dtype=KINDS[kind], tokens=int(new), dims=(dim, dim))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES, help="cached tokens + new ones")
    parser.add_argument("--dims", type=int, nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--append", action="store_true", help="keep the cases that the output has")
    parser.add_argument("--output", type=Path, default=result_file("extends"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/extends.py needs a CUDA device")
    device, records = gpu(), kept(options.output, options.append)
    for dim, kind, case in itertools.product(options.dims, KINDS, options.cases):
        problem = problem_of(case, dim, kind)
        found = kernels.beside(problem, (rivals.Fa3, rivals.FlashInfer))
        record = Record(
            case.partition("+")[0], problem.tokens, HEADS[dim], dim, kind, found.us, found.errors, found.missing,
            round(problem.floor_us, 1),
        )  # fmt: skip
        print(record, flush=True)
        records.append(msgspec.to_builtins(record))
        options.output.write_text(json.dumps({"device": device, "records": records}, indent=1) + "\n")
        del problem


if __name__ == "__main__":
    main()
