"""Verify steps: several tokens of each request at once, a draft with branches or without."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import msgspec
import pytest
import torch
from kernel_cases import TOLERANCE
from test_cpu_kernel import Case
from trees import random_batch

from sglang_pat.backend import verify
from sglang_pat.kernels import cpu, reference
from sglang_pat.packing import CPU_TILES, Batch, Node, PackConfig, layout, make_plan
from sglang_pat.packing.layout import flatten

pytestmark = pytest.mark.once


def random_tree(generator: random.Random, tokens: int) -> torch.Tensor:
    """Which tokens each of a draft's sees, [tokens, tokens]: itself, and what it follows."""
    seen = torch.eye(tokens, dtype=torch.bool)
    for token in range(1, tokens):
        seen[token] |= seen[generator.randrange(token)]
    return seen


class Verified(Case):
    """A draft of `tokens` at the end of each of a batch's requests, whose prefixes are the batch's."""

    def __init__(
        self, batch: Batch, trees: torch.Tensor, heads: int, kv_heads: int, dtype: torch.dtype = torch.float32, window: int = 0,
        sinks: bool = False,
    ) -> None:  # fmt: skip
        self.trees, self.tokens, self.kv_heads = trees, trees.shape[1], kv_heads
        self.cached = torch.tensor(batch.seq_lens)
        whole = Batch([length + self.tokens for length in batch.seq_lens], batch.roots)
        super().__init__(whole, heads, kv_heads, 24, 16, dtype, sinks=sinks)
        self.spec = msgspec.structs.replace(self.spec, window=window, query_tokens=self.tokens)
        self.drafts = torch.randn(len(whole.seq_lens) * self.tokens, heads, 24).to(dtype)
        if window:
            named = self.token_table()[0]
            seen = torch.zeros(len(self.k), dtype=torch.bool)
            for row, length in zip(named, self.token_table()[1].tolist(), strict=True):
                seen[row[max(0, length - window) : length].long()] = True
            self.k[~seen] = self.v[~seen] = math.nan

    def token_table(self) -> tuple[torch.Tensor, torch.Tensor]:
        """For each token the slots that it sees, and how many; rows are its own."""
        rows, lengths = [], []
        for request, cached in enumerate(self.cached.tolist()):
            slots = self.table[self.rows[request]]
            for token in range(self.tokens):
                own = slots[cached : cached + self.tokens][self.trees[request, token]]
                seen = torch.cat([slots[:cached], own])
                rows.append(torch.cat([seen, seen.new_zeros(self.table.shape[1] - len(seen))]))
                lengths.append(len(seen))
        return torch.stack(rows), torch.tensor(lengths)

    def right(self, logit_cap: float) -> torch.Tensor:
        table, lengths = self.token_table()
        return reference.decode(
            self.drafts, self.k, self.v, table, torch.arange(len(table)), lengths, scale=self.scale, logit_cap=logit_cap,
            window=self.spec.window, sinks=self.sinks,
        ).flatten(1)  # fmt: skip

    def masks(self, full: bool = True) -> torch.Tensor:
        flags = [
            torch.cat([torch.ones(self.tokens, cached if full else 0, dtype=torch.bool), tree], dim=1).flatten()
            for cached, tree in zip(self.cached.tolist(), self.trees, strict=True)
        ]
        spec_info = SimpleNamespace(custom_mask=torch.cat(flags), tree_topk=2)
        return verify.masks(SimpleNamespace(spec_info=spec_info, seq_lens=self.cached), self.tokens)  # type: ignore[arg-type]

    def run(self, plan: torch.Tensor, logit_cap: float = 0.0) -> torch.Tensor:
        out = cpu.attention(
            verify.gather(self.drafts, self.tokens, self.kv_heads), self.k, self.v, self.table, self.rows, self.seq_lens, plan,
            scale=self.scale, logit_cap=logit_cap, sinks=verify.spread(self.sinks, self.tokens, self.kv_heads), window=self.spec.window,
            masks=self.masks(),
        )  # fmt: skip
        return verify.scatter(out, self.tokens, self.kv_heads)

    def plan_for(self, workers: int = 8, policy: str = "optimal") -> torch.Tensor:
        config = PackConfig(self.spec.cost(), CPU_TILES, workers, policy, self.spec.planned_window)  # type: ignore[arg-type]
        return torch.from_numpy(flatten(make_plan(self.batch, config)))


def error(out: torch.Tensor, right: torch.Tensor) -> float:
    assert out.shape == right.shape and torch.isfinite(out).all()
    return ((out.double() - right).norm() / right.norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (6, 6), (7, 1)])
@pytest.mark.parametrize(("cap", "sinks", "window"), [(0.0, False, 0), (2.0, True, 0), (0.0, True, 150)])
def test_random_trees_of_drafts(
    dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, cap: float, sinks: bool, window: int
) -> None:
    generator = random.Random(heads * tokens)
    batch = random_batch(generator, depth=2, fanout=3, length=80)
    trees = torch.stack([random_tree(generator, tokens) for _ in batch.seq_lens])
    case = Verified(batch, trees, heads, kv_heads, dtype, window, sinks)
    for policy in ("optimal", "naive"):
        assert error(case.run(case.plan_for(policy=policy), cap), case.right(cap)) < TOLERANCE[dtype]


def test_what_requests_share_is_read_once() -> None:
    batch = Batch([210, 220, 230], [Node(0, 200, [0, 1, 2])])
    case = Verified(batch, torch.ones(3, 4, 4).tril().bool(), 4, 2)
    plan = case.plan_for(workers=1)
    together = [item for item in layout.work_items(plan.numpy()) if len(item.queries) == 3]
    assert [(item.start, item.end) for item in together] == [(0, 200)]
    assert error(case.run(plan), case.right(0.0)) < TOLERANCE[torch.float32]


def test_a_plan_serves_while_drafts_are_accepted() -> None:
    batch = Batch([30, 40, 50], [Node(0, 20, [0, 1, 2])])
    generator = random.Random(0)
    longest = Batch([length + 60 for length in batch.seq_lens], batch.roots)
    plan = Verified(batch, torch.stack([random_tree(generator, 6) for _ in range(3)]), 4, 2).plan_for()
    case = Verified(longest, torch.stack([random_tree(generator, 6) for _ in range(3)]), 4, 2)
    for _ in range(4):
        # Some accept all of their drafts, some one token.
        assert error(case.run(plan), case.right(0.0)) < TOLERANCE[torch.float32]
        case.cached -= torch.tensor([6, 1, 3])
        case.seq_lens = case.cached + 6
        case.trees = torch.stack([random_tree(generator, 6) for _ in range(3)])


def test_both_forms_of_a_tree_mask() -> None:
    generator = random.Random(1)
    trees = torch.stack([random_tree(generator, 7) for _ in range(4)])
    case = Verified(Batch([5, 1, 90, 31], []), trees, 2, 1)
    bits = (trees.long() << torch.arange(7)).sum(-1)
    assert torch.equal(case.masks(full=True), bits) and torch.equal(case.masks(full=False), bits)


def test_a_draft_without_branches_needs_no_mask() -> None:
    spec_info = SimpleNamespace(custom_mask=None, tree_topk=1)
    found = verify.masks(SimpleNamespace(spec_info=spec_info, seq_lens=torch.tensor([3, 9])), 64)  # type: ignore[arg-type]
    assert found.tolist() == [[(1 << j) - 1 for j in range(1, 64)] + [-1]] * 2


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.int64), "heads of a KV head"),
        (torch.zeros(1, 2, dtype=torch.int64), "masks must be the batch's"),
        (torch.zeros(2, 65, dtype=torch.int64), "64 tokens at most"),
        (torch.zeros(2, 2, dtype=torch.int32), "wrong dtype"),
        (torch.zeros(2, 4, dtype=torch.int64)[:, ::2], "contiguous"),
        (torch.zeros(2, 4, dtype=torch.int64), "shorter than its new tokens"),
    ],
)
def test_masks_that_are_wrong_are_named(masks: torch.Tensor, message: str) -> None:
    case = Case(Batch([3, 3], []), 4, 1, 8, 8, torch.float32)
    with pytest.raises(ValueError, match=message):
        cpu.attention(case.q, case.k, case.v, case.table, case.rows, case.seq_lens, case.plan(), scale=1.0, masks=masks)
