"""What the CUDA kernels offer to packing: their tiles, and what these take. Knows nothing of torch."""

from __future__ import annotations

from sglang_pat.packing import CostModel, TileTable

HEAD_DIMS = (64, 96, 128, 192, 256)

KV_TILE = 64
"""The n of every tile (`kTokens` in csrc/cuda/params.cuh)."""

ITEM_BYTES = 50_000
"""`CostModel.item_bytes`: what the plans of benchmarks/kernels.py ran best with on an H200 (benchmarks/NOTES.md)."""

HOPPER_TOKEN_BYTES = {8: 512, 16: 512, 64: 512, 128: 700, 192: 1000}
"""`TileTable.token_bytes` for 128 columns. A worker's share of an H200's bandwidth is 33 KB/us. 64 tokens take tiles of 128
and 192 rows 1.3 to 1.6 us; of the prices around that, plans ran best with these (benchmarks/NOTES.md, 2026-11-21)."""


def tile_table(arch: str, head_dim: int) -> TileTable:
    """The tiles of a GPU: 128 and 192 rows take several warpgroups (csrc/cuda/params.cuh, `groups`).

    Args:
        arch: Compute capability, such as `8.0` or `9.0a`.
        head_dim: One of HEAD_DIMS.
    """
    if head_dim > 128 or not arch.startswith("9."):
        return TileTable((8, 16, 64), kv_tiles=(KV_TILE,), kv_bounds=())
    token_bytes = tuple(price * head_dim // 128 for price in HOPPER_TOKEN_BYTES.values())
    return TileTable(tuple(HOPPER_TOKEN_BYTES), (KV_TILE,), (), token_bytes)


def cost_model(heads: int, kv_heads: int, head_dim: int, kv_bytes: int = 2) -> CostModel:
    """What plans for these kernels cost; `kv_bytes` of one element."""
    return CostModel(heads, kv_heads, head_dim, head_dim, kv_bytes, item_bytes=ITEM_BYTES)
