"""Packing by FastTree's cost model, which counts computation on padding (the paper's ablation PAT-compute, §8.5)."""

from __future__ import annotations

from sglang_pat.packing.heuristic import Choice, Pack, collect
from sglang_pat.packing.prices import PackConfig
from sglang_pat.packing.tree import Batch, Prefix

ALPHA, BETA, GAMMA = 0.66, 0.33, 0.1
"""Weights of padded queries, of padded KV, and of the reduction of a query (FastTree-Artifact, kernel_bench/fasttree.py)."""

LARGE, SMALL = (64, 32), (16, 128)
"""FastTree's two tiles (query rows, KV positions); the small one is for up to 16 queries."""


def pack_compute(prefixes: list[Prefix], batch: Batch, config: PackConfig) -> list[Pack]:
    """FastTree's greedy rule: for each child in turn, split along queries if that is cheaper than along KV."""
    group = config.cost.group

    def padding(queries: int, tokens: int) -> float:
        m, n = SMALL if queries <= SMALL[0] else LARGE
        return ALPHA * (-queries % m) * group * tokens + BETA * max(0, n - tokens) * queries * group

    def choose(index: int, start: int, above: bool) -> Choice:
        prefix = prefixes[index]
        length = prefix.end - start
        remaining = len(prefix.queries)

        def joins(queries: int, tokens: int) -> bool:
            nonlocal remaining
            along_kv = padding(remaining, length) + padding(queries, tokens) + GAMMA * queries
            along_queries = padding(remaining - queries, length) + padding(queries, length + tokens)
            if along_kv > along_queries:
                remaining -= queries
                return True
            return False

        children = [prefixes[child] for child in prefix.children]
        return Choice(
            [joins(len(child.queries), child.end - child.start) for child in children],
            [joins(1, batch.seq_lens[query] - prefix.end) for query in prefix.leaves],
        )

    return collect(prefixes, choose)
