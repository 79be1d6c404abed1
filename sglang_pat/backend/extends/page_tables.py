"""Extends over KV of 4 and 2 bits as calls of a paged attention with pages of 64 tokens, which GPUs run them as.

A query sees its request's full pages in few bits, and what is behind them as it was computed. Which pages are full depends on how many tokens it sees.
So queries that have the same number of full pages are a sequence of their own (a block): its pages are the full ones, dequantised, and then the
unfinished one. Causal attention, aligned at the last token, is then exactly what the CPU executor computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import torch

from sglang_pat.backend.tensors import to_device
from sglang_pat.kernels import low_bit

PAGE = low_bit.PAGE_TOKENS


def cut(cached: int, added: int) -> Iterator[tuple[int, int]]:
    """The blocks of a request's new tokens: how many full pages each sees, and how many tokens its last query sees."""
    seen, last = cached, cached + added
    while seen < last:
        full = (seen + 1) // PAGE
        seen = min(last, PAGE * full + PAGE - 1)
        yield full, seen


def unfinished_pages(cached: int, added: int) -> int:
    """How many blocks of a request see an unfinished page."""
    return sum(end > PAGE * full for full, end in cut(cached, added))


class Blocks(msgspec.Struct, frozen=True):
    """The sequences of some requests of an extend, and what is in the pages that they read: first the dequantised ones, then the unfinished ones.

    Attributes:
        pages: [dequantised], int64: pages of the pool, each once.
        new: [unfinished * 64], int64: for each token of the unfinished pages its index among the requests' new tokens. For those that the old ones
            replace, and behind the end of a sequence, it is another one of the same request.
        old: [old], int64: which tokens of the unfinished pages were cached.
        tails: [old], int64: their indices among the tails of all rows.
        table: [blocks, most pages], int32: the pages of each sequence; its last one again behind that.
        lengths: [blocks], int32: tokens of each sequence.
        starts: [blocks + 1], int32: where the queries of each begin among the new tokens, with the end of the last.
        longest: Queries of the largest block, at most 64.
    """

    pages: torch.Tensor
    new: torch.Tensor
    old: torch.Tensor
    tails: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    longest: int

    @classmethod
    def of(
        cls, pages: torch.Tensor, rows: Sequence[int], cached: Sequence[int], added: Sequence[int], device: torch.device
    ) -> Blocks:
        """Made on the host, and copied to `device` without waiting for it.

        Args:
            pages: [requests, most], int64, on the host: the full pages of each request after the extend; behind them anything.
            rows, cached, added: For each request its row, its tokens before the extend, and its new tokens.
            device: Where it is needed.
        """
        request_of, full, ends, starts = [], [], [], [0]
        for request, (before, more) in enumerate(zip(cached, added, strict=True)):
            begin = before
            for count, end in cut(before, more):
                request_of.append(request)
                full.append(count)
                ends.append(end)
                starts.append(starts[-1] + end - begin)
                begin = end
        owners, counts, lengths = (torch.tensor(values, dtype=torch.int64) for values in (request_of, full, ends))
        old, new, row = (torch.tensor(list(values), dtype=torch.int64) for values in (cached, added, rows))
        columns = torch.arange(pages.shape[1] + 1)

        # Of a request with no new tokens nothing is read.
        named = columns[:-1] < torch.where(new > 0, (old + new) // PAGE, 0)[:, None]
        own, inverse = torch.unique(pages[named], return_inverse=True)
        table_of = torch.zeros(len(row), len(columns), dtype=torch.int64)
        table_of[:, :-1][named] = inverse
        table = table_of[owners]
        behind = lengths > PAGE * counts
        table[behind, counts[behind]] = len(own) + torch.arange(int(behind.sum()))
        last = torch.where(behind, counts, counts - 1)
        table = table.gather(1, torch.minimum(columns, last[:, None]))

        # Unfinished pages: what was cached is in the row's tail, the rest is new.
        owner = owners[behind, None]
        positions = PAGE * counts[behind, None] + torch.arange(PAGE)
        first = (new.cumsum(0) - new)[owner]
        among_new = first + torch.minimum(positions.clamp(min=old[owner]), lengths[behind, None] - 1) - old[owner]
        is_old = positions < old[owner]
        tails = row[owner] * PAGE + positions % PAGE
        ends_of_blocks = torch.tensor(starts, dtype=torch.int32)

        of_pages, of_new, of_old, of_tails, of_table, of_lengths, of_starts = to_device(
            device, own, among_new.flatten(), is_old.flatten().nonzero().flatten(), tails[is_old], table.int(), lengths.int(),
            ends_of_blocks,
        )  # fmt: skip
        longest = int(ends_of_blocks.diff().max()) if ends else 0
        return cls(of_pages, of_new, of_old, of_tails, of_table, of_lengths, of_starts, longest)

    @property
    def used(self) -> int:
        """How many pages the sequences read."""
        return len(self.pages) + len(self.new) // PAGE

    def fill_unfinished(self, workspace: torch.Tensor, tails: torch.Tensor, new: torch.Tensor) -> None:
        """Write the unfinished pages, before the new tokens are stored.

        Args:
            workspace: K or V of [pages, 64, kv_heads, head_dim], contiguous: those behind the dequantised ones are written.
            tails: K or V of [rows, 64, kv_heads, head_dim].
            new: The same of the requests' new tokens, [tokens, kv_heads, head_dim].
        """
        made = workspace[len(self.pages) : self.used].flatten(0, 1)
        torch.index_select(new, 0, self.new, out=made)
        made.index_copy_(0, self.old, tails.flatten(0, 1).index_select(0, self.tails))
