"""Measures a GPU for packing, and prints which tiles it can run (PAT §5.2):

    python -m sglang_pat.tune --output tiles.json       # then serve with SGLANG_PAT_TILES=tiles.json
    python -m sglang_pat.tune --derive a100             # from the H200's table and data sheets; needs no GPU

A tile (m, n) is feasible if Q, K and V fit into shared memory, the accumulators fit into registers, and enough of K and V is in flight to hide the
latency of memory. The kernels have some of the feasible tiles. For each of these, `items * (item_ns + tokens * token_ns)` is fitted to forward
kernels in which all workers have the same number of items with the same number of tokens; the time to write parts (`CostModel.part_bytes`) is
subtracted. With KV of 16 bits, of 8, and in pages of 4 and 2. The time to switch between wide and narrow items is what both together take beyond each
alone.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import msgspec

from sglang_pat.cli.parser import Parser, run
from sglang_pat.cli.tile_prices import H200, PRICED, measure
from sglang_pat.kernels import capabilities
from sglang_pat.packing import FORMATS
from sglang_pat.packing.devices import GpuTable, Price
from sglang_pat.packing.spec import KVFormat

PROG = "python -m sglang_pat.tune"

SM_REGISTERS, THREAD_REGISTERS = 65_536, 255
"""Registers of an SM, and of a thread at most (CUDA C++ Programming Guide, "Compute Capabilities")."""

OTHER_REGISTERS, LOADER_REGISTERS = 40, 56
"""Registers of a thread besides its tiles, and of a thread that only loads, in the compiled kernels (`sglang_pat.build --report`)."""

WARP_ROWS, WARPS = 32, 12
"""A warp computes tiles of up to so many rows; so many warps share an SM (csrc/cuda/kv/plain_narrow.cuh)."""

CANDIDATES = (8, 16, 32, 64, 128, 192, 256)


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

MEASURED = ("h200", "h100")
"""GPUs with tables that were measured."""


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
    source = (
        f"derived from the table of {known.gpu} by `python -m sglang_pat.tune --derive {name}`; not measured; KV of 8 bits is converted by other warps "
        "where there is no wgmma"
    )
    latency = round(known.latency_ns * slower, 1)
    turn = round(known.turn_ns * slower, 1)
    return GpuTable(
        sheet.gpu, sheet.sms, sheet.read_tbps, latency, known.head_dim, of_16bit, source, turn, known.bin_ns, known.wave_ns, of_8bit, of_4bit,
        of_2bit, turn_in_plans_ns=known.turn_in_plans_ns,
    )  # fmt: skip


def written(table: GpuTable) -> str:
    """The text of a table's file, with a price on each line."""
    text = msgspec.json.format(msgspec.json.encode(table), indent=1).decode() + "\n"
    return re.sub(r'\{\s+("m"[^{}]*?)\s+\}', lambda price: f"{{{' '.join(price[1].split())}}}", text)


def print_feasible(table: GpuTable, sheet: Sheet) -> None:
    """Print the paper's figure 7b: rows are m, columns are n."""
    print(
        f"Feasible tiles of {table.gpu} at head dimension {table.head_dim}, one CTA a SM (built: 8 and 16 x 16 by a warp, 64 to 192 x 64):"
    )
    for m in CANDIDATES:
        cells = [
            ", ".join(refusals(m, n, table.head_dim, sheet, table.latency_ns)) or "yes" for n in (16, 32, 64, 128, 256)
        ]
        print(
            f"  m {m:3}  " + "  ".join(f"n {n}: {cell}" for n, cell in zip((16, 32, 64, 128, 256), cells, strict=True))
        )


def main(arguments: list[str] | None = None, prog: str = PROG) -> int:
    """Run the command; returns the exit status."""
    return run(prog, lambda: _run(arguments, prog))


def _run(arguments: list[str] | None, prog: str) -> None:
    parser = Parser(prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--head-dim",
        type=int,
        choices=[*capabilities.HEAD_DIMS, *dict(capabilities.LATENT_DIMS)],
        help=f"{capabilities.MEASURED_DIM} if not given",
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], help="bfloat16 if not given")
    parser.add_argument(
        "--only",
        type=int,
        nargs="+",
        choices=[8, 4, 2],
        default=[],
        metavar="BITS",
        help="measure only prices with KV of 8, 4 or 2 bits",
    )
    parser.add_argument(
        "--derive", choices=[name for name in SHEETS if name not in MEASURED], help="a GPU that is not here"
    )
    parser.add_argument("--output", type=Path, help="where the table goes; printed if not given")
    options = parser.parse_args(arguments)
    if options.derive:
        if options.head_dim or options.dtype or options.only:
            parser.error("--derive computes a whole table: --head-dim, --dtype and --only are for a GPU that is here")
        table = derive(H200, options.derive)
    else:
        import torch

        if not torch.cuda.is_available():
            parser.error("there is no GPU here to measure; --derive computes a table without one")
        try:
            table = measure(options.head_dim or capabilities.MEASURED_DIM, options.dtype or "bfloat16", options.only)
        except ValueError as error:
            parser.error(str(error))
    sheet = next((sheet for name, sheet in SHEETS.items() if name in table.gpu.lower()), None)
    if sheet is not None:
        print_feasible(table, sheet)
    text = written(table)
    if options.output is None:
        print(text)
        return
    try:
        options.output.write_text(text)
    except OSError as error:
        # What took a minute to measure is not lost.
        print(text)
        sys.exit(f"--output: {options.output} cannot be written: {error.strerror}")
    print(f"written to {options.output}")
