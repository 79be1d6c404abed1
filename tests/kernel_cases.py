"""Random pools for a batch, what attention on them is, and what a decoder makes of them."""

from __future__ import annotations

import math
import random
from typing import Any, Self

import msgspec
import numpy as np
import reference
import torch
from oracle import make_plan

from sglang_pat.backend.start.layers import kv_format
from sglang_pat.kernels.arguments import KvView, Scores, Tables
from sglang_pat.kernels.low_bit import Pages
from sglang_pat.packing import AttentionSpec, Batch, Node, PackConfig, TileTable, tree
from sglang_pat.packing.layout import flatten
from sglang_pat.packing.native import NativeScheduler, load

# Norm of the error over that of the result: the output is rounded to the dtype, and on a GPU the weights of V too.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}


Q_DTYPES = {torch.float8_e4m3fn: torch.bfloat16, torch.float8_e5m2: torch.float16}
"""Of Q where KV has 8 bits, if a case does not say; with other KV it is the same."""

FP8_SCALES = 0.5, 3.0
"""Factors on K and on V of 8 bits."""


def spec_of(dtype: torch.dtype, dim: int, v_dim: int = 0) -> AttentionSpec:
    """V is as wide as K if nothing is said."""
    return AttentionSpec(1, 1, dim, v_dim or dim, kv_format(dtype))


class Case:
    """Random pools, and a `req_to_token` in which requests share the slots of their common nodes.

    Pools have pages of `page_size` slots; as in SGLang, positions of one page are next to each other, and page 0 is nobody's.
    """

    splits_heads = True
    """Whether the decoder computes query heads of a KV head in splits where they are more than a tile has rows."""

    def __init__(
        self,
        batch: Batch,
        heads: int,
        kv_heads: int,
        dim: int,
        v_dim: int,
        dtype: torch.dtype,
        spare: int = 0,
        page_size: int = 1,
        window: int = 0,
        device: str = "cpu",
        q_dtype: torch.dtype | None = None,
        sinks: bool = False,
    ) -> None:
        self.batch = batch
        context = -(-(max(batch.seq_lens) + spare) // page_size) * page_size
        size = len(batch.seq_lens)
        pages = torch.randperm(size * context // page_size, device=device).int() + 1
        slots = (pages[:, None] * page_size + torch.arange(page_size, device=device, dtype=torch.int32)).reshape(
            size, context
        )
        for node in tree.walk(batch.roots):
            slots[node.queries, node.start : node.end] = slots[node.queries[0], node.start : node.end].clone()
        # Rows that belong to nobody are poisoned, and so are the slots that nobody's row names.
        self.rows = torch.randperm(size + 3, device=device)[:size]
        self.table = torch.full((size + 3, context), 2**30, dtype=torch.int32, device=device)
        self.table[self.rows] = slots
        # Torch cannot index what has 8 bits.
        wide = dtype if dtype.itemsize > 1 else torch.float32
        self.k = torch.full((page_size + size * context, kv_heads, dim), math.nan, dtype=wide, device=device)
        self.v = torch.full((page_size + size * context, kv_heads, v_dim), math.nan, dtype=wide, device=device)
        used = slots.flatten().unique().long()
        self.k[used] = torch.randn(len(used), kv_heads, dim, device=device).to(wide)
        self.v[used] = torch.randn(len(used), kv_heads, v_dim, device=device).to(wide)
        for i, length in enumerate(batch.seq_lens):
            if spare == 0:
                own = slots[i, length:].long()
                self.k[own] = self.v[own] = math.nan
        if window:
            # What lies in front of every window may be anybody's by now.
            seen = torch.cat([slots[i, max(0, length - window) :] for i, length in enumerate(batch.seq_lens)]).unique()
            unseen = torch.ones(len(self.k), dtype=torch.bool, device=device)
            unseen[seen.long()] = False
            self.k[unseen] = self.v[unseen] = math.nan
        self.k, self.v = self.k.to(dtype), self.v.to(dtype)
        self.k_scale, self.v_scale = FP8_SCALES if dtype.itemsize == 1 else (1.0, 1.0)
        self.q = torch.randn(size, heads, dim, device=device).to(q_dtype or Q_DTYPES.get(dtype, dtype))
        self.seq_lens = torch.tensor(batch.seq_lens, device=device)
        # Some count nothing, some nearly everything.
        self.sinks = torch.linspace(-2, 8, heads, device=device).bfloat16() if sinks else None
        self.spec = AttentionSpec(heads, kv_heads, dim, v_dim, kv_format(dtype), window, sinks)
        self.scale = dim**-0.5

    dear_tokens = False
    """Whether a token costs so much that packing pays for short prefixes of few queries too."""

    masks: torch.Tensor | None = None
    """Of drafts."""

    records: torch.Tensor | None = None
    """Pages of few bits."""

    limits = False
    """Whether queries of a work item see different stretches of its KV."""

    logit_cap = 0.0
    """Of a decoder's scores."""

    def cap(self, logit_cap: float) -> Self:
        """Caps scores from now on, by decoders that are made from now on, if it is not 0."""
        self.logit_cap = logit_cap
        self.spec = msgspec.structs.replace(self.spec, capped=logit_cap > 0)
        return self

    @property
    def kv(self) -> KvView:
        pages = None if self.records is None else Pages(self.records, self.spec.kv.bits, None)
        return KvView(self.k, self.v, self.k_scale, self.v_scale, pages)

    @property
    def tables(self) -> Tables:
        return Tables(self.table, self.rows, self.seq_lens, self.masks)

    def scores(self, logit_cap: float = 0.0) -> Scores:
        return Scores(self.scale, logit_cap, self.sinks)

    def read(self) -> tuple[torch.Tensor, ...]:
        """K and V as they are meant."""
        scaled = ((self.k, self.k_scale), (self.v, self.v_scale))
        return tuple(pool.float() * scale if pool.dtype.itemsize == 1 else pool for pool, scale in scaled)

    def reference(self, logit_cap: float = 0.0) -> torch.Tensor:
        k, v = self.read()
        return reference.decode(
            self.q, k, v, self.table, self.rows, self.seq_lens, scale=self.scale, logit_cap=logit_cap,
            window=self.spec.window, sinks=self.sinks,
        )  # fmt: skip

    def difference(self, out: torch.Tensor, logit_cap: float = 0.0) -> float:
        right = self.reference(logit_cap)
        assert out.dtype == self.q.dtype and out.shape == right.shape
        assert torch.isfinite(out).all()
        return ((out.double() - right).norm() / right.norm()).item()

    def config(self, tiles: TileTable, workers: int, policy: str) -> PackConfig:
        config = PackConfig.of(self.spec, tiles, workers, policy)
        cost = config.cost if self.splits_heads else self.spec.cost()
        return msgspec.structs.replace(
            config, cost=msgspec.structs.replace(cost, flop_per_byte=1) if self.dear_tokens else cost
        )

    def plan(self, tiles: TileTable, workers: int = 132, policy: str = "optimal") -> torch.Tensor:
        plan = flatten(make_plan(self.batch, self.config(tiles, workers, policy)))
        return torch.from_numpy(plan).to(self.q.device)

    def poison_unseen(self, table: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> None:
        """Make NaN what is in no window of queries that have so many tokens of these rows: it may be anybody's by now."""
        seen = torch.zeros(len(self.k), dtype=torch.bool, device=self.k.device)
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            seen[table[row, max(0, length - self.spec.window) : length].long()] = True
        for pool in (self.k, self.v):
            wide = pool.float()
            wide[~seen] = math.nan
            pool.copy_(wide.to(pool.dtype))


def in_turns(tokens: int) -> Batch:
    """Prefixes of up to so many tokens, of 1 to 16 requests each: with 8 rows of each request, items of 64 and of 128 rows in no order."""
    generator = random.Random(tokens)
    nodes: list[Node] = []
    lengths: list[int] = []
    for count in (8, 16, 3, 12, 16, 5, 2, 7, 9, 1, 10, 8, 8, 16, 4):
        end = generator.randint(tokens // 3, tokens)
        nodes.append(Node(0, end, list(range(len(lengths), len(lengths) + count))))
        lengths += [end + generator.randint(0, 3) for _ in range(count)]
    return Batch(lengths, nodes)


def of_latents(case: Any) -> Any:
    """A case with V in K, which has no scales."""
    case.v = case.k[..., : case.spec.v_head_dim]
    case.k_scale = case.v_scale = 1.0
    case.spec = msgspec.structs.replace(case.spec, latent=True)
    return case


def random_tree(generator: random.Random, tokens: int) -> torch.Tensor:
    """Which tokens each of a draft's sees, [tokens, tokens]: itself, and what it follows."""
    seen = torch.eye(tokens, dtype=torch.bool)
    for token in range(1, tokens):
        seen[token] |= seen[generator.randrange(token)]
    return seen


def random_trees(generator: random.Random, batch: Batch, tokens: int) -> torch.Tensor:
    """One for each request of a batch."""
    return torch.stack([random_tree(generator, tokens) for _ in batch.seq_lens])


class Drafts(Case):
    """Behind each of a batch's requests a draft, whose tokens are one query.

    Attributes:
        trees: [batch, tokens, tokens]: what each token of a draft sees of it.
        cached: [batch], tokens in front of the drafts.
    """

    def __init__(
        self, batch: Batch, trees: torch.Tensor, heads: int, kv_heads: int, dim: int, v_dim: int, dtype: torch.dtype, window: int = 0,
        sinks: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        self.trees, self.tokens = trees, trees.shape[1]
        self.cached = torch.tensor(batch.seq_lens)
        whole = Batch([length + self.tokens for length in batch.seq_lens], batch.roots)
        super().__init__(whole, heads * self.tokens, kv_heads, dim, v_dim, dtype, **options)
        self.q = self.q.view(-1, heads, dim)
        if sinks:
            self.sinks = torch.linspace(-2, 8, heads, device=self.q.device).bfloat16()
        self.spec = AttentionSpec(heads, kv_heads, dim, v_dim, kv_format(dtype), window, sinks, self.tokens)
        if window:
            table, lengths = self.token_table()
            self.poison_unseen(table, torch.arange(len(table)), lengths)

    @property
    def masks(self) -> torch.Tensor:
        return (self.trees.long() << torch.arange(self.tokens)).sum(-1).to(self.q.device)

    def token_table(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For each token the slots that it sees, and how many; rows are its own."""
        rows, lengths = [], []
        for request, cached in enumerate(self.cached.tolist()):
            slots = self.table[self.rows[request]].cpu()
            for token in range(self.tokens):
                own = slots[cached : cached + self.tokens][self.trees[request, token]]
                seen = torch.cat([slots[:cached], own])
                rows.append(torch.cat([seen, seen.new_zeros(self.table.shape[1] - len(seen))]))
                lengths.append(len(seen))
        return torch.stack(rows).to(self.q.device), torch.tensor(lengths, device=self.q.device)

    def reference(self, logit_cap: float = 0.0) -> torch.Tensor:
        table, lengths = self.token_table()
        k, v = self.read()
        return reference.decode(
            self.q, k, v, table, torch.arange(len(table)), lengths, scale=self.scale, logit_cap=logit_cap, window=self.spec.window,
            sinks=self.sinks,
        )  # fmt: skip


class Extended(Case):
    """New tokens behind a batch's requests, each of which is a query; their KV is cached already.

    Attributes:
        cached: What is in front of them.
        added: How many there are of each request.
        shared: Prefixes that the last plan reads for several requests at once.
    """

    limits = True

    def __init__(
        self, batch: Batch, added: list[int], heads: int, kv_heads: int, dim: int, v_dim: int, dtype: torch.dtype, window: int = 0,
        **options: Any,
    ) -> None:  # fmt: skip
        self.cached, self.added = batch, added
        whole = Batch([cached + count for cached, count in zip(batch.seq_lens, added, strict=True)], batch.roots)
        super().__init__(whole, heads, kv_heads, dim, v_dim, dtype, **options)
        counts = torch.tensor(added, device=self.q.device)
        pairs = zip(batch.seq_lens, added, strict=True)
        self.rows = self.rows.repeat_interleave(counts)
        self.seq_lens = torch.tensor([cached + j for cached, count in pairs for j in range(1, count + 1)]).to(self.rows)
        self.q = torch.randn(len(self.rows), heads, dim, device=self.q.device).to(self.q.dtype)
        self.spec = msgspec.structs.replace(self.spec, window=window)
        if window:
            self.poison_unseen(self.table, self.rows, self.seq_lens)

    def plan(self, tiles: TileTable, workers: int = 132, policy: str = "optimal") -> torch.Tensor:
        scheduler = NativeScheduler(self.config(tiles, workers, policy), len(self.added))
        requests = load(scheduler, self.cached)
        made = scheduler.extend(requests, np.array(self.cached.seq_lens), np.array(self.added))
        self.shared = made.shared
        return torch.from_numpy(made.data).to(self.q.device)


class Run:
    """A case with its plan, output and workspace, for a decoder on the case's device."""

    def __init__(self, case: Case, decoder: Any, tiles: TileTable, policy: str = "optimal") -> None:
        self.case = case
        self.decoder = decoder
        self.plan = case.plan(tiles, decoder.workers, policy)
        self.out = torch.empty(*case.q.shape[:2], case.spec.v_head_dim, dtype=case.q.dtype, device=case.q.device)
        self.make_workspace(int(self.plan[2]))

    def make_workspace(self, slots: int) -> None:
        heads, dim = self.case.spec.query_heads, self.case.spec.v_head_dim
        self.partial = torch.empty(max(1, slots), heads, dim, dtype=torch.float16, device=self.case.q.device)
        self.lse = torch.empty(max(1, slots), heads, device=self.case.q.device)

    def poison(self) -> None:
        for tensor in (self.out, self.partial, self.lse):
            tensor.fill_(math.nan)

    def decode(self, overlap: bool = True, early: bool = False) -> None:
        case = self.case
        self.decoder.decode(
            case.q, case.kv, case.tables, case.scores(case.logit_cap), self.out, self.plan, self.partial, self.lse, overlap=overlap,
            early=early,
        )  # fmt: skip

    def error(self) -> float:
        self.poison()
        self.decode()
        return self.case.difference(self.out, self.case.logit_cap)

    def check_longer_tails(self, tolerance: float) -> None:
        """By the same plan; as in a CUDA graph, rows behind its batch become zero. The case has 99 spare tokens."""
        case, real = self.case, self.case.q.shape[0]
        q = torch.cat([case.q, torch.randn_like(case.q[:2])])
        self.out = self.out.new_empty(len(q), *self.out.shape[1:])
        for _ in range(3):
            case.seq_lens += 33
            self.poison()
            case.q = q
            self.decode()
            case.q = q[:real]
            assert case.difference(self.out[:real]) < tolerance
            assert not self.out[real:].any()

    def check_in_any_order(self, tolerance: float, seeds: int = 2) -> None:
        """Right, and the same bits, whatever the order of threads: an emulated decoder's is another one for each seed."""
        first = None
        for seed in range(seeds):
            if hasattr(self.decoder, "seed"):
                self.decoder.seed(1000 * seed)
            if first is None:
                error = self.error()
                assert error < tolerance, f"seed {seed}: error {error:.1e}"
                first = self.out.clone()
                continue
            # The same bits are as right as the first.
            self.poison()
            self.decode()
            assert torch.equal(self.out, first), f"seed {seed}: not the same in every order"
