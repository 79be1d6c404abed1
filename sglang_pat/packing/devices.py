"""Tables of GPUs: the measured prices of their tiles. Knows nothing of torch."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from sglang_pat.packing.spec import FORMATS, KVFormat
from sglang_pat.packing.tiles import Splits, TileTable, WideSteps
from sglang_pat.text import printable

TABLES = Path(__file__).parent / "tables"
"""One table for each known GPU, such as `h200.json`; one that was measured with another head dimension than that is beside it, such as `h200-256.json`.
`python -m sglang_pat.tune` makes them."""

BY_ARCH = {"9": "h200", "8.0": "a100"}
"""The table for a GPU without its own, by its compute capability or the major part of that."""

PRICES = {
    "float16": "prices", "bfloat16": "prices", "float8_e4m3fn": "prices_8bit", "float8_e5m2": "prices_8bit", "int4": "prices_4bit",
    "int2": "prices_2bit",
}  # fmt: skip
"""Which prices of a table a format has, by its name in `packing.FORMATS`. One whose kernels take other times has prices of its own, or none."""


LARGEST = 1 << 20
"""Bytes that are read of a table; those that there are have 3,000."""


class TablesError(ValueError):
    """A file is not a table of tiles; the message says which file, and why."""


Nanoseconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
"""No work item costs a millisecond or more, and a plan's sums would overflow."""

Factor = Annotated[float, msgspec.Meta(ge=0, le=100)]


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How long a work item of one m occupies a worker, for one KV head: to start and end, and per token.

    Measured while all SMs run the same tile. In a plan, SMs that wait or compute on wide tiles leave their bandwidth to the others; the
    factors say how much of each price counts then: `in_plans` when it is decided what is packed, `in_bins` when packs are laid out in bins, where
    None stands for the former; only with the head dimension that was measured. An H200's were fitted to when workers end (benchmarks/notes/prices.md, "Ends of
    workers").
    """

    m: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    item_ns: Nanoseconds
    token_ns: Nanoseconds
    item_in_plans: Factor
    token_in_plans: Factor
    item_in_bins: Factor | None = None
    token_in_bins: Factor | None = None

    def in_plans(self) -> tuple[float, float]:
        """Nanoseconds of an item and of a token when it is decided what is packed."""
        return self.item_ns * self.item_in_plans, self.token_ns * self.token_in_plans

    def in_bins(self) -> tuple[float, float]:
        """The same when packs are laid out in bins."""
        item = self.item_in_plans if self.item_in_bins is None else self.item_in_bins
        token = self.token_in_plans if self.token_in_bins is None else self.token_in_bins
        return self.item_ns * item, self.token_ns * token


class GpuTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the cost model knows of a GPU.

    Attributes:
        gpu: Its name.
        sms: Streaming multiprocessors.
        read_tbps: Memory bandwidth that reads reach, in TB/s.
        head_dim: The head dimension that was measured; the time per token scales with the dimension.
        prices: Prices with KV of 16 bits, by ascending m.
        source: When and how it was measured, or what it was derived from.
        bin_ns: In a step with narrow items only: time that each bin adds, for the parts at its end and their merge, with 8 KV heads or more.
        wave_ns: Time that such a step takes longer if each worker has one more bin to start.
        prices_8bit: Prices with KV of 8 bits; empty if they were not measured.
        prices_4bit, prices_2bit: Prices with KV in pages of so many bits, likewise.
        slice_token_ns: `TileTable.slice_token_ns` with KV of 16 bits; 0 if it was not fitted (benchmarks/notes/verify-steps.md, "Slices of a query's rows").
        slice_token_8bit_ns: The same with KV of 8 bits. On an H200 11 was better than 8.5 and than 14 (benchmarks/notes/fp8-kv.md, "Two groups of warps
            that convert"); an H100 has it from there.
        turn_in_plans_ns: `TileTable.turn_ns`, as it counts in a plan. With 3 us plans ran best on an H200, where a turn was measured at 1.6 us
            and at 3.7 later, and as well as with any other on an H100, where it was 0.5 (benchmarks/notes/prices.md, "Prices of an H100").
        narrow_first_ns: `TileTable.narrow_first_ns`, likewise: 12,000 on an H200, where limits from 10,000 to 20,000 are equally good, and on an H100, where it
            was the only one measured (benchmarks/notes/wide-beside-narrow.md, "Narrow items first on every second SM").
        wide_steps: `TileTable.wide_steps` with KV of 16 bits and the dimension that was measured (benchmarks/notes/which-tiles.md, "Drafts of
            small batches", "Small decode steps that share" and "Wide tiles only"); by default no step is.
        splits, splits_8bit: `TileTable.splits` with KV of 16 bits and of 8, likewise. Where packs are split on an H200, plans without tiles of single warps take 0.90
            of the time, those with KV of 8 bits 0.96; others with 16 bits took 1.00. An H100 has them from there (benchmarks/notes/bins.md, "Work items of fewer queries").
    """

    gpu: str
    sms: Annotated[int, msgspec.Meta(ge=1, le=10_000)]
    read_tbps: Annotated[float, msgspec.Meta(gt=0, le=1e4)]
    head_dim: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    prices: tuple[Price, ...]
    source: str
    bin_ns: Nanoseconds
    wave_ns: Nanoseconds
    prices_8bit: tuple[Price, ...] = ()
    prices_4bit: tuple[Price, ...] = ()
    prices_2bit: tuple[Price, ...] = ()
    slice_token_ns: Nanoseconds = 0
    slice_token_8bit_ns: Nanoseconds = 0
    turn_in_plans_ns: Nanoseconds = 3000
    wide_steps: WideSteps = WideSteps()
    narrow_first_ns: Nanoseconds = 0
    splits: Splits = "none"
    splits_8bit: Splits = "none"

    def __post_init__(self) -> None:
        for kv in FORMATS.values():
            every = [price.m for price in self.prices_of(kv)]
            if every != sorted(set(every)):
                raise ValueError(f"prices with KV of {kv.bits} bits must have ascending m, each one once")

    def prices_of(self, kv: KVFormat) -> tuple[Price, ...]:
        """The prices with KV of this format; empty if they were not measured."""
        return getattr(self, PRICES[kv.name]) if kv.name in PRICES else ()

    def tiles(
        self, query_tiles: tuple[int, ...], head_dim: int, warp_m: int, warp_tokens: int, kv: KVFormat = FORMATS["bfloat16"],
    ) -> TileTable | None:  # fmt: skip
        """The tiles with their prices in plans; None if an m has no price.

        Args:
            query_tiles: Every m, ascending.
            head_dim: The model's head dimension.
            warp_m, warp_tokens: As of `TileTable`.
            kv: How K and V are stored.
        """
        prices = {price.m: price for price in self.prices_of(kv)}
        if not all(m in prices for m in query_tiles):
            return None
        found = [prices[m] for m in query_tiles]
        scale = head_dim / self.head_dim
        bits = kv.bits if kv.layout == "plain" else 0
        fitted = bits == 16 and head_dim == self.head_dim

        def scaled(times: list[tuple[float, float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
            return tuple(token * scale for _, token in times), tuple(item for item, _ in times)

        packs, bins = scaled([price.in_plans() for price in found]), scaled([price.in_bins() for price in found])
        return TileTable(
            query_tiles,
            *packs,
            warp_m,
            warp_tokens,
            {16: self.slice_token_ns, 8: self.slice_token_8bit_ns}.get(bits, 0) * scale,
            self.turn_in_plans_ns,
            self.bin_ns,
            self.wave_ns,
            self.read_tbps * 1e3,
            self.sms,
            self.wide_steps if fitted else WideSteps(),
            *bins if fitted and bins != packs else ((), ()),
            narrow_first_ns=self.narrow_first_ns if fitted else 0,
            splits={16: self.splits, 8: self.splits_8bit}.get(bits, "none") if head_dim == self.head_dim else "none",
        )


def load(path: Path, named_by: str = "") -> GpuTable:
    """Read a table.

    Args:
        named_by: The setting that names it, for messages.

    Raises:
        TablesError: The file is not a table.
    """
    name = f"{named_by}: {path}" if named_by else str(path)
    try:
        # Reading a pipe would wait for a writer, reading a device might not end.
        if path.exists() and not path.is_file():
            raise TablesError(f"{name} is not a table of tiles: name a file")
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(LARGEST), type=GpuTable)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # A key that there is not is quoted, whatever it is.
        why = error.strerror if isinstance(error, OSError) else printable(str(error)[:300])
        raise TablesError(f"{name} is not a table of tiles, make one with `python -m sglang_pat.tune`: {why}") from None


@contextlib.contextmanager
def used(path: str) -> Iterator[None]:
    """Within it, what is wrong with a plan's prices is the fault of the table in this file; of nobody's, if there is none.

    Raises:
        TablesError: Its times are too long for a plan.
    """
    try:
        yield
    except ValueError as error:
        if not path or isinstance(error, TablesError):
            raise
        raise TablesError(f"{path} is a table that no plan can be made with: {error}") from None


def find(arch: str, gpu: str = "", head_dim: int = 0) -> GpuTable | None:
    """The table of a GPU by its name, else by its architecture, and its own for a head dimension where there is one; None if there is none."""
    # Whole words: an RTX A1000 is no A100. A GH200 is an H200.
    named = (
        path.stem
        for path in TABLES.glob("*.json")
        if re.search(rf"(?<![a-z0-9])g?{path.stem}(?![a-z0-9])", gpu.lower())
    )
    name = next(named, None) or next((name for key, name in BY_ARCH.items() if arch.startswith(key)), None)
    if name is None:
        return None
    own = TABLES / f"{name}-{head_dim}.json"
    return load(own if own.exists() else TABLES / f"{name}.json")
