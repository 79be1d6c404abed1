"""The pack scheduler: batch in, plan out."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from sglang_pat.packing.cost import CostModel
from sglang_pat.packing.heuristic import Pack, pack_nodes, pack_queries, pack_tree
from sglang_pat.packing.optimal import pack_optimal
from sglang_pat.packing.plan import OPEN, Plan, WorkItem
from sglang_pat.packing.split import kv_length, split_kv, split_length, split_queries
from sglang_pat.packing.tiles import TileTable
from sglang_pat.packing.tree import Batch

TAIL_GROWTH = 2
"""A tail may grow to this multiple of the split length: replanning at every doubling makes the number of plans
logarithmic in the tokens generated."""

POLICIES: dict[str, Callable[[Batch, CostModel], list[Pack]]] = {
    "pat": pack_tree,
    "optimal": pack_optimal,
    "naive": lambda batch, cost: pack_nodes(batch),
    "query": lambda batch, cost: pack_queries(batch),
}
"""`pat` is the paper's heuristic, `optimal` moves the fewest bytes by the same model, `naive` packs every node and
`query` none (one query per CTA)."""


class PackConfig(msgspec.Struct, frozen=True):
    """What a plan depends on besides the batch.

    Attributes:
        cost: The model's shape and bytes.
        tiles: Tiles of the device.
        workers: Work items that run at the same time (SMs, CPU threads).
        policy: A key of `POLICIES`.
    """

    cost: CostModel
    tiles: TileTable
    workers: int
    policy: str = "pat"


def make_plan(batch: Batch, config: PackConfig) -> Plan:
    """Plan one batch.

    Packing pays by the model or is not done: where it would move more bytes than one query per CTA (many short
    prefixes, or splits that the policy did not foresee), the latter is returned.

    Args:
        batch: Sequence lengths (at least one token each) and prefix tree; see `tree.check`.
        config: Device and model.
    """
    plan = _finish(POLICIES[config.policy](batch, config.cost), batch, config)
    if config.policy == "query" or not batch.roots:
        return plan
    baseline = _finish(pack_queries(batch), batch, config)
    return min(plan, baseline, key=lambda candidate: candidate.bytes(config.cost))


def _finish(packs: list[Pack], batch: Batch, config: PackConfig) -> Plan:
    """Split what is too large, choose tiles, number the parts."""
    cost, tiles, seq_lens = config.cost, config.tiles, batch.seq_lens
    group = -(-cost.heads // cost.kv_heads)
    packs = split_queries(packs, tiles.max_queries(group))
    limit = split_length(packs, seq_lens, cost.kv_heads, config.workers, tiles.kv_tiles[-1])
    packs = split_kv(packs, seq_lens, limit)
    lengths = [kv_length(pack, seq_lens) for pack in packs]
    order = sorted(range(len(packs)), key=lambda i: lengths[i] * len(packs[i].queries), reverse=True)

    num_parts = [0] * len(seq_lens)
    items = []
    for i in order:
        pack = packs[i]
        parts = []
        for query in pack.queries:
            parts.append(num_parts[query])
            num_parts[query] += 1
        end = OPEN if pack.end is None else pack.end
        items.append(
            WorkItem(pack.start, end, pack.queries, parts, tiles.select(len(pack.queries) * group, lengths[i]))
        )
    tails = [length for pack, length in zip(packs, lengths, strict=True) if pack.end is None]
    steps = TAIL_GROWTH * limit - max(tails, default=0)
    return Plan(items, num_parts, steps, kv_tokens=sum(lengths), open_items=len(tails))
