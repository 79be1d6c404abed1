"""Extends over KV of 4 and 2 bits as one call of a paged attention with pages of 64 tokens. No server does so yet: it is for GPUs.

A query sees its request's full pages in few bits, and what is behind them as it was computed. Which pages are full depends on how many tokens it sees.
So queries that have the same number of full pages are a sequence of their own (a block): its pages are the full ones, dequantised, and then the
unfinished one. Causal attention, aligned at the last token, is then exactly what the CPU executor computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import torch

from sglang_pat.kernels import low_bit

PAGE = low_bit.PAGE_TOKENS


class Blocks(msgspec.Struct, frozen=True):
    """The sequences of an extend, and what is in the pages that they read: first the dequantised ones, then the unfinished ones.

    Attributes:
        pages: [dequantised], int64: pages of the pool, each once, in order.
        places: [unfinished, 64], int64: for each token of the unfinished pages its index among the tails of all rows followed by the new tokens.
            Behind the end of a sequence it is any index.
        table: [blocks, most pages], int32: the pages of each sequence; behind its last one any page.
        lengths: [blocks], int32: tokens of each sequence.
        starts: [blocks + 1], int32: where the queries of each begin among the new tokens, with the end of the last.
        longest: Queries of the largest block, at most 64.
    """

    pages: torch.Tensor
    places: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    longest: int

    @classmethod
    def of(cls, req_to_token: torch.Tensor, rows: Sequence[int], cached: Sequence[int], added: Sequence[int]) -> Blocks:
        """
        Args:
            req_to_token: [rows, context], int32: the slot of each position, those of the new tokens included.
            rows, cached, added: For each request its row, its tokens before the extend, and its new tokens.
        """
        device = req_to_token.device
        request_of, full, ends, starts, new_of = [], [], [], [0], []
        begin = 0
        for request, (before, more) in enumerate(zip(cached, added, strict=True)):
            seen, last = before, before + more
            while seen < last:
                pages = (seen + 1) // PAGE
                upto = min(last, PAGE * pages + PAGE - 1)
                request_of.append(request)
                full.append(pages)
                ends.append(upto)
                starts.append(starts[-1] + upto - seen)
                new_of.append(begin - before)
                seen = upto
            begin += more

        def tensor(values: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        most = max(full, default=0)
        block_rows = tensor([rows[request] for request in request_of])
        counts = tensor(full)
        columns = torch.arange(most, device=device)
        is_full = columns < counts[:, None]
        named = (req_to_token[block_rows[:, None], columns * PAGE] // PAGE).long()
        pages, inverse = torch.unique(named[is_full], return_inverse=True)
        table = torch.zeros(len(full), most + 1, dtype=torch.int32, device=device)
        table[:, :most][is_full] = inverse.int()
        unfinished = tensor([i for i, (count, end) in enumerate(zip(full, ends, strict=True)) if end > PAGE * count])
        table[unfinished, counts[unfinished]] = len(pages) + torch.arange(len(unfinished), device=device).int()
        # In an unfinished page: what was cached is in the row's tail, the rest is new.
        old = tensor([cached[request] for request in request_of])[unfinished, None]
        positions = counts[unfinished, None] * PAGE + torch.arange(PAGE, device=device)
        in_tail = block_rows[unfinished, None] * PAGE + positions % PAGE
        new = len(req_to_token) * PAGE + tensor(new_of)[unfinished, None] + positions
        behind = positions >= tensor(ends)[unfinished, None]
        places = torch.where(behind | (positions < old), in_tail, new)
        sizes = [end - start for start, end in itertools.pairwise(starts)]
        return cls(pages, places, table, tensor(ends, torch.int32), tensor(starts, torch.int32), max(sizes, default=0))

    def unfinished(self, tails: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """The unfinished pages, [unfinished, 64, kv_heads, head_dim], before the new tokens are stored.

        Args:
            tails: K or V of [rows, 64, kv_heads, head_dim].
            new: The same of the new tokens, [tokens, kv_heads, head_dim].
        """
        return torch.cat([tails.flatten(0, 1), new])[self.places]
