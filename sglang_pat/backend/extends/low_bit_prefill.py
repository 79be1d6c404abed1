"""Extends over KV of 4 and 2 bits on a GPU: pages are dequantised into a workspace, over which a paged attention runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from sglang_pat import compat
from sglang_pat.backend.extends.page_tables import PAGE, Blocks, unfinished_pages
from sglang_pat.backend.extends.paged_attention import PagedAttention
from sglang_pat.backend.kv.pages import LowBitKVPool, shared_kv
from sglang_pat.backend.tensors import by_token, lengths, to_device
from sglang_pat.radix_bridge import hooks

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from sglang_pat.backend.groups import LayerGroup


class Call(msgspec.Struct, frozen=True):
    """Consecutive requests of an extend whose pages fit in the workspace.

    Attributes:
        tokens: Which of the batch's new tokens are theirs.
        rows, seq_lens: [tokens], int64: of each its request's row, and how many tokens it sees.
        blocks: Their sequences.
    """

    tokens: slice
    rows: torch.Tensor
    seq_lens: torch.Tensor
    blocks: Blocks


class LowBitPrefill:
    """Runs all extends, each whole; in place of `prefill.Prefill`.

    Attributes:
        extend: None: nothing is planned.
        mixed_steps: 0: mixed chunks are refused.
    """

    extend = None
    mixed_steps = 0

    def __init__(
        self, pool: LowBitKVPool, req_to_token: torch.Tensor, workspace: torch.Tensor, unpack: Mapping[str, Callable[..., None]],
        attention: PagedAttention, group_of: Callable[..., LayerGroup],
    ) -> None:  # fmt: skip
        """
        Args:
            pool: Where KV is, its tails made.
            req_to_token: [rows, context], int32: SGLang's.
            workspace: [2, pages, 64, kv_heads, head_dim], of Q's dtype: for K and V of one layer. It must have pages for any one request
                (`low_bit.workspace_pages`); for a longer one a larger is made.
            unpack: Executors', by their format's name.
            attention: Runs the calls.
            group_of: Returns a layer's group, given the layer and the options of its forward (`LayerGroups.of`).
        """
        self._pool, self._req_to_token, self._workspace = pool, req_to_token, workspace
        self._unpack, self._attention, self._group_of = unpack, attention, group_of
        self._calls: list[Call] = []

    def begin(self, forward_batch: ForwardBatch, check: Callable[..., None] | None = None) -> None:
        """Lay out a batch's extend, before its layers run. There is no plan to `check`."""
        cached, added = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
        size = min(len(cached), len(added))
        cached, added = list(cached[:size]), list(added[:size])
        named = hooks.rows_of(forward_batch)
        given = forward_batch.req_pool_indices[:size].long()
        # SGLang's dry runs have rows on the GPU only.
        rows = (named if named is not None and len(named) >= size else given)[:size].tolist()
        pages = self._full_pages(given, cached, added)
        self._calls = self._cut_in_calls(pages, rows, cached, added)
        most = max((call.blocks.used for call in self._calls), default=0)
        if most > self._workspace.shape[1]:
            # One request that is longer than any should be.
            self._workspace = self._workspace.new_empty(2, most, *self._workspace.shape[2:])

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch,
        save_kv_cache: bool, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        """One layer's attention, [tokens, heads * v_head_dim]; padding is zero."""
        self._group_of(layer, **options)  # refuses options that nobody knows
        if not save_kv_cache or k is None:
            raise shared_kv(layer)
        slots = forward_batch.out_cache_loc
        k, v = self._pool.of_heads(k), self._pool.of_heads(v)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        found = [
            self._run(call, q[call.tokens], k[call.tokens], v[call.tokens], layer, slots[call.tokens])
            for call in self._calls
        ]
        padding = len(q) - sum(map(len, found))
        if padding or not found:
            found.append(q.new_zeros(padding, *q.shape[1:]))
        out = found[0] if len(found) == 1 else torch.cat(found)
        return out.flatten(1)

    def _run(
        self, call: Call, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, slots: torch.Tensor
    ) -> torch.Tensor:
        pool, blocks, number = self._pool, call.blocks, layer.layer_id
        # Tails are read before they are written, and pages after the new tokens may have completed them.
        for workspace, tails, new in zip(self._workspace, pool.tails(number), (k, v), strict=True):
            blocks.fill_unfinished(workspace, tails, new)
        pool.store(number, k, v, call.rows, call.seq_lens, slots)
        self._unpack[pool.form_of(number).name](pool.full_pages(number), blocks.pages, *self._workspace)
        found_k, found_v = self._workspace[:, : blocks.used]
        return self._attention(q, found_k, found_v, blocks, layer.scaling, compat.model.logit_cap(layer))

    def _full_pages(self, rows: torch.Tensor, cached: Sequence[int], added: Sequence[int]) -> torch.Tensor:
        """The pages of the pool that are full after the extend: [requests, most], int64 on the host. Waits for the GPU, once an extend."""
        most = max((before + more for before, more in zip(cached, added, strict=True)), default=0) // PAGE
        # SGLang's dry runs may be longer than a row.
        firsts = (torch.arange(most, device=rows.device) * PAGE).clamp(max=self._req_to_token.shape[1] - 1)
        return (self._req_to_token[rows[:, None], firsts] // PAGE).to("cpu", torch.int64)

    def _cut_in_calls(
        self, pages: torch.Tensor, rows: Sequence[int], cached: Sequence[int], added: Sequence[int]
    ) -> list[Call]:
        """As many requests in each call as fit, pages that they share counted once."""
        room, device = self._workspace.shape[1], self._workspace.device
        seen = torch.zeros(len(self._pool.full_pages(self._pool.start_layer)), dtype=torch.bool)
        firsts, used = [0], 0
        for request, (before, more) in enumerate(zip(cached, added, strict=True)):
            own = pages[request, : (before + more) // PAGE if more else 0]
            unfinished = unfinished_pages(before, more)
            if used and used + int((~seen[own]).sum()) + unfinished > room:
                firsts.append(request)
                seen.zero_()
                used = 0
            used += int((~seen[own]).sum()) + unfinished
            seen[own] = True
        calls, begin = [], 0
        rows_of_tokens, seq_lens = to_device(device, by_token(rows, added), lengths(cached, added))
        for first, end in zip(firsts, [*firsts[1:], len(added)], strict=True):
            which = slice(first, end)
            tokens = slice(begin, begin + sum(added[which]))
            begin = tokens.stop
            if tokens.start < tokens.stop:
                blocks = Blocks.of(pages[which], rows[which], cached[which], added[which], device)
                calls.append(Call(tokens, rows_of_tokens[tokens], seq_lens[tokens], blocks))
        return calls
