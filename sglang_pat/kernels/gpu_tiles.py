"""What the CUDA kernels offer to packing: their tiles, and what these take. Knows nothing of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from sglang_pat.packing import CostModel, TileTable

HEAD_DIMS = (64, 96, 128, 192, 256)

KV_TILE = 64
"""The n of every tile (`kTokens` in csrc/cuda/params.cuh)."""

TABLES = Path(__file__).parent / "tables"
"""One table for each GPU that is known; `python -m sglang_pat.tune` makes them."""

BY_ARCH = {"9": "h200", "8.0": "a100"}
"""The table of a GPU whose own is not there, by its compute capability or the major part of it."""


IN_PLANS = {8: (1.0, 0.95), 16: (1.0, 0.95), 64: (3.0, 0.8), 128: (3.0, 1.07), 192: (3.0, 1.4)}
"""What the prices of an item and of a token count in a plan, for each m. They are measured while all SMs run the same tile;
in a plan some wait or compute on wide tiles, and the others have their bandwidth. Of eight sets plans ran best with this one,
1 to 10 % faster than with the plain prices (benchmarks/NOTES.md, 2026-11-21)."""

TURN_IN_PLANS = 1.825
"""Likewise what going over from one kind of work items to the other counts: 3.0 us on an H200, where 1.64 are measured. Of 0, 3, 5,
6 and 9 us plans ran best with 3 (benchmarks/NOTES.md, 2026-11-22)."""

NARROW_M = 16
"""Rows that a warp has for itself (`kNarrowM` in csrc/cuda/params.cuh)."""


class TablesError(ValueError):
    """A file is no table of tiles; the message says which and why."""


Nanoseconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
"""A millisecond and more is no price of a work item, and would not fit a plan's sums."""


class Price(msgspec.Struct, frozen=True):
    """What work items of one m take of a worker, for one KV head: to start and end, and for each token."""

    m: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    item_ns: Nanoseconds
    token_ns: Nanoseconds


class GpuTable(msgspec.Struct, frozen=True):
    """A GPU as packing sees it.

    Attributes:
        gpu: Its name.
        sms: Streaming multiprocessors.
        read_tbps: What it reads from memory, in TB/s.
        latency_ns: Of one load from memory.
        head_dim: Of which `prices` are; other dimensions take a proportional time for each token.
        prices: By ascending m.
        source: When and how it was measured, or from what derived.
        turn_ns: What a worker takes to go over from work items of all its warps to those of single warps.
    """

    gpu: str
    sms: Annotated[int, msgspec.Meta(ge=1, le=10_000)]
    read_tbps: Annotated[float, msgspec.Meta(gt=0, le=1e4)]
    latency_ns: Nanoseconds
    head_dim: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    prices: tuple[Price, ...]
    source: str
    turn_ns: Nanoseconds = 0

    @property
    def share(self) -> float:
        """Bytes that one SM's part of the bandwidth moves in a nanosecond."""
        return self.read_tbps * 1e3 / self.sms


def load(path: Path) -> GpuTable:
    """Read a table.

    Raises:
        TablesError: The file is none.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=GpuTable)
    except (OSError, msgspec.DecodeError) as error:
        raise TablesError(f"{path} is no table of tiles, make one with `python -m sglang_pat.tune`: {error}") from None


def query_tiles(arch: str, head_dim: int) -> tuple[int, ...]:
    """Every m of an architecture's kernels: 128 and 192 rows take several warpgroups (csrc/cuda/params.cuh, `groups`).

    Args:
        arch: Compute capability, such as `8.0` or `9.0a`.
        head_dim: One of HEAD_DIMS.
    """
    return (8, 16, 64, 128, 192) if head_dim <= 128 and arch.startswith("9.") else (8, 16, 64)


def find(arch: str, gpu: str = "") -> GpuTable | None:
    """The table of a GPU by its name, else of its architecture; None where nothing is known."""
    for path in TABLES.glob("*.json"):
        if path.stem in gpu.lower():
            return load(path)
    name = next((name for key, name in BY_ARCH.items() if arch.startswith(key)), None)
    return load(TABLES / f"{name}.json") if name else None


def tile_table(arch: str, head_dim: int, gpu: str = "", table: GpuTable | None = None) -> TileTable:
    """The tiles of a GPU, with their prices where they are known.

    Args:
        arch: Compute capability, such as `8.0` or `9.0a`.
        head_dim: One of HEAD_DIMS.
        gpu: The name by which the GPU goes.
        table: Prices, if not those of the GPU's own table.
    """
    tiles = query_tiles(arch, head_dim)
    table = table or find(arch, gpu)
    prices = {price.m: price for price in table.prices} if table else {}
    if table is None or head_dim > table.head_dim or not all(m in prices for m in tiles):
        return TileTable(tiles, (KV_TILE,), ())
    scale = head_dim / table.head_dim
    token_bytes = tuple(round(prices[m].token_ns * IN_PLANS[m][1] * table.share * scale) for m in tiles)
    item_bytes = tuple(round(prices[m].item_ns * IN_PLANS[m][0] * table.share) for m in tiles)
    return TileTable(
        tiles, (KV_TILE,), (), token_bytes, item_bytes, NARROW_M, round(table.turn_ns * TURN_IN_PLANS * table.share)
    )


def cost_model(heads: int, kv_heads: int, head_dim: int, tiles: TileTable, kv_bytes: int = 2) -> CostModel:
    """What plans for these kernels with these tiles cost; `kv_bytes` of one element."""
    splits = tiles.head_splits(heads, kv_heads)
    return CostModel(heads, kv_heads, head_dim, head_dim, kv_bytes, head_splits=splits)
