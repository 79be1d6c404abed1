"""GPUs as packing sees them: what each one's tiles take, from tables that were measured. Knows nothing of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from sglang_pat.packing.tiles import TileTable

TABLES = Path(__file__).parent / "tables"
"""One table for each GPU that is known; `python -m sglang_pat.tune` makes them."""

BY_ARCH = {"9": "h200", "8.0": "a100"}
"""The table of a GPU whose own is not there, by its compute capability or the major part of it."""


class TablesError(ValueError):
    """A file is no table of tiles; the message says which and why."""


Nanoseconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
"""A millisecond and more is no price of a work item, and would not fit a plan's sums."""

Factor = Annotated[float, msgspec.Meta(ge=0, le=100)]


class Price(msgspec.Struct, frozen=True):
    """What work items of one m take of a worker, for one KV head: to start and end, and for each token.

    Measured while all SMs run the same tile. In a plan some wait or compute on wide tiles, and the others have their
    bandwidth: the factors say how much of each price counts there.
    """

    m: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    item_ns: Nanoseconds
    token_ns: Nanoseconds
    item_in_plans: Factor
    token_in_plans: Factor


class GpuTable(msgspec.Struct, frozen=True):
    """A GPU as packing sees it.

    Attributes:
        gpu: Its name.
        sms: Streaming multiprocessors.
        read_tbps: What it reads from memory, in TB/s.
        latency_ns: Of one load from memory.
        head_dim: Of which the prices are; other dimensions take a proportional time for each token.
        prices: With KV of 16 bits, by ascending m.
        source: When and how it was measured, or from what derived.
        turn_ns: What a worker takes to go over from work items of all its warps to those of single warps.
        turn_in_plans: How much of that counts in a plan.
        bin_ns: What a step of narrow items takes longer for each bin: the parts that its end makes, and their merge.
        wave_ns: What such a step takes longer where each worker has one more bin, whose items it has to begin.
        prices_8bit: With KV of 8 bits; none in tables from before there was any.
        part_token_ns: As `TileTable.part_token_ns`, with KV of 16 bits; 0 where it was not fitted (benchmarks/NOTES.md, 2026-11-24).
    """

    gpu: str
    sms: Annotated[int, msgspec.Meta(ge=1, le=10_000)]
    read_tbps: Annotated[float, msgspec.Meta(gt=0, le=1e4)]
    latency_ns: Nanoseconds
    head_dim: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    prices: tuple[Price, ...]
    source: str
    turn_ns: Nanoseconds
    turn_in_plans: Factor
    bin_ns: Nanoseconds
    wave_ns: Nanoseconds
    prices_8bit: tuple[Price, ...] = ()
    part_token_ns: Nanoseconds = 0

    def tiles(
        self, query_tiles: tuple[int, ...], kv_tile: int, head_dim: int, warp_m: int, kv_bytes: int = 2
    ) -> TileTable | None:
        """Tiles with what they take in plans for a head dimension; None where an m has no price.

        Args:
            query_tiles: Every m, ascending.
            kv_tile: The one n.
            head_dim: Of the model.
            warp_m: As `TileTable.warp_m`.
            kv_bytes: Of one element of KV.
        """
        prices = {price.m: price for price in (self.prices_8bit if kv_bytes == 1 else self.prices)}
        if not all(m in prices for m in query_tiles):
            return None
        found = [prices[m] for m in query_tiles]
        scale = head_dim / self.head_dim
        return TileTable(
            query_tiles,
            (kv_tile,),
            (),
            tuple(price.token_ns * price.token_in_plans * scale for price in found),
            tuple(price.item_ns * price.item_in_plans for price in found),
            warp_m,
            self.part_token_ns * scale if kv_bytes == 2 else 0,
            self.turn_ns * self.turn_in_plans,
            self.bin_ns,
            self.wave_ns,
            self.read_tbps * 1e3,
            self.sms,
        )


def load(path: Path) -> GpuTable:
    """Read a table.

    Raises:
        TablesError: The file is none.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=GpuTable)
    except (OSError, msgspec.DecodeError) as error:
        raise TablesError(f"{path} is no table of tiles, make one with `python -m sglang_pat.tune`: {error}") from None


def find(arch: str, gpu: str = "") -> GpuTable | None:
    """The table of a GPU by its name, else of its architecture; None where nothing is known."""
    for path in TABLES.glob("*.json"):
        if path.stem in gpu.lower():
            return load(path)
    name = next((name for key, name in BY_ARCH.items() if arch.startswith(key)), None)
    return load(TABLES / f"{name}.json") if name else None
