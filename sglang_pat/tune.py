"""Measures a GPU for packing, and prints which tiles it can run (PAT §5.2):

    python -m sglang_pat.tune --output tiles.json       # then serve with SGLANG_PAT_TILES=tiles.json
    python -m sglang_pat.tune --derive h100             # from the H200's table and data sheets; needs no GPU

A tile (m, n) is feasible if Q, K and V fit into shared memory, the accumulators fit into registers, and enough of K and V is in flight to hide the
latency of memory. The kernels have some of the feasible tiles. For each of these, `items * (item_ns + tokens * token_ns)` is fitted to forward
kernels in which all workers have the same number of items with the same number of tokens; the time to write parts (`CostModel.part_bytes`) is
subtracted. With KV of 16 bits, of 8, and in pages of 4 and 2. The time to switch between wide and narrow items is what both together take beyond each alone.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Collection
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sglang_pat.kernels import capabilities
from sglang_pat.packing import FORMATS, AttentionSpec, PackConfig, Plan, Tile, TileTable, WorkItem, devices, layout
from sglang_pat.packing.cost import PARTIAL_BYTES
from sglang_pat.packing.devices import GpuTable, Price
from sglang_pat.packing.spec import LOW_BIT_PAGE, KVFormat
from sglang_pat.parser import Parser

PRICED = ("bfloat16", capabilities.FP8["fp8_e4m3"], "int4", "int2")
"""Formats of KV that are measured; those of equal bits have equal prices."""

GROUP = 4
"""Query heads of the one KV head that is measured, as in Llama 3 8B and Qwen 3 8B."""

ITEMS = {True: (12, 24, 48), False: (2, 4, 8)}
"""How many work items of a worker are timed: narrow ones (the key is True) on its 12 warps, wide ones one after another."""

TOKENS = (32, 64, 128, 256, 512)
"""Of a work item; pages of few bits are not cut, so with these only whole ones."""

TURN = {64: 2, 8: 12}
"""Work items of each m when measuring the time that a worker takes to switch from wide to narrow items."""

SM_REGISTERS, THREAD_REGISTERS = 65_536, 255
"""Registers of an SM, and of a thread at most (CUDA C++ Programming Guide, "Compute Capabilities")."""

OTHER_REGISTERS, LOADER_REGISTERS = 40, 56
"""Registers of a thread besides its tiles, and of a thread that only loads, in the compiled kernels (`sglang_pat.build --report`)."""

WARP_ROWS, WARPS = 32, 12
"""A warp computes tiles of up to so many rows; so many warps share an SM (csrc/cuda/narrow.cuh)."""

H200 = devices.load(devices.TABLES / "h200.json")
"""The table whose factors (how much prices count in plans) were fitted; other tables copy them. Of eight sets plans ran best with this one, 1 to 10 %
faster than with the plain prices (benchmarks/NOTES-archive.md, 2026-11-21). Of turns priced at 0, 3, 5, 6 and 9 us plans ran best with 3; 1.64 are
measured (the same, 2026-11-22)."""

CANDIDATES = (16, 32, 64, 128, 192, 256)


class Sheet(msgspec.Struct, frozen=True):
    """Numbers from a GPU's data sheet (NVIDIA H100 and A100 Tensor Core GPU data sheets; CUDA C++ Programming Guide, "Compute Capabilities").
    `read_tbps` is 0.92 of the nominal bandwidth, the fraction that the H200 reaches of its 4.8 TB/s."""

    gpu: str
    sms: int
    read_tbps: float
    clock_ghz: float
    shared_bytes: int


SHEETS = {
    "h200": Sheet("NVIDIA H200", 132, 4.4, 1.98, 227 << 10),
    "h100": Sheet("NVIDIA H100 SXM", 132, 3.08, 1.98, 227 << 10),
    "a100": Sheet("NVIDIA A100 SXM 80GB", 108, 1.88, 1.41, 163 << 10),
}


def refusals(m: int, n: int, head_dim: int, sheet: Sheet, latency_ns: float) -> list[str]:
    """Which of the paper's constraints forbid a tile, with one CTA per SM and 16-bit KV; empty if it is feasible."""
    row = 2 * head_dim
    broken = []
    # Q, K and V: V of one tile is used while K of the next arrives.
    if m * row + 4 * n * row > sheet.shared_bytes:
        broken.append("shared memory")
    if m <= WARP_ROWS:
        # Outputs and scores in float32, Q in 16 bits, over the 32 threads of a warp.
        needed, groups = m * (head_dim + n + head_dim / 2) / 32, WARPS // 4
    else:
        # A warpgroup has 64 rows; weights are packed for the second product while the next scores are computed.
        needed, groups = 64 * (head_dim + n + n / 2) / 128, -(-m // 64)
    there = min(THREAD_REGISTERS, (SM_REGISTERS // 128 - LOADER_REGISTERS) // groups // 8 * 8)
    if needed + OTHER_REGISTERS > there:
        broken.append("registers")
    # Everything in shared memory except Q may be in flight.
    stages = (sheet.shared_bytes - m * row) // (2 * n * row)
    in_flight = max(0, stages - 1) * 2 * n * row * sheet.sms
    if in_flight < latency_ns * sheet.read_tbps * 1e3:
        broken.append("bytes in flight")
    return broken


def derive(known: GpuTable, name: str) -> GpuTable:
    """A table for a GPU that was not measured, from the table of one that was: the start of an item takes the same number of cycles, and so does a
    token, unless reading its bytes takes longer."""
    sheet, clock = SHEETS[name], SHEETS["h200"].clock_ghz
    share = sheet.read_tbps * 1e3 / sheet.sms
    slower = clock / sheet.clock_ghz

    def prices(form: KVFormat) -> tuple[Price, ...]:
        reading_ns = 2 * known.head_dim * form.bytes_with_scales(known.head_dim, known.head_dim) / share
        return tuple(
            msgspec.structs.replace(
                price,
                item_ns=round(price.item_ns * slower, 1),
                token_ns=round(max(price.token_ns * slower, reading_ns), 2),
            )
            for price in known.prices_of(form.bits)
        )

    of_16bit, of_8bit, of_4bit, of_2bit = (prices(FORMATS[name]) for name in PRICED)
    source = f"derived from the table of {known.gpu} by `python -m sglang_pat.tune --derive {name}`; not measured"
    latency = round(known.latency_ns * slower, 1)
    turn = round(known.turn_ns * slower, 1)
    return GpuTable(
        sheet.gpu, sheet.sms, sheet.read_tbps, latency, known.head_dim, of_16bit, source, turn, known.turn_in_plans,
        known.bin_ns, known.wave_ns, of_8bit, of_4bit, of_2bit,
    )  # fmt: skip


def synthetic(items: dict[int, int], tokens: int, workers: int) -> Plan:
    """A plan in which every worker has the given (even) number of work items of each m. Each item reads `tokens` tokens of its own; each query is in
    two items."""
    work: list[WorkItem] = []
    batch = 0
    for _ in range(workers):
        for m, count in items.items():
            queries = m // GROUP
            for i in range(count):
                start, first = len(work) * tokens, batch + i // 2 * queries
                rows = list(range(first, first + queries))
                work.append(WorkItem(start, start + tokens, rows, [i % 2] * queries, Tile(m, capabilities.KV_TILE)))
            batch += count // 2 * queries
    bins = [worker * sum(items.values()) for worker in range(workers + 1)]
    return Plan(work, bins, [2] * batch, 1, len(work) * tokens, 0)


class Bench:
    """Runs synthetic plans on this machine's GPU."""

    def __init__(self, head_dim: int, dtype: str, kv: str) -> None:
        """
        Args:
            head_dim: One of `capabilities.HEAD_DIMS`.
            dtype: Dtype of Q.
            kv: A key of `packing.FORMATS`.
        """
        import torch

        from sglang_pat.kernels import cuda

        self.torch, self.dtype = torch, getattr(torch, dtype)
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.spec = AttentionSpec(GROUP, 1, head_dim, head_dim, FORMATS[kv])
        self.arch = cuda.arch_of(self.device)
        tiles = capabilities.tile_table(self.arch, head_dim, kv_bits=self.spec.kv.bits)
        self.query_tiles = tiles.query_tiles
        self.decoder = cuda.Decoder(self.spec, tiles, self.device, dtype=self.dtype)
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device=self.device)

    def time_us(self, run: Callable[[], Any], repeats: int = 7) -> float:
        """The median time of `run`, with a cold L2 cache."""
        cuda = self.torch.cuda
        times = []
        for _ in range(repeats + 1):
            begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            self.flush.zero_()
            begin.record()
            run()
            end.record()
            cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        return statistics.median(times[1:])

    def read_tbps(self) -> float:
        numbers = self.torch.zeros(1 << 30, device=self.device)
        return numbers.nbytes / self.time_us(numbers.sum) * 1e-6

    def latency_ns(self) -> float:
        """Latency of loads that each return the address of the next."""
        import triton
        import triton.language as tl

        @triton.jit
        def chase(table, out, count):  # type: ignore[no-untyped-def]
            at = tl.load(table)
            for _ in range(count):
                at = tl.load(table + at)
            tl.store(out, at)

        size, count = 1 << 26, 2000
        order = self.torch.randperm(size, device=self.device)
        table = self.torch.empty_like(order)
        table[order] = order.roll(-1)
        out = self.torch.empty(1, dtype=self.torch.int64, device=self.device)
        none, all_ = (self.time_us(partial(chase[(1,)], table, out, loads, num_warps=1)) for loads in (0, count))
        return (all_ - none) / count * 1e3

    def pool(self, kv_tokens: int) -> tuple[Any, Any, Any, Any]:
        """Random KV, as `Decoder.decode` takes it: k, v, records, and the slots of the tokens, [1, kv_tokens]."""
        from sglang_pat.kernels import low_bit

        torch, dim = self.torch, self.spec.head_dim
        if not self.spec.kv.is_low_bit:
            kept = getattr(torch, self.spec.kv.name)
            k, v = (torch.randn(kv_tokens, 1, dim, device=self.device).to(kept) for _ in range(2))
            return k, v, None, torch.randperm(kv_tokens, device=self.device, dtype=torch.int32)[None]
        size = LOW_BIT_PAGE
        # Nothing is in tails: items are whole pages.
        tails = torch.zeros(2, size, 1, dim, device=self.device, dtype=self.dtype)
        k, v = torch.randn(2, 64, size, 1, dim)
        some = low_bit.pack(k, v, self.spec.kv.bits).to(self.device)
        pages = torch.randperm(kv_tokens // size, device=self.device, dtype=torch.int32)
        slots = size * pages[:, None] + torch.arange(size, device=self.device, dtype=torch.int32)
        return *tails, some[torch.arange(len(pages)) % len(some)], slots.reshape(1, -1)

    def forward_us(self, items: dict[int, int], tokens: int) -> float:
        torch, workers, dim = self.torch, self.decoder.workers, self.spec.head_dim
        plan = synthetic(items, tokens, workers)
        batch, kv_tokens = len(plan.num_parts), plan.kv_tokens
        data = torch.from_numpy(layout.flatten(plan)).to(self.device)
        q = torch.randn(batch, GROUP, dim, device=self.device).to(self.dtype)
        k, v, records, table = self.pool(kv_tokens)
        rows = torch.zeros(batch, dtype=torch.int64, device=self.device)
        seq_lens = torch.full_like(rows, kv_tokens)
        partial = torch.empty(2 * batch, GROUP, dim, dtype=torch.float16, device=self.device)
        lse = torch.empty(2 * batch, GROUP, device=self.device)
        out = torch.empty_like(q)
        return self.time_us(
            lambda: self.decoder.decode(
                q, k, v, out, table, rows, seq_lens, data, partial, lse, scale=dim**-0.5, records=records, merge=False
            )
        )

    def price(self, m: int, share: float) -> tuple[Price, float, float]:
        """The price of an m, if an SM moves `share` bytes per nanosecond; the kernel's time besides its items, in microseconds; and the greatest
        relative error of the fit."""
        grain = PackConfig.of(self.spec, TileTable((m,), (capabilities.KV_TILE,), ()), workers=1).grain
        lengths = [tokens for tokens in TOKENS if tokens % grain == 0]
        cases = [(items, tokens) for items in ITEMS[m <= capabilities.NARROW_M] for tokens in lengths]
        times = np.array([self.forward_us({m: items}, tokens) for items, tokens in cases])
        features = np.array([[1, items, items * tokens] for items, tokens in cases], dtype=float)
        fit = np.linalg.lstsq(features / times[:, None], np.ones(len(times)), rcond=None)[0]
        error = float(np.abs(features @ fit / times - 1).max())
        for case, time in zip(cases, times, strict=True):
            print(f"  m {m:3}: {case[0]:3} items of {case[1]:3} tokens a worker take {time:7.1f} us", flush=True)
        writing = m * (self.spec.head_dim + 1) * PARTIAL_BYTES / share
        item_ns, token_ns = round(max(0.0, float(fit[1]) * 1e3 - writing), 1), round(float(fit[2]) * 1e3, 2)
        known = H200.prices_of(self.spec.kv.bits)
        fitted = next((price for price in known if price.m == m), Price(m, 0, 0, 1, 1))
        price = msgspec.structs.replace(fitted, item_ns=item_ns, token_ns=token_ns)
        return price, float(fit[0]), error

    def turn_ns(self, base_us: float) -> float:
        """Time to switch between the two kinds of work items; `base_us` is a kernel's time besides its items."""
        tokens = TOKENS[-2]
        both = self.forward_us(TURN, tokens)
        alone = sum(self.forward_us({m: count}, tokens) for m, count in TURN.items())
        return max(0.0, both - alone + base_us) * 1e3

    def prices(self, share: float) -> tuple[tuple[Price, ...], float]:
        """The price of each m, and the time of a kernel with the smallest m besides its items, in microseconds."""
        prices, bases = [], []
        for m in self.query_tiles:
            price, base_us, error = self.price(m, share)
            prices.append(price)
            bases.append(base_us)
            print(
                f"m {m}, KV of {self.spec.kv.bits} bits: {price.item_ns:.0f} ns an item, {price.token_ns:.1f} ns a token, "
                f"fitted within {error:.0%}"
            )
        return tuple(prices), bases[0]


def measure(head_dim: int, dtype: str, only: Collection[int] = ()) -> GpuTable:
    """The table of this machine's GPU.

    Args:
        head_dim: The head dimension to measure with, one of `capabilities.HEAD_DIMS`.
        dtype: Dtype of Q and of 16-bit KV.
        only: Bits of KV, less than 16; everything else is then taken from the table that the GPU has.

    Raises:
        ValueError: `only` is given, and the GPU has no table.
    """
    import torch

    from sglang_pat.kernels import cuda

    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    source = f"measured on {date.today().isoformat()} by `python -m sglang_pat.tune`, torch {torch.__version__}"
    if only:
        table = devices.find(cuda.arch_of(device), properties.name)
        if table is None or table.head_dim != head_dim:
            raise ValueError(f"{properties.name} has no table for a head dimension of {head_dim}: measure all of it")
        source = f"{table.source}; prices with KV of {' and '.join(map(str, only))} bits {source}"
        share = table.read_tbps * 1e3 / table.sms
    else:
        bench = Bench(head_dim, dtype, dtype)
        tbps, latency = bench.read_tbps(), bench.latency_ns()
        print(f"{properties.name}: reads {tbps:.2f} TB/s, a load takes {latency:.0f} ns")
        share = tbps * 1e3 / properties.multi_processor_count
        prices, base_us = bench.prices(share)
        turn = bench.turn_ns(base_us)
        print(f"{turn:.0f} ns from work items of all warps to those of one")
        table = GpuTable(
            properties.name, properties.multi_processor_count, round(tbps, 3), round(latency, 1), head_dim, prices, source, round(turn, 1),
            H200.turn_in_plans, H200.bin_ns, H200.wave_ns, part_token_ns=H200.part_token_ns,
        )  # fmt: skip
    for name in PRICED[1:]:
        bits = FORMATS[name].bits
        if not only or bits in only:
            table = msgspec.structs.replace(
                table, **{f"prices_{bits}bit": Bench(head_dim, dtype, name).prices(share)[0]}
            )
    return msgspec.structs.replace(table, source=source)


def print_feasible(table: GpuTable, sheet: Sheet) -> None:
    """Print the paper's figure 7b: rows are m, columns are n."""
    print(
        f"Feasible tiles of {table.gpu} at head dimension {table.head_dim}, one CTA a SM (built: 16 x 32 by a warp, 64 to 192 x 64):"
    )
    for m in CANDIDATES:
        cells = [
            ", ".join(refusals(m, n, table.head_dim, sheet, table.latency_ns)) or "yes" for n in (16, 32, 64, 128, 256)
        ]
        print(
            f"  m {m:3}  " + "  ".join(f"n {n}: {cell}" for n, cell in zip((16, 32, 64, 128, 256), cells, strict=True))
        )


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(
        prog="python -m sglang_pat.tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head-dim", type=int, choices=[d for d in capabilities.HEAD_DIMS if d <= 128], default=128)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument(
        "--only",
        type=int,
        nargs="+",
        choices=[8, 4, 2],
        default=[],
        metavar="BITS",
        help="measure only prices with KV of 8, 4 or 2 bits",
    )
    parser.add_argument("--derive", choices=[name for name in SHEETS if name != "h200"], help="a GPU that is not here")
    parser.add_argument("--output", type=Path, help="where the table goes; printed if not given")
    options = parser.parse_args(arguments)
    if options.derive:
        table = derive(H200, options.derive)
    else:
        import torch

        if not torch.cuda.is_available():
            parser.error("there is no GPU here to measure; --derive computes a table without one")
        try:
            table = measure(options.head_dim, options.dtype, options.only)
        except ValueError as error:
            parser.error(str(error))
    sheet = next((sheet for name, sheet in SHEETS.items() if name in table.gpu.lower()), None)
    if sheet is not None:
        print_feasible(table, sheet)
    text = msgspec.json.format(msgspec.json.encode(table), indent=1).decode() + "\n"
    if options.output:
        options.output.write_text(text)
        print(f"written to {options.output}")
    else:
        print(text)


if __name__ == "__main__":
    main()
