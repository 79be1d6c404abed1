"""The CUDA kernels against attention in float64, in pools poisoned with NaN wherever no request's KV is.

Where there is no GPU, the same kernels run on the host (emulated.py).
"""

from __future__ import annotations

import math
import random
from typing import Any

import emulated
import msgspec
import pytest
import torch
from kernel_cases import Q_DTYPES, TOLERANCE, Case, Drafts, Extended, Run, in_turns, random_trees, spec_of
from trees import random_batch

from sglang_pat.backend.start.layers import kv_format
from sglang_pat.kernels import capabilities, cuda
from sglang_pat.packing import POLICIES, AttentionSpec, Batch, Node, TileTable, WideSteps, layout
from sglang_pat.packing.plan import OPEN

pytestmark = pytest.mark.once

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
ARCHS = [cuda.arch_of(torch.device("cuda"))] if ON_GPU else ["9.0a", "8.0"]
FORMATS = tuple(getattr(torch, name) for name in capabilities.KV_FORMATS["cuda"] if not name.startswith("int"))
# On the host each module takes seconds to compile, in every process that runs some of these tests.
DIMS = [*((dim, dim) for dim in capabilities.HEAD_DIMS), *capabilities.UNEQUAL_HEAD_DIMS]
"""Of K and V."""
KINDS = [
    (dtype, *dims)
    for dtype in FORMATS
    for dims in DIMS
    if ON_GPU
    or dtype == torch.bfloat16
    or dims == (128, 128)
    or (dtype == torch.float8_e4m3fn and (dims[0] != dims[1] or dims == (256, 256)))
]
FOUR_HEADS = (8, 2) if ON_GPU else (4, 1)
"""Query heads, four for each KV head."""
TILE_DIMS = [(64, 64), (128, 128), *capabilities.UNEQUAL_HEAD_DIMS] if ON_GPU else [(128, 128)]


def emulated_slowly(*values: Any) -> Any:
    """Parameters that `make test` leaves out where there is no GPU."""
    return pytest.param(*values, marks=[] if ON_GPU else pytest.mark.slow)


def in_dimension(dim: int, *values: Any) -> Any:
    name = "-".join(str(value).removeprefix("torch.") for value in dict.fromkeys(values))
    marks = [] if ON_GPU or dim == 128 else pytest.mark.slow
    return pytest.param(*values, marks=marks, id=name)


KIND_PARAMETERS = [in_dimension(dim, dtype, dim, v_dim) for dtype, dim, v_dim in KINDS]
DRAFT_KINDS = (
    KIND_PARAMETERS
    if ON_GPU
    else [
        (torch.bfloat16, 128, 128),
        emulated_slowly(torch.float8_e4m3fn, 128, 128),
        emulated_slowly(torch.float8_e4m3fn, 256, 256),
    ]
)
"""With drafts likewise."""
SINK_KINDS = (
    KIND_PARAMETERS
    if ON_GPU
    else [
        (torch.bfloat16, 64, 64),
        emulated_slowly(torch.float8_e4m3fn, 128, 128),
        emulated_slowly(torch.float8_e4m3fn, 192, 128),
        emulated_slowly(torch.float8_e4m3fn, 256, 256),
    ]
)
"""With sinks, modules are others."""

each_arch = pytest.mark.parametrize(
    "arch",
    ARCHS if ON_GPU else ["9.0a", emulated_slowly("8.0")],
)


hopper = pytest.mark.skipif(not ARCHS[0].startswith("9."), reason="items of several warpgroups are Hopper's")

each_format = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, emulated_slowly(torch.float8_e4m3fn)], ids=["16 bits", "8 bits"]
)


@pytest.fixture(scope="module", autouse=True)
def modules() -> None:
    """On a GPU every module that the tests need, compiled at the same time; an emulated one is compiled when it is needed."""
    if not ON_GPU:
        return
    wanted = [
        cuda.Variant.of(
            msgspec.structs.replace(spec_of(dtype, dim, v_dim), sinks=sinks), arch, dtype=Q_DTYPES.get(dtype)
        )
        for arch in ARCHS
        for dtype, dim, v_dim in KINDS
        for sinks in (False, True)
    ]
    single = [
        cuda.Variant.of(spec_of(dtype, dim, v_dim), arch, (m,))
        for dtype in (torch.bfloat16, torch.float8_e4m3fn)
        for arch in ARCHS
        for dim, v_dim in TILE_DIMS
        for m in capabilities.query_tiles(arch, dim, kv_format(dtype))
    ]
    cuda.build([*wanted, *single])


def run(case: Case, arch: str, tiles: TileTable | None = None, policy: str = "optimal") -> Run:
    known = capabilities.tile_table_of(case.spec, arch)
    tiles = tiles or known
    if ON_GPU:
        return Run(case, cuda.Decoder(case.spec, tiles, case.q.device, case.q.dtype, case.limits), tiles, policy)
    # A plan for some of the tiles is run by the module that has all: a module takes longer to compile than most tests to run.
    compiled = known if set(tiles.query_tiles) <= set(known.query_tiles) else tiles
    return Run(case, emulated.Decoder(case.spec, compiled, arch, dtype=case.q.dtype, limits=case.limits), tiles, policy)


def make_case(
    batch: Batch, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, v_dim: int = 0, **options: Any
) -> Case:
    """V is as wide as K if nothing is said."""
    return Case(batch, heads, kv_heads, dim, v_dim or dim, dtype, device=DEVICE, **options)


def shared(queries: int, prefix: int, tail: int) -> Batch:
    return Batch([prefix + tail] * queries, [Node(0, prefix, list(range(queries)))])


@each_arch
@pytest.mark.parametrize(("dtype", "dim", "v_dim"), KIND_PARAMETERS)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16] if ON_GPU else [3, emulated_slowly(8)])
def test_random_trees(dtype: torch.dtype, dim: int, v_dim: int, group: int, arch: str) -> None:
    generator = random.Random(dim * 100 + group)
    for _ in range(3 if ON_GPU else 1):
        batch = random_batch(
            generator,
            generator.randint(1, 3),
            generator.randint(1, 5),
            generator.choice([9, 90, 700 if ON_GPU else 300]),
        )
        kv_heads = generator.choice([1, 2, 5])
        page_size = generator.choice([1, 16, 64])
        case = make_case(batch, kv_heads * group, kv_heads, dim, dtype, v_dim, page_size=page_size)
        for policy in POLICIES if ON_GPU else ["optimal"]:
            assert run(case, arch, policy=policy).error() < TOLERANCE[case.q.dtype], policy


@each_arch
@pytest.mark.parametrize(("dtype", "dim", "v_dim"), KIND_PARAMETERS)
@pytest.mark.parametrize("window", [1, 17, 130, 1024] if ON_GPU else [1, 130])
def test_windows(dtype: torch.dtype, dim: int, v_dim: int, window: int, arch: str) -> None:
    """What lies in front of a window is NaN; requests that have not filled theirs share."""
    generator = random.Random(dim * 100 + window)
    batch = random_batch(generator, 2, 4, max(9, window))
    lengths = [length + generator.choice([0, 0, window, 3 * window]) for length in batch.seq_lens]
    case = make_case(Batch(lengths, batch.roots), 8, 2, dim, dtype, v_dim, window=window)
    assert run(case, arch).error() < TOLERANCE[case.q.dtype]


def of_any_batch(tiles: TileTable) -> TileTable:
    """The same tiles for all steps: the tests' batches are all small."""
    return msgspec.structs.replace(tiles, wide_steps=WideSteps())


@pytest.mark.parametrize(("tokens", "heads"), [(4, 4), (4, 3), emulated_slowly(3, 4), emulated_slowly(8, 2)])
@pytest.mark.parametrize("window", [0, 40])
def test_drafts_of_up_to_16_rows_by_single_warps(tokens: int, heads: int, window: int) -> None:
    """Each row's mask is looked up with its Q; the module has no smaller tile."""
    tiles = of_any_batch(capabilities.tile_table(ARCHS[0], 128))
    generator = random.Random(tokens * heads)
    batch = Batch([generator.randint(1, 90) for _ in range(9)] + [230], [Node(0, 1, [0, 1, 2])])
    case = Drafts(
        batch, random_trees(generator, batch, tokens), 2 * heads, 2, 128, 128, torch.bfloat16, window, device=DEVICE
    )
    decoded = run(case, ARCHS[0], tiles)
    ends = [item for item in layout.work_items(decoded.plan.cpu().numpy()) if item.end == OPEN]
    assert {item.m for item in ends} == {16}
    decoded.check_in_any_order(TOLERANCE[torch.bfloat16])


@each_arch
@pytest.mark.parametrize(("dtype", "dim", "v_dim"), DRAFT_KINDS)
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads"),
    [(2, 8, 2), (8, 4, 1), (5, 3, 3), *([(64, 8, 2), (3, 40, 1)] if ON_GPU else [(16, 8, 1)])],
)
def test_drafts(tokens: int, heads: int, kv_heads: int, dtype: torch.dtype, dim: int, v_dim: int, arch: str) -> None:
    """Trees of a few tokens behind each request, whose rows each see some of them; tiles of every size."""
    generator = random.Random(tokens)
    for cap, lengths in ((0.0, (1, 9)), (3.0, (30, 200))):
        batch = random_batch(generator, 2, 3, generator.randint(*lengths))
        trees = random_trees(generator, batch, tokens)
        case = Drafts(batch, trees, heads, kv_heads, dim, v_dim, dtype, device=DEVICE)
        assert run(case.cap(cap), arch).error() < TOLERANCE[case.q.dtype]


def in_any_order(case: Case, arch: str, tiles: TileTable | None = None, policy: str = "optimal") -> None:
    run(case, arch, tiles, policy=policy).check_in_any_order(TOLERANCE[case.q.dtype], seeds=3 if ON_GPU else 2)


@each_arch
@pytest.mark.parametrize(("dtype", "dim", "v_dim"), DRAFT_KINDS)
@pytest.mark.parametrize("window", [17, 64, 130] if ON_GPU else [17])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads"), [(2, 8, 2), (8, 4, 1), (5, 3, 3), *([(3, 40, 1)] if ON_GPU else [(16, 8, 1)])]
)
def test_drafts_behind_windows(
    tokens: int, heads: int, kv_heads: int, window: int, dtype: torch.dtype, dim: int, v_dim: int, arch: str
) -> None:
    """Each token's window begins where its own place says; what is in front of all of them is NaN."""
    generator = random.Random(tokens * window)
    for cap, length in ((0.0, 9), (3.0, window)):
        batch = random_batch(generator, 2, 3, length)
        lengths = [
            cached + generator.choice([0, 0, 1, window - tokens, window, 3 * window]) for cached in batch.seq_lens
        ]
        batch = Batch(lengths, batch.roots)
        trees = random_trees(generator, batch, tokens)
        case = Drafts(batch, trees, heads, kv_heads, dim, v_dim, dtype, window, device=DEVICE)
        in_any_order(case.cap(cap), arch)


@each_arch
@pytest.mark.parametrize(("dtype", "dim", "v_dim"), DRAFT_KINDS)
@pytest.mark.parametrize("window", [0, 1, 30, 150] if ON_GPU else [0, 30])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (7, 1), *([(6, 6), (32, 1), (150, 1)] if ON_GPU else [])])
def test_extends(heads: int, kv_heads: int, window: int, dtype: torch.dtype, dim: int, v_dim: int, arch: str) -> None:
    """Tokens of short turns share their prefixes, those of long ones fill tiles; each sees what is in front of its own end."""
    generator = random.Random(heads)
    for cap, length in ((0.0, 80), (3.0, 300 if ON_GPU else 150)):
        batch = random_batch(generator, 2, 3, length)
        added = [generator.choice([0, 1, 1, 3, 6, 70]) for _ in batch.seq_lens]
        added[:3] = [1, 3, 2]
        case = Extended(batch, added, heads, kv_heads, dim, v_dim, dtype, window, device=DEVICE)
        in_any_order(case.cap(cap), arch)


@each_arch
@pytest.mark.slow
@pytest.mark.parametrize("m", capabilities.tile_table(ARCHS[0], 128).query_tiles)
def test_extends_by_every_tile(m: int, arch: str) -> None:
    known = capabilities.tile_table(arch, 128)
    if m not in known.query_tiles:
        pytest.skip("not a tile of this architecture")
    tiles = TileTable((m,))
    for cached, added, window in (([500, 500, 500], [1, 4, 9], 0), ([400, 310, 0], [40, 1, 90], 100), ([63], [66], 0)):
        nodes = [Node(0, 300, [0, 1])] if len(cached) > 1 else []
        case = Extended(
            Batch(cached, nodes), added, *FOUR_HEADS, 128, 128, torch.bfloat16, window, sinks=True, device=DEVICE
        )
        in_any_order(case, arch, tiles)


@each_format
@pytest.mark.parametrize("heads", [3, 4, 5])
@pytest.mark.parametrize("tokens", [8, 1])
def test_rows_of_a_query_in_slices(tokens: int, heads: int, dtype: torch.dtype) -> None:
    """Of short items, by single warps; the last slice has some rows of the one before again."""
    arch = ARCHS[0]
    tiles = of_any_batch(capabilities.tile_table("9.0a", 128, "NVIDIA H200", kv=kv_format(dtype)))
    if not set(tiles.query_tiles) <= set(capabilities.query_tiles(arch, 128, kv_format(dtype))):
        pytest.skip("not the tiles of this architecture")
    batch = Batch([209, 231, 203, 9, 700], [Node(0, 200, [0, 1, 2])])
    if tokens > 1:
        trees = random_trees(random.Random(heads), batch, tokens)
        case: Case = Drafts(batch, trees, 2 * heads, 2, 128, 128, dtype, device=DEVICE)
    else:
        case = make_case(batch, 16 * heads, 2, 128, dtype)
    decoded = run(case, arch, tiles)
    rows = sorted({item.m for item in layout.work_items(decoded.plan.cpu().numpy()) if len(item.queries) == 1})
    assert rows == [16, 64], "short items in slices, the long one whole"
    assert decoded.error() < TOLERANCE[case.q.dtype]


@hopper
@pytest.mark.parametrize(
    ("dtype", "dim", "tokens"),
    [
        (torch.bfloat16, 128, 1),
        (torch.bfloat16, 128, 4),
        emulated_slowly(torch.float8_e4m3fn, 128, 1),
        emulated_slowly(torch.float16, 64, 1),
        emulated_slowly(torch.bfloat16, 256, 1),
        emulated_slowly(torch.float8_e4m3fn, 256, 1),
        emulated_slowly(torch.float8_e5m2, 192, 1),
    ],
)
@pytest.mark.parametrize("narrow_first", [True, False])
def test_workers_with_both_kinds_of_items(dtype: torch.dtype, dim: int, tokens: int, narrow_first: bool) -> None:
    """Every second worker may run those of single warps first."""
    generator = random.Random(tokens)
    batch = Batch([300 + generator.randint(1, 70) for _ in range(40)], [Node(0, 300, list(range(40)))])
    if tokens == 1:
        case = make_case(batch, 12, 3, dim, dtype)
    else:
        case = Drafts(batch, random_trees(generator, batch, tokens), 6, 3, dim, dim, dtype, device=DEVICE)
    decoded = run_for(3, case)
    decoded.plan[layout.HEADER.index("narrow_first")] = narrow_first
    first, last = layout.sections(decoded.plan.cpu().numpy()).bins[:2]
    ms = {item.m for item in layout.work_items(decoded.plan.cpu().numpy())[first:last]}
    assert min(ms) <= 16 and max(ms) >= 64, "each KV head's worker has both"
    decoded.check_in_any_order(TOLERANCE[case.q.dtype], seeds=3)


TAILS = ((1, 64), (8, 8), (3, 16), (4, 11))
"""Tokens of a query and query heads of a KV head."""


@hopper
@pytest.mark.parametrize(
    ("tokens", "heads", "dtype", "dim"),
    [
        *((tokens, heads, torch.bfloat16, 128) for tokens, heads in TAILS[1:2]),
        *(emulated_slowly(tokens, heads, torch.bfloat16, 128) for tokens, heads in (TAILS[0], *TAILS[2:])),
        *(emulated_slowly(tokens, heads, torch.float16, 128) for tokens, heads in TAILS),
        *(emulated_slowly(tokens, heads, torch.bfloat16, 64) for tokens, heads in TAILS),
        *(emulated_slowly(tokens, heads, torch.float8_e4m3fn, 128) for tokens, heads in (*TAILS, (3, 11))),
        *(emulated_slowly(tokens, heads, torch.float8_e5m2, 64) for tokens, heads in ((1, 33), (8, 8))),
    ],
)
def test_tails(tokens: int, heads: int, dtype: torch.dtype, dim: int) -> None:
    """Work items in which queries of more than 42 rows share a prefix, with 8 bits of more than 32, and then each has its own tail."""
    generator = random.Random(tokens)
    batch = with_tails(generator)
    if tokens == 1:
        case = make_case(batch, 2 * heads, 2, dim, dtype)
    else:
        trees = random_trees(generator, batch, tokens)
        case = Drafts(batch, trees, 2 * heads, 2, dim, dim, dtype, device=DEVICE)
    # Some see more in their tails than in front of them: what was summed up there is made smaller.
    for query, length in enumerate(batch.seq_lens):
        if query % 2:
            own = case.table[case.rows[query], 270:length].long()
            case.k[own] = (case.k[own].float() * 8).to(dtype)
    decoded = run_for(3, case)
    found = [len(item.queries) for item in layout.work_items(decoded.plan.cpu().numpy()) if item.tails]
    # With 8 bits the third warpgroup converts.
    assert ({2, 3} if case.spec.kv.bits == 16 else {2}) <= set(found)
    decoded.check_in_any_order(TOLERANCE[case.q.dtype], seeds=3)


@hopper
@each_format
@pytest.mark.parametrize("more", [70, -1])
def test_tails_that_grow_or_have_no_tokens(more: int, dtype: torch.dtype) -> None:
    batch = Batch([330, 340, 400, 301, 302, 333, 450], [Node(0, 300, list(range(7)))])
    case = make_case(batch, 64, 1, 128, dtype, spare=100)
    decoded = run_for(1, case)
    assert any(item.tails for item in layout.work_items(decoded.plan.cpu().numpy()))
    decoded.check_in_any_order(TOLERANCE[torch.bfloat16])
    # One of them then has none, with -1.
    case.seq_lens += more
    decoded.check_in_any_order(TOLERANCE[torch.bfloat16])


def with_tails(generator: random.Random) -> Batch:
    """Prefixes of 200 to 270 tokens, with tails of one token to six tiles."""
    lengths = [270 + generator.choice([10, 65, 130, 131, 390]) for _ in range(17)]
    inner = [Node(200, 270, list(range(8))), Node(200, 230, list(range(8, 12)))]
    return Batch(lengths, [Node(0, 200, list(range(13)), inner), Node(0, 75, list(range(13, 17)))])


def run_for(workers: int, case: Case) -> Run:
    """With a plan for so few: for many, such small batches have no work items with tails."""
    decoded = run(case, ARCHS[0])
    tiles = capabilities.tile_table(ARCHS[0], case.spec.head_dim, kv=case.spec.kv)
    decoded.plan = case.plan(tiles, workers)
    decoded.make_workspace(int(decoded.plan[2]))
    return decoded


@each_arch
@pytest.mark.slow
def test_drafts_with_sinks(arch: str) -> None:
    """Of each token's heads, in parts that are alone and in the merge."""
    generator = random.Random(0)
    for batch in (Batch([9, 30, 70]), Batch([210, 220, 230], [Node(0, 200, [0, 1, 2])])):
        trees = random_trees(generator, batch, 5)
        case = Drafts(batch, trees, 6, 2, 128, 128, torch.bfloat16, sinks=True, device=DEVICE)
        assert run(case, arch).error() < TOLERANCE[case.q.dtype]


@each_arch
@pytest.mark.parametrize(("dtype", "dim", "v_dim"), SINK_KINDS)
@pytest.mark.parametrize(
    ("lengths", "window"),
    [((0, 40), 0), ((130, 20), 0), ((700, 0), 0), ((0, 90), 17)],
    ids=["alone", "shared", "split", "window"],
)
def test_sinks(lengths: tuple[int, int], window: int, dtype: torch.dtype, dim: int, v_dim: int, arch: str) -> None:
    """Each counts once, in the part that is alone or in the merge, scaled and capped by nothing."""
    case = make_case(shared(9, *lengths), 6, 2, dim, dtype, v_dim, sinks=True, window=window)
    assert run(case, arch).error() < TOLERANCE[case.q.dtype]
    assert run(case.cap(5.0), arch).error() < TOLERANCE[case.q.dtype]
    right, case.sinks = case.reference(), None
    assert (right - case.reference()).norm() > 0.1 * right.norm(), "sinks must matter in this test"


@each_arch
@each_format
@pytest.mark.parametrize(
    ("dim", "v_dim"), [in_dimension(dim, dim, v_dim) for dim, v_dim in DIMS if ON_GPU or dim == v_dim]
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(71, 1), (130, 2), *([(200, 1), (640, 1)] if ON_GPU else [])])
def test_more_query_heads_than_a_tile_has_rows(
    heads: int, kv_heads: int, dim: int, v_dim: int, dtype: torch.dtype, arch: str
) -> None:
    """They are computed in splits, the last of which has some heads of the one before again."""
    case = make_case(random_batch(random.Random(heads), 2, 3, 90), heads, kv_heads, dim, dtype, v_dim)
    assert run(case, arch).error() < TOLERANCE[case.q.dtype]
    tiles = TileTable(capabilities.tiles_of(case.spec, arch))
    assert run(case, arch, tiles, policy="naive").error() < TOLERANCE[case.q.dtype]


@each_arch
@pytest.mark.parametrize("policy", POLICIES)
def test_policies(policy: str, arch: str) -> None:
    case = make_case(random_batch(random.Random(5), 3, 4, 200), 16, 4, 128, torch.bfloat16)
    assert run(case, arch, policy=policy).error() < TOLERANCE[torch.bfloat16]


@each_arch
@each_format
@pytest.mark.parametrize("m", [emulated_slowly(m) for m in capabilities.tile_table(ARCHS[0], 128).query_tiles])
@pytest.mark.parametrize(("dim", "v_dim"), TILE_DIMS)
def test_every_tile(dim: int, v_dim: int, m: int, dtype: torch.dtype, arch: str) -> None:
    if m not in capabilities.query_tiles(arch, dim, kv_format(dtype)):
        pytest.skip("not a tile of this architecture")
    tiles = TileTable((m,))
    for queries, prefix in ((1, 1), (40, 1), (40, 31), (33, 200), (70, 64), (3, 1000)):
        case = make_case(shared(queries, prefix, 1), *FOUR_HEADS, dim, dtype, v_dim)
        for policy in ("naive", "query") if ON_GPU else ("naive",):
            assert run(case, arch, tiles, policy=policy).error() < TOLERANCE[case.q.dtype], (queries, prefix)


@each_arch
@each_format
@pytest.mark.parametrize(
    ("dim", "v_dim"), [(64, 64), (128, 128), emulated_slowly(256, 256), *([(192, 128)] if ON_GPU else [])]
)
@pytest.mark.parametrize(
    "count", [1, 3, 13, *(emulated_slowly(count) for count in (2, 5, 7, 12, 25)), *([4, 6, 11] if ON_GPU else [])]
)
def test_every_number_of_warps_for_an_item(count: int, dim: int, v_dim: int, dtype: torch.dtype, arch: str) -> None:
    """A CTA's warps share its items in teams, as large as there are few of them, and those that are left when each warp has as many as the others."""
    generator = random.Random(count)
    for least, most in ((1, 40), (1, 700), (400, 400)):
        batch = Batch([generator.randint(least, most) for _ in range(count)], [])
        for heads in (1, 16):
            case = make_case(batch, heads, 1, dim, dtype, v_dim)
            few = run(case, arch)
            few.plan = case.plan(capabilities.tile_table_of(case.spec, arch), workers=1)
            assert few.error() < TOLERANCE[case.q.dtype]


@each_arch
@pytest.mark.parametrize(
    ("dtype", "dim", "heads"),
    [
        (torch.bfloat16, 128, 6),
        emulated_slowly(torch.float8_e4m3fn, 128, 6),
        emulated_slowly(torch.float8_e4m3fn, 256, 8),
    ],
)
def test_a_worker_with_more_items_than_threads(dtype: torch.dtype, dim: int, heads: int, arch: str) -> None:
    """They are looked up in turns, wide ones too, whose barriers begin anew."""
    batch = Batch([70] * 520, [Node(0, 60, list(range(first, first + 4))) for first in range(0, 520, 4)])
    case = make_case(batch, heads, 1, dim, dtype)
    tiles = TileTable(capabilities.query_tiles(arch, dim, kv_format(dtype))[:3])
    for chosen in (tiles, TileTable(tiles.query_tiles[-1:])):
        turns = run(case, arch, chosen, policy="naive")
        turns.plan = case.plan(chosen, workers=1, policy="naive")
        assert len(layout.work_items(turns.plan.cpu().numpy())) > 512
        assert turns.error() < TOLERANCE[case.q.dtype]


@hopper
@pytest.mark.parametrize(("dim", "v_dim"), [(256, 256), emulated_slowly(192, 128)])
@pytest.mark.parametrize("tokens", [90, 400])
def test_warpgroups_with_queries_of_their_own(tokens: int, dim: int, v_dim: int) -> None:
    """Two warpgroups take items of 64 rows in turn, and those of 128 together, whoever's turn it is."""
    case = make_case(in_turns(tokens), 8, 1, dim, torch.bfloat16, v_dim)
    tiles = TileTable((64, 128))
    turns = run(case, "9.0a", tiles, policy="naive")
    turns.plan = case.plan(tiles, workers=1, policy="naive")
    assert {item.m for item in layout.work_items(turns.plan.cpu().numpy())} == {64, 128}
    turns.check_in_any_order(TOLERANCE[case.q.dtype], seeds=3)


@hopper
@pytest.mark.parametrize(
    ("dim", "v_dim", "heads"),
    [(256, 256, 8), (192, 128, 8), *(emulated_slowly(*dims) for dims in ((256, 256, 7), (192, 192, 8)))],
)
@pytest.mark.parametrize(("tokens", "draft"), [(90, 1), emulated_slowly(400, 1), emulated_slowly(150, 4)])
def test_kv_of_8_bits_converted_directly(tokens: int, draft: int, dim: int, v_dim: int, heads: int) -> None:
    """Four sets of threads fill stages in turn, whatever the number of tiles of an item; some items have none at all."""
    prefixes = in_turns(tokens)
    batch = Batch([length + 1 for length in prefixes.seq_lens], prefixes.roots)
    if draft == 1:
        case = make_case(batch, heads, 1, dim, torch.float8_e4m3fn, v_dim)
    else:
        trees = random_trees(random.Random(tokens), batch, draft)
        case = Drafts(batch, trees, heads, 1, dim, v_dim, torch.float8_e4m3fn, device=DEVICE)
    tiles = TileTable((64,))
    turns = run(case, "9.0a", tiles)
    turns.plan = case.plan(tiles, workers=1)
    turns.check_in_any_order(TOLERANCE[case.q.dtype], seeds=3)
    if draft == 1:
        # Tails of one token then have none.
        case.seq_lens -= 1
        turns.check_in_any_order(TOLERANCE[case.q.dtype], seeds=2)


@each_arch
@each_format
@pytest.mark.parametrize("queries", [1, 2, 33, 500, *([2048] if ON_GPU else [])])
def test_many_queries_on_a_node(queries: int, dtype: torch.dtype, arch: str) -> None:
    case = make_case(shared(queries, 300, 2), 8, 2, 128, dtype)
    assert run(case, arch).error() < TOLERANCE[case.q.dtype]


@each_arch
@each_format
def test_long_contexts(dtype: torch.dtype, arch: str) -> None:
    unit = 1_000 if ON_GPU else 100
    nodes = [Node(0, 100 * unit, [0, 1, 2], [Node(100 * unit, 120 * unit, [0, 1])])]
    case = make_case(Batch([131 * unit, 131 * unit, 100 * unit + 1], nodes), 8, 2, 128, dtype)
    for policy in ("optimal", "query"):
        assert run(case, arch, policy=policy).error() < TOLERANCE[case.q.dtype]


@each_arch
@each_format
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (64, 2)], ids=["narrow", "wide"])
def test_a_tail_without_tokens(heads: int, kv_heads: int, dtype: torch.dtype, arch: str) -> None:
    """Its part counts for nothing."""
    batch = Batch([200, 230, 200], [Node(0, 100, [0, 1, 2], [Node(100, 199, [0, 1, 2])])])
    case = make_case(batch, heads, kv_heads, 128, dtype)
    empty = run(case, arch, policy="naive")
    case.seq_lens -= 1
    assert empty.error() < TOLERANCE[case.q.dtype]


@each_arch
@each_format
def test_logit_cap(dtype: torch.dtype, arch: str) -> None:
    case = make_case(shared(5, 90, 30), 8, 2, 128, dtype)
    case.q *= 4
    assert run(case.cap(5.0), arch).error() < TOLERANCE[case.q.dtype]
    assert (case.reference() - case.reference(5.0)).norm() > 0.1 * case.reference(5.0).norm()


@each_arch
def test_large_scores_do_not_overflow(arch: str) -> None:
    case = make_case(shared(40, 150, 50), 8, 2, 128, torch.float16)
    case.q *= 100
    assert run(case, arch).error() < TOLERANCE[torch.float16]


@each_arch
@pytest.mark.parametrize("dtype", [torch.bfloat16, emulated_slowly(torch.float16)], ids=str)
def test_what_8_bits_say_is_exact(dtype: torch.dtype, arch: str) -> None:
    """Numbers of either kind up to 1,000, by items of every kind; queries that are beyond float16 count as its largest."""
    for kept in (torch.float8_e4m3fn, torch.float8_e5m2):
        for queries in (1, 4, 40):
            case = make_case(shared(queries, 256, 3), 8, 2, 128, kept, q_dtype=dtype)
            codes = torch.arange(256, device=DEVICE, dtype=torch.uint8).view(kept).float()
            codes = codes[codes.isfinite() & (codes.abs() < 1000)]
            case.v = codes[torch.randint(len(codes), case.v.shape, device=DEVICE)].to(kept)
            case.k = codes[torch.randint(len(codes), case.k.shape, device=DEVICE)].to(kept)
            case.q *= 0.02  # so that scores are about 1
            assert run(case, arch).error() < 2 * TOLERANCE[dtype]
    if dtype == torch.bfloat16:
        case = make_case(shared(40, 90, 30), 8, 2, 128, torch.float8_e4m3fn)
        case.q[:, :, 0], case.k_scale = 1e6, 1e-5
        beyond = run(case, arch)
        beyond.poison()
        beyond.decode()
        case.q[:, :, 0] = 65504
        assert case.difference(beyond.out) < 4 * TOLERANCE[torch.bfloat16]


@each_arch
@each_format
def test_strided_tensors(dtype: torch.dtype, arch: str) -> None:
    case = make_case(shared(5, 90, 30), 8, 2, 128, dtype)
    case.k, case.v = torch.stack([case.k, case.v], dim=1).unbind(1)
    case.q = torch.cat([case.q, case.q], dim=1)[:, :8]
    assert not case.k.is_contiguous() and not case.q.is_contiguous()
    assert run(case, arch).error() < TOLERANCE[case.q.dtype]


@each_arch
@each_format
@pytest.mark.parametrize(("dim", "v_dim"), [emulated_slowly(*dims) for dims in capabilities.UNEQUAL_HEAD_DIMS])
def test_v_narrower_than_k_in_one_pool(dim: int, v_dim: int, dtype: torch.dtype, arch: str) -> None:
    """K and V of a head are neighbours, and what lies behind its V is NaN."""
    for batch in (shared(5, 90, 30), shared(1, 4000, 1), shared(40, 500, 3)):
        case = make_case(batch, 8, 2, dim, dtype, v_dim)
        behind = torch.full((*case.v.shape[:2], dim - v_dim), math.nan, device=DEVICE).to(dtype)
        # Torch cannot join what has 8 bits.
        plain = torch.uint8 if dtype.itemsize == 1 else dtype
        pool = torch.cat([part.view(plain) for part in (case.k, case.v, behind)], dim=2).view(dtype)
        case.k, case.v = pool[:, :, :dim], pool[:, :, dim : dim + v_dim]
        assert not case.v.is_contiguous()
        assert run(case, arch).error() < TOLERANCE[case.q.dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
def test_a_graph_replays_other_plans_and_longer_tails(overlap: bool) -> None:
    generator = random.Random(3)
    tiles = capabilities.tile_table(ARCHS[0], 128)
    case = make_case(random_batch(generator, 2, 6, 200), 16, 4, 128, torch.bfloat16, spare=200)
    # Tails grow into slots that are poisoned at first.
    case.k.nan_to_num_(nan=1.5)
    case.v.nan_to_num_(nan=-0.5)
    graphed = run(case, ARCHS[0])
    plans = [case.plan(tiles, graphed.decoder.workers, policy) for policy in POLICIES]
    # Two more rows than the batch has, as SGLang's graphs pad.
    real, q = case.q.shape[0], torch.cat([case.q, torch.randn_like(case.q[:2])])
    graphed.make_workspace(max(int(plan[2]) for plan in plans))
    graphed.out = torch.empty_like(q)
    graphed.plan = torch.zeros(max(map(len, plans)), dtype=torch.int32, device="cuda")
    graphed.plan[: len(plans[0])] = plans[0]
    case.q = q
    graphed.decode(overlap=overlap)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed.decode(overlap=overlap)
    case.q = q[:real]
    for plan in plans:
        graphed.plan.fill_(-7)
        graphed.plan[: len(plan)] = plan
        for _ in range(3):
            graphed.poison()
            graph.replay()
            assert case.difference(graphed.out[:real]) < TOLERANCE[torch.bfloat16]
            assert not graphed.out[real:].any()
            case.seq_lens += generator.randint(1, 12)  # 180 at most, of 200 spare ones


@pytest.mark.gpu
def test_what_the_kernel_in_front_writes_is_waited_for() -> None:
    """Also where forward begins before that kernel has ended."""
    case = make_case(shared(20, 3000, 500), 32, 8, 128, torch.bfloat16)
    started = run(case, ARCHS[0])
    pools = case.q, case.k, case.v
    right = [pool.clone() for pool in pools]

    def step() -> None:
        for pool, values in zip(pools, right, strict=True):
            torch.mul(values, 1, out=pool)
        started.decode(early=True)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for begin in [graph.replay, step] * 5:
        for pool in pools:
            pool.fill_(math.nan)
        started.poison()
        begin()
        assert case.difference(started.out) < TOLERANCE[torch.bfloat16]


@each_arch
@each_format
def test_a_plan_serves_longer_tails_and_padding(dtype: torch.dtype, arch: str) -> None:
    case = make_case(random_batch(random.Random(4), 2, 4, 100), 16, 4, 128, dtype, spare=100)
    case.k, case.v = (pool.float().nan_to_num(nan=nan).to(dtype) for pool, nan in ((case.k, 1.5), (case.v, -0.5)))
    run(case, arch).check_longer_tails(TOLERANCE[case.q.dtype])


@each_arch
@each_format
def test_repeated_runs_agree_bit_for_bit(dtype: torch.dtype, arch: str) -> None:
    batch = random_batch(random.Random(1), 3, 4, 300 if ON_GPU else 60)
    repeated = run(make_case(batch, 32, 8, 128, dtype), arch)
    repeated.decode()
    first = repeated.out.clone()
    for _ in range(20 if ON_GPU else 5):
        repeated.poison()
        repeated.decode()
        assert torch.equal(repeated.out, first)


@pytest.mark.parametrize("side_stream", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_loading_copies_what_is_in_use(side_stream: bool) -> None:
    """On the stream that is current, where the event is too."""
    case = make_case(random_batch(random.Random(2), 2, 4, 100), 16, 4, 128, torch.bfloat16)
    loaded = run(case, ARCHS[0])
    plan = torch.full((len(loaded.plan) + 50,), -5, dtype=torch.int32, pin_memory=ON_GPU)
    plan[: len(loaded.plan)] = loaded.plan
    loaded.plan = torch.full_like(plan, -7, device=DEVICE)
    copied = 0
    if ON_GPU:
        event = torch.cuda.Event()
        event.record()
        copied = event.cuda_event
    with torch.cuda.stream(torch.cuda.Stream() if side_stream else None):
        if side_stream:
            torch.cuda._sleep(100_000_000)
        loaded.decoder.load(loaded.plan, plan, copied)
        if side_stream:
            assert not event.query()
            event.synchronize()
    assert torch.equal(loaded.plan[:-50].cpu(), plan[:-50])
    assert (loaded.plan[-50:] == -7).all()
    assert loaded.error() < TOLERANCE[torch.bfloat16]

    with pytest.raises(ValueError, match="shorter than the plan"):
        loaded.decoder.load(loaded.plan[:40], plan, copied)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: setattr(case, "k", case.k.float()), "k has the wrong dtype"),
        (lambda case: setattr(case, "table", case.table.long()), "req_to_token has the wrong dtype"),
        pytest.param(
            lambda case: setattr(case, "rows", case.rows.cpu()), "rows must be on the GPU", marks=pytest.mark.gpu
        ),
        (lambda case: setattr(case, "q", case.q[:, :3]), "3 query heads are not a multiple of 2"),
        (lambda case: setattr(case, "v", case.v[:, :, 1:]), "v must have heads of 128"),
        (lambda case: setattr(case, "v", case.v[:-1]), "k and v must have the same slots and heads"),
        (
            lambda case: setattr(case, "k", case.k.as_strided((1, 2, 128), (2**33, 128, 1))),
            "k's slots and heads must be less",
        ),
        (
            # Memory that nobody touches.
            lambda case: setattr(case, "k", case.k.new_empty(2**31 + 128).as_strided((1, 3, 128), (128, 2**30, 1))),
            "k's heads must all be within 4 GiB",
        ),
        (
            lambda case: setattr(case, "sinks", case.q[0, 0, :4]),
            "4 sinks for 4 query heads, and a kernel without sinks",
        ),
        (lambda case: setattr(case, "sinks", case.q[0, 0, :4].float()), "sinks has the wrong dtype"),
        (
            lambda case: setattr(case, "logit_cap", 5.0),
            "a logit cap of 5, and a kernel that does not cap scores",
        ),
    ],
)
def test_wrong_tensors_are_named(change, message: str) -> None:
    wrong = run(make_case(shared(3, 40, 10), 4, 2, 128, torch.bfloat16), ARCHS[0])
    change(wrong.case)
    with pytest.raises(Exception, match=message):
        wrong.decode()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["k", "rows", "table"])
def test_a_tensor_on_another_gpu_is_named(name: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    wrong = run(make_case(shared(3, 40, 10), 4, 2, 128, torch.bfloat16), ARCHS[0])
    setattr(wrong.case, name, getattr(wrong.case, name).to("cuda:1"))
    with pytest.raises(ValueError, match="must be on GPU 0, as the others are, not on GPU 1"):
        wrong.decode()


def test_a_workspace_of_another_dimension_is_named() -> None:
    wrong = run(make_case(shared(3, 40, 10), 4, 2, 128, torch.bfloat16), ARCHS[0])
    wrong.partial = wrong.partial[:, :, :64].contiguous()
    with pytest.raises(Exception, match="partial must have heads of 128"):
        wrong.decode()


GPU_DIMS = r" on a GPU \(64, 96, 128, 192, 256 for both K and V are, and 192 for K with 128 for V\)"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (spec_of(torch.float32, 128), "a KV cache of float32"),
        *((spec_of(torch.bfloat16, dim), f"a head dimension of {dim}{GPU_DIMS}") for dim in (80, 112, 512)),
        (spec_of(torch.bfloat16, 128, 192), rf"head dimensions of 128 \(K\) and 192 \(V\){GPU_DIMS}"),
        (spec_of(torch.bfloat16, 256, 128), rf"head dimensions of 256 \(K\) and 128 \(V\){GPU_DIMS}"),
    ],
)
def test_what_there_are_no_kernels_for_is_named(spec: AttentionSpec, message: str) -> None:
    with pytest.raises(ValueError, match=f"^the CUDA kernels do not compute {message}$"):
        cuda.Variant.of(spec, "9.0a")


@pytest.mark.parametrize("v_dim", [192, 128])
@pytest.mark.parametrize("arch", ["8.6", "8.9", "12.0"])
def test_too_little_shared_memory_is_named(arch: str, v_dim: int) -> None:
    cuda.Variant.of(spec_of(torch.bfloat16, 128), arch)
    with pytest.raises(
        ValueError, match=f"dimension of 192 take more shared memory than compute capability {arch} has"
    ):
        cuda.Variant.of(spec_of(torch.bfloat16, 192, v_dim), arch)
