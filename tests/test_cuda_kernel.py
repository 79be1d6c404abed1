"""The CUDA kernels against attention in float64, in pools poisoned with NaN wherever no request's KV is."""

from __future__ import annotations

import math
import random

import pytest
import torch
from kernel_cases import TOLERANCE, Case
from trees import random_batch

from sglang_pat.kernels import cuda, gpu_tiles
from sglang_pat.packing import POLICIES, Batch, Node, TileTable

pytestmark = pytest.mark.gpu

ARCH = cuda.arch_of(torch.device("cuda")) if torch.cuda.is_available() else "9.0a"
FUSED = gpu_tiles.tile_table(ARCH, 128)
HALF = (torch.bfloat16, torch.float16)


@pytest.fixture(scope="module", autouse=True)
def modules() -> None:
    """Every module that the tests need, compiled at the same time."""
    if not torch.cuda.is_available():
        return
    variants = [
        cuda.Variant(dtype, dim, ARCH, gpu_tiles.tile_table(ARCH, dim).query_tiles)
        for dtype in HALF
        for dim in gpu_tiles.HEAD_DIMS
    ]
    variants += [cuda.Variant(torch.bfloat16, dim, ARCH, (m,)) for dim in (64, 128) for m in FUSED.query_tiles]
    cuda.build(variants)


class Run:
    """A case with its output and workspace on the GPU."""

    def __init__(self, case: Case, tiles: TileTable, mode: cuda.Mode = "fused", policy: str = "optimal") -> None:
        self.case = case
        self.decoder = cuda.Decoder(case.q.dtype, case.q.shape[2], tiles, case.q.device, mode)
        self.plan = case.plan(tiles, self.decoder.workers, policy)
        slots = max(1, int(self.plan[2]))
        heads, dim = case.q.shape[1:]
        self.partial = torch.empty(slots, heads, dim, device="cuda")
        self.lse = torch.empty(slots, heads, device="cuda")
        self.out = torch.empty_like(case.q)

    def poison(self) -> None:
        for tensor in (self.out, self.partial, self.lse):
            tensor.fill_(math.nan)

    def decode(self, logit_cap: float = 0.0, overlap: bool = True) -> None:
        case = self.case
        self.decoder.decode(
            case.q, case.k, case.v, self.out, case.table, case.rows, case.seq_lens, self.plan, self.partial, self.lse,
            scale=case.scale, logit_cap=logit_cap, overlap=overlap,
        )  # fmt: skip

    def error(self, logit_cap: float = 0.0) -> float:
        self.poison()
        self.decode(logit_cap)
        return self.case.difference(self.out, logit_cap)


def gpu_case(batch: Batch, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, **options: int) -> Case:
    return Case(batch, heads, kv_heads, dim, dim, dtype, device="cuda", **options)


def shared(queries: int, prefix: int, tail: int) -> Batch:
    return Batch([prefix + tail] * queries, [Node(0, prefix, list(range(queries)))])


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("dim", gpu_tiles.HEAD_DIMS)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16])
def test_random_trees(dtype: torch.dtype, dim: int, group: int) -> None:
    generator = random.Random(dim * 100 + group)
    for _ in range(3):
        batch = random_batch(
            generator, generator.randint(1, 3), generator.randint(1, 5), generator.choice([9, 90, 700])
        )
        kv_heads = generator.choice([1, 2, 5])
        case = gpu_case(batch, kv_heads * group, kv_heads, dim, dtype, page_size=generator.choice([1, 16, 64]))
        for policy in POLICIES:
            assert Run(case, gpu_tiles.tile_table(ARCH, dim), policy=policy).error() < TOLERANCE[dtype], policy


@pytest.mark.parametrize("mode", ["fused", "streams", "serial"])
def test_modes(mode: cuda.Mode) -> None:
    batch = random_batch(random.Random(7), 2, 6, 300)
    case = gpu_case(batch, 16, 4, 128, torch.bfloat16)
    assert Run(case, FUSED, mode).error() < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("m", FUSED.query_tiles)
@pytest.mark.parametrize("dim", [64, 128])
def test_every_tile(dim: int, m: int) -> None:
    tiles = TileTable((m,), FUSED.kv_tiles, ())
    for queries, prefix in ((1, 1), (40, 1), (40, 31), (33, 200), (70, 64), (3, 1000)):
        case = gpu_case(shared(queries, prefix, 1), 8, 2, dim, torch.bfloat16)
        for policy in ("naive", "query"):
            assert Run(case, tiles, policy=policy).error() < TOLERANCE[torch.bfloat16], (queries, prefix)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 25])
def test_every_number_of_warps_for_an_item(count: int, dim: int) -> None:
    """A CTA's warps share its items in teams, as large as there are few of them."""
    generator = random.Random(count)
    for most in (40, 700):
        batch = Batch([generator.randint(1, most) for _ in range(count)], [])
        for heads in (2, 32):
            case = gpu_case(batch, heads, 2, dim, torch.bfloat16)
            run = Run(case, gpu_tiles.tile_table(ARCH, dim))
            run.plan = case.plan(gpu_tiles.tile_table(ARCH, dim), workers=2)
            assert run.error() < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("queries", [1, 2, 33, 500, 2048])
def test_many_queries_on_a_node(queries: int) -> None:
    case = gpu_case(shared(queries, 300, 2), 8, 2, 128, torch.bfloat16)
    assert Run(case, FUSED).error() < TOLERANCE[torch.bfloat16]


def test_long_contexts() -> None:
    batch = Batch([131_072, 131_072, 100_001], [Node(0, 100_000, [0, 1, 2], [Node(100_000, 120_000, [0, 1])])])
    case = gpu_case(batch, 8, 2, 128, torch.bfloat16)
    for policy in ("optimal", "query"):
        assert Run(case, FUSED, policy=policy).error() < TOLERANCE[torch.bfloat16]


def test_a_tail_without_tokens() -> None:
    """Its part counts for nothing."""
    case = gpu_case(Batch([200, 230, 200], [Node(0, 100, [0, 1, 2], [Node(100, 199, [0, 1, 2])])]), 8, 2, 128, HALF[0])
    run = Run(case, FUSED, policy="naive")
    case.seq_lens -= 1
    assert run.error() < TOLERANCE[torch.bfloat16]


def test_logit_cap() -> None:
    case = gpu_case(shared(5, 90, 30), 8, 2, 128, torch.bfloat16)
    case.q *= 4
    assert Run(case, FUSED).error(logit_cap=5.0) < TOLERANCE[torch.bfloat16]
    assert (case.reference() - case.reference(5.0)).norm() > 0.1 * case.reference(5.0).norm()


def test_large_scores_do_not_overflow() -> None:
    case = gpu_case(shared(40, 150, 50), 8, 2, 128, torch.float16)
    case.q *= 100
    assert Run(case, FUSED).error() < TOLERANCE[torch.float16]


def test_strided_tensors() -> None:
    case = gpu_case(shared(5, 90, 30), 8, 2, 128, torch.bfloat16)
    case.k, case.v = torch.stack([case.k, case.v], dim=1).unbind(1)
    case.q = torch.cat([case.q, case.q], dim=1)[:, :8]
    run = Run(case, FUSED)
    run.out = torch.empty(case.q.shape, dtype=case.q.dtype, device="cuda")
    assert not case.k.is_contiguous() and not case.q.is_contiguous()
    assert run.error() < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("mode", ["fused", "streams"])
def test_a_graph_replays_other_plans_and_longer_tails(mode: cuda.Mode, overlap: bool) -> None:
    generator = random.Random(3)
    case = gpu_case(random_batch(generator, 2, 6, 200), 16, 4, 128, torch.bfloat16, spare=200)
    # Tails grow into slots that are poisoned at first.
    case.k.nan_to_num_(nan=1.5)
    case.v.nan_to_num_(nan=-0.5)
    run = Run(case, FUSED, mode)
    plans = [case.plan(FUSED, run.decoder.workers, policy) for policy in POLICIES]
    # Two more rows than the batch has, as SGLang's graphs pad.
    real, q = case.q.shape[0], torch.cat([case.q, torch.randn_like(case.q[:2])])
    slots = max(int(plan[2]) for plan in plans)
    run.out = torch.empty_like(q)
    run.partial = torch.empty(slots, *q.shape[1:], device="cuda")
    run.lse = torch.empty(slots, q.shape[1], device="cuda")
    run.plan = torch.zeros(max(map(len, plans)), dtype=torch.int32, device="cuda")
    run.plan[: len(plans[0])] = plans[0]
    case.q = q
    run.decode(overlap=overlap)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run.decode(overlap=overlap)
    case.q = q[:real]
    for plan in plans:
        run.plan.fill_(-7)
        run.plan[: len(plan)] = plan
        for _ in range(3):
            run.poison()
            graph.replay()
            assert case.difference(run.out[:real]) < TOLERANCE[torch.bfloat16]
            assert not run.out[real:].any()
            case.seq_lens += generator.randint(1, 12)  # 180 at most, of 200 spare ones


def test_repeated_runs_agree_bit_for_bit() -> None:
    run = Run(gpu_case(random_batch(random.Random(1), 3, 4, 300), 32, 8, 128, torch.bfloat16), FUSED)
    run.decode()
    first = run.out.clone()
    for _ in range(20):
        run.poison()
        run.decode()
        assert torch.equal(run.out, first)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: setattr(case, "k", case.k.float()), "k has the wrong dtype"),
        (lambda case: setattr(case, "table", case.table.long()), "req_to_token has the wrong dtype"),
        (lambda case: setattr(case, "rows", case.rows.cpu()), "rows must be on the GPU"),
        (lambda case: setattr(case, "q", case.q[:, :3]), "3 query heads are not a multiple of 2"),
        (lambda case: setattr(case, "v", case.v[:, :, 1:]), "v must have heads of 128"),
    ],
)
def test_wrong_tensors_are_named(change, message: str) -> None:
    run = Run(gpu_case(shared(3, 40, 10), 4, 2, 128, torch.bfloat16), FUSED)
    change(run.case)
    with pytest.raises(Exception, match=message):
        run.decode()


def test_unsupported_dtypes_and_dimensions_are_named() -> None:
    for dtype, dim in ((torch.float32, 128), (torch.bfloat16, 80)):
        with pytest.raises(ValueError, match=r"float16 or bfloat16 and head dimensions 64, 96, 128, 192, 256, not"):
            cuda.Decoder(dtype, dim, FUSED, torch.device("cuda"))
