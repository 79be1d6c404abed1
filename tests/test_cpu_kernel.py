from __future__ import annotations

import math
import random
import subprocess
import sys
from pathlib import Path

import kernel_cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import TOLERANCE
from trees import TILES, batches, random_batch

from sglang_pat import jit
from sglang_pat.kernels import cpu
from sglang_pat.packing import CPU_TILES, OPEN, POLICIES, Batch, Node, Plan, TileTable, WorkItem, layout

pytestmark = pytest.mark.once

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Case(kernel_cases.Case):
    splits_heads = False

    def decode(self, plan: torch.Tensor, logit_cap: float = 0.0) -> torch.Tensor:
        return cpu.attention(self.q, self.kv, self.tables, self.scores(logit_cap), plan)

    def error(self, plan: torch.Tensor, logit_cap: float = 0.0) -> float:
        return self.difference(self.decode(plan, logit_cap), logit_cap)

    def plan(self, tiles: TileTable = CPU_TILES, workers: int = 132, policy: str = "optimal") -> torch.Tensor:
        return super().plan(tiles, workers, policy)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "v_dim"),
    [
        (32, 8, 128, 128),
        (8, 8, 64, 64),
        (16, 1, 256, 256),
        (6, 2, 40, 24),
        (5, 5, 8, 8),
        (7, 1, 96, 256),
        (200, 1, 32, 32),
        (8, 4, 192, 128),
    ],
)
def test_any_shape_and_dtype(dtype: torch.dtype, heads: int, kv_heads: int, dim: int, v_dim: int) -> None:
    batch = random_batch(random.Random(heads * dim), depth=3, fanout=2, length=70)
    case = Case(batch, heads, kv_heads, dim, v_dim, dtype)
    assert case.error(case.plan()) < TOLERANCE[dtype]


@pytest.mark.parametrize("form", FP8, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "v_dim"), [(32, 8, 128, 128), (6, 2, 40, 24), (7, 1, 96, 256)])
def test_an_fp8_cache_is_read_times_its_scales(
    form: torch.dtype, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, v_dim: int
) -> None:
    batch = random_batch(random.Random(heads * dim), depth=3, fanout=2, length=70)
    case = Case(batch, heads, kv_heads, dim, v_dim, dtype)
    # Powers of two, so that what stands in the cache is exact in every dtype of Q.
    k_scale, v_scale = 0.125, 4.0
    kept_k, kept_v = (case.k / k_scale).to(form), (case.v / v_scale).to(form)
    case.k, case.v = kept_k.to(dtype) * k_scale, kept_v.to(dtype) * v_scale
    right = case.reference(logit_cap=3.0)
    case.k, case.v, case.k_scale, case.v_scale = kept_k, kept_v, k_scale, v_scale
    out = case.decode(case.plan(), logit_cap=3.0)
    assert out.dtype == dtype and torch.isfinite(out).all()
    assert (out - right).norm() / right.norm() < TOLERANCE[dtype]


@pytest.mark.parametrize("form", FP8, ids=str)
@pytest.mark.parametrize("v_dim", [8, 24, 256])
def test_every_code_of_fp8_is_what_torch_says(form: torch.dtype, v_dim: int) -> None:
    """A query that sees one token gets its V as it stands. NaN and infinity stay what they are."""
    values = torch.cat([torch.arange(256), torch.arange(-256 % v_dim)]).to(torch.uint8).view(form).view(-1, 1, v_dim)
    size = len(values)
    case = Case(Batch([1] * size, []), 1, 1, 8, v_dim, torch.float32)
    case.k, case.v = (torch.zeros(len(case.k), 1, dim).to(form) for dim in (8, v_dim))
    case.v[case.table[case.rows, 0].long()] = values
    torch.testing.assert_close(case.decode(case.plan()), values.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("of", ["k", "v"])
def test_whoever_sees_a_broken_token_gets_nan(of: str, bad: float) -> None:
    """And nobody else does, wherever work items begin and end."""
    batch = Batch([300, 300, 300, 290], [Node(0, 200, [0, 1, 2])])
    for position in (0, 199, 200, 299):
        case = Case(batch, 4, 2, 16, 16, torch.float32)
        pool = getattr(case, of)
        pool[case.table[case.rows[0], position].long()] = bad
        broken = [0, 1, 2] if position < 200 else [0]
        for policy in ("query", "optimal", "naive"):
            out = case.decode(case.plan(workers=16, policy=policy))
            assert not torch.isfinite(out[broken]).any() if of == "k" else not torch.isfinite(out[broken]).all()
            assert torch.isfinite(out[[i for i in range(4) if i not in broken]]).all()


@given(batches(max_queries=12, max_length=40), st.sampled_from(list(POLICIES)), st.sampled_from([2, 132, 4096]))
@settings(max_examples=60, deadline=None)
def test_any_tree_and_split(batch: Batch, policy: str, workers: int) -> None:
    case = Case(batch, 6, 2, 16, 16, torch.float32)
    assert case.error(case.plan(TILES, workers, policy)) < TOLERANCE[torch.float32]


LATENT_DIMS = [(576, 512), (288, 256), (80, 64), (40, 40), (24, 8)]
"""Of K and V: DeepSeek, MiniCPM3, and small ones, of which one has no numbers that know the position."""


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("dim", "v_dim"), LATENT_DIMS)
@pytest.mark.parametrize("heads", [1, 16, 20])
def test_latents_of_any_shape_and_dtype(dtype: torch.dtype, dim: int, v_dim: int, heads: int) -> None:
    batch = random_batch(random.Random(heads * dim), depth=3, fanout=2, length=70)
    case = kernel_cases.of_latents(Case(batch, heads, 1, dim, v_dim, dtype))
    out = case.decode(case.plan())
    # A score adds up 576 products: with one head 1 of 60 cases is off by more than 1e-6 in float32.
    assert case.difference(out) < TOLERANCE[dtype] * (2 if dim == 576 and dtype == torch.float32 else 1)
    case.v = case.v.contiguous()
    assert torch.equal(case.decode(case.plan()), out), "with a V of its own"


@pytest.mark.parametrize("form", FP8, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_latents_of_8_bits_have_no_scales(form: torch.dtype, dtype: torch.dtype) -> None:
    batch = random_batch(random.Random(3), depth=3, fanout=2, length=70)
    case = kernel_cases.of_latents(Case(batch, 16, 1, 80, 64, form, q_dtype=dtype))
    assert case.error(case.plan()) < TOLERANCE[dtype]


def test_a_v_that_begins_elsewhere_in_k_is_read_there() -> None:
    case = Case(random_batch(random.Random(4), 3, 2, 70), 4, 1, 80, 64, torch.float32)
    case.v = case.k[..., 16:]
    assert case.error(case.plan()) < TOLERANCE[torch.float32]


@given(batches(max_queries=12, max_length=40), st.sampled_from(list(POLICIES)), st.sampled_from([2, 132]))
@settings(max_examples=40, deadline=None)
def test_latents_under_any_tree_and_split(batch: Batch, policy: str, workers: int) -> None:
    case = kernel_cases.of_latents(Case(batch, 6, 1, 24, 16, torch.float32))
    assert case.error(case.plan(TILES, workers, policy)) < TOLERANCE[torch.float32]


class Extended(kernel_cases.Extended):
    splits_heads = False

    def decode(self, plan: torch.Tensor, logit_cap: float = 0.0) -> torch.Tensor:
        return cpu.attention(self.q, self.kv, self.tables, self.scores(logit_cap), plan, self.spec.window)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [0, 1, 30, 150])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (6, 6), (7, 1), pytest.param(150, 1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("cap", "sinks"), [(0.0, False), (2.0, True)])
def test_extends(dtype: torch.dtype, window: int, heads: int, kv_heads: int, cap: float, sinks: bool) -> None:
    """Tokens of short turns share their prefixes, those of long ones fill tiles; each sees what is in front of its own end."""
    generator = random.Random(heads)
    batch = random_batch(generator, depth=2, fanout=3, length=80)
    added = [generator.choice([0, 1, 1, 3, 6, 70, 200]) for _ in batch.seq_lens]
    added[:3] = [1, 3, 2]
    case = Extended(batch, added, heads, kv_heads, 24, 16, dtype, window, sinks=sinks)
    assert case.difference(case.decode(case.plan(CPU_TILES, 2), cap), cap) < TOLERANCE[dtype]
    assert case.shared > 0 or window in (1, 30) or heads == 150, "with 150 heads a token fills a tile"


@pytest.mark.parametrize("of", ["k", "v"])
def test_a_broken_token_of_one_request_breaks_no_other(of: str) -> None:
    case = Extended(Batch([60, 70, 60], [Node(0, 50, [0, 1, 2])]), [4, 3, 1], 4, 2, 24, 16, torch.float32)
    for position in (55, 61):
        getattr(case, of)[case.table[case.rows[0], position].long()] = math.nan
    out = case.decode(case.plan(CPU_TILES, 2), 0.0)
    assert case.shared == 1 and not torch.isfinite(out[3]).any() and torch.isfinite(out[4:]).all()


@pytest.mark.parametrize("m", [1, 4, 16, 64, 128])
@pytest.mark.parametrize("shared", [1, 100, 128, 129, 300])
def test_every_tile(m: int, shared: int) -> None:
    case = Case(Batch([shared + 30] * 40 + [61], [Node(0, shared, list(range(40)))]), 8, 2, 64, 64, torch.bfloat16)
    assert case.error(case.plan(TileTable((m,)))) < TOLERANCE[torch.bfloat16]


def test_logit_cap() -> None:
    case = Case(Batch([90] * 5, [Node(0, 64, [0, 1, 2])]), 8, 2, 64, 64, torch.float32)
    case.q *= 8
    assert case.error(case.plan(), logit_cap=5.0) < TOLERANCE[torch.float32]
    uncapped, capped = case.reference(), case.reference(logit_cap=5.0)
    assert (uncapped - capped).norm() > 0.1 * capped.norm(), "the cap must matter in this test"


@given(batches(max_queries=12, max_length=40), st.sampled_from([2, 132]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_sinks(batch: Batch, workers: int, capped: bool) -> None:
    """Each counts once, in the part that is alone or in the merge, scaled and capped by nothing."""
    case = Case(batch, 6, 2, 16, 24, torch.float32, sinks=True)
    assert case.error(case.plan(TILES, workers), logit_cap=5.0 if capped else 0.0) < TOLERANCE[torch.float32]


def test_a_sink_beyond_everything_leaves_nothing() -> None:
    case = Case(Batch([90] * 5, [Node(0, 64, [0, 1, 2])]), 8, 2, 64, 64, torch.float32, sinks=True)
    case.sinks = torch.full((8,), 1e30)
    assert case.decode(case.plan()).abs().max() == 0


def test_one_plan_serves_while_tails_grow() -> None:
    case = Case(Batch([70, 80, 33], [Node(0, 64, [0, 1])]), 8, 2, 64, 64, torch.float32, spare=200)
    case.k, case.v = torch.randn_like(case.k), torch.randn_like(case.v)
    plan = case.plan()
    for _ in range(4):
        assert case.error(plan) < TOLERANCE[torch.float32]
        case.seq_lens += 50


@given(batches(max_queries=12, max_length=40), st.sampled_from([1, 5, 33, 90]), st.sampled_from([2, 132, 4096]))
@settings(max_examples=60, deadline=None)
def test_windows(batch: Batch, window: int, workers: int) -> None:
    """What lies in front of a window is NaN."""
    case = Case(batch, 6, 2, 16, 16, torch.float32, window=window)
    assert case.error(case.plan(TILES, workers)) < TOLERANCE[torch.float32]


def test_one_plan_serves_while_windows_move() -> None:
    case = Case(Batch([70, 80, 33], [Node(0, 64, [0, 1])]), 8, 2, 64, 64, torch.float32, spare=200, window=32)
    case.k, case.v = torch.randn_like(case.k), torch.randn_like(case.v)
    plan = case.plan()
    for _ in range(4):
        assert case.error(plan) < TOLERANCE[torch.float32]
        case.seq_lens += 50


def test_large_scores_do_not_overflow() -> None:
    case = Case(Batch([200] * 3, [Node(0, 150, [0, 1, 2])]), 4, 4, 64, 64, torch.float32)
    case.q *= 100
    # Scores of a thousand have float32 steps of 6e-5, which exp passes on.
    assert case.error(case.plan()) < 1e-4


def test_many_queries_on_one_long_prefix() -> None:
    case = Case(Batch([1030] * 300, [Node(0, 1024, list(range(300)))]), 4, 1, 64, 64, torch.bfloat16)
    assert case.error(case.plan()) < TOLERANCE[torch.bfloat16]


def test_strided_pools() -> None:
    case = Case(Batch([50] * 3, [Node(0, 40, [0, 1, 2])]), 4, 2, 64, 64, torch.float32)
    both = torch.stack([case.k, case.v], dim=1)
    case.k, case.v = both[:, 0], both[:, 1]
    assert not case.k.is_contiguous()
    assert case.error(case.plan()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: (setattr(case, "k", case.k.double()), setattr(case, "v", case.v.double())), "KV must be"),
        (lambda case: setattr(case, "v", case.v.half()), "v has the wrong dtype"),
        (lambda case: setattr(case, "table", case.table.long()), "req_to_token has the wrong dtype"),
        (lambda case: setattr(case, "q", case.q[:, :3]), "3 query heads are not a multiple of 2"),
        (lambda case: setattr(case, "sinks", torch.zeros(3)), "3 sinks are not one for each of 4 query heads"),
        (lambda c: (setattr(c, "k", c.k[:, :0]), setattr(c, "v", c.v[:, :0])), "not a multiple of 0 KV heads"),
        (lambda c: setattr(c, "q", c.q[:, :0]), "0 query heads are not a multiple of 2"),
        (
            lambda c: (setattr(c, "q", torch.zeros(3, 4, 1 << 15)), setattr(c, "k", torch.zeros(len(c.k), 2, 1 << 15))),
            "heads of 32768 dimensions are too large",
        ),
    ],
)
def test_wrong_tensors_are_named(change, message: str) -> None:
    case = Case(Batch([50] * 3, [Node(0, 40, [0, 1, 2])]), 4, 2, 64, 64, torch.float32)
    plan = case.plan()
    change(case)
    with pytest.raises(Exception, match=message):
        case.decode(plan)


@pytest.mark.parametrize("what", ["plan", "rows", "seq_lens", "table"])
def test_an_index_that_is_wrong_is_an_error_or_harmless(what: str) -> None:
    """Never an access out of bounds, which would end this process sooner or later."""
    generator = random.Random(what)
    case = Case(random_batch(generator, 2, 4, 60), 4, 2, 16, 16, torch.float32)
    plan = case.plan()
    values = plan if what == "plan" else getattr(case, what)
    right, refused = values.clone(), 0
    flat = values.view(-1)
    for _ in range(1000):
        values.copy_(right)
        for _ in range(generator.choice([1, 1, 2, 5])):
            wrong = generator.choice([-(2**31), -2, -1, 0, 1, 7, 1000, 2**30, 2**31 - 1, generator.randrange(-99, 99)])
            flat[generator.randrange(len(flat))] = wrong
        try:
            cpu.attention(case.q, case.kv, case.tables, case.scores(), plan)
        except ValueError:
            refused += 1
    assert refused > 100


def test_a_work_item_of_more_rows_than_offsets_reach_is_refused() -> None:
    case = Case(Batch([50] * 3, [Node(0, 40, [0, 1, 2])]), 4, 2, 64, 64, torch.float32)
    many = [0] * ((1 << 13) + 1)
    plan = Plan([WorkItem(0, 10, many, many, 16)], [0, 1], [1] * 3, 1, 10)
    with pytest.raises(ValueError, match="too many rows"):
        case.decode(torch.from_numpy(layout.flatten(plan)))


@pytest.mark.parametrize("wrong", ["another request", "a longer query", "a bound that moves"])
def test_an_open_work_item_is_one_requests_up_to_its_first_query(wrong: str) -> None:
    case = Extended(Batch([40, 40], []), [5, 5], 4, 2, 24, 16, torch.float32)
    data = case.plan(CPU_TILES, 2)
    plan = layout.sections(data.numpy())
    item = plan.items[0]
    assert item[1] == OPEN and item[3] == 5
    if wrong == "another request":
        case.rows = case.rows.clone()
        case.rows[plan.queries[item[2] + 1]] = case.rows[plan.queries[plan.items[1][2]]]
    elif wrong == "a longer query":
        case.seq_lens[plan.queries[item[2]]] -= 3
    else:
        item[0] = OPEN - 7
    with pytest.raises(ValueError, match=r"open work item|counts from the ends"):
        case.decode(data)


def test_a_missing_compiler_is_one_sentence(tmp_path: Path) -> None:
    code = "from sglang_pat import jit\ntry: jit.load('cpu')\nexcept jit.BuildError as error: print(error)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"CXX": "no-such-compiler", jit.CACHE: str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == (
        "sglang-pat needs a C++ compiler and 'no-such-compiler' is not there: install g++, or set CXX to yours\n"
    )
