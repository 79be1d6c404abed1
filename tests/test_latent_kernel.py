"""The CUDA kernels for latents (MLA) against attention in float64, as test_cuda_kernel.py: on the host where there is no GPU."""

from __future__ import annotations

import math
import random
from typing import Any

import emulated
import pytest
import torch
from kernel_cases import TOLERANCE, Case, Drafts, Extended, Run, of_latents, random_trees
from trees import random_batch

from sglang_pat.kernels import capabilities, cuda
from sglang_pat.packing import Batch, Node, TileTable, layout

pytestmark = pytest.mark.once

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
ARCHS = [cuda.arch_of(torch.device("cuda"))] if ON_GPU else ["9.0a", "8.0", "8.9"]
DEEPSEEK, MINICPM = capabilities.LATENT_DIMS


def slowly(*values: Any) -> Any:
    """Parameters that `make test` leaves out where there is no GPU."""
    return pytest.param(*values, marks=[] if ON_GPU else pytest.mark.slow)


BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
# On the host each kind takes ten seconds; what kinds have in common is emulated in one of them.
KINDS = [
    (arch, dims, dtype) for arch in ARCHS for dims in capabilities.LATENT_DIMS for dtype in (BF16, E4M3, E5M2)
    if ON_GPU or (arch == "9.0a" and (dims == DEEPSEEK or dtype != E5M2)) or (dims == DEEPSEEK and dtype != E5M2)
    or (arch == "8.0" and dtype == BF16)
]  # fmt: skip
each_kind = pytest.mark.parametrize(
    ("arch", "dims", "dtype"), [KINDS[0], *(slowly(*kind) for kind in KINDS[1:])], ids=str
)


def run(case: Case, arch: str, policy: str = "optimal", workers: int = 0) -> Run:
    """With a plan for so many workers, if not for those that there are."""
    tiles = TileTable(capabilities.latent_query_tiles(arch))
    decoder: Any = (
        cuda.Decoder(case.spec, tiles, case.q.device, case.q.dtype, case.limits)
        if ON_GPU
        else emulated.Decoder(case.spec, tiles, arch, dtype=case.q.dtype, limits=case.limits)
    )
    made = Run(case, decoder, tiles, policy)
    if workers:
        made.plan = case.plan(tiles, workers, policy)
        made.make_workspace(int(made.plan[2]))
    return made


def make_case(batch: Batch, rows: int, dims: tuple[int, int], dtype: torch.dtype, **options: Any) -> Case:
    return of_latents(Case(batch, rows, 1, *dims, dtype, device=DEVICE, **options))


STRADDLING = [(40, 1), (20, 2), (33, 1), (48, 1), (63, 1), (80, 1), (5, 8), (13, 3), (16, 3), (20, 4)]
"""Heads and tokens whose queries straddle work items; every kind has the first two."""


@each_kind
@pytest.mark.parametrize(
    "rows", [slowly(5), 8, slowly(13), slowly(16), 20, slowly(40), slowly(48), slowly(64), slowly(128)]
)
def test_random_trees(rows: int, arch: str, dims: tuple[int, int], dtype: torch.dtype) -> None:
    """With 40 and 48 rows a work item has one query and a part of others, with 128 half of one: it runs twice."""
    case = make_case(random_batch(random.Random(rows), 2, 3, 120), rows, dims, dtype)
    case.dear_tokens = True
    for policy in ("optimal", "naive") if rows < 64 or ON_GPU else ("optimal",):
        run(case, arch, policy).check_in_any_order(TOLERANCE[case.q.dtype])


@pytest.mark.parametrize(
    ("arch", "dims", "dtype", "heads", "tokens"),
    [
        (*KINDS[0], *STRADDLING[0]),
        *(slowly(*KINDS[0], *rows) for rows in STRADDLING[1:]),
        *(slowly(*kind, *rows) for kind in KINDS[1:] for rows in STRADDLING[:2]),
    ],
    ids=str,
)
def test_queries_straddle_work_items(
    arch: str, dims: tuple[int, int], dtype: torch.dtype, heads: int, tokens: int
) -> None:
    """Some rows of a request are in one item and some in the next, which are cut at other positions; with 80 rows, of both sets of 40 that are run."""
    generator, count = random.Random(heads), 68 if heads == 63 else 12
    nodes = [Node(0, 130, list(range(count)), [Node(130, 700, list(range(count - 3)))])]
    batch = Batch([700 + generator.randint(1, 90) for _ in range(count)], nodes)
    if tokens > 1:
        case: Case = Drafts(batch, random_trees(generator, batch, tokens), heads, 1, *dims, dtype, device=DEVICE)
    else:
        case = Case(batch, heads, 1, *dims, dtype, device=DEVICE)
    of_latents(case).dear_tokens = True
    made = run(case, arch, workers=40)
    items = layout.work_items(made.plan.cpu().numpy())
    if TileTable(capabilities.latent_query_tiles(arch)).query_tiles[-1] == 64:
        windows = [item for item in items if item.rows]
        rows = [rows for item in windows for rows in item.rows]
        group = heads * tokens // -(-heads * tokens // 64)
        assert (
            sum(end - first < group for first, end in rows) > 3 and sum(len(item.queries) == 2 for item in windows) > 1
        )
        # One is cut where its neighbour is not.
        assert {item.end for item in windows} - {130, 700}
    made.check_in_any_order(TOLERANCE[case.q.dtype], seeds=3)


@each_kind
def test_every_number_of_kv_tiles(arch: str, dims: tuple[int, int], dtype: torch.dtype) -> None:
    """Of one worker's items, which the warpgroups take by turns: whose turn it is goes on from item to item."""
    batch = Batch([64, 1, 65, 200, 128, 3, 129, 40], [])
    for rows in (4, 12, 24, 48):
        turns = run(make_case(batch, rows, dims, dtype), arch, workers=1)
        ms = {item.m for item in layout.work_items(turns.plan.cpu().numpy())}
        assert ms == {TileTable(capabilities.latent_query_tiles(arch)).query_tile(rows)}
        turns.check_in_any_order(TOLERANCE[turns.case.q.dtype], seeds=3)


@each_kind
def test_a_worker_with_more_items_than_it_looks_up(arch: str, dims: tuple[int, int], dtype: torch.dtype) -> None:
    case = make_case(Batch([130] + [70] * 64 + [3] * 75, []), 8, dims, dtype)
    turns = run(case, arch, "query", workers=1)
    plan = turns.plan.cpu().numpy()
    tiles = [-(-case.batch.seq_lens[item.queries[0]] // 64) for item in layout.work_items(plan)]
    # An odd number of tiles in each turn, so that barriers end otherwise than they began.
    assert len(tiles) > 2 * 64 and sum(tiles[:64]) % 2 == sum(tiles[64:128]) % 2 == 1
    assert turns.error() < TOLERANCE[case.q.dtype]


each_arch = pytest.mark.parametrize("arch", [ARCHS[0], *map(slowly, ARCHS[1:])])


@each_arch
def test_a_tail_without_tokens(arch: str) -> None:
    """Its part counts for nothing."""
    batch = Batch([200, 230, 200], [Node(0, 100, [0, 1, 2], [Node(100, 199, [0, 1, 2])])])
    case = make_case(batch, 20, DEEPSEEK, torch.bfloat16)
    empty = run(case, arch, "naive")
    case.seq_lens -= 1
    assert empty.error() < TOLERANCE[torch.bfloat16]


@each_arch
def test_a_plan_serves_longer_tails_and_padding(arch: str) -> None:
    case = Case(random_batch(random.Random(4), 2, 4, 100), 16, 1, *DEEPSEEK, torch.bfloat16, spare=100, device=DEVICE)
    case.k = case.k.nan_to_num(nan=1.5)
    run(of_latents(case), arch).check_longer_tails(TOLERANCE[torch.bfloat16])


@each_arch
def test_q_in_two_tensors(arch: str) -> None:
    """As `forward_absorb_core` gives it: the first columns are a view of [heads, tokens, 512]."""
    batch = Batch([90, 70, 80], [Node(0, 64, [0, 1, 2])])
    case = make_case(batch, 20, DEEPSEEK, torch.bfloat16)
    whole = run(case, arch)
    assert whole.error() < TOLERANCE[torch.bfloat16]
    right, v_dim = whole.out.clone(), DEEPSEEK[1]
    q = case.q[..., :v_dim].transpose(0, 1).contiguous().transpose(0, 1)
    q_rope = case.q[..., v_dim:].contiguous()
    whole.out.fill_(math.nan)
    whole.decoder.decode(
        q, case.kv, case.tables, case.scores(), whole.out, whole.plan, whole.partial, whole.lse, q_rope=q_rope
    )
    assert torch.equal(whole.out, right)
    with pytest.raises(ValueError, match="q_rope"):
        whole.decoder.decode(q, case.kv, case.tables, case.scores(), whole.out, whole.plan, whole.partial, whole.lse)
    with pytest.raises(ValueError, match=r"q_rope is for .* this q has 576 of 576"):
        whole.decoder.decode(
            case.q, case.kv, case.tables, case.scores(), whole.out, whole.plan, whole.partial, whole.lse, q_rope=q_rope
        )
    case.v = case.v.contiguous()
    with pytest.raises(ValueError, match="first columns of k"):
        whole.decode()


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        (ARCHS[0], torch.bfloat16),
        slowly(ARCHS[0], torch.float8_e4m3fn),
        *(slowly(arch, dtype) for arch in ARCHS[1:] for dtype in (torch.bfloat16, torch.float8_e4m3fn)),
    ],
    ids=str,
)
@pytest.mark.parametrize(("tokens", "heads"), [slowly(2, 8), (4, 16), slowly(3, 1), slowly(4, 20)])
def test_drafts(tokens: int, heads: int, arch: str, dtype: torch.dtype) -> None:
    generator = random.Random(tokens)
    batch = random_batch(generator, 2, 2, 80)
    trees = random_trees(generator, batch, tokens)
    case = of_latents(Drafts(batch, trees, heads, 1, *DEEPSEEK, dtype, device=DEVICE))
    run(case, arch).check_in_any_order(TOLERANCE[case.q.dtype])


@pytest.mark.parametrize("arch", map(slowly, ARCHS))
@pytest.mark.parametrize("window", [0, 30])
def test_extends(window: int, arch: str) -> None:
    cached, nodes = [70, 40, 90, 90], [Node(0, 30, [0, 1, 2, 3])]
    case = of_latents(
        Extended(Batch(cached, nodes), [5, 1, 9, 33], 8, 1, *DEEPSEEK, torch.bfloat16, window, device=DEVICE)
    )
    run(case, arch).check_in_any_order(TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("arch", map(slowly, ARCHS))
def test_sinks_and_caps(arch: str) -> None:
    batch = random_batch(random.Random(1), 2, 2, 80)
    case = make_case(batch, 20, DEEPSEEK, torch.bfloat16, sinks=True).cap(2.0)
    run(case, arch).check_in_any_order(TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("arch", map(slowly, ARCHS))
def test_rows_whose_maximum_grows(arch: str) -> None:
    """From tile to tile by more than is let pass (`kSlack` in csrc/cuda/softmax.cuh), so that what was summed up is made smaller every time."""
    tokens = 64 if arch == "9.0a" else 32
    for rows in (8, 64):
        case = make_case(Batch([600]), rows, DEEPSEEK, torch.bfloat16)
        slots = case.table[case.rows[0], :600].long()
        to_log2 = case.scale / math.log(2)
        # The last column of K, which V does not have.
        case.q[..., -1] = 1
        case.k[slots, 0, -1] = (torch.arange(600, device=DEVICE) // tokens * (16 / to_log2)).to(case.k)
        scores = case.q[0].float() @ case.k[slots, 0].float().T * to_log2
        maxima = torch.stack([tile.amax(-1) for tile in scores.split(tokens, -1)])
        assert (maxima.diff(dim=0) > 8).all()
        run(case, arch, workers=1).check_in_any_order(TOLERANCE[case.q.dtype])
