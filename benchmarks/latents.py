"""Attention over latents (MLA) on a GPU, beside FA3, FlashInfer and FlashMLA in the same run:

    python benchmarks/latents.py                                        # DeepSeek's shape, several numbers of heads
    python benchmarks/latents.py --trees A --heads 16 --kv-cache-dtype fp8_e4m3 --append

Cases: trees of shared latents, in slots that lie anywhere, or in pages that do. In a verify step (`--tokens`) the last so many tokens of each request are
its draft. Times and the floor as in kernels.py: the larger of each latent, query and output once at the rate at which the GPU reads, and the arithmetic
at 790 TFLOP/s. With KV of 8 bits the pool has POOL_SLOTS slots: SGLang's fa3 and flashinfer backends give their kernels a copy of all of it in 16 bits
in each layer (`fa3`, `flashinfer`); `fa3_copied` is the kernel over a copy that is there already. `splits` are sets of a query's heads that are run
after one another (`PackConfig`, `head_splits`): 40 rows in five sets of 8 fill a tile of 64 rows, in one set they fill 40 of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernels
import msgspec
import rivals
import torch
import trees
from about import gpu, kept, result_file

sys.path.append(str(Path(__file__).parent.parent / "tests"))

import reference

from sglang_pat.backend import verify
from sglang_pat.kernels import capabilities, cuda
from sglang_pat.kernels.arguments import KvView, Scores, Tables
from sglang_pat.packing import FORMATS, AttentionSpec, PackConfig, TileTable, devices, layout, native

BENCHMARKS = {
    "latents": {
        "what": "attention over latents (MLA) beside FA3, FlashInfer and FlashMLA",
        "gpu": True,
        "results": "mla-h200.json",
    },
}
"""For run.py, which reads it without importing this file."""

HEADS = (8, 16, 20, 32, 40, 64, 128)

POOL_SLOTS = 500_000
"""About what DeepSeek V3 leaves room for on eight H200s."""


class Problem:
    """Queries and a pool of latents for a tree."""

    def __init__(
        self, tree: str, heads: int, dims: tuple[int, int], form: str, page_size: int = 1, tokens: int = 1, device: str = "cuda"
    ) -> None:  # fmt: skip
        self.dims, self.page_size, self.tokens, self.heads = dims, page_size, tokens, heads
        self.batch = trees.of_cell(tree)
        self.size, self.kv_tokens = len(self.batch.seq_lens), sum(length for _, length, _ in trees.pieces(self.batch))
        self.slots = torch.from_numpy(trees.slots(tree, self.batch, page_size)).to(device)
        num_slots = self.kv_tokens if form == "bfloat16" or device == "cpu" else max(POOL_SLOTS, self.kv_tokens)
        pool = torch.empty(-(-num_slots // 64) * 64, 1, dims[0], dtype=torch.bfloat16, device=device).normal_()
        self.k = pool.to(getattr(torch, form))
        self.q = torch.empty(self.size * tokens, heads, dims[0], dtype=torch.bfloat16, device=device).normal_()
        self.rows = torch.arange(self.size, device=device)
        self.seq_lens = torch.tensor(self.batch.seq_lens, device=device)
        self.spec = AttentionSpec(heads, 1, *dims, FORMATS[form], query_tokens=tokens, latent=True)
        self.scale = dims[0] ** -0.5

    @property
    def floor_us(self) -> float:
        dim, v_dim = self.dims
        rows = self.q.shape[0] * self.heads
        latents = self.kv_tokens * dim * self.k.itemsize
        read = (latents + rows * (dim + v_dim) * self.q.itemsize) / kernels.read_rate()
        flop = 2 * (dim + v_dim) * self.heads * self.tokens * sum(self.batch.seq_lens) / kernels.FLOP_RATE
        return max(read, flop) * 1e6

    def pages(self) -> torch.Tensor:
        """Of each request, int32."""
        return (self.slots[:, :: self.page_size] // self.page_size).int().contiguous()

    def paged(self, k: torch.Tensor) -> torch.Tensor:
        """A pool as [pages, page_size, 1, dim]."""
        return k[: len(k) // self.page_size * self.page_size].unflatten(0, (-1, self.page_size))

    def error(self, out: torch.Tensor) -> float:
        """Against float64, on some of the queries."""
        some = torch.linspace(0, len(self.q) - 1, min(self.size, 4), device=self.q.device).long()
        requests, behind = some // self.tokens, self.tokens - 1 - some % self.tokens
        k = self.k.to(self.q.dtype)
        right = reference.decode(
            self.q[some], k, k[..., : self.dims[1]], self.slots, self.rows[requests], self.seq_lens[requests] - behind, scale=self.scale
        )  # fmt: skip
        return ((out.view_as(self.q[..., : self.dims[1]])[some].double() - right).norm() / right.norm()).item()


class Pat:
    """Our own."""

    def __init__(self, problem: Problem, decoder: Any, tiles: TileTable, splits: int = 0) -> None:
        self._problem, self._decoder = problem, decoder
        spec, device = problem.spec, problem.q.device
        config = PackConfig.of(spec, tiles, decoder.workers)
        if splits:
            config = msgspec.structs.replace(config, cost=spec.cost(splits))
            decoder._tile_rows = -(-spec.heads // splits)
        scheduler = native.NativeScheduler(config, problem.size)
        index, _, _ = scheduler.take(native.load(scheduler, problem.batch), problem.seq_lens.cpu(), 0)
        data = scheduler.buffers[index]
        self.plan = torch.from_numpy(data[: layout.sections(data).header["size"]].copy()).to(device)
        slots = max(1, layout.num_slots(data))
        self._partial = torch.empty(slots, spec.query_heads, spec.v_head_dim, dtype=torch.float16, device=device)
        self._lse = torch.empty(slots, spec.query_heads, device=device)
        masks = verify.without_branches(problem.size, problem.tokens, device) if problem.tokens > 1 else None
        self._tables = Tables(problem.slots, problem.rows, problem.seq_lens, masks)
        self.out = torch.empty(*problem.q.shape[:2], spec.v_head_dim, dtype=problem.q.dtype, device=device)

    def run(self) -> None:
        p = self._problem
        kv = KvView(p.k, p.k[..., : p.dims[1]])
        self._decoder.decode(p.q, kv, self._tables, Scores(p.scale), self.out, self.plan, self._partial, self._lse)


class Fa3:
    """As SGLang's fa3 backend calls it, which gives it KV of 8 bits as a copy in 16."""

    name, copied = "fa3", False

    def __init__(self, problem: Problem) -> None:
        try:
            import sgl_kernel.flash_ops  # noqa: F401
            from sgl_kernel.flash_attn import flash_attn_with_kvcache
        except (ImportError, OSError) as error:
            raise rivals.UnsupportedError(f"not installed: {error}") from None
        if self.copied and problem.k.dtype == problem.q.dtype:
            raise rivals.UnsupportedError("nothing is copied")
        self._forward, self._problem, self._lens = flash_attn_with_kvcache, problem, problem.seq_lens.int()
        self._cu_q, self._table = rivals.first_tokens(problem), problem.pages()
        self._k = problem.k.to(problem.q.dtype) if self.copied else problem.k
        v_dim = problem.dims[1]
        self._q, self._q_rope = problem.q[..., :v_dim].contiguous(), problem.q[..., v_dim:].contiguous()
        self.out: Any = None

    def run(self) -> None:
        p, v_dim = self._problem, self._problem.dims[1]
        k = p.paged(self._k.to(p.q.dtype))
        self.out = self._forward(
            q=self._q_rope, qv=self._q, k_cache=k[..., v_dim:], v_cache=k[..., :v_dim], page_table=self._table, cache_seqlens=self._lens,
            cu_seqlens_q=self._cu_q, max_seqlen_q=p.tokens, softmax_scale=p.scale, causal=True,
        )  # fmt: skip


class Fa3Copied(Fa3):
    """FA3 over a copy of 16 bits that is there already."""

    name, copied = "fa3_copied", True


class FlashInfer:
    """FlashInfer's MLA wrapper, as SGLang's flashinfer backend calls it: page size 1, KV of 8 bits copied."""

    name = "flashinfer"

    def __init__(self, problem: Problem) -> None:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        size, device, (dim, v_dim) = problem.size, "cuda", problem.dims
        starts = rivals.first_tokens(problem)
        indptr = torch.zeros(size + 1, dtype=torch.int32, device=device)
        indptr[1:] = problem.seq_lens.cumsum(0)
        places = torch.arange(problem.slots.shape[1], device=device)
        indices = problem.slots[places < problem.seq_lens[:, None]]
        lens = problem.seq_lens.int()
        self._wrapper = BatchMLAPagedAttentionWrapper(
            rivals.workspace(), use_cuda_graph=True, qo_indptr=starts, kv_indptr=indptr, kv_indices=indices, kv_len_arr=lens, backend="auto"
        )  # fmt: skip
        self._wrapper.plan(
            starts, indptr, indices, lens, problem.heads, v_dim, dim - v_dim, 1, problem.tokens > 1, problem.scale, problem.q.dtype,
            problem.q.dtype,
        )  # fmt: skip
        self._problem = problem
        self._q, self._q_rope = problem.q[..., :v_dim].contiguous(), problem.q[..., v_dim:].contiguous()
        self.out = torch.empty_like(self._q)

    def run(self) -> None:
        p, v_dim = self._problem, self._problem.dims[1]
        k = p.k.to(p.q.dtype)
        self._wrapper.run(self._q, self._q_rope, k[..., :v_dim], k[..., v_dim:], out=self.out)


class FlashMla:
    """FlashMLA, as SGLang's flashmla backend calls it; with KV of 8 bits Q has 8 bits too, which makes its error larger."""

    name = "flashmla"

    def __init__(self, problem: Problem) -> None:
        from sgl_kernel.flash_mla import flash_mla_with_kvcache, get_mla_metadata

        if problem.page_size != 64:
            raise rivals.UnsupportedError("its pages have 64 tokens")
        self._forward, self._problem = flash_mla_with_kvcache, problem
        self._table, self._lens = problem.pages(), problem.seq_lens.int()
        fp8 = problem.k.dtype != problem.q.dtype
        self._metadata = get_mla_metadata(self._lens, problem.tokens * problem.heads, 1, is_fp8_kvcache=fp8)
        one = torch.ones(1, device="cuda")
        self._scales = {"descale_q": one, "descale_k": one} if fp8 else {}
        self.out: Any = None

    def run(self) -> None:
        p = self._problem
        q = p.q.view(p.size, p.tokens, p.heads, -1).to(p.k.dtype)
        self.out, _ = self._forward(
            q, p.paged(p.k), self._table, self._lens, p.dims[1], *self._metadata, softmax_scale=p.scale, causal=True, **self._scales
        )  # fmt: skip


RIVALS: tuple[Callable[[Problem], Any], ...] = (Fa3, Fa3Copied, FlashInfer, FlashMla)


class Record(msgspec.Struct):
    """One case; times in microseconds, with cold L2.

    Attributes:
        tree: A, B, C or alone; or a tree as it was given.
        tokens: Of each request: more than one in a verify step.
        missing: Why a rival has no time.
    """

    tree: str
    heads: int
    tokens: int
    kv: str
    page_size: int
    pat_us: float
    rivals: dict[str, float]
    floor_us: float
    pat_error: float
    rival_errors: dict[str, float]
    missing: dict[str, str]


def measure(tree: str, problem: Problem, pat: Pat, form: str, names: list[str]) -> Record:
    us = kernels.median_us(pat.run, cold=True)
    others = kernels.beside(problem, [rival for rival in RIVALS if rival.name in names])  # type: ignore[attr-defined]
    return Record(
        tree, problem.heads, problem.tokens, form, problem.page_size, round(us, 2), others.us, round(problem.floor_us, 2),
        problem.error(pat.out), others.errors, others.missing,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--trees", nargs="+", default=list(trees.LATENTS), help="A, B, C, alone, or nodes per level _ tokens per node"
    )
    parser.add_argument("--heads", nargs="+", type=int, default=list(HEADS), help="query heads")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1], help="of each request")
    parser.add_argument("--page-sizes", nargs="+", type=int, default=[1])
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8_e4m3"], default="auto")
    parser.add_argument("--tiles", type=Path, help="a table of prices to plan with, in place of the GPU's own")
    parser.add_argument("--splits", type=int, default=0, help="sets of a query's heads; 0: as few as there can be")
    names = [rival.name for rival in RIVALS]  # type: ignore[attr-defined]
    parser.add_argument("--rivals", nargs="*", choices=names, default=names)
    parser.add_argument("--append", action="store_true", help="keep the cases that the output has")
    parser.add_argument("--output", type=Path, help="where the JSON goes; default: results/mla-<gpu>.json")
    arguments = parser.parse_args()
    form = capabilities.FP8.get(arguments.kv_cache_dtype, "bfloat16")
    device = torch.device("cuda", 0)
    table = devices.load(arguments.tiles, "--tiles") if arguments.tiles else None
    path = arguments.output or result_file("mla")
    records = kept(path, arguments.append)
    about = {**gpu(), **kernels.bandwidth()}
    print(about)
    for tokens, page_size, heads, tree in itertools.product(
        arguments.tokens, arguments.page_sizes, arguments.heads, arguments.trees
    ):
        problem = Problem(trees.LATENTS.get(tree, tree), heads, capabilities.LATENT_DIMS[0], form, page_size, tokens)
        tiles = capabilities.tile_table_of(problem.spec, cuda.arch_of(device), torch.cuda.get_device_name(), table)
        pat = Pat(problem, cuda.Decoder(problem.spec, tiles, device, problem.q.dtype), tiles, arguments.splits)
        form_name = arguments.kv_cache_dtype if form != "bfloat16" else form
        found = measure(tree, problem, pat, form_name, arguments.rivals)
        best = min(found.rivals, key=found.rivals.__getitem__, default="")
        print(
            f"{tree:6} {heads:4} heads x {tokens}, pages of {page_size}: {found.pat_us:7.1f} us, {found.pat_us / found.floor_us:5.2f} of the floor, "
            f"error {found.pat_error:.1e}; "
            + (f"{found.rivals[best] / found.pat_us:.2f} x {best}: " if best else "")
            + ", ".join(f"{name} {us:.1f} ({found.rival_errors[name]:.1e})" for name, us in found.rivals.items())
            + "".join(f", {name}: {why}" for name, why in found.missing.items()),
            flush=True,
        )
        records.append(msgspec.to_builtins(found))
        path.write_text(json.dumps({"device": about, "records": records}, indent=1) + "\n")
        del problem, pat


if __name__ == "__main__":
    main()
