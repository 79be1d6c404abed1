"""Decode attention over latents (MLA) on a GPU, beside FA3 in the same run. No server runs these kernels yet:

    python benchmarks/latents.py                                        # DeepSeek's shape, several numbers of heads
    python benchmarks/latents.py --trees 1,128_4096,128 --heads 16 --kv-cache-dtype fp8_e4m3

Cases: a tree's latents in slots that lie anywhere (page size 1). Times and the floor as in kernels.py: the larger of each latent, query and output once
at the rate at which the GPU reads, and the arithmetic at 790 TFLOP/s. `splits` are sets of a query's heads that are run after one another (`PackConfig`,
`head_splits`): 40 rows in five sets of 8 fill a tile of 64 rows, in one set they fill 40 of it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import kernels
import msgspec
import numpy as np
import torch
import trees

sys.path.append(str(Path(__file__).parent.parent / "tests"))

import reference

from sglang_pat.kernels import capabilities, cuda
from sglang_pat.kernels.arguments import KvView, Scores, Tables
from sglang_pat.packing import FORMATS, AttentionSpec, PackConfig, TileTable, layout, native

BENCHMARKS = {
    "latents": {"what": "attention over latents (MLA) beside FA3", "gpu": True},
}
"""For run.py, which reads it without importing this file."""

TREES = ("1,256_4096,256", "1,32_8192,128", "8,256_2048,128", "128_4096")
"""A, B and C of the design, and requests that share nothing."""

HEADS = (8, 16, 20, 32, 40, 64, 128)


class Problem:
    """Queries and a pool of latents for a tree."""

    def __init__(self, tree: str, heads: int, dims: tuple[int, int], form: str, device: str = "cuda") -> None:
        self.tree, self.dims = tree, dims
        self.batch = trees.of_cell(tree)
        pieces = list(trees.pieces(self.batch))
        self.size, self.kv_tokens = len(self.batch.seq_lens), sum(length for _, length, _ in pieces)
        order = np.random.default_rng(0).permutation(self.kv_tokens)
        slots = np.zeros((self.size, max(self.batch.seq_lens)), dtype=np.int32)
        begin = 0
        for start, length, queries in pieces:
            slots[queries, start : start + length] = order[begin : begin + length]
            begin += length
        self.slots = torch.from_numpy(slots).to(device)
        pool = torch.empty(self.kv_tokens, 1, dims[0], dtype=torch.bfloat16, device=device).normal_()
        self.k = pool.to(getattr(torch, form))
        self.q = torch.empty(self.size, heads, dims[0], dtype=torch.bfloat16, device=device).normal_()
        self.rows = torch.arange(self.size, device=device)
        self.seq_lens = torch.tensor(self.batch.seq_lens, device=device)
        self.spec = AttentionSpec(heads, 1, *dims, FORMATS[form], latent=True)
        self.scale = dims[0] ** -0.5

    @property
    def floor_us(self) -> float:
        dim, v_dim = self.dims
        rows = self.q.shape[0] * self.q.shape[1]
        read = (self.k.nbytes + 2 * rows * (dim + v_dim)) / kernels.read_rate()
        flop = 2 * (dim + v_dim) * self.q.shape[1] * sum(self.batch.seq_lens) / kernels.FLOP_RATE
        return max(read, flop) * 1e6

    def error(self, out: torch.Tensor) -> float:
        """Against float64, on some of the queries."""
        some = torch.linspace(0, self.size - 1, min(self.size, 4), device=self.q.device).long()
        k = self.k.to(self.q.dtype)
        right = reference.decode(
            self.q[some], k, k[..., : self.dims[1]], self.slots, self.rows[some], self.seq_lens[some], scale=self.scale
        )
        return ((out[some].double() - right).norm() / right.norm()).item()


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
        self.plan = torch.from_numpy(data[: layout.size(data)].copy()).to(device)
        slots = max(1, layout.num_slots(data))
        self._partial = torch.empty(slots, spec.heads, spec.v_head_dim, dtype=torch.float16, device=device)
        self._lse = torch.empty(slots, spec.heads, device=device)
        self.out = torch.empty(problem.size, spec.heads, spec.v_head_dim, dtype=problem.q.dtype, device=device)

    def run(self) -> None:
        p = self._problem
        self._decoder.decode(
            p.q, KvView(p.k, p.k[..., : p.dims[1]]), Tables(p.slots, p.rows, p.seq_lens), Scores(p.scale), self.out, self.plan,
            self._partial, self._lse,
        )  # fmt: skip


class Fa3:
    """As SGLang's fa3 backend calls it, which gives it KV of 8 bits as a copy in 16."""

    def __init__(self, problem: Problem) -> None:
        import sgl_kernel.flash_ops  # noqa: F401
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        self._forward, self._problem, self._lens = flash_attn_with_kvcache, problem, problem.seq_lens.int()
        self._cu_q = torch.arange(problem.size + 1, dtype=torch.int32, device="cuda")
        self.out: Any = None

    def run(self) -> None:
        p, v_dim = self._problem, self._problem.dims[1]
        k = p.k.to(p.q.dtype)[:, None]
        self.out = self._forward(
            q=p.q[..., v_dim:], qv=p.q[..., :v_dim], k_cache=k[..., v_dim:], v_cache=k[..., :v_dim], page_table=p.slots,
            cache_seqlens=self._lens, cu_seqlens_q=self._cu_q, max_seqlen_q=1, softmax_scale=p.scale, causal=True,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", nargs="+", default=list(TREES), help="nodes per level _ tokens per node")
    parser.add_argument("--heads", nargs="+", type=int, default=list(HEADS), help="query heads")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8_e4m3"], default="auto")
    parser.add_argument("--splits", type=int, default=0, help="sets of a query's heads; 0: as few as there can be")
    arguments = parser.parse_args()
    form = capabilities.FP8.get(arguments.kv_cache_dtype, "bfloat16")
    device = torch.device("cuda", 0)
    tiles = TileTable(capabilities.latent_query_tiles(cuda.arch_of(device)))
    for tree in arguments.trees:
        for heads in arguments.heads:
            problem = Problem(tree, heads, capabilities.LATENT_DIMS[0], form)
            pat = Pat(problem, cuda.Decoder(problem.spec, tiles, device, problem.q.dtype), tiles, arguments.splits)
            us = kernels.median_us(pat.run, cold=True)
            line = f"{tree:20} {heads:4} heads: {us:7.1f} us, {us / problem.floor_us:.2f} of the floor, error {problem.error(pat.out):.1e}"
            try:
                rival = Fa3(problem)
                rival_us = kernels.median_us(rival.run, cold=True)
                line += f"; fa3 {rival_us:.1f} us ({rival_us / us:.2f}), error {problem.error(rival.out):.1e}"
            except Exception as error:  # a rival that fails must not cost our numbers
                line += f"; fa3 failed: {str(error).splitlines()[0][:100]}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
