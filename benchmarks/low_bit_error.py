"""How far attention over KV of few bits is from attention over KV as it was: random KV, without and with outlying channels in K.

python benchmarks/low_bit_error.py --output benchmarks/results/low_bit_error.json

Norm of the outputs' error over that of the outputs, in float64, of 8 queries of 4 KV heads on 4,096 tokens each. What real weights make of it
nobody knows from this: it says which scheme errs less, and by how much.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from about import about

from sglang_pat.kernels import low_bit

BENCHMARKS = {
    "low-bit-error": {"what": "attention over KV of few bits, random KV", "results": "low_bit_error.json"},
}
"""For run.py, which reads it without importing this file."""

TOKENS, HEADS, DIM, QUERIES, SEEDS = 4096, 4, 128, 8, 5
PAGE = low_bit.PAGE_TOKENS
OUTLIERS = {"plain": 0, "4 of 128 channels of K outlying": 4}
"""Channels that are 8 times as large and 10 away from zero, as in tests/test_low_bit.py; BitDecoding §2 and KIVI find such channels in K."""

Pair = tuple[torch.Tensor, torch.Tensor]


def random_kv(outliers: int, generator: torch.Generator) -> Pair:
    """[pages, 64, heads, dim] each."""
    k, v = torch.randn(2, TOKENS // PAGE, PAGE, HEADS, DIM, generator=generator)
    channels = torch.randperm(DIM, generator=generator)[:outliers]
    k[..., channels] = k[..., channels] * 8 + 10
    return k, v


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k, v = (x.double().flatten(0, 1).transpose(0, 1) for x in (k, v))
    return (q.double() @ k.transpose(-1, -2) * DIM**-0.5).softmax(-1) @ v


def by_token(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Quantised with a scale and a zero for each token, as K is not."""
    zero = x.amin(-1, keepdim=True).half().float()
    scale = ((x.amax(-1, keepdim=True) - zero) / (2**bits - 1)).half().float()
    return ((x - zero) / scale).round().clamp(0, 2**bits - 1) * scale + zero


def pages(bits: int) -> Callable[[torch.Tensor, torch.Tensor], Pair]:
    return lambda k, v: low_bit.unpack(low_bit.pack(k, v, bits), bits, DIM)


def as_dtype(dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor], Pair]:
    return lambda k, v: (k.to(dtype).float(), v.to(dtype).float())


SCHEMES: dict[str, Callable[[torch.Tensor, torch.Tensor], Pair]] = {
    "bfloat16": as_dtype(torch.bfloat16),
    "fp8_e4m3 without scales": as_dtype(torch.float8_e4m3fn),
    "int4": pages(4),
    "int4, K by token": lambda k, v: (by_token(k, 4), pages(4)(k, v)[1]),
    "int4, V only": lambda k, v: (k, pages(4)(k, v)[1]),
    "int2": pages(2),
    "int2, K by token": lambda k, v: (by_token(k, 2), pages(2)(k, v)[1]),
    "int2, V only": lambda k, v: (k, pages(2)(k, v)[1]),
}


def error(scheme: Callable[[torch.Tensor, torch.Tensor], Pair], outliers: int, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    k, v = random_kv(outliers, generator)
    q = torch.randn(HEADS, QUERIES, DIM, generator=generator)
    right = attention(q, k, v)
    return ((attention(q, *scheme(k, v)) - right).norm() / right.norm()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="where to write the errors as JSON")
    output = parser.parse_args().output
    records = [
        {"scheme": name, "kv": kv, "errors": [round(error(scheme, outliers, seed), 5) for seed in range(SEEDS)]}
        for name, scheme in SCHEMES.items()
        for kv, outliers in OUTLIERS.items()
    ]
    print("| scheme | KV | error, mean | least | greatest |\n|---|---|---|---|---|")
    for record in records:
        errors = record["errors"]
        print(
            f"| {record['scheme']} | {record['kv']} | {sum(errors) / SEEDS:.4f} | {min(errors):.4f} | {max(errors):.4f} |"
        )
    if output:
        output.write_text(json.dumps({"about": about(), "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
