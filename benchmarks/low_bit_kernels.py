"""Decode attention over KV of 4 and 2 bits, beside our own and others' kernels for 16 and 8 bits, in the same run:

    python benchmarks/low_bit_kernels.py                                # into results/kernels-lowbit-<gpu>.json
    python benchmarks/low_bit_kernels.py --trees 1,64_4096,128 --heads 32/8 --append
    python benchmarks/low_bit_kernels.py --paper --append               # the paper's 20 trees

Nodes of trees are rounded up to whole pages of 64 tokens, as SGLang's are then. Times are cold ones of `kernels.py`; that of the store kernel is of
one new token for each request, a 64th of which complete a page. The floor is each page's bytes once at 4.4 TB/s.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import kernels
import msgspec
import reference  # in tests/, which `kernels` adds to the path
import rivals
import torch
import trees
from about import gpu, kept, result_file

from sglang_pat.kernels import low_bit
from sglang_pat.packing import FORMATS

BENCHMARKS = {
    "low-bit-kernels": {
        "what": "decode attention over pages of 4 and 2 bits",
        "gpu": True,
        "results": "kernels-lowbit-h200.json",
    },
}
"""For run.py, which reads it without importing this file."""

PAGE = low_bit.PAGE_TOKENS
TAIL = 32
"""Tokens behind the last full page, of the mean request."""
TREES = (
    "256_4096", "256_1024", "8_32768", "1_32768", "64_16384", "1,64_4096,1024", "1,8,64_2048,1024,256", "8,256_2048,128", "1,1024_2048,64",
)  # fmt: skip
"""Those of the gate (benchmarks/notes/low-bit-kv.md, "The gate"), and some that share."""


class LowBit(kernels.Pat):
    """Our own over pages of few bits, which the store kernel has made of a problem's KV; behind them `tail` tokens of each request."""

    def __init__(self, problem: kernels.Problem, form: str, tail: int) -> None:
        super().__init__(problem, form=FORMATS[form])
        self.bits, self.pool = FORMATS[form].bits, problem
        # Page 0 is for padding, so nothing is stored there: whoever has it reads zeros, in `error` too.
        pages, heads, dim = len(problem.k) // PAGE, problem.kv_heads, problem.dim
        self.records = torch.zeros(pages, heads, low_bit.record_bytes(self.bits, dim), dtype=torch.uint8, device="cuda")
        shape = (2, problem.size, PAGE, heads, dim)
        self.tails = torch.empty(shape, dtype=problem.q.dtype, device="cuda").normal_()
        # Every page as if it were a request's first.
        slots = torch.arange(len(problem.k), device="cuda")
        scratch = torch.empty_like(self.tails[:, :1])
        self.decoder.store(problem.k, problem.v, self.records, *scratch, slots * 0, slots % PAGE + 1, slots)
        self.k, self.v = self.tails.flatten(1, 2)
        self.pages = low_bit.Pages(self.records, self.bits, None)
        self.seq_lens = problem.seq_lens + tail
        step = torch.arange(problem.size, device="cuda")
        self._new = torch.randn(2, problem.size, heads, dim, device="cuda").to(problem.q.dtype)
        # Pages of requests that share nothing.
        self._step = step, step % PAGE + 1, (1 + step % (pages - 1)) * PAGE

    def store(self) -> None:
        """One token for each request; what it does to the pages and tails is not undone."""
        self.decoder.store(*self._new, self.records, *self.tails, *self._step)

    def error(self) -> float:
        """Against float64 on what the pages say, of some requests."""
        problem = self.pool
        some = torch.linspace(0, problem.size - 1, min(problem.size, 3)).long()
        outs, rights = [], []
        for request in some.tolist():
            full = int(problem.seq_lens[request])
            pages = (problem.slots[request, :full:PAGE] // PAGE).long()
            read = low_bit.unpack(self.records[pages].cpu(), self.bits, problem.dim)
            pools = [
                torch.cat([page.flatten(0, 1).cuda(), tail[request].float()])
                for page, tail in zip(read, self.tails, strict=True)
            ]
            length = self.seq_lens[request : request + 1]
            table = torch.arange(int(length), device="cuda", dtype=torch.int32)[None]
            row = torch.zeros(1, dtype=torch.int64, device="cuda")
            rights.append(
                reference.decode(problem.q[request : request + 1], *pools, table, row, length, scale=problem.scale)
            )
            outs.append(self.out[request].double())
        right = torch.cat(rights)
        return ((torch.stack(outs) - right).norm() / right.norm()).item()


class Record(msgspec.Struct):
    """One case; times in microseconds, by format where there are several: with 32 tokens behind the last page of each request, and without."""

    tree: str
    heads: str
    page_size: int
    bits: int
    pat_us: float
    pat_tail_us: float
    store_us: float
    floor_us: float
    pat_error: float
    plan_bytes: int
    own_us: dict[str, float]
    rivals: dict[str, float]
    """By name and format, such as `fa3 fp8`."""


def rounded_up_to_pages(tree: str) -> str:
    """The tree with the tokens of each node rounded up to whole pages."""
    nodes, tokens = trees.parse(tree)
    return "_".join(",".join(map(str, numbers)) for numbers in (nodes, [-(-count // PAGE) * PAGE for count in tokens]))


def others(shape: tuple[str, int, int], names: list[str]) -> tuple[dict[str, float], dict[str, float]]:
    """What kernels for 16 and 8 bits take: our own, and the rivals'."""
    own, theirs = {}, {}
    for form, kv_dtype in (("bf16", None), ("fp8", torch.float8_e4m3fn)):
        problem = kernels.Problem(*shape, PAGE, torch.bfloat16, kv_dtype=kv_dtype)
        record = kernels.measure(problem, names, warm=False)
        own[form] = record.pat_us
        theirs |= {f"{name} {form}": us for name, us in record.rivals.items()}
    return own, theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", nargs="+", default=list(TREES), help="nodes per level _ tokens per node")
    parser.add_argument("--paper", action="store_true", help="the paper's trees in place of these")
    parser.add_argument("--heads", nargs="+", default=["32/8"], help="query heads / KV heads")
    parser.add_argument("--formats", nargs="+", choices=["int4", "int2"], default=["int4", "int2"])
    parser.add_argument("--rivals", nargs="*", default=[rivals.FlashInfer.name, rivals.Fa3.name])
    parser.add_argument("--append", action="store_true", help="keep the cases that the output has")
    parser.add_argument("--output", type=Path, help="where the JSON goes; default: results/kernels-lowbit-<gpu>.json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/low_bit_kernels.py needs a CUDA device")
    path = arguments.output or result_file("kernels-lowbit")
    device = {**gpu(), **kernels.bandwidth()}
    records = kept(path, arguments.append)
    for heads in arguments.heads:
        for tree in map(rounded_up_to_pages, trees.PAPER if arguments.paper else arguments.trees):
            shape = tree, *map(int, heads.split("/"))
            own, theirs = others(shape, arguments.rivals)
            problem = kernels.Problem(*shape, PAGE, torch.bfloat16)
            for form in arguments.formats:
                times = {}
                for tail in (0, TAIL):
                    pat = LowBit(problem, form, tail)
                    times[tail] = round(kernels.median_us(pat.run, cold=True), 2)
                error = pat.error()
                store_us = round(kernels.median_us(pat.store, cold=True), 2)
                record = Record(
                    problem.tree, heads, PAGE, pat.bits, times[0], times[TAIL], store_us,
                    round(pat.records.nbytes / kernels.read_rate() * 1e6, 2), error,
                    pat.config.cost.bytes(pat.kv_tokens, pat.parts), own, theirs,
                )  # fmt: skip
                records.append(msgspec.to_builtins(record))
                best = min([*own.values(), *theirs.values()])
                print(
                    f"{heads:>6} {tree:24} {form} floor {record.floor_us:.1f} pat {record.pat_us:.1f}, with tails {record.pat_tail_us:.1f}, "
                    f"store {store_us:.1f}; best other {best:.1f} ({best / record.pat_us:.2f}) {own} {theirs} error {error:.1e}",
                    flush=True,
                )
                # After each case: a run that is cut short keeps what it has.
                path.write_text(json.dumps({"device": device, "records": records}, indent=1) + "\n")
            del problem


if __name__ == "__main__":
    main()
