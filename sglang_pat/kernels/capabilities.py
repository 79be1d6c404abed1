"""What each executor can compute, and the tiles of the CUDA kernels with their prices. Knows nothing of torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from sglang_pat.packing import FORMATS, AttentionSpec, PackConfig, TileTable, devices
from sglang_pat.packing.devices import GpuTable
from sglang_pat.packing.spec import KVFormat

Device = Literal["cpu", "cuda"]

HEAD_DIMS = (64, 96, 128, 192, 256)
"""Head dimensions of the CUDA kernels, for both K and V."""

UNEQUAL_HEAD_DIMS = ((192, 128),)
"""(K, V) with a narrower V: MiMo V2's, the only such pair in SGLang's models besides MLA (configs/model_config.py, `has_asymmetric_kv`). V's must
be a multiple of 32 (csrc/cuda/kv/plain.cuh)."""

LARGE_SHARED = ("8.0", "9.0a", "10.0")
"""Architectures known to have more than 99 KB of shared memory per CTA (`kSharedLimit` in csrc/cuda/smem.cuh). K dimensions above 128 need it."""

LATENT_DIMS = ((576, 512), (288, 256))
"""(K, V) of the CUDA kernels for latents (MLA): DeepSeek's, which most have, and MiniCPM3's (`model_config.LATENTS_ON_GPUS`)."""

CPU_HEAD_DIM, CPU_HEAD_DIM_STEP = 256, 8
"""The largest head dimension of the CPU executor, and the number that it must be a multiple of."""

CPU_LATENT_DIM = 576
"""The largest K dimension of latents (MLA): DeepSeek's 512 with 64 for positions."""

FP8 = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""8-bit formats, by their names in SGLang's `--kv-cache-dtype`."""

CUDA_DTYPES = ("float16", "bfloat16")
"""Dtypes of Q on a GPU."""

KV_FORMATS: dict[Device, tuple[str, ...]] = {
    "cpu": ("float32", "float16", "bfloat16", *FP8.values(), "int4", "int2"),
    "cuda": (*CUDA_DTYPES, *FP8.values(), "int4", "int2"),
}
"""The names in `packing.FORMATS` that each executor reads."""

LOW_BIT_HEAD_DIM_STEP = 32
"""What head dimensions have to be a multiple of where KV is in pages of few bits (`LowBit` in csrc/cpu/low_bit.h)."""

PAGES_HEAD_DIMS = (64, 128)
"""Head dimensions of the CUDA kernels for pages of few bits (`Record` in csrc/cuda/kv/page_record.cuh)."""

LATENT_TILES = {"9.0a": (8, 16, 32, 64), "8.0": (16, 64), "10.0": (16, 64)}
"""Every m of the kernels for latents, by architecture; (16,) where there is less shared memory. A CTA computes a work item together
(csrc/cuda/kv/latent.cuh, latent_mma.cuh)."""

STRADDLING_ROWS = {16: 42, 8: 48}
"""With latents of so many bits, the most rows of a query that are packed where work items have no room for two. Behind shared prefixes packing 40 took 0.77 to 0.89 of the
time with 16 bits, which is 0.82 to 1.00 of FA3's, to which others are left; packing 48 took 0.86 to 0.99 with 8 (benchmarks/notes/latents.md, "Queries that straddle tiles")."""

NARROW_M = 16
"""The most rows that a single warp computes (`kNarrowM` in csrc/cuda/tiles.h)."""

WARP_TOKENS = 16
"""Tokens that it computes at a time (`kStepTokens` in csrc/cuda/tiles.h): one of them took as long as 16
(benchmarks/notes/prices.md, "Prices of an H200, and rows in slices")."""

WARPGROUP_ROWS = 64
"""Rows of a wide tile that a warpgroup computes (`kWarpgroupRows` in csrc/cuda/tiles.h)."""

TAILS_DIM = 128
"""The largest head dimension of work items with tails, and of those of 64 rows that two warpgroups share. Above it a warpgroup sees nothing of the
other one's query (`OwnQueries` in csrc/cuda/ring.cuh)."""

MEASURED_DIM = 128
"""What `sglang_pat.tune` measures if it is not told, and the largest head dimension whose prices every table has: from it smaller ones are scaled."""


def arch_name(major: int, minor: int) -> str:
    """The architecture to compile for. On Hopper it ends in `a`, which enables Hopper's own instructions."""
    return f"{major}.{minor}a" if major == 9 else f"{major}.{minor}"


def query_tiles(arch: str, head_dim: int, kv: KVFormat = FORMATS["bfloat16"]) -> tuple[int, ...]:
    """Every m of an architecture's kernels. 128 rows take two warpgroups, 192 three: with KV of 8 bits the third one converts (csrc/cuda/threads.cuh,
    `wide_warpgroups`). On Hopper, above 128 dimensions:

    | KV | dimensions | tiles | compute wide, convert, run narrow items |
    |---|---|---|---|
    | 16 bits | 192 (256 without 16) | 8, 16, 64, 128 | two, none, two |
    | 8 bits | 192 (256 without 16) | 8, 16, 64 | one, two, two (`converts_directly`) |

    Of 256 two warpgroups leave a warp too few registers for 16 rows (ptxas of CUDA 13.0 spills 364 bytes, with KV of 8 bits 120).

    Args:
        arch: Compute capability, such as `8.0` or `9.0a`.
        head_dim: K's, one of HEAD_DIMS.
        kv: How K and V are stored. Pages of few bits have wide items on Hopper only (csrc/cuda/kv/page.cuh).
    """
    if head_dim <= 128 and arch.startswith("9."):
        return (8, NARROW_M, 64, 128) if kv.bits == 8 else (8, NARROW_M, 64, 128, 192)
    if kv.layout == "pages":
        return (8, NARROW_M)
    if not arch.startswith("9."):
        return (8, NARROW_M, 64)
    narrow = (8,) if head_dim > 192 else (8, NARROW_M)
    return (*narrow, 64) if kv.bits == 8 else (*narrow, 64, 128)


def latent_query_tiles(arch: str) -> tuple[int, ...]:
    """Every m of an architecture's kernels for latents."""
    return LATENT_TILES.get(arch, (NARROW_M,))


def tiles_of(spec: AttentionSpec, arch: str) -> tuple[int, ...]:
    """Every m of the kernels for a spec."""
    if spec.latent:
        return latent_query_tiles(arch)
    return query_tiles(arch, spec.head_dim, spec.kv)


def holds_several(spec: AttentionSpec, arch: str) -> bool:
    """Whether work items of an architecture have room for more than one query of this spec."""
    return not spec.latent or 2 * spec.query_heads <= latent_query_tiles(arch)[-1]


def packs(spec: AttentionSpec, arch: str) -> bool:
    """Whether queries of this spec are packed: work items have room for several, or for one and enough of another (`PackConfig.straddled_rows`). Where a query fills
    them, requests wait for products of matrices, not for KV: reading latents once for several requests saves nothing then (benchmarks/notes/latents.md, "Beside FA3,
    FlashInfer and FlashMLA")."""
    if holds_several(spec, arch):
        return True
    config = PackConfig.of(spec, TileTable(latent_query_tiles(arch)), workers=1)
    return config.straddled_rows == WARPGROUP_ROWS and config.cost.group <= STRADDLING_ROWS.get(spec.kv.bits, 0)


def straddles(spec: AttentionSpec, query_tiles: tuple[int, ...]) -> bool:
    """Whether queries of this spec may straddle work items in plans with these tiles; kernels run them with modules made for that (`cuda.Variant.straddles`)."""
    return PackConfig.of(spec, TileTable(query_tiles), workers=1).straddled_rows > 0


def latent_spec_problem(spec: AttentionSpec) -> str | None:
    """What in a spec with latents the CUDA kernels cannot compute."""
    if (spec.head_dim, spec.v_head_dim) not in LATENT_DIMS or spec.kv_heads != 1:
        known = " or ".join(f"{dim} and {v_dim}" for dim, v_dim in LATENT_DIMS)
        wanted = f"{spec.kv_heads} KV heads with {spec.head_dim} (K) and {spec.v_head_dim} (V) columns"
        return f"latents of {wanted} (one KV head with {known} is)"
    if spec.kv.name not in (*CUDA_DTYPES, *FP8.values()):
        return f"latents of {spec.kv.name}"
    return None


def tiles_for_drafts(query_tiles: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """Those of an architecture's tiles that a module for drafts has. Where a draft has more rows than the smallest, and no more than a single warp
    computes, it is never run with that one; without its code small batches took 4 % less (benchmarks/notes/code-placement.md, "Less code for
    drafts of 16 rows").

    Args:
        query_tiles: As `query_tiles` returns it.
        rows: Of a draft: query heads of a KV head for each of its tokens.
    """
    return query_tiles[1:] if query_tiles[0] < rows <= NARROW_M and len(query_tiles) > 1 else query_tiles


def has_tails(query_tiles: tuple[int, ...], rows: int, kv: KVFormat, head_dim: int) -> bool:
    """Whether a module has work items with tails (`plan.WorkItem`), which need a warpgroup for each query. Pages of few bits have a loader of
    their own, which does not know them.

    Args:
        query_tiles: As `query_tiles` returns it.
        rows: Of a query: query heads of a KV head for each of its tokens.
        kv: How K and V are stored.
        head_dim: K's, one of HEAD_DIMS.
    """
    return (
        head_dim <= TAILS_DIM
        and kv.layout == "plain"
        and TileTable(query_tiles, tails_m=WARPGROUP_ROWS).tails_queries(rows) > 1
    )


def tile_table(
    arch: str, head_dim: int, gpu: str = "", table: GpuTable | None = None, kv: KVFormat = FORMATS["bfloat16"]
) -> TileTable:
    """The tiles of a GPU, with their prices if these are known.

    Args:
        arch: Compute capability, such as `8.0` or `9.0a`.
        head_dim: K's, one of HEAD_DIMS.
        gpu: The GPU's name.
        table: Prices to use instead of the GPU's own table.
        kv: How K and V are stored. Pages of few bits have no prices where they have no wide tiles.

    Raises:
        ValueError: `table` is given, and has no prices of these tiles.
    """
    tiles = query_tiles(arch, head_dim, kv)
    if tiles[-1] == NARROW_M:
        return TileTable(tiles, warp_m=NARROW_M, warp_tokens=WARP_TOKENS)
    chosen, table = table, table or devices.find(arch, gpu, head_dim)
    # Prices of 128 dimensions scaled up make worse plans than no prices (benchmarks/notes/prices.md, "Larger head dimensions"). Those of latents are of other
    # kernels.
    if table is not None and (
        head_dim == table.head_dim or (head_dim <= MEASURED_DIM and head_dim < table.head_dim <= HEAD_DIMS[-1])
    ):
        by_warps = max(m for m in tiles if m <= NARROW_M)
        priced = table.tiles(tiles, head_dim, by_warps, WARP_TOKENS, kv)
        if priced is not None and by_warps < NARROW_M:
            priced = msgspec.structs.replace(priced, slice_token_ns=0)  # kernels slice by NARROW_M rows
        if priced is not None:
            tails = kv.layout == "plain" and head_dim <= TAILS_DIM
            return msgspec.structs.replace(priced, tails_m=WARPGROUP_ROWS) if tails else priced
    # A model's larger dimensions have a table of their own or none: one of others is no fault.
    if chosen is not None and (head_dim <= MEASURED_DIM or chosen.head_dim == head_dim):
        raise _unpriced(head_dim, kv.bits)
    return TileTable(tiles)


def _unpriced(head_dim: int, kv_bits: int) -> ValueError:
    return ValueError(f"it has no prices for head dimension {head_dim} with KV of {kv_bits} bits")


def tile_table_of(spec: AttentionSpec, arch: str, gpu: str = "", table: GpuTable | None = None) -> TileTable:
    """`tile_table` for a spec: the tiles that its plans are made with.

    Raises:
        ValueError: `table` is given, and has no prices of these tiles. With latents only one of their dimension is to have them: others are passed over,
            as `tile_table` does with larger dimensions.
    """
    if spec.latent:
        tiles = latent_query_tiles(arch)
        chosen, table = table, table or devices.find(arch, gpu, spec.head_dim)
        if table is None or table.head_dim != spec.head_dim:
            return TileTable(tiles)
        # A CTA computes every item together: there are no tiles of single warps.
        priced = table.tiles(tiles, spec.head_dim, 0, 1, spec.kv)
        if priced is None and chosen is not None:
            raise _unpriced(spec.head_dim, spec.kv.bits)
        return priced or TileTable(tiles)
    return tile_table(arch, spec.head_dim, gpu, table, spec.kv)


def batch_invariant(tiles: TileTable) -> TileTable:
    """Of a GPU's tiles those that add up a query's KV in the same order, whatever else a work item has, in modules made for that (`cuda.Variant.batch_invariant`):
    items of fewer rows are divided by length among warps. Plans in pieces have no tails."""
    return msgspec.structs.replace(tiles.above(NARROW_M), tails_m=0)


def low_bit_problem(head_dim: int, v_head_dim: int) -> str | None:
    """What of these dimensions of K and V is not kept in pages of few bits."""
    if head_dim != v_head_dim:
        return f"head dimensions of {head_dim} (K) and {v_head_dim} (V)"
    if head_dim % LOW_BIT_HEAD_DIM_STEP or head_dim > CPU_HEAD_DIM:
        return f"a head dimension of {head_dim} (multiples of {LOW_BIT_HEAD_DIM_STEP} up to {CPU_HEAD_DIM} are)"
    return None


def pages_problem(spec: AttentionSpec, arch: str = "", limits: bool = False) -> str | None:
    """What in a spec with KV of few bits the CUDA kernels cannot compute; on any GPU, if `arch` is empty."""
    form = f"a KV cache of {spec.kv.name} on a GPU"
    if spec.head_dim != spec.v_head_dim or spec.head_dim not in PAGES_HEAD_DIMS:
        dims = " and ".join(map(str, PAGES_HEAD_DIMS))
        return f"head dimensions of {spec.head_dim} (K) and {spec.v_head_dim} (V) with {form} ({dims} for both are)"
    if spec.window or spec.query_tokens > 1 or limits:
        return f"windows, drafts and extends with {form}"
    if arch and arch not in LARGE_SHARED:
        return f"{form} of compute capability {arch}, which has too little shared memory"
    return None


def _dims_problem(*dims: int) -> str | None:
    """What of these dimensions of K and V the CUDA kernels cannot compute."""
    if dims in UNEQUAL_HEAD_DIMS or (dims[0] == dims[1] and dims[0] in HEAD_DIMS):
        return None
    wanted = (
        f"a head dimension of {dims[0]}" if dims[0] == dims[1] else "head dimensions of {} (K) and {} (V)".format(*dims)
    )
    equal = ", ".join(map(str, HEAD_DIMS))
    unequal = ", ".join("{} for K with {} for V".format(*pair) for pair in UNEQUAL_HEAD_DIMS)
    return f"{wanted} on a GPU ({equal} for both K and V are, and {unequal})"


def refusal(spec: AttentionSpec, device: Device) -> str | None:
    """What in a spec the device's executor cannot compute; None if it computes everything."""
    if spec.kv.name not in KV_FORMATS[device]:
        return f"a KV cache of {spec.kv.name}"
    if spec.kv.layout == "pages":
        windows = f"windows with a KV cache of {spec.kv.name}" if spec.window else None
        return pages_problem(spec) if device == "cuda" else windows or low_bit_problem(spec.head_dim, spec.v_head_dim)
    if device == "cuda":
        return latent_spec_problem(spec) if spec.latent else _dims_problem(spec.head_dim, spec.v_head_dim)
    most = CPU_LATENT_DIM if spec.latent else CPU_HEAD_DIM
    for dim in (spec.head_dim, spec.v_head_dim):
        if dim % CPU_HEAD_DIM_STEP or dim > most:
            return f"a head dimension of {dim} (multiples of {CPU_HEAD_DIM_STEP} up to {most} are)"
    return None
