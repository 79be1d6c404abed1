"""Decode attention on a GPU, beside every other kernel there is, in the same run:

    python benchmarks/kernels.py                                        # the paper's trees (PAT §8.1, figure 10)
    python benchmarks/kernels.py --trees 1,64_4096,128 --heads 32/8     # any tree: nodes per level _ tokens per node
    SGLANG_PAT_TRACE=file python -m sglang.launch_server ...            # or what a server decoded:
    python benchmarks/kernels.py --trees file --page-sizes 1 --contiguous
    python benchmarks/kernels.py --ablations                            # what each part of the design brings (§8.5)
    python benchmarks/kernels.py --page-sizes 32 --append               # more cases, into the same file
    python benchmarks/kernels.py --kv-cache-dtype fp8_e4m3              # into results/kernels-fp8-<gpu>.json
    python benchmarks/kernels.py --tokens 2 4 8                         # verify steps, into results/verify-<gpu>.json
    python benchmarks/kernels.py --dim 256 --heads 16/2 32/2            # other head dimensions, all into results/kernels-dim256-<gpu>.json
    python benchmarks/kernels.py --dim 192/128 --append                 # K's and V's

In a verify step the last so many tokens of each request are its draft, each of which sees those in front of it.

Times are medians of CUDA graph replays, measured by events inside the graph. Cold: something else is read into the L2 cache
before each; this is what a model sees, whose layers have weights and KV of their own. Warm: the same replays one after the other.
Planning is not part of them. The floor is the larger of two times: each KV token, query and output once at the rate at which the GPU
reads (READ_RATES), and the arithmetic at 790 TFLOP/s (measured on an H200, 2026-11-20).
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import rivals
import torch
import trees
from about import gpu, gpu_slug, kept, result_file

sys.path.append(str(Path(__file__).parent.parent / "tests"))

import reference

from sglang_pat.backend import verify
from sglang_pat.backend.start.layers import kv_format
from sglang_pat.kernels import capabilities, cuda
from sglang_pat.kernels.arguments import KvView, Scores, Tables
from sglang_pat.kernels.low_bit import Pages
from sglang_pat.packing import AttentionSpec, PackConfig, TileTable, layout, native
from sglang_pat.packing.spec import KVFormat

BENCHMARKS = {
    "kernels": {
        "what": "decode attention beside FlashInfer, its cascade, Triton and FA3",
        "minutes": 2.5,
        "gpu": True,
        "results": "kernels-h200.json",
    },
    "ablations": {
        "arguments": ["--ablations"],
        "what": "without one part of the design",
        "minutes": 0.3,
        "gpu": True,
        "results": "kernel-ablations-h200.json",
    },
}
"""For run.py, which reads it without importing this file."""

HEADS = ("32/32", "16/8", "32/8", "64/8")
READ_RATES, FLOP_RATE = {"h200": 4.4e12, "h100": 3.08e12}, 790e12
"""Bytes and operations a second that these GPUs reach: an H200 measured 2026-11-20; H100's bytes are the same share, 0.92, of what the data
sheet says."""
FLUSH_BYTES = 256 << 20
"""Five times the L2 cache of an H200."""
WARM_UP_SECONDS = 0.01
"""Before anything is timed: the first case of a run, in front of which modules are loaded, looked 6 to 8 us slower than the model that
fits the others (benchmarks/notes/tests-and-faults.md, "How kernels are timed")."""
DIM = 128
"""Of heads, where none is given."""

DIMS = {str(dim): (dim, dim) for dim in capabilities.HEAD_DIMS} | {
    f"{dim}/{v_dim}": (dim, v_dim) for dim, v_dim in capabilities.UNEQUAL_HEAD_DIMS
}
"""K's and V's, by how they are written."""


def read_rate() -> float:
    """Bytes a second that this GPU reads from memory; others than these count as an H200."""
    return READ_RATES.get(gpu_slug(), READ_RATES["h200"])


class Problem:
    """A tree's tensors: KV pools in which the pages of a node lie anywhere, or one after the other.

    Attributes:
        slots: [requests, longest], int32: the slot of each token of each request.
        seq_lens: [requests], int64.
        tokens: Of each request, the last ones, that are computed: more than one in a verify step.
        levels: (nodes, tokens of each) of every level; none where the tree is not regular.
        dim, v_dim: Head dimensions of K, which is Q's, and V, which is the output's.
    """

    def __init__(
        self, tree: str, heads: int, kv_heads: int, page_size: int, dtype: torch.dtype, contiguous: bool = False,
        kv_dtype: torch.dtype | None = None, tokens: int = 1, dims: tuple[int, int] = (DIM, DIM),
    ) -> None:  # fmt: skip
        self.batch = trees.of_cell(tree)
        shape = trees.shape_of_cell(tree)
        self.levels = list(zip(*shape, strict=True)) if shape else []
        self.tree, self.contiguous = Path(tree).stem, contiguous
        self.heads, self.kv_heads, self.page_size, self.tokens = heads, kv_heads, page_size, tokens
        self.dim, self.v_dim = dims
        pieces = list(trees.pieces(self.batch))
        slots = trees.slots(tree, self.batch, page_size, contiguous)
        if tokens > min(length for _, length, queries in pieces if len(queries) == 1):
            raise SystemExit(f"--tokens: requests of {tree} have fewer than {tokens} tokens of their own")
        self.size, self.kv_tokens = len(self.batch.seq_lens), sum(length for _, length, _ in pieces)
        self.slots = torch.from_numpy(slots).cuda()
        self.k, self.v = (
            torch.empty(self.kv_tokens, kv_heads, dim, dtype=dtype, device="cuda").normal_().to(kv_dtype or dtype)
            for dim in dims
        )
        self.paged = tuple(pool.view(-1, page_size, *pool.shape[1:]) for pool in (self.k, self.v))
        self.q = torch.empty(self.size * tokens, heads, self.dim, dtype=dtype, device="cuda").normal_()
        self.rows = torch.arange(self.size, device="cuda")
        self.seq_lens = torch.tensor(self.batch.seq_lens, device="cuda")
        self.scale = self.dim**-0.5

    def new_out(self) -> torch.Tensor:
        """[queries, heads, v_dim] of Q's dtype, to be written."""
        return self.q.new_empty(*self.q.shape[:2], self.v_dim)

    def pages(self, slots: torch.Tensor) -> torch.Tensor:
        """The pages of rows of slots, int32."""
        return (slots[:, :: self.page_size] // self.page_size).int()

    def page_list(self, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each request's pages of that size begin, with the end of the last, and all of them; int32."""
        counts = self.seq_lens // page_size
        table = self.slots[:, ::page_size] // page_size
        indptr = torch.zeros(self.size + 1, dtype=torch.int32, device="cuda")
        indptr[1:] = counts.cumsum(0)
        return indptr, table[torch.arange(table.shape[1], device="cuda") < counts[:, None]]

    @property
    def floor_us(self) -> float:
        dims = self.dim + self.v_dim
        io = len(self.q) * self.heads * dims * self.q.itemsize
        read = (self.kv_tokens * self.kv_heads * dims * self.k.itemsize + io) / read_rate()
        flop = 2 * dims * self.heads * self.tokens * sum(self.batch.seq_lens) / FLOP_RATE
        return max(read, flop) * 1e6

    def error(self, out: torch.Tensor) -> float:
        """Against float64, on some of the queries."""
        some = torch.linspace(0, len(self.q) - 1, min(self.size, 8), device="cuda").long()
        requests, behind = some // self.tokens, self.tokens - 1 - some % self.tokens
        k, v = self.k.to(self.q.dtype), self.v.to(self.q.dtype)
        lengths = self.seq_lens[requests] - behind
        right = reference.decode(self.q[some], k, v, self.slots, self.rows[requests], lengths, scale=self.scale)
        return ((out[some].double() - right).norm() / right.norm()).item()


class Pat:
    """Our own."""

    name = "pat"

    def __init__(
        self, problem: Problem, policy: str = "optimal", query_tiles: tuple[int, ...] = (), overlap: bool = True, form: KVFormat | None = None,
        piece: int = 0,
    ) -> None:  # fmt: skip
        self._problem, self._overlap = problem, overlap
        form = form or kv_format(problem.k.dtype)
        tokens = problem.tokens
        spec = AttentionSpec(problem.heads, problem.kv_heads, problem.dim, problem.v_dim, form, query_tokens=tokens)
        tiles = capabilities.tile_table_of(spec, cuda.arch_of(problem.q.device), torch.cuda.get_device_name())
        if query_tiles:
            tiles = TileTable(query_tiles)
        if piece:
            tiles = capabilities.batch_invariant(tiles)
        self.decoder = cuda.Decoder(spec, tiles, problem.q.device, problem.q.dtype, batch_invariant=piece > 0)
        self.config = PackConfig.of(spec, tiles, self.decoder.workers, policy, piece)
        room = layout.capacity(self.config, problem.size, max(problem.batch.seq_lens))
        buffers = [np.zeros(room, dtype=np.int32) for _ in range(2)]
        scheduler = native.NativeScheduler(self.config, problem.size, buffers=buffers)
        index, _, _ = scheduler.take(native.load(scheduler, problem.batch), problem.seq_lens.cpu(), 0)
        data = scheduler.buffers[index]
        self.kv_tokens, self.parts, _ = scheduler.current()
        self.plan = torch.from_numpy(data[: layout.sections(data).header["size"]].copy()).to("cuda")
        slots = max(1, layout.num_slots(data))
        self._partial = torch.empty(slots, spec.query_heads, problem.v_dim, dtype=torch.float16, device="cuda")
        self._lse = torch.empty(slots, spec.query_heads, device="cuda")
        self._masks = verify.without_branches(problem.size, tokens, "cuda") if tokens > 1 else None
        self.out = problem.new_out()
        self.k, self.v, self.seq_lens = problem.k, problem.v, problem.seq_lens
        self.pages: Pages | None = None

    def run(self) -> None:
        p = self._problem
        tables = Tables(p.slots, p.rows, self.seq_lens, self._masks)
        kv = KvView(self.k, self.v, pages=self.pages)
        self.decoder.decode(
            p.q, kv, tables, Scores(p.scale), self.out, self.plan, self._partial, self._lse, overlap=self._overlap
        )


def median_us(run: Callable[[], None], cold: bool, repeats: int = 11) -> float:
    """The median time of `run` in a CUDA graph."""
    run()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
    # Read, not written: what a kernel in front has written is put back into memory while this one runs, 7 us here.
    flush = torch.zeros(FLUSH_BYTES // 4, device="cuda") if cold else None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if flush is not None:
            flush.sum()
        begin.record()
        run()
        end.record()
    deadline = time.perf_counter() + WARM_UP_SECONDS
    while time.perf_counter() < deadline:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        graph.replay()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


class Record(msgspec.Struct):
    """One case; times in microseconds."""

    tree: str
    heads: str
    page_size: int
    dtype: str
    pat_us: float
    pat_warm_us: float | None
    rivals: dict[str, float]
    rivals_warm: dict[str, float]
    floor_us: float
    pat_error: float
    rival_errors: dict[str, float]
    plan_bytes: int
    contiguous: bool = False
    kv_dtype: str = ""
    """Of KV where it is not Q's; then `bf16_us` is our own time with KV of Q's dtype."""
    bf16_us: float | None = None
    tokens: int = 1
    """Of each request: more than one in a verify step."""
    dim: int = DIM
    v_dim: int = DIM
    kv: str = ""
    """Format of KV, a key of `packing.FORMATS`; older records have none."""
    missing: dict[str, str] = {}
    """Why a rival has no time."""


def cases(arguments: argparse.Namespace) -> Iterator[tuple[str, int, int, int, int]]:
    """Tree, query heads, KV heads, page size, tokens."""
    for heads, tokens, page_size in itertools.product(arguments.heads, arguments.tokens, arguments.page_sizes):
        query_heads, kv_heads = map(int, heads.split("/"))
        for tree in arguments.trees:
            yield tree, query_heads, kv_heads, page_size, tokens


ABLATIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "tile 16 only": {"query_tiles": (16,)},
    "tile 64 only": {"query_tiles": (64,)},
    "tile 128 only": {"query_tiles": (128,)},
    "merge not overlapped": {"overlap": False},
    "policy pat": {"policy": "pat"},
    "policy naive": {"policy": "naive"},
    "policy query": {"policy": "query"},
}
"""Arguments of `Pat`."""


def ablate(trees_: list[str]) -> list[dict[str, Any]]:
    """Each ablation's time with cold L2 on each tree, 32/8 heads, page size 1."""
    rows = []
    for tree in trees_:
        problem = Problem(tree, 32, 8, 1, torch.bfloat16)
        times = {
            name: round(median_us(Pat(problem, **options).run, cold=True), 2) for name, options in ABLATIONS.items()
        }
        rows.append({"tree": tree, "us": times})
        print(f"{tree:42} " + ", ".join(f"{name} {us:.1f} ({us / times['full']:.2f})" for name, us in times.items()))
    return rows


class Beside(msgspec.Struct):
    """What others take, in microseconds with a cold L2 cache and perhaps a warm one, their errors, and why one has no time."""

    us: dict[str, float] = {}
    warm_us: dict[str, float] = {}
    errors: dict[str, float] = {}
    missing: dict[str, str] = {}


def beside(problem: Any, others: Iterable[Any], warm: bool = False) -> Beside:
    """Times these rivals (their classes) on a problem; one that fails must not cost the others' numbers."""
    found = Beside()
    for rival in others:
        try:
            other = rival(problem)
            us = round(median_us(other.run, cold=True), 2)
            warm_us = round(median_us(other.run, cold=False), 2) if warm else None
            other.run()  # what a graph has written may not last
            found.errors[rival.name] = problem.error(other.out)
            found.us[rival.name] = us
            if warm_us is not None:
                found.warm_us[rival.name] = warm_us
        except rivals.UnsupportedError as error:
            found.missing[rival.name] = str(error)
        except Exception as error:
            found.missing[rival.name] = rivals.failure(error)
            print(f"  {rival.name} failed: {found.missing[rival.name]}", flush=True)
            torch.cuda.synchronize()
    return found


def measure(problem: Problem, names: list[str], warm: bool, same_us: float | None = None) -> Record:
    pat = Pat(problem)
    cold_us = median_us(pat.run, cold=True)
    warm_us = round(median_us(pat.run, cold=False), 2) if warm else None
    others = beside(problem, [rival for rival in rivals.of(problem) if rival.name in names], warm)
    return Record(
        problem.tree, f"{problem.heads}/{problem.kv_heads}", problem.page_size,
        str(problem.q.dtype).removeprefix("torch."), round(cold_us, 2), warm_us, others.us, others.warm_us,
        round(problem.floor_us, 2), problem.error(pat.out), others.errors,
        pat.config.cost.bytes(pat.kv_tokens, pat.parts), problem.contiguous,
        "" if same_us is None else str(problem.k.dtype).removeprefix("torch."), same_us,
        problem.tokens, problem.dim, problem.v_dim, kv_format(problem.k.dtype).name, others.missing,
    )  # fmt: skip


def bandwidth() -> dict[str, float]:
    """What this device moves, in TB/s: a copy (bytes read and written) and a plain read."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    to = torch.empty_like(source)
    numbers = source.view(torch.float32).zero_()
    # A kernel, as `copy_` becomes the copy engine's work in a graph.
    copies = to.view(torch.float32)
    copy = 2 * source.numel() / median_us(lambda: torch.mul(numbers, 1, out=copies), cold=False) * 1e-6
    read = source.numel() / median_us(lambda: torch.sum(numbers), cold=False) * 1e-6
    return {"copy_tbps": round(copy, 3), "read_tbps": round(read, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--trees", nargs="+", default=list(trees.PAPER), help="nodes per level _ tokens per node, or traces"
    )
    parser.add_argument("--heads", nargs="+", default=list(HEADS), help="query heads / KV heads")
    parser.add_argument("--page-sizes", nargs="+", type=int, default=[1, 32])
    parser.add_argument(
        "--contiguous",
        action="store_true",
        help="a node's pages one after the other, as in a fresh pool; else anywhere",
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--kv-cache-dtype", choices=["auto", *capabilities.FP8], default="auto")
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=[1], help="of each request: more than one in a verify step"
    )
    parser.add_argument("--dim", choices=DIMS, default=str(DIM), help="of heads; K/V where V's is another")
    parser.add_argument("--rivals", nargs="*", choices=rivals.NAMES, default=rivals.NAMES)
    parser.add_argument("--no-warm", action="store_true", help="cold L2 only")
    parser.add_argument("--ablations", action="store_true", help="only our own kernels, without one part of the design")
    parser.add_argument("--append", action="store_true", help="keep the cases that the output has")
    parser.add_argument("--output", type=Path, help="where the JSON goes; default: results/kernels-<gpu>.json")
    arguments = parser.parse_args()
    dims = DIMS[arguments.dim]
    if arguments.ablations and dims != (DIM, DIM):
        parser.error(f"--ablations are of {DIM} dimensions: others have not all of their tiles")
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/kernels.py needs a CUDA device")
    device = {**gpu(), **bandwidth()}
    print(device)
    kv_dtype = getattr(torch, capabilities.FP8.get(arguments.kv_cache_dtype, ""), None)
    kind = "kernels-fp8" if kv_dtype else "verify" if arguments.tokens != [1] else "kernels"
    if dims != (DIM, DIM):
        kind = "kernels-dim256"
    if arguments.ablations:
        kind = "kernel-ablations"
    path = arguments.output or result_file(kind)
    if arguments.ablations:
        path.write_text(json.dumps({"device": device, "records": ablate(arguments.trees)}, indent=1) + "\n")
        return
    print(
        f"{'heads':>6}{'page':>5}{'tokens':>7} {'tree':42}{'floor':>8}{'pat':>8}{'/floor':>7}{'best rival':>20}{'ratio':>7}  warm, others"
    )
    records = kept(path, arguments.append)
    for tree, heads, kv_heads, page_size, tokens in cases(arguments):
        shape = tree, heads, kv_heads, page_size, getattr(torch, arguments.dtype), arguments.contiguous
        same_us = None
        if kv_dtype:
            same_us = round(median_us(Pat(Problem(*shape, tokens=tokens, dims=dims)).run, cold=True), 2)
        problem = Problem(*shape, kv_dtype, tokens, dims)
        record = measure(problem, arguments.rivals, not arguments.no_warm, same_us)
        records.append(msgspec.to_builtins(record))
        best = min(record.rivals, key=record.rivals.__getitem__, default="")
        rival = f"{best} {record.rivals[best]:.1f}" if best else ""
        ratio = f"{record.rivals[best] / record.pat_us:.2f}" if best else ""
        print(
            f"{record.heads:>6}{page_size:>5}{tokens:>7} {tree:42}{record.floor_us:8.1f}{record.pat_us:8.1f}"
            f"{record.pat_us / record.floor_us:7.2f}{rival:>20}{ratio:>7}  {record.pat_warm_us or ''} "
            f"{' '.join(f'{k} {v:.1f}' for k, v in record.rivals.items())} error {record.pat_error:.1e}"
            + (f" 16-bit KV {same_us:.1f} ({same_us / record.pat_us:.2f})" if same_us else ""),
            flush=True,
        )
        del problem
        # After each case: a run that is cut short keeps what it has.
        path.write_text(json.dumps({"device": device, "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
