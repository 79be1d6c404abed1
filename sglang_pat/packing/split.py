"""Packs that are too large for one work item: along queries (PAT §5.2) and along KV (§6)."""

from __future__ import annotations

from sglang_pat.packing.heuristic import Pack


def split_queries(packs: list[Pack], limit: int) -> list[Pack]:
    """Packs of at most `limit` queries, as even as can be."""
    result = []
    for pack in packs:
        for begin, end in _even_cuts(len(pack.queries), -(-len(pack.queries) // limit)):
            result.append(Pack(pack.start, pack.end, pack.queries[begin:end]))
    return result


def kv_length(pack: Pack, seq_lens: list[int]) -> int:
    """KV positions of a pack now; those of an open tail grow with its request."""
    return (seq_lens[pack.queries[0]] if pack.end is None else pack.end) - pack.start


def split_length(packs: list[Pack], seq_lens: list[int], kv_heads: int, workers: int, kv_tile: int) -> int:
    """The longest KV that one work item may have.

    The paper splits whatever exceeds the mean length. With a few long prefixes over many short tails that is
    far below what keeps every worker busy, and each cut costs a part per query. So no cut is finer than a
    worker's fair share of the whole, or than a KV tile.
    """
    lengths = [kv_length(pack, seq_lens) for pack in packs]
    total = sum(lengths)
    mean = -(-total // max(1, len(lengths)))
    fair = -(-total * kv_heads // workers)
    return max(mean, fair, kv_tile)


def split_kv(packs: list[Pack], seq_lens: list[int], length: int) -> list[Pack]:
    """Packs of at most `length` KV positions, in equal parts; the last part of an open tail stays open."""
    result = []
    for pack in packs:
        size = kv_length(pack, seq_lens)
        cuts = _even_cuts(size, -(-size // length))
        for begin, end in cuts[:-1]:
            result.append(Pack(pack.start + begin, pack.start + end, pack.queries))
        result.append(Pack(pack.start + (cuts[-1][0] if cuts else 0), pack.end, pack.queries))
    return result


def _even_cuts(size: int, pieces: int) -> list[tuple[int, int]]:
    return [(size * i // pieces, size * (i + 1) // pieces) for i in range(pieces)]
