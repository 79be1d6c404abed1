"""The CUDA kernels for pages of few bits against attention in float64 on what the pages say, and against what the CPU stores; nobody's pages
and tails are NaN.

Where there is no GPU, the same kernels run on the host (emulated.py).
"""

from __future__ import annotations

import random
from typing import Any

import emulated
import pytest
import torch
from kernel_cases import TOLERANCE, Case, Run
from oracle import make_plan
from page_cases import PAGE, Paged, Stored, with_pages_for_tokens
from trees import random_batch

from sglang_pat.kernels import capabilities, cuda, low_bit
from sglang_pat.packing import FORMATS, AttentionSpec, Batch, Node, TileTable

pytestmark = pytest.mark.once

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
ARCH = cuda.arch_of(torch.device("cuda")) if ON_GPU else "9.0a"
DTYPES = {"int4": torch.bfloat16, "int2": torch.float16}
"""Of Q and of tails: on the host one for each format, as every module takes seconds to compile."""


fewer_on_the_host = pytest.mark.parametrize(
    "form", ["int4", pytest.param("int2", marks=[] if ON_GPU else pytest.mark.slow)]
)


def case_of(batch: Batch, heads: int, kv_heads: int, form: str, dim: int = 128, sinks: bool = False) -> Paged:
    return Paged(batch, heads, kv_heads, dim, form, DTYPES[form], DEVICE, sinks)


def check(case: Paged, cap: float = 0.0, policy: str = "optimal", arch: str = ARCH, seeds: int = 1) -> Run:
    tiles = capabilities.tile_table(arch, case.spec.head_dim, kv=case.spec.kv)
    run = Run(case.cap(cap), decoder_of(case.spec, tiles, case.q.dtype, arch), tiles, policy)
    run.check_in_any_order(TOLERANCE[torch.bfloat16], seeds)
    return run


@fewer_on_the_host
@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [(8, 2), *([(16, 1), (3, 3), (32, 8), (5, 1)] if ON_GPU else [pytest.param(16, 1, marks=pytest.mark.slow)])],
)
def test_random_trees(form: str, heads: int, kv_heads: int) -> None:
    generator = random.Random(heads)
    for depth, fanout, pages in ((2, 3, 2), (1, 4, 5), *(((3, 4, 9), (2, 9, 2)) if ON_GPU else ())):
        batch = with_pages_for_tokens(random_batch(generator, depth, fanout, pages))
        for policy in ("optimal", "naive", "query") if ON_GPU else ("optimal",):
            check(case_of(batch, heads, kv_heads, form), policy=policy)


@fewer_on_the_host
def test_tails_of_every_length(form: str) -> None:
    """Behind pages that are shared, behind pages of their own, and alone."""
    lengths = [shared + length for shared in (0, 2 * PAGE) for length in range(1, PAGE + 2)]
    sharing = list(range(PAGE + 1, len(lengths)))
    check(case_of(Batch(lengths, [Node(0, PAGE, sharing)]), 4, 1, form), policy="naive")


@pytest.mark.parametrize("form", DTYPES)
def test_long_items_are_shared_by_teams(form: str) -> None:
    """Or run by single warps; some warps of a team have no page of an item."""
    for lengths in ([1500], [64], [700, 650, 200], [333] * 10):
        check(case_of(Batch(lengths), 4, 1, form), seeds=2)


@pytest.mark.slow
@pytest.mark.parametrize("form", DTYPES)
def test_more_items_than_a_worker_looks_up_at_once(form: str) -> None:
    requests, heads = (5000, 8) if ON_GPU else (800, 1)
    check(case_of(Batch([5] * requests), heads, heads, form))
    if not ARCH.startswith("9."):
        return
    # Wide ones among them: a worker then goes over its items twice.
    shared = Batch([70] * 40 + [5] * requests, [Node(0, PAGE, list(range(40)))])
    case, tiles = (
        case_of(shared, heads, heads, form),
        TileTable(capabilities.query_tiles(ARCH, 128, kv=FORMATS["int4"])),
    )
    run = Run(case, decoder_of(case.spec, tiles, case.q.dtype), tiles, "naive")
    run.check_in_any_order(TOLERANCE[torch.bfloat16])


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU and not ARCH.startswith("9."), reason="only with wgmma")
def test_more_wide_items_than_a_worker_looks_up_at_once() -> None:
    """Where a look-up begins, the ring's records are those of the first tile again."""
    requests, kv_heads = (5000, 8) if ON_GPU else (800, 1)
    case = case_of(Batch([PAGE] * requests), 32 * kv_heads, kv_heads, "int4", 64)
    tiles = TileTable(capabilities.query_tiles(ARCH, 64, kv=FORMATS["int4"]))
    run = Run(case, decoder_of(case.spec, tiles, case.q.dtype), tiles, "naive")
    run.check_in_any_order(TOLERANCE[torch.bfloat16], seeds=1)


@fewer_on_the_host
def test_tiles_of_both_sizes_in_one_bin(form: str) -> None:
    batch = Batch([400 + 3 * i for i in range(9)], [Node(0, 320, list(range(8)))])
    # Sinks are another module.
    case = case_of(batch, 4, 2, form, sinks=ON_GPU or form == "int4")
    check(case, 0.0, "naive", seeds=2)
    check(case, 5.0, "naive")


WIDE = {
    "queries for the largest tile, and pages for more than the ring": (8, 2, Batch([660] * 40, [Node(0, 640, list(range(40)))])),
    "tiles of each size, and single warps": (
        8, 2, Batch([400] * 60, [Node(0, 320, list(range(18))), Node(0, 192, list(range(18, 44))), Node(0, 64, list(range(44, 48)))]),
    ),
    "requests with all their heads in a tile, so tails too": (32, 1, Batch([130, 64, 300, 63, 1, 400, 321, 127])),
}  # fmt: skip
"""Heads, KV heads and batches whose plans have items of more rows than a single warp computes, where tiles have no prices."""


@pytest.mark.skipif(ON_GPU and not ARCH.startswith("9."), reason="only with wgmma")
@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("form", DTYPES)
@pytest.mark.parametrize("dim", [128, pytest.param(64, marks=[] if ON_GPU else pytest.mark.slow)])
def test_wide_items(name: str, form: str, dim: int) -> None:
    heads, kv_heads, batch = WIDE[name]
    tiles = TileTable(capabilities.query_tiles(ARCH, dim, kv=FORMATS["int4"]))
    case = case_of(batch, heads, kv_heads, form, dim)
    plan = make_plan(batch, case.config(tiles, emulated.WORKERS, "naive"))
    assert any(item.m > capabilities.NARROW_M for item in plan.items)
    for cap in (0.0, 5.0):
        run = Run(case.cap(cap), decoder_of(case.spec, tiles, case.q.dtype), tiles, "naive")
        run.check_in_any_order(TOLERANCE[torch.bfloat16], seeds=2)


@pytest.mark.skipif(ON_GPU and not ARCH.startswith("9."), reason="only with wgmma")
@fewer_on_the_host
def test_numbers_beyond_16_bits_are_no_infinities_in_wide_items(form: str) -> None:
    """As for single warps and for readers of whole pages: the others of a page are right."""
    case, dim = case_of(Batch([128] * 9, [Node(0, 128, list(range(9)))]), 8, 2, form), 128
    tiles = TileTable(capabilities.query_tiles(ARCH, dim, kv=FORMATS["int4"]))
    assert case.records is not None
    first = low_bit.v_parameters(FORMATS[form].bits, dim)
    parameters = case.records[..., first : first + 4 * PAGE].view(torch.float16)
    parameters[..., ::2], parameters[..., 1::2] = 6e4, 0.0  # a token's scale and zero lie together
    run = Run(case, decoder_of(case.spec, tiles, case.q.dtype), tiles, "naive")
    run.poison()
    run.decode()
    assert torch.isfinite(run.out).all()
    assert 2e4 < run.out.float().max() < 6.6e4


@pytest.mark.parametrize("form", DTYPES)
def test_q_times_a_scale_of_k_may_be_beyond_16_bits(form: str) -> None:
    """A channel of K with a huge range, and some rows of Q that are huge there: their greatest score is ahead by far. Rows beside them are as exact
    as ever."""
    channels = (5, 60)  # whose scales are kept divided by different powers of 2

    def widen(case: Case) -> None:
        case.k[..., channels], case.q[..., channels] = 0.0, 0.0
        for number, first in enumerate(range(0, len(case.k), PAGE)):
            # What is fitted to 2 bits reaches 1.2 times as far as the numbers, and must stay within 16 bits too.
            most = (6e4 if form == "int4" else 4e4) - 500 * number
            case.k[first + 7, :, channels], case.k[first + 9, :, channels] = most, -most
        for channel, sign, heads in zip(channels, (1, -1), (slice(0, None, 4), slice(1, None, 4)), strict=True):
            # Scores stay below 2^24, where float32 has integers.
            case.q[1:, heads, channel] = sign * 2e3

    batch = Batch([200, 330, 264, 150, 64], [Node(0, 128, [0, 1, 2])])
    case = Paged(batch, 8, 2, 128, form, DTYPES[form], DEVICE, edit=widen)
    tiles = capabilities.tile_table(ARCH, 128, kv=FORMATS["int4"])
    plan = make_plan(batch, case.config(tiles, emulated.WORKERS, "naive"))
    assert {item.m for item in plan.items} == {8, 16}
    run = Run(case, decoder_of(case.spec, tiles, case.q.dtype), tiles, "naive")
    run.poison()
    run.decode()
    right, out = case.reference(), run.out.double()
    huge = (case.q.abs() > 1e3).any(-1)
    assert huge.any() and not huge.all()
    for rows in (huge, ~huge):
        assert (out[rows] - right[rows]).norm() < TOLERANCE[torch.bfloat16] * right[rows].norm()


@pytest.mark.parametrize("form", DTYPES)
@pytest.mark.parametrize("dim", [pytest.param(64, marks=[] if ON_GPU else pytest.mark.slow)])
def test_another_head_dimension(form: str, dim: int) -> None:
    batch = Batch([300, 290, 130, 700], [Node(0, 128, [0, 1, 2])])
    check(case_of(batch, 8, 2, form, dim))


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="for the host")
@pytest.mark.parametrize("form", DTYPES)
def test_on_another_architecture(form: str) -> None:
    """With fewer stages."""
    check(case_of(with_pages_for_tokens(random_batch(random.Random(1), 2, 3, 3)), 8, 2, form), arch="8.0")


def decoder_of(spec: AttentionSpec, tiles: TileTable, dtype: torch.dtype, arch: str = ARCH) -> Any:
    if ON_GPU:
        return cuda.Decoder(spec, tiles, torch.device("cuda"), dtype=dtype)
    return emulated.Decoder(spec, tiles, arch, dtype=dtype)


def stored_by(form: str, rows: int, pages: int, dim: int = 128) -> Stored:
    tiles = capabilities.tile_table(ARCH, dim, kv=FORMATS["int4"])
    decoder = decoder_of(AttentionSpec(8, 2, dim, dim, FORMATS[form]), tiles, DTYPES[form])
    return Stored(form, rows, pages, decoder, DTYPES[form], DEVICE, dim)


@pytest.mark.parametrize(("form", "dim"), [("int4", 128), ("int2", 128), ("int2", 64)])
def test_tokens_are_stored_as_on_the_cpu(form: str, dim: int) -> None:
    """To the byte, in steps of one token each and of many, which begin and end anywhere in a page."""
    torch.manual_seed(0)
    generator = random.Random(0)
    stored = stored_by(form, rows=7, pages=25, dim=dim)
    lengths = dict.fromkeys(range(6), 0)
    for added in (
        [64, 10, 0, 130, 63, 1],
        [1, 60, 200, 1, 1, 1],
        [1] * 6,
        *([generator.choice([0, 1, 1, 3, 64, 65]) for _ in lengths] for _ in range(4)),
    ):
        order = generator.sample(list(lengths), len(lengths))
        tokens = []
        for row, wanted in zip(order, added, strict=True):
            more = min(wanted, 4 * PAGE - lengths[row])
            first = PAGE * (1 + 4 * row)
            tokens += [(row, lengths[row] + j + 1, first + lengths[row] + j) for j in range(more)]
            lengths[row] += more
        stored.store(tokens, *stored.random(len(tokens)))
        assert stored.same()
    assert max(lengths.values()) > 3 * PAGE


def test_an_index_that_there_is_not_writes_nothing() -> None:
    stored = stored_by("int4", rows=3, pages=4)
    for length in (1, PAGE):
        bad = [
            (3, length, PAGE),
            (-1, length, PAGE),
            (2**40, length, PAGE),
            (0, 0, PAGE),
            (0, -PAGE, PAGE + 5),
            (1, length, -1),
            (1, length, 4 * PAGE),
        ]
        tokens = [(2, length, 2 * PAGE - 1), *bad, (0, length, 3 * PAGE - 1)]
        stored.store(tokens, *stored.random(len(tokens)))
        assert stored.same()
    k, v, record, tails = (x.to(DEVICE) for x in (*stored.random(2), *stored.found))
    one = torch.ones(2, dtype=torch.int64, device=DEVICE)
    given = (k, v, record, *tails, one, one, one)
    wrong = ((0, k.float()), (1, v[:1]), (2, record[:, :1]), (3, tails[0][:, :32]), (5, one[:1]), (6, one.int()))
    for i, one_wrong in wrong:
        with pytest.raises(ValueError, match=r"must|wrong dtype"):
            stored.decoder.store(*given[:i], one_wrong, *given[i + 1 :])


def test_padding_is_not_stored() -> None:
    """Page 0 is SGLang's for padding. In graphs it comes with row 0 and length 1; here also with rows and lengths that are somebody's."""
    stored = stored_by("int4", rows=4, pages=4)
    full = [(2, index + 1, PAGE + index) for index in range(PAGE)]
    for padding in (
        [(0, 1, 0)] * 3,
        [(2, PAGE, PAGE - 1), (2, 1, 0), (3, PAGE, 0)],
        [(2, index + 1, index) for index in range(PAGE)],
    ):
        before = stored.found[0][0].clone(), stored.found[1][:, [0, 3]].clone()
        stored.store([*full, *padding], *stored.random(PAGE + len(padding)))
        assert stored.same()
        assert torch.equal(stored.found[0][0], before[0])
        assert torch.equal(stored.found[1][:, [0, 3]].view(torch.uint8), before[1].view(torch.uint8))
        stored.store(padding, *stored.random(len(padding)))
        assert stored.same()


@pytest.mark.parametrize("form", DTYPES)
def test_a_padded_batch_is_decoded(form: str) -> None:
    """As in a graph: queries behind those of the plan are of row 0, one token long. Their output is zero."""
    case = case_of(Batch([300, 130, 700], [Node(0, 128, [0, 1])]), 8, 2, form)
    run, size = check(case), 3
    right = run.out.clone()
    case.q = torch.cat([case.q, torch.full_like(case.q[:2], torch.nan)])
    case.rows, case.seq_lens = (
        torch.cat([x, torch.full_like(x[:2], fill)]) for x, fill in ((case.rows, 0), (case.seq_lens, 1))
    )
    run.out = torch.full_like(case.q, torch.nan)
    run.decode()
    assert torch.equal(run.out[:size], right) and (run.out[size:] == 0).all()


@pytest.mark.parametrize("form", DTYPES)
def test_pages_are_read_as_on_the_cpu(form: str) -> None:
    """Rounded to 16 bits; some twice, and zeros for those that there are not."""
    torch.manual_seed(0)
    stored = stored_by(form, rows=1, pages=1)
    records = low_bit.pack(*(x.view(7, PAGE, *stored.shape) for x in stored.random(7 * PAGE)), stored.bits)
    chosen = torch.tensor([3, 0, 6, 6, 7, -1, 2**40, 5])
    right = [x[chosen.clamp(0, 6)] for x in low_bit.unpack(records, stored.bits, stored.shape[1])]
    made = torch.full((2, len(chosen) + 1, PAGE, *stored.shape), 7.0, dtype=stored.dtype, device=DEVICE)
    stored.decoder.unpack(records.to(DEVICE), chosen.to(DEVICE), *made)
    most = torch.finfo(stored.dtype).max
    for found, numbers in zip(made.cpu(), right, strict=True):
        numbers[[4, 5, 6]] = 0
        torch.testing.assert_close(
            found[:-1], numbers.clamp(-most, most).to(stored.dtype), rtol=0, atol=0, equal_nan=True
        )
        assert (found[-1] == 7).all()
        assert found.isnan().any() and not found.isinf().any()


def test_pages_go_only_where_they_fit() -> None:
    stored = stored_by("int4", rows=1, pages=2)
    records, pages = stored.found[0].to(DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    k, v = torch.empty(2, 2, PAGE, *stored.shape, dtype=stored.dtype, device=DEVICE)
    given = (records, pages, k, v)
    wrong = (
        (0, records[0]), (0, records[..., :-1]), (1, pages.int()), (2, k[:1]), (2, k.float()), (3, v[:, :32]), (3, v[:, :, :1]), (3, v[..., :64]),
    )  # fmt: skip
    for i, one in wrong:
        with pytest.raises(ValueError, match=r"must|wrong dtype|dimensions"):
            stored.decoder.unpack(*given[:i], one, *given[i + 1 :])


def test_what_the_kernels_cannot_read_is_refused() -> None:
    def problem(dim: int = 128, v_dim: int = 128, window: int = 0, tokens: int = 1, arch: str = "9.0a") -> str:
        spec = AttentionSpec(8, 2, dim, v_dim, FORMATS["int4"], window, query_tokens=tokens)
        with pytest.raises(ValueError, match="the CUDA kernels do not compute ") as error:
            cuda.Variant.of(spec, arch)
        return str(error.value)

    assert "head dimensions of 96 (K) and 96 (V)" in problem(96, 96)
    assert "head dimensions of 128 (K) and 64 (V)" in problem(128, 64)
    assert "windows, drafts and extends" in problem(window=100)
    assert "windows, drafts and extends" in problem(tokens=4)
    assert "8.9, which has too little shared memory" in problem(arch="8.9")
    case = case_of(Batch([100, 30]), 4, 2, "int4")
    run = check(case)
    records, tails = case.records, (case.k, case.v)
    for wrong, message in (
        (records[:, :1], "records must be"),
        (records[..., :-1], "records must be"),
        (None, "records must be"),
    ):
        case.records = wrong
        with pytest.raises(ValueError, match=message):
            run.decode()
    case.records, case.k, case.v = records, *(tail[:-PAGE] for tail in tails)
    with pytest.raises(ValueError, match="a tail of 64 tokens for each row"):
        run.decode()
