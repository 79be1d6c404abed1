"""Variants of the CUDA kernels, by turns in one process on a GPU:

    python benchmarks/variants.py order=-DPAT_ORDER columns=-DPAT_COLUMNS=128
    python benchmarks/variants.py order=-DPAT_ORDER --tokens 4 --trees 8x512 1,256_256,32 --heads 32/8 --rounds 5

Put a change of the sources behind `#ifdef`, name its compiler flags here (several with commas), and see what it brings before it is kept. `base` is
built without flags and always among them. Prints for each case the median of the rounds' medians with a cold L2 cache, in microseconds, and
last the geometric mean of base's time over each variant's, and the greatest error against float64.
"""

from __future__ import annotations

import argparse
import json
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kernels
import tables
import torch
import trees

from sglang_pat import jit
from sglang_pat.kernels import capabilities, cuda
from sglang_pat.packing import FORMATS, AttentionSpec

BENCHMARKS = {
    "variants": {"what": "variants of our kernels, by turns", "gpu": True, "inputs": "NAME=FLAGS"},
}
"""For run.py, which reads it without importing this file."""

BASE = "base"


class Flags:
    """The flags of the variant whose modules are loaded from now on."""

    def __init__(self) -> None:
        self.extra: tuple[str, ...] = ()
        plain = cuda.Variant.flags.fget
        assert plain is not None
        self.plain = plain
        cuda.Variant.flags = property(lambda variant: (*plain(variant), *self.extra))


def parse(text: str) -> tuple[str, tuple[str, ...]]:
    """A variant's name and flags.

    Raises:
        ArgumentTypeError: The text is not NAME=FLAG or NAME=FLAG,FLAG.
    """
    name, found, flags = text.partition("=")
    if not (name and found and all(flag.startswith("-") for flag in flags.split(","))) or name == BASE:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=-DFLAG, with another name than {BASE}")
    return name, tuple(flags.split(","))


def build(variants: dict[str, tuple[str, ...]], tokens: int, plain: Flags) -> None:
    """Compile all at once: their modules are then found in the cache."""
    arch = cuda.arch_of(torch.device("cuda"))
    spec = AttentionSpec(32, 8, kernels.DIM, kernels.DIM, FORMATS["bfloat16"], query_tokens=tokens)
    variant = cuda.Variant.of(spec, arch, capabilities.query_tiles(arch, kernels.DIM), torch.bfloat16)
    with ThreadPoolExecutor() as pool:
        list(
            pool.map(
                lambda flags: jit.load_cuda(variant.name, arch, (*plain.plain(variant), *flags)), variants.values()
            )
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+", type=parse, metavar="NAME=FLAGS")
    parser.add_argument("--trees", nargs="+", default=list(trees.PAPER))
    parser.add_argument("--heads", nargs="+", default=["32/8", "64/8"])
    parser.add_argument("--tokens", type=int, default=1, help="of each request: more than one in a verify step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="a JSON of all times, which grows with each case")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/variants.py needs a CUDA device")
    flags, variants = Flags(), {BASE: (), **dict(options.variants)}
    build(variants, options.tokens, flags)
    rows: dict[str, dict[str, float]] = {}
    errors = dict.fromkeys(variants, 0.0)
    print(f"{torch.cuda.get_device_name()}\n{'':50}" + "".join(f"{name:>10}" for name in variants), flush=True)
    for heads in options.heads:
        query_heads, kv_heads = map(int, heads.split("/"))
        for tree in options.trees:
            problem = kernels.Problem(tree, query_heads, kv_heads, 1, torch.bfloat16, tokens=options.tokens)
            runs = {}
            for name, flags.extra in variants.items():
                runs[name] = kernels.Pat(problem)
                runs[name].run()
                errors[name] = max(errors[name], problem.error(runs[name].out))
            # By turns, so that a GPU that grows warm or is shared slows all down.
            times = [
                {name: kernels.median_us(run.run, cold=True) for name, run in runs.items()}
                for _ in range(options.rounds)
            ]
            row = rows[f"{heads} {tree}"] = {name: statistics.median(one[name] for one in times) for name in variants}
            print(f"{heads} {tree:44}" + "".join(f"{us:10.1f}" for us in row.values()), flush=True)
            if options.output:
                options.output.write_text(json.dumps(rows, indent=1) + "\n")
    means = {name: tables.mean([row[BASE] / row[name] for row in rows.values()]) for name in variants}
    print(f"{'base / variant':50}" + "".join(f"{mean:10.3f}" for mean in means.values()))
    print(f"{'greatest error':50}" + "".join(f"{error:10.1e}" for error in errors.values()))


if __name__ == "__main__":
    main()
