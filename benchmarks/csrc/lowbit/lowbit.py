"""The 4-bit kernel of lowbit.cuh: checked against float64 on dequantised values, then timed beside the kernels of bf16 and FP8 KV:

    nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -I sglang_pat/csrc/cuda -shared -Xcompiler -fPIC -o lowbit.so benchmarks/csrc/lowbit/lowbit.cu
    python benchmarks/csrc/lowbit/lowbit.py ./lowbit.so --output gate.json

An experiment, which a KV format of 4 bits will replace; what it found is in benchmarks/notes/low-bit-kv.md, "The gate".
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from pathlib import Path

import torch

PAGE, DIM, GROUP, RECORD = 64, 128, 4, 8960
VARIANTS = {"12x4 bulk": (0, 12), "16x3 bulk": (1, 16), "8x6 bulk": (2, 8), "12x4 cp.async": (3, 12)}


def places() -> tuple[torch.Tensor, ...]:
    """Of a code at [chunk, lane, word, nibble place, half of the register]: token and channel in K, and in V."""
    c, lane, j, place, high = torch.meshgrid(*map(torch.arange, (4, 32, 8, 4, 2)), indexing="ij")
    g, t = lane // 4, lane % 4
    k = 16 * c + g + 8 * (place >= 2), 16 * j + 2 * t + high + 8 * (place % 2)
    v = 16 * c + 2 * t + high + 8 * (place >= 2), 16 * j + g + 8 * (place % 2)
    return *k, *v


def unpack(words: torch.Tensor) -> torch.Tensor:
    """[..., 4096] bytes to codes [..., chunk, lane, word, place, half of the register]."""
    words = words.contiguous().view(torch.int32).unflatten(-1, (4, 2, 32, 4)).transpose(-3, -2).flatten(-2)
    return torch.stack([torch.stack([words >> (16 * h + 4 * p) & 15 for h in (0, 1)], -1) for p in range(4)], -2)


def pack(codes: torch.Tensor) -> torch.Tensor:
    words = sum(codes[..., p, h].long() << (16 * h + 4 * p) for h in (0, 1) for p in range(4))
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    return words.unflatten(-1, (2, 4)).transpose(-3, -2).contiguous().flatten(-4).view(torch.uint8)


def channels() -> tuple[torch.Tensor, torch.Tensor]:
    """Channel of K's parameter at [unit, t, pair in the unit, which], and whether its scale is divided by 16."""
    i, t, e, which = torch.meshgrid(*map(torch.arange, (4, 4, 4, 2)), indexing="ij")
    pair = 4 * i + e
    return (16 * (pair // 2) + 8 * (pair % 2) + 2 * t + which).flatten(), (pair % 2 == 1).flatten()


def tokens() -> torch.Tensor:
    """Token of V's parameters at [g, chunk, half]."""
    g, c, h = torch.meshgrid(*map(torch.arange, (8, 4, 2)), indexing="ij")
    return (16 * c + 8 * h + g).flatten()


def quantise(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    zero = x.amin(dim, keepdim=True).half()
    scale = ((x.amax(dim, keepdim=True) - zero.float()) / 15).half()
    codes = ((x - zero.float()) / scale.float()).round().clamp(0, 15)
    return codes.int(), scale, zero


def to_records(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[pages, 64, heads, 128] of float32 to [pages, heads, 8960] bytes."""
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    k_codes, k_scale, k_zero = quantise(k, 2)
    v_codes, v_scale, v_zero = quantise(v, 3)
    k_token, k_channel, v_token, v_channel = places()
    channel, divided = channels()
    token = tokens()
    scale = k_scale[:, :, 0][..., channel]
    scale = torch.where(divided.to(scale.device), scale / 16, scale)

    def as_bytes(x):
        return x.contiguous().view(torch.uint8)

    v_parameters = torch.stack([v_scale[..., 0][..., token], v_zero[..., 0][..., token]], -1).flatten(2)
    return torch.cat(
        [
            as_bytes(scale), as_bytes(k_zero[:, :, 0][..., channel]), pack(k_codes[:, :, k_token, k_channel]),
            as_bytes(v_parameters), pack(v_codes[:, :, v_token, v_channel]),
        ], -1
    )  # fmt: skip


def from_records(records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., 8960] bytes to K and V [..., 64, 128], float64."""
    lead, device = records.shape[:-1], records.device

    def halves(begin, size):
        return records[..., begin : begin + size].contiguous().view(torch.float16).double()

    k_token, k_channel, v_token, v_channel = places()
    channel, divided = channels()
    scale, zero = torch.empty(2, *lead, DIM, dtype=torch.float64, device=device)
    scale[..., channel] = halves(0, 256) * torch.where(divided, 16, 1).to(device)
    zero[..., channel] = halves(256, 256)
    k, v = torch.empty(2, *lead, PAGE, DIM, dtype=torch.float64, device=device)
    k[..., k_token, k_channel] = unpack(records[..., 512:4608]).double()
    v[..., v_token, v_channel] = unpack(records[..., 4864:]).double()
    parameters = torch.empty(*lead, PAGE, 2, dtype=torch.float64, device=device)
    parameters[..., tokens(), :] = halves(4608, 256).unflatten(-1, (PAGE, 2))
    return k * scale[..., None, :] + zero[..., None, :], v * parameters[..., :1] + parameters[..., 1:]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[heads, 128], [kv_heads, tokens, 128] in float64."""
    q = q.double().unflatten(0, (k.shape[0], -1))
    return ((q @ k.transpose(-1, -2) * DIM**-0.5).softmax(-1) @ v).flatten(0, 1)


def random_records(pages: int, heads: int, device: str) -> torch.Tensor:
    """As of normal KV, without quantising it: any codes, scales about 0.33, zeros about -2.5."""
    records = torch.randint(-(1 << 31), 1 << 31, (pages, heads, RECORD // 4), dtype=torch.int32, device=device)
    records = records.view(torch.uint8)

    def like(*shape):
        return torch.rand(pages, heads, *shape, device=device)

    scale, divided = 0.25 + 0.15 * like(128), channels()[1].to(device)
    records[..., :256] = torch.where(divided, scale / 16, scale).half().view(torch.uint8)
    records[..., 256:512] = (-3 + like(128)).half().view(torch.uint8)
    low = torch.tensor([0.25, -3], device=device)
    records[..., 4608:4864] = (
        (low + torch.tensor([0.15, 1], device=device) * like(64, 2)).half().flatten(2).view(torch.uint8)
    )
    return records


class LowBit:
    def __init__(
        self, library: str, variant: str, q: torch.Tensor, records: torch.Tensor, table: torch.Tensor, sms: int
    ) -> None:
        self._call = ctypes.CDLL(library).lowbit_decode
        self._variant, warps = VARIANTS[variant]
        self._q, self._records, self._table, self._sms = q, records, table, sms
        self.out = torch.full_like(q, torch.nan)
        self._parts = torch.full((2 * warps * sms, GROUP, DIM), torch.nan, dtype=torch.float16, device=q.device)
        self._lse = torch.full((2 * warps * sms, GROUP), torch.nan, device=q.device)

    def run(self) -> None:
        stream = torch.cuda.current_stream().cuda_stream if self._q.is_cuda else 1
        pointers = (
            ctypes.c_void_p(x.data_ptr())
            for x in (self._q, self._records, self._table, self.out, self._parts, self._lse)
        )
        error = self._call(
            self._variant, *pointers, len(self._q), self._records.shape[1], self._table.shape[1],
            ctypes.c_float(DIM**-0.5 * 1.4426950408889634), self._sms, ctypes.c_void_p(stream),
        )  # fmt: skip
        if error:
            raise RuntimeError(f"error {error}")


def error_of(out: torch.Tensor, right: torch.Tensor) -> float:
    return ((out.double() - right).norm() / right.norm()).item()


def check(library: str, device: str, sms: int, requests: int, pages: int, variants: list[str], heads: int = 8) -> bool:
    """On quantised normal KV, whose K has outlying channels with an offset."""
    torch.manual_seed(requests * 1000 + pages)
    total = requests * pages + 3
    k, v = torch.randn(2, total, PAGE, heads, DIM, device=device)
    outliers = torch.randperm(DIM)[:4]
    k[..., outliers] = k[..., outliers] * 4 + 10
    records = to_records(k, v)
    k_read, v_read = from_records(records)
    print(
        "quantisation: K",
        error_of(k_read.transpose(1, 2), k.double()),
        "V",
        error_of(v_read.transpose(1, 2), v.double()),
    )
    q = torch.randn(requests, heads * GROUP, DIM, device=device).bfloat16()
    table = torch.randperm(total, device=device)[: requests * pages].view(requests, pages).int()

    def order(x):
        return x.transpose(0, 1).flatten(1, 2)

    right = torch.stack(
        [attention(q[r], order(k_read[table[r].long()]), order(v_read[table[r].long()])) for r in range(requests)]
    )
    whole = torch.stack(
        [
            attention(q[r], *(order(x[table[r].long()].transpose(1, 2).double()) for x in (k, v)))
            for r in range(requests)
        ]
    )
    good = True
    for name in variants:
        kernel = LowBit(library, name, q, records, table, sms)
        kernel.run()
        one = error_of(kernel.out, right)
        again = LowBit(library, name, q, records, table, sms)
        again.run()
        same = bool((again.out == kernel.out).all())
        good &= one < 4e-3 and same
        print(
            f"{name:14} {requests} x {pages} pages: error {one:.2e}, same again {same}, against 16 bits {error_of(kernel.out, whole):.2e}",
            flush=True,
        )
    return good


def measure(library: str, cells: list[tuple[str, int, int]], output: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    import kernels

    sms = torch.cuda.get_device_properties(0).multi_processor_count
    rows = {"device": torch.cuda.get_device_name(), "cells": {}, **kernels.bandwidth()}
    for cell, requests, length in cells:
        times = {}
        for name, dtype in (("bf16", None), ("fp8", torch.float8_e4m3fn)):
            problem = kernels.Problem(cell, 32, 8, 1, torch.bfloat16, kv_dtype=dtype)
            times[name] = round(kernels.median_us(kernels.Pat(problem).run, cold=True), 2)
            del problem
        pages = length // PAGE
        records = random_records(requests * pages, 8, "cuda")
        q = torch.randn(requests, 32, DIM, device="cuda").bfloat16()
        table = torch.randperm(requests * pages, device="cuda").view(requests, pages).int()
        some = sorted({0, requests // 3, requests - 1})
        right = []
        for r in some:
            k, v = (x.transpose(0, 1).flatten(1, 2) for x in from_records(records[table[r].long()]))
            right.append(attention(q[r], k, v))
        errors = {}
        for name in VARIANTS:
            kernel = LowBit(library, name, q, records, table, sms)
            times[name] = round(kernels.median_us(kernel.run, cold=True), 2)
            errors[name] = error_of(kernel.out[some], torch.stack(right))
        bytes_ = records.numel()
        best = min(times[name] for name in VARIANTS)
        rows["cells"][cell] = {"us": times, "errors": errors, "floor_us": bytes_ / 4.4e6}
        print(
            f"{cell:10} floor {bytes_ / 4.4e6:.1f}", times,
            f"bf16 / best {times['bf16'] / best:.2f}, fp8 / best {times['fp8'] / best:.2f}, worst error {max(errors.values()):.2e}", flush=True,
        )  # fmt: skip
        del records
        output.write_text(json.dumps(rows, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library")
    parser.add_argument("--emulated", action="store_true")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.emulated:
        good = [
            check(arguments.library, "cpu", 1, *shape, list(VARIANTS), heads=1)
            for shape in ((1, 1), (3, 7), (1, 40), (13, 2))
        ]
        raise SystemExit(not all(good))
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    if not all(
        check(arguments.library, "cuda", sms, *shape, list(VARIANTS)) for shape in ((1, 1), (3, 7), (300, 3), (5, 300))
    ):
        print("wrong results: nothing is timed")
        raise SystemExit(1)
    measure(
        arguments.library, [("256_4096", 256, 4096), ("256_1024", 256, 1024), ("8x32768", 8, 32768), ("1x32768", 1, 32768)],
        arguments.output,
    )  # fmt: skip


if __name__ == "__main__":
    main()
