"""KV in pages of few bits, written token by token, and what attention on it is."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import kernel_cases
import msgspec
import reference
import torch

from sglang_pat.kernels import cpu, low_bit
from sglang_pat.kernels.arguments import KvView
from sglang_pat.packing import FORMATS, Batch, Node

PAGE = low_bit.PAGE_TOKENS


def with_pages_for_tokens(batch: Batch) -> Batch:
    """The same tree with a page for each token of its nodes, as SGLang's has; tails end anywhere, some with a page."""
    generator = random.Random(len(batch.seq_lens))

    def grow(nodes: list[Node]) -> list[Node]:
        return [Node(PAGE * node.start, PAGE * node.end, node.queries, grow(node.children)) for node in nodes]

    lengths = [PAGE * (length - 1) + generator.choice([1, 17, 63, 64, 64 + 40]) for length in batch.seq_lens]
    return Batch(lengths, grow(batch.roots))


class Written:
    """A case whose KV is written token by token to a pool of pages that was full of NaN; what nobody wrote still is."""

    def __init__(self, case: kernel_cases.Case, form: str, lengths: list[int], table: torch.Tensor) -> None:
        self.case, self.bits = case, FORMATS[form].bits
        case.spec = msgspec.structs.replace(case.spec, kv=FORMATS[form])
        self.heads, self.dim = case.k.shape[1:]
        size = low_bit.record_bytes(self.bits, self.dim)
        self.records = torch.full((len(case.k) // PAGE, self.heads, size), 0xFF, dtype=torch.uint8)
        self.tails = torch.full((2, len(case.table), PAGE, self.heads, self.dim), math.nan, dtype=case.k.dtype)
        # Requests take turns, a few tokens each.
        for begin in range(0, max(lengths), 50):
            for row, length in zip(table.tolist(), lengths, strict=True):
                positions = torch.arange(length)[begin : begin + 50]
                if len(positions):
                    slots = case.table[row, positions].long()
                    low_bit.store(
                        case.k[slots], case.v[slots], self.records, *self.tails, torch.full_like(slots, row), positions + 1, slots, self.bits,
                    )  # fmt: skip

    def attention(
        self, plan: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tails: torch.Tensor, cap: float
    ) -> torch.Tensor:
        kv = KvView(k, v, pages=low_bit.Pages(self.records, self.bits, tails))
        return cpu.attention(self.case.q, kv, self.case.tables, self.case.scores(cap), plan)

    def decode(self, plan: torch.Tensor, cap: float = 0.0) -> torch.Tensor:
        """What is behind full pages is in the requests' tails."""
        tails = self.case.rows * PAGE - low_bit.in_pages(self.case.seq_lens)
        return self.attention(plan, *self.tails.flatten(1, 2), tails, cap)

    def reference(self, cap: float = 0.0) -> torch.Tensor:
        """In float64 on what the pages say, and what is behind them as it was written."""
        case = self.case
        read = [x.flatten(0, 1) for x in low_bit.unpack(self.records, self.bits, self.dim)]
        table = case.table[case.rows].clone()
        behind = torch.arange(table.shape[1]) >= low_bit.in_pages(case.seq_lens)[:, None]
        table[behind] += len(case.k)
        pools = [torch.cat([page, pool.float()]) for page, pool in zip(read, (case.k, case.v), strict=True)]
        return reference.decode(
            case.q, *pools, table, torch.arange(len(table)), case.seq_lens, scale=case.scale, logit_cap=cap, sinks=case.sinks
        )  # fmt: skip

    def error(self, out: torch.Tensor, cap: float = 0.0) -> float:
        right = self.reference(cap)
        assert torch.isfinite(out).all()
        return ((out.double() - right).norm() / right.norm()).item()


class Paged(kernel_cases.Case):
    """The same for a decoder on a GPU, or for an emulated one: the case's K and V are tails."""

    def __init__(
        self, batch: Batch, heads: int, kv_heads: int, dim: int, form: str, dtype: torch.dtype = torch.bfloat16, device: str = "cpu",
        sinks: bool = False, edit: Callable[[kernel_cases.Case], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """`edit` changes the case's numbers before they are written."""
        super().__init__(batch, heads, kv_heads, dim, dim, dtype, page_size=PAGE, sinks=sinks)
        edit(self)
        written = Written(self, form, batch.seq_lens, self.rows)
        self._right = {cap: written.reference(cap).to(device) for cap in (0.0, 5.0)}
        self.k, self.v = written.tails.flatten(1, 2).to(device)
        self.records = written.records.to(device)
        self.q, self.table, self.rows, self.seq_lens = (
            x.to(device) for x in (self.q, self.table, self.rows, self.seq_lens)
        )
        if self.sinks is not None:
            self.sinks = self.sinks.to(device)

    def reference(self, logit_cap: float = 0.0) -> torch.Tensor:
        return self._right[logit_cap]


class Stored:
    """Records and tails in which the same tokens are stored by the CPU and by the kernel."""

    def __init__(
        self, form: str, rows: int, pages: int, decoder: Any, dtype: torch.dtype = torch.bfloat16, device: str = "cpu",
        dim: int = 128,
    ) -> None:  # fmt: skip
        heads = 2
        self.decoder, self.bits, self.shape, self.dtype, self.device = (
            decoder,
            FORMATS[form].bits,
            (heads, dim),
            dtype,
            device,
        )
        records = torch.randint(256, (pages, heads, low_bit.record_bytes(self.bits, dim)), dtype=torch.uint8)
        tails = torch.randn(2, rows, PAGE, heads, dim).to(dtype)
        self.right, self.found = ((records.clone(), tails.clone()) for _ in range(2))

    def store(self, tokens: list[tuple[int, int, int]], k: torch.Tensor, v: torch.Tensor) -> None:
        """Tokens are (row, length, slot)."""
        indices = torch.tensor(tokens, dtype=torch.int64).view(-1, 3).unbind(1)
        records, tails = self.right
        good = [i for i, token in enumerate(tokens) if self.exists(*token)]
        low_bit.store(k[good], v[good], records, *tails, *(x[good].contiguous() for x in indices), self.bits)
        given = [x.to(self.device) for x in (k, v, self.found[0], *self.found[1], *(x.contiguous() for x in indices))]
        self.decoder.store(*given)
        self.found = given[2].cpu(), torch.stack([tail.cpu() for tail in given[3:5]])

    def exists(self, row: int, length: int, slot: int) -> bool:
        records, tails = self.right
        return 0 <= row < tails.shape[1] and length > 0 and PAGE <= slot < PAGE * len(records)

    def same(self) -> bool:
        pairs = zip(self.right, self.found, strict=True)
        return all(torch.equal(right.view(torch.uint8), found.view(torch.uint8)) for right, found in pairs)

    def random(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Some with channels and tokens that are constant, zero of both signs, huge or broken."""
        k, v = torch.randn(2, count, *self.shape)
        for x in (k, v):
            x[..., 3], x[..., 4], x[..., 5] = (
                2.5,
                torch.tensor([0.0, -0.0])[torch.arange(count) % 2][:, None],
                6e4 * x[..., 5],
            )
            x[torch.rand(count) < 0.1, 0] = 0.0
            x[torch.rand(x.shape) < 1e-3] = random.Random(count).choice([float("nan"), float("inf"), -float("inf")])
        return k.to(self.dtype), v.to(self.dtype)
