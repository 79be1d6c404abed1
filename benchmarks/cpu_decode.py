"""Decode attention on the CPU beside SGLang's `torch_native`, in one run.

python benchmarks/cpu_decode.py            # with and without sharing: the documentation's table
python benchmarks/cpu_decode.py --tiles    # every tile forced in turn
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("SGLANG_PLATFORM", "pat_cpu")

import torch
from about import about
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sglang_pat.kernels import cpu
from sglang_pat.kernels.arguments import KvView, Scores, Tables
from sglang_pat.packing import CPU_TILES, Batch, CostModel, Node, PackConfig, TileTable, layout
from sglang_pat.packing.native import make_plan

BENCHMARKS = {
    "cpu": {"what": "CPU executor beside torch_native", "minutes": 1.2, "results": "cpu_decode.json"},
}
"""For run.py, which reads it without importing this file."""

RESULTS = Path(__file__).parent / "results" / "cpu_decode.json"


def inputs(batch: int, shared: int, private: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype):
    """Random pools and a `req_to_token` whose rows share their first `shared` slots."""
    tokens = shared + batch * private
    slots = torch.randperm(tokens).int()
    table = torch.empty(batch, shared + private, dtype=torch.int32)
    table[:, :shared] = slots[:shared]
    table[:, shared:] = slots[shared:].reshape(batch, private)
    return SimpleNamespace(
        q=torch.randn(batch, heads, dim).to(dtype),
        k=torch.randn(tokens, kv_heads, dim).to(dtype),
        v=torch.randn(tokens, kv_heads, dim).to(dtype),
        table=table,
        rows=torch.arange(batch),
        seq_lens=torch.full((batch,), shared + private),
        tree=Batch([shared + private] * batch, [Node(0, shared, list(range(batch)))] if shared else []),
        cost=CostModel(heads, kv_heads, dim, dim, dtype.itemsize),
        scale=dim**-0.5,
    )


def run_pat(x, tiles: TileTable = CPU_TILES):
    plan = torch.from_numpy(layout.flatten(make_plan(x.tree, PackConfig(x.cost, tiles, torch.get_num_threads()))))
    return lambda: cpu.attention(x.q, KvView(x.k, x.v), Tables(x.table, x.rows, x.seq_lens), Scores(x.scale), plan)


def run_torch_native(x):
    backend = object.__new__(TorchNativeAttnBackend)
    return lambda: backend._run_sdpa_forward_decode(
        x.q, torch.empty_like(x.q), x.k, x.v, x.table, x.rows, x.seq_lens, scaling=x.scale, enable_gqa=True
    )


def median_ms(run, repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def compare(arguments: argparse.Namespace) -> list[dict]:
    dtype = getattr(torch, arguments.dtype)
    print(
        f"{torch.get_num_threads()} threads, {arguments.dtype}, {arguments.heads}/{arguments.kv_heads} heads, dim {arguments.dim}"
    )
    print(f"{'batch':>6}{'shared':>8}{'private':>8}{'torch_native ms':>17}{'pat ms':>9}{'ratio':>8}{'max diff':>10}")
    records = []
    for batch, shared, private in ((64, 2048, 128), (64, 0, 2176), (1, 0, 2176), (16, 512, 64), (64, 0, 128)):
        x = inputs(batch, shared, private, arguments.heads, arguments.kv_heads, arguments.dim, dtype)
        pat, native = run_pat(x), run_torch_native(x)
        difference = (pat().float() - native().float()).abs().max().item()
        native_ms, pat_ms = median_ms(native, arguments.repeats), median_ms(pat, arguments.repeats)
        print(
            f"{batch:6}{shared:8}{private:8}{native_ms:17.1f}{pat_ms:9.2f}{native_ms / pat_ms:7.1f}x{difference:10.4f}"
        )
        records.append(
            {
                "batch": batch,
                "shared": shared,
                "private": private,
                "dtype": arguments.dtype,
                "heads": f"{arguments.heads}/{arguments.kv_heads}",
                "threads": torch.get_num_threads(),
                "torch_native_ms": native_ms,
                "pat_ms": pat_ms,
                **about(),
            }
        )
    return records


def tiles(arguments: argparse.Namespace) -> None:
    """Time a shared and an unshared batch with each tile alone."""
    dtype = getattr(torch, arguments.dtype)
    for shared, private, batch in ((2048, 0, 64), (2048, 0, 16), (2048, 0, 4), (0, 2048, 16), (0, 24, 64)):
        x = inputs(batch, shared, private, arguments.heads, arguments.kv_heads, arguments.dim, dtype)
        for m in (4, 16, 64, 128, 256):
            took = median_ms(run_pat(x, TileTable((m,))), arguments.repeats)
            print(f"batch {batch} shared {shared} private {private} tile {m}: {took:.2f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--tiles", action="store_true", help="time every tile instead of comparing")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.tiles:
        return tiles(arguments)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(compare(arguments), indent=1) + "\n")


if __name__ == "__main__":
    main()
