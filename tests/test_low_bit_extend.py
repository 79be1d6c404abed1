"""Extends over KV of few bits as blocks of a paged attention, which is torch's here: what the CPU executor computes."""

from __future__ import annotations

import random

import kernel_cases
import pytest
import torch
from page_cases import PAGE, Written

from sglang_pat.backend.low_bit_extend import Blocks
from sglang_pat.kernels import low_bit
from sglang_pat.packing import Batch, Node

pytestmark = pytest.mark.once


def paged_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Blocks, scale: float) -> torch.Tensor:
    """Causal and aligned at the last token, as FlashAttention with a page table."""
    outs, group = [], q.shape[1] // k.shape[2]
    starts = blocks.starts.tolist()
    for i, length in enumerate(blocks.lengths.tolist()):
        pages = blocks.table[i, : -(-length // PAGE)].long()
        own_k, own_v = (x[pages].flatten(0, 1)[:length].double().repeat_interleave(group, 1) for x in (k, v))
        own = q[starts[i] : starts[i + 1]].double()
        assert len(own) <= blocks.longest <= PAGE
        scores = torch.einsum("qhd,khd->hqk", own, own_k) * scale
        hidden = torch.arange(length) > torch.arange(len(own))[:, None] + length - len(own)
        outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), own_v))
    return torch.cat(outs)


def test_blocks_see_what_decode_steps_would() -> None:
    """Extends begin and end with a page or amid one, some before their first page is full; most share pages."""
    generator = random.Random(0)
    cached = [320, 320, 384, 321, 340, 383, 384, 330, 0, 64, 0, 63, 5] + [generator.randint(0, 200) for _ in range(6)]
    added = [3, 1, 2, 3, 64, 1, 140, 2, 70, 64, 64, 1, 58] + [
        generator.choice([1, 2, 63, 64, 65, 129]) for _ in range(6)
    ]
    batch = Batch(cached, [Node(0, 320, list(range(8)))])
    case = kernel_cases.Extended(batch, added, 8, 2, 32, 32, torch.float32, page_size=PAGE)
    lengths = [before + new for before, new in zip(cached, added, strict=True)]
    firsts = [sum(added[:i]) for i in range(len(added))]
    rows = case.rows[torch.tensor(firsts)]
    blocks = Blocks.of(case.table, rows.tolist(), cached, added)
    # The pool and the tails before the extend, and the pool after it.
    before = Written(case, "int4", cached, rows)
    after = Written(case, "int4", lengths, rows)
    slots = torch.cat([case.table[row, a:b].long() for row, a, b in zip(rows.tolist(), cached, lengths, strict=True)])
    workspace = [
        torch.cat([read, blocks.unfinished(tails, pool[slots])])
        for read, tails, pool in zip(
            low_bit.unpack(after.records[blocks.pages].contiguous(), after.bits, 32), before.tails, (case.k, case.v), strict=True
        )
    ]  # fmt: skip
    out = paged_attention(case.q, *workspace, blocks, case.scale)
    assert after.error(out.float()) < 1e-6
    assert len(blocks.pages) == len(blocks.pages.unique()) < int((blocks.lengths // PAGE).sum())


def test_an_extend_without_requests_has_no_blocks() -> None:
    blocks = Blocks.of(torch.zeros(3, 128, dtype=torch.int32), [1], [64], [0])
    assert blocks.lengths.tolist() == [] and blocks.starts.tolist() == [0] and blocks.longest == 0
