"""Packs with more queries than a tile has rows for (PAT §5.2), or too short for one that has them."""

from __future__ import annotations

from sglang_pat.packing.config import PackConfig
from sglang_pat.packing.heuristic import Pack


def split_queries(packs: list[Pack], seq_lens: list[int], config: PackConfig) -> list[Pack]:
    """Packs that are a work item each until they are cut: as few as `config.pieces` says, as even as can be."""
    result = []
    for pack in packs:
        size, pieces = len(pack.queries), config.pieces(len(pack.queries), kv_length(pack, seq_lens))
        for i in range(pieces):
            queries = pack.queries[size * i // pieces : size * (i + 1) // pieces]
            result.append(Pack(pack.start, pack.end, queries))
    return result


def kv_length(pack: Pack, seq_lens: list[int]) -> int:
    """KV positions of a pack now; those of an open tail grow with its request."""
    return (seq_lens[pack.queries[0]] if pack.end is None else pack.end) - pack.start
