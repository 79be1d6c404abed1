"""Extends by plan: the new tokens of several requests read shared cached KV together."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from sglang_pat import compat
from sglang_pat.backend.extends.halves import Halves, divide, trailing
from sglang_pat.backend.groups import LayerGroup
from sglang_pat.backend.kv import NewTokens, Store
from sglang_pat.backend.tensors import by_token, lengths, to_device
from sglang_pat.kernels.arguments import Scores, Tables
from sglang_pat.packing import layout
from sglang_pat.packing.native import ExtendPlan
from sglang_pat.radix_bridge import hooks

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

WINDOW_TABLE_SLOTS = 4 << 20
"""Slots that an extend's table for a pool of windows has on a GPU, at most: 16 MiB, and five times that while it is made, outside of what SGLang
reserves. 256 requests of 16,384 tokens; larger extends run on a stock backend. Where all are planned (deterministic inference) a table has as many as
the extend's requests times its longest, 128 MiB for 256 of 131,072 tokens, and is looked up so many at a time."""

STOCK_REUSE = 1.5
"""How much faster than its reads from memory a stock backend may be, which finds some of a shared prefix in the L2 cache. Planned extends whose price
was 0.73 of those reads took 1.02 times as long as FA3's on an H200, at 0.2 and less 0.65 to 0.94 (docs/measured-serving.md, "Short extends on one
document")."""


class Round(msgspec.Struct):
    """Some of an extend's new tokens, which one plan runs: as many as there is room for their parts.

    Attributes:
        tokens: Which ones.
        cached, added: What is in front of them, and how many there are, of each request of the extend.
    """

    tokens: slice
    cached: list[int]
    added: list[int]


def rounds(cached: Sequence[int], added: Sequence[int], piece: int, slots: int) -> list[Round]:
    """An extend's new tokens, in order, in rounds that need no more than so many parts. One round without pieces.

    Args:
        cached, added: Cached and new tokens of each request.
        piece: `PackConfig.piece`.
        slots: Parts that there is room for: as many as one token needs, at least.
    """
    firsts = np.concatenate([[0], np.cumsum(added)]).astype(np.int64)
    tokens = int(firsts[-1])
    if not piece:
        return [Round(slice(0, tokens), list(cached), list(added))]
    parts = np.concatenate([[0], np.cumsum(-(-lengths(cached, added).numpy() // piece))])
    found: list[Round] = []
    start = 0
    while start < tokens or not found:
        end = int(np.searchsorted(parts, parts[start] + slots, side="right")) - 1
        assert end > start or tokens == 0
        before, behind = (np.clip(place - firsts[:-1], 0, added) for place in (start, end))
        found.append(Round(slice(start, end), (np.array(cached) + before).tolist(), (behind - before).tolist()))
        start = end
    return found


class PackedExtend:
    """Runs extends of decoder layers by plan: one plan for each group of layers, or several one after the other, where there is room for the parts of some
    of the new tokens only.

    It runs all extends on a CPU, and on a GPU where they shall have the bits of decode steps (`PackConfig.piece`). Elsewhere it runs the requests at the
    end of a batch with few new tokens, and only if the plan costs less than what a stock backend takes, which reads each request's KV, some of it from the L2 cache. So there extends that share nothing go to a stock backend.

    Attributes:
        count: How many extends it ran.
        shared: How many of these read some prefix once for several requests.
    """

    def __init__(self, runner: ModelRunner, groups: Sequence[LayerGroup], store: Store) -> None:
        self.count = self.shared = 0
        self._groups, self._store = groups, store
        self._pools = runner.req_to_token_pool
        self._req_to_token: torch.Tensor = runner.req_to_token_pool.req_to_token
        self._pool = runner.token_to_kv_pool
        self._piece = groups[0].executor.pack_config.piece
        self._on_cpu = runner.device == "cpu"
        self._everything = self._on_cpu or self._piece > 0
        self._rounds: list[tuple[slice, dict[LayerGroup, torch.Tensor]]] = []  # with their plans, on the device
        # For each new token: its request's row, and how many tokens it sees. The window ones are for the pool for windows.
        self._rows = self._seq_lens = self._window_rows = self._window_table = torch.empty(0)
        self._window_slots: torch.Tensor | None = None
        self._failed = False

    def begin(self, forward_batch: ForwardBatch, check: Callable[..., None] | None) -> Halves | None:
        """Plan a batch's extend, before its layers run.

        Args:
            check: Called with a plan's items, each query's row, a function that returns their lengths, and the window (`check_plan`).

        Returns:
            The batch in two parts, of which the second is planned; None if nothing is.
        """
        first = 0 if self._everything else self._first_short(forward_batch)
        if first is None:
            return None
        all_cached, all_added = self._tokens(forward_batch)
        cached, added = all_cached[first:], all_added[first:]
        apart = compat.pool.has_window_pool(self._pool)
        longest = max(map(sum, zip(cached, added, strict=True)), default=0)
        if apart and not self._everything and len(added) * longest > WINDOW_TABLE_SLOTS:
            return None
        requests = self._named(forward_batch, first, len(added))
        slots = min(group.executor.max_slots for group in self._groups)
        found = rounds(cached, added, self._piece, slots)
        made = [{group: self._plan(group, requests, one.cached, one.added) for group in self._groups} for one in found]
        # Before anything is divided or copied: most extends of a GPU end here.
        if not self._everything and not self._pays(made[0]):
            return None
        parts = self._divided(forward_batch, all_added, first)
        batch = parts.second
        device, rows = batch.req_pool_indices.device, self._rows_on_host(batch, len(added))
        data = [torch.from_numpy(plan.data) for plans in made for plan in plans.values()]
        places = [by_token(range(len(added)), added)] if apart else []
        self._rows, self._seq_lens, *moved = to_device(
            device, by_token(rows, added), lengths(cached, added), *data, *places
        )
        on_device = iter(moved)
        self._rounds = [
            (one.tokens, {group: next(on_device) for group in plans}) for one, plans in zip(found, made, strict=True)
        ]
        if check is not None:
            for one, plans, (tokens, kept) in zip(found, made, self._rounds, strict=True):
                for group in [group for group, plan in plans.items() if not self._holds(group, plan, tokens, check)]:
                    plans[group] = self._plan(group, torch.full_like(requests, -1), one.cached, one.added)
                    (kept[group],) = to_device(device, torch.from_numpy(plans[group].data))
            if not self._everything and not self._pays(made[0]):
                return None
        self.count += 1
        self.shared += any(plan.shared for plans in made for plan in plans.values())
        self._store.begin_extend(rows, cached, added)
        if apart:
            # KV that its window has left behind maps to 0 there, and is not read.
            mapping, own = compat.pool.window_mapping(self._pool), batch.req_pool_indices[: len(added)].long()
            self._window_slots = mapping[batch.out_cache_loc]
            self._window_table = self._req_to_token[own, :longest]
            for some in self._window_table.split(max(1, WINDOW_TABLE_SLOTS // max(1, longest))):
                some.copy_(mapping[some.long()])
            self._window_rows = moved[-1]
        return parts

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, group: LayerGroup,
        forward_batch: ForwardBatch, save_kv_cache: bool, sinks: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """One layer's attention, [tokens, heads * v_head_dim]; padding is zero."""
        apart = compat.pool.in_window_pool(self._pool, layer)
        table, rows = (self._window_table, self._window_rows) if apart else (self._req_to_token, self._rows)
        tables = Tables(table, rows, self._seq_lens)
        new = NewTokens(forward_batch.out_cache_loc, self._rows, self._seq_lens, self._window_slots)
        new_k, new_v = (k, v) if save_kv_cache else (None, None)
        kv = self._store.extend(layer, new_k, new_v, new, tables)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        scores = Scores(layer.scaling, compat.model.logit_cap(layer), sinks)
        real = len(self._rows)
        parts = []
        for tokens, plans in self._rounds:
            own = Tables(table, rows[tokens], self._seq_lens[tokens])
            parts.append(group.executor.extend(q[tokens], kv, own, scores, plans[group]))
        if real < len(q):
            parts.append(parts[0].new_zeros(len(q) - real, *parts[0].shape[1:]))
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).flatten(1)

    def _first_short(self, forward_batch: ForwardBatch) -> int | None:
        """The first request from which on all have few new tokens; None if these are not several."""
        rows = hooks.rows_of(forward_batch)
        added = None if rows is None else compat.batch.new_tokens(forward_batch, len(rows))
        if added is None:
            return None
        # Requests with more new tokens fill a tile by themselves and do not share (csrc/packing/extend.h).
        first = trailing(added, max(group.executor.pack_config.max_queries for group in self._groups) - 1)
        return first if first < len(added) - 1 else None

    def _divided(self, forward_batch: ForwardBatch, added: list[int], first: int) -> Halves:
        """The batch in front of the request `first`, and from there on; `added` are the new tokens of all."""
        if self._everything:
            # A copy, because `Halves` changes its batches.
            return Halves(0, sum(added), None, copy.copy(forward_batch))
        return divide(forward_batch, added, first)

    def _pays(self, made: Mapping[LayerGroup, ExtendPlan]) -> bool:
        price = sum(plan.price * group.layers for group, plan in made.items())
        alone = sum(plan.alone * group.layers for group, plan in made.items())
        fits = all(layout.num_slots(plan.data) <= group.executor.max_slots for group, plan in made.items())
        return fits and price * STOCK_REUSE < alone and any(plan.shared for plan in made.values())

    def _tokens(self, forward_batch: ForwardBatch) -> tuple[list[int], list[int]]:
        """Cached and new tokens of each request."""
        cached, added = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
        if self._on_cpu or (self._everything and (cached is None or added is None)):
            # The extend of a draft, or a dry run, may have tensors only. On the CPU they cost nothing.
            cached, added = forward_batch.extend_prefix_lens.tolist(), forward_batch.extend_seq_lens.tolist()
        size = min(len(cached), len(added))
        return list(cached[:size]), list(added[:size])

    def _named(self, forward_batch: ForwardBatch, first: int, size: int) -> torch.Tensor:
        """The numbers of so many of the batch's requests, -1 for unknown ones; int64 on the host."""
        named = torch.full((size,), -1)
        rows = hooks.rows_of(forward_batch)
        if rows is not None:
            found = compat.requests.numbers(self._pools, rows[first:])[:size]
            named[: len(found)] = found
        return named

    def _rows_on_host(self, forward_batch: ForwardBatch, size: int) -> list[int]:
        rows = hooks.rows_of(forward_batch)
        # Of other batches nothing is planned on a GPU (`_first_short`), unless all are; then they are those of dry runs.
        found: list[int] = (forward_batch.req_pool_indices if rows is None else rows)[:size].tolist()
        return found

    def _plan(self, group: LayerGroup, requests: torch.Tensor, cached: list[int], added: list[int]) -> ExtendPlan:
        numbers = _int64(cached), _int64(added)
        try:
            return group.scheduler.extend(requests, *numbers)
        except Exception:
            self._report_failure()
            return group.scheduler.extend(torch.full_like(requests, -1), *numbers)

    def _holds(self, group: LayerGroup, plan: ExtendPlan, tokens: slice, check: Callable[..., None]) -> bool:
        try:
            check(layout.work_items(plan.data), self._rows[tokens], lambda: self._seq_lens[tokens], group.spec.window)
        except Exception:
            self._report_failure()
            return False
        return True

    def _report_failure(self) -> None:
        if not self._failed:
            self._failed = True
            logger.exception("planning failed: this extend shares nothing (reported once)")


def _int64(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)
