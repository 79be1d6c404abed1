"""Verify steps: several tokens of each request at once, a draft with branches or without."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from kernel_cases import TOLERANCE, Drafts, random_trees
from test_cpu_kernel import Case
from trees import random_batch

from sglang_pat import compat
from sglang_pat.backend import verify
from sglang_pat.kernels import cpu
from sglang_pat.kernels.arguments import Scores
from sglang_pat.packing import CPU_TILES, FORMATS, AttentionSpec, Batch, Node, layout

pytestmark = pytest.mark.once


class Verified(Drafts):
    """On the CPU."""

    splits_heads = False

    def run(self, plan: torch.Tensor, logit_cap: float = 0.0) -> torch.Tensor:
        tokens, kv_heads = self.tokens, self.spec.kv_heads
        scores = Scores(self.scale, logit_cap, verify.spread(self.sinks, tokens, kv_heads))
        out = cpu.attention(
            verify.gather(self.q, tokens, kv_heads), self.kv, self.tables, scores, plan, self.spec.window
        )
        return verify.scatter(out, tokens, kv_heads)

    def error(self, plan: torch.Tensor, logit_cap: float = 0.0) -> float:
        return self.difference(self.run(plan, logit_cap), logit_cap)


def verified(
    batch: Batch, trees: torch.Tensor, heads: int, kv_heads: int, dtype: torch.dtype = torch.float32, **options: Any
) -> Verified:
    return Verified(batch, trees, heads, kv_heads, 24, 16, dtype, **options)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (6, 6), (7, 1)])
@pytest.mark.parametrize(("cap", "sinks", "window"), [(0.0, False, 0), (2.0, True, 0), (0.0, True, 150)])
def test_random_trees_of_drafts(
    dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, cap: float, sinks: bool, window: int
) -> None:
    generator = random.Random(heads * tokens)
    batch = random_batch(generator, depth=2, fanout=3, length=80)
    case = verified(batch, random_trees(generator, batch, tokens), heads, kv_heads, dtype, sinks=sinks, window=window)
    for policy in ("optimal", "naive"):
        assert case.error(case.plan(CPU_TILES, 8, policy), cap) < TOLERANCE[dtype]


def test_drafts_of_more_rows_than_were_measured_are_named() -> None:
    for kv in ("bfloat16", "float8_e4m3fn"):
        assert verify.advice(AttentionSpec(64, 8, 128, 128, FORMATS[kv], query_tokens=8)) is None
    advice = verify.advice(AttentionSpec(64, 8, 128, 128, FORMATS["bfloat16"], query_tokens=16))
    assert advice is not None
    assert "128 rows" in advice
    assert "drafts of up to 8 tokens" in advice
    assert verify.advice(AttentionSpec(32, 1, 128, 128, FORMATS["bfloat16"])) is None, "nothing is speculated"
    assert "no drafts" in str(verify.advice(AttentionSpec(64, 1, 128, 128, FORMATS["bfloat16"], query_tokens=2)))


def test_what_requests_share_is_read_once() -> None:
    batch = Batch([210, 220, 230], [Node(0, 200, [0, 1, 2])])
    case = verified(batch, torch.ones(3, 4, 4).tril().bool(), 4, 2)
    plan = case.plan(CPU_TILES, 1)
    together = [item for item in layout.work_items(plan.numpy()) if len(item.queries) == 3]
    assert [(item.start, item.end) for item in together] == [(0, 200)]
    assert case.error(plan) < TOLERANCE[torch.float32]


def test_a_plan_serves_while_drafts_are_accepted() -> None:
    batch = Batch([30, 40, 50], [Node(0, 20, [0, 1, 2])])
    generator = random.Random(0)
    longest = Batch([length + 60 for length in batch.seq_lens], batch.roots)
    plan = verified(batch, random_trees(generator, batch, 6), 4, 2).plan(CPU_TILES, 8)
    case = verified(longest, random_trees(generator, batch, 6), 4, 2)
    for _ in range(4):
        # Some accept all of their drafts, some one token.
        assert case.error(plan) < TOLERANCE[torch.float32]
        case.cached -= torch.tensor([6, 1, 3])
        case.seq_lens = case.cached + 6
        case.trees = random_trees(generator, batch, 6)


def test_both_forms_of_a_tree_mask() -> None:
    generator = random.Random(1)
    lengths = torch.tensor([5, 1, 90, 31])
    trees = random_trees(generator, Batch(lengths.tolist(), []), 7)
    for known in (lengths, torch.zeros(4, dtype=torch.int64)):
        flags = [
            torch.cat([torch.ones(7, seen, dtype=torch.bool), tree], dim=1).flatten()
            for seen, tree in zip(known.tolist(), trees, strict=True)
        ]
        spec_info = SimpleNamespace(custom_mask=torch.cat(flags), tree_topk=2)
        found = verify.masks(SimpleNamespace(spec_info=spec_info, seq_lens=lengths), 7, len(lengths))  # type: ignore[arg-type]
        assert torch.equal(found, (trees.long() << torch.arange(7)).sum(-1))


def test_drafts_without_branches_are_all_alike() -> None:
    found = verify.without_branches(2, 64, "cpu")
    assert found.tolist() == [[(1 << j) - 1 for j in range(1, 64)] + [-1]] * 2


def test_padding_has_no_flags() -> None:
    """A graph's batch is padded behind its requests, of which alone SGLang says what their tokens see."""
    generator = random.Random(2)
    trees = random_trees(generator, Batch([5, 1], []), 7)
    flags = [
        torch.cat([torch.ones(7, n, dtype=torch.bool), tree], dim=1).flatten()
        for n, tree in zip((5, 1), trees, strict=True)
    ]
    batch = SimpleNamespace(
        spec_info=SimpleNamespace(custom_mask=torch.cat(flags), tree_topk=2), seq_lens=torch.tensor([5, 1, 1, 1])
    )
    assert verify.branches(batch)  # type: ignore[arg-type]
    assert torch.equal(verify.masks(batch, 7, 2), (trees.long() << torch.arange(7)).sum(-1))  # type: ignore[arg-type]


def test_masks_in_a_buffer_for_more_drafts() -> None:
    trees = random_trees(random.Random(3), Batch([5, 1], []), 7)
    room = compat.batch.verify_mask(4, 7, "cpu")
    room.buffer[: trees.numel()] = trees.flatten()
    batch: Any = SimpleNamespace(
        spec_info=SimpleNamespace(custom_mask=room.buffer, tree_topk=2), seq_lens=torch.tensor([5, 1])
    )
    assert room.fits(4) and not room.fits(5)
    assert torch.equal(verify.masks(batch, 7, 2, room), (trees.long() << torch.arange(7)).sum(-1))
    assert compat.batch.verify_mask(4, 0, "cpu") is None, "nothing is speculated"


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
        cpu.attention(case.q, case.kv, msgspec.structs.replace(case.tables, masks=masks), Scores(1.0), case.plan())
