"""What the CUDA kernels can: head dimensions, and tiles with what these take on a GPU. Knows nothing of torch."""

from __future__ import annotations

from sglang_pat.packing import CostModel, TileTable, devices
from sglang_pat.packing.devices import GpuTable

HEAD_DIMS = (64, 96, 128, 192, 256)

KV_TILE = 64
"""The n of every tile (`kTokens` in csrc/cuda/params.cuh)."""

NARROW_M = 16
"""Rows that a warp has for itself (`kNarrowM` in csrc/cuda/params.cuh)."""


def query_tiles(arch: str, head_dim: int) -> tuple[int, ...]:
    """Every m of an architecture's kernels: 128 and 192 rows take several warpgroups (csrc/cuda/params.cuh, `groups`).

    Args:
        arch: Compute capability, such as `8.0` or `9.0a`.
        head_dim: One of HEAD_DIMS.
    """
    return (8, 16, 64, 128, 192) if head_dim <= 128 and arch.startswith("9.") else (8, 16, 64)


def tile_table(arch: str, head_dim: int, gpu: str = "", table: GpuTable | None = None) -> TileTable:
    """The tiles of a GPU, with their prices where they are known.

    Args:
        arch: Compute capability, such as `8.0` or `9.0a`.
        head_dim: One of HEAD_DIMS.
        gpu: The name by which the GPU goes.
        table: Prices, if not those of the GPU's own table.
    """
    tiles = query_tiles(arch, head_dim)
    table = table or devices.find(arch, gpu)
    # Prices of 128 dimensions, scaled to more, make worse plans than none (benchmarks/NOTES.md, 2026-11-23).
    if table is not None and head_dim <= table.head_dim:
        priced = table.tiles(tiles, KV_TILE, head_dim, NARROW_M)
        if priced is not None:
            return priced
    return TileTable(tiles, (KV_TILE,), ())


def cost_model(heads: int, kv_heads: int, head_dim: int, tiles: TileTable, kv_bytes: int = 2) -> CostModel:
    """What plans for these kernels with these tiles cost; `kv_bytes` of one element."""
    splits = tiles.head_splits(heads, kv_heads)
    return CostModel(heads, kv_heads, head_dim, head_dim, kv_bytes, head_splits=splits)
