"""Measures a GPU for packing:

    python -m sglang_pat.tune --output tiles.json       # then serve with SGLANG_PAT_TILES=tiles.json

For each tile of the kernels, `items * (item_ns + tokens * token_ns)` is fitted to forward kernels in which all workers have the same number of items with
the same number of tokens; the time to write parts (`CostModel.part_bytes`) is subtracted. With KV of 16 bits, of 8, and in pages of 4 and 2.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import msgspec

from sglang_pat.cli.parser import Parser, run
from sglang_pat.cli.tile_prices import measure
from sglang_pat.kernels import capabilities
from sglang_pat.packing.devices import GpuTable

PROG = "python -m sglang_pat.tune"


def written(table: GpuTable) -> str:
    """The text of a table's file, with a price on each line."""
    text = msgspec.json.format(msgspec.json.encode(table), indent=1).decode() + "\n"
    return re.sub(r'\{\s+("m"[^{}]*?)\s+\}', lambda price: f"{{{' '.join(price[1].split())}}}", text)


def main(arguments: list[str] | None = None, prog: str = PROG) -> int:
    """Run the command; returns the exit status."""
    return run(prog, lambda: _run(arguments, prog))


def _run(arguments: list[str] | None, prog: str) -> None:
    parser = Parser(prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--head-dim",
        type=int,
        choices=[*capabilities.HEAD_DIMS, *dict(capabilities.LATENT_DIMS)],
        default=capabilities.MEASURED_DIM,
        help="%(default)s if not given",
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16", help="%(default)s if not given")
    parser.add_argument(
        "--only",
        type=int,
        nargs="+",
        choices=[8, 4, 2],
        default=[],
        metavar="BITS",
        help="measure only prices with KV of 8, 4 or 2 bits",
    )
    parser.add_argument("--output", type=Path, help="where the table goes; printed if not given")
    options = parser.parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        parser.error("there is no GPU here to measure")
    try:
        table = measure(options.head_dim, options.dtype, options.only)
    except ValueError as error:
        parser.error(str(error))
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
