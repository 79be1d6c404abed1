"""Extends on the CPU beside SGLang's `torch_native`, in one run: the documentation's table.

python benchmarks/cpu_extend.py
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("SGLANG_PLATFORM", "pat_cpu")

import numpy as np
import torch
from about import about
from cpu_decode import inputs, median_ms
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sglang_pat.kernels import cpu
from sglang_pat.kernels.arguments import KvView, Scores, Tables
from sglang_pat.packing import CPU_TILES, Batch, Node, PackConfig
from sglang_pat.packing.native import NativeScheduler, load

BENCHMARKS = {
    "cpu-extends": {"what": "extends on the CPU beside torch_native", "results": "cpu_extend.json"},
}
"""For run.py, which reads it without importing this file."""

RESULTS = Path(__file__).parent / "results" / "cpu_extend.json"

CASES = ((32, 1_024, 16), (8, 2_048, 16), (16, 2_048, 1), (8, 1_024, 64), (1, 2_048, 512), (1, 0, 2_048))
"""Requests, cached tokens that they share, new tokens of each."""


def run_pat(x, cached: torch.Tensor, added: torch.Tensor):
    size = len(cached)
    tree = Batch(cached.tolist(), [Node(0, int(cached[0]), list(range(size)))] if cached[0] else [])
    scheduler = NativeScheduler(PackConfig(x.cost, CPU_TILES, torch.get_num_threads()), size)
    requests = load(scheduler, tree)
    rows = x.rows.repeat_interleave(added)
    seq_lens = torch.cat([torch.arange(c + 1, c + a + 1) for c, a in zip(cached.tolist(), added.tolist(), strict=True)])

    def run() -> torch.Tensor:
        plan = scheduler.extend(requests, cached, added).data
        tables = Tables(x.table, rows, seq_lens)
        return cpu.attention(x.q, KvView(x.k, x.v), tables, Scores(x.scale), torch.from_numpy(np.asarray(plan)))

    return run


def run_torch_native(x, cached: torch.Tensor, added: torch.Tensor):
    backend = object.__new__(TorchNativeAttnBackend)
    return lambda: backend._run_sdpa_forward_extend(
        x.q, torch.empty_like(x.q), x.k, x.v, x.table, x.rows, x.seq_lens, cached, added, scaling=x.scale, enable_gqa=True, causal=True
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    records = []
    for requests, shared, new in CASES:
        x = inputs(requests, shared, new, arguments.heads, arguments.kv_heads, arguments.dim, torch.bfloat16)
        x.q = torch.randn(requests * new, arguments.heads, arguments.dim).bfloat16()
        cached, added = torch.full((requests,), shared), torch.full((requests,), new)
        pat, native = run_pat(x, cached, added), run_torch_native(x, cached, added)
        difference = (pat().float() - native().float()).abs().max().item()
        native_ms, pat_ms = median_ms(native, arguments.repeats), median_ms(pat, arguments.repeats)
        print(f"{requests:4} requests, {shared:6} cached, {new:5} new: torch_native {native_ms:9.1f} ms, pat {pat_ms:8.2f} ms, "
              f"{native_ms / pat_ms:6.1f}x, largest difference {difference:.4f}")  # fmt: skip
        records.append(
            {
                "requests": requests,
                "shared": shared,
                "new": new,
                "heads": f"{arguments.heads}/{arguments.kv_heads}",
                "threads": torch.get_num_threads(),
                "torch_native_ms": native_ms,
                "pat_ms": pat_ms,
                **about(),
            }
        )
    RESULTS.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
