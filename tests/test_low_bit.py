"""Pages of KV in few bits: what is read is what float64 says, and how far it is from what was written."""

from __future__ import annotations

import importlib.util
import math
import random
from pathlib import Path

import kernel_cases
import pytest
import torch
from page_cases import PAGE, Written, with_pages_for_tokens
from trees import random_batch

from sglang_pat.backend.kv.rotation import Rotation
from sglang_pat.kernels import capabilities, low_bit
from sglang_pat.packing import CPU_TILES, FORMATS, POLICIES, AttentionSpec, Batch, Node

pytestmark = pytest.mark.once

DIM, HEADS, PAGES = 128, 2, 5
GATE = Path(__file__).parents[1] / "benchmarks/csrc/lowbit/lowbit.py"
FORMS = ("int4", "int2")


def outlying(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """KV whose K has channels that are larger and away from zero, as real models' have (BitDecoding §2, KIVI)."""
    torch.manual_seed(seed)
    k, v = torch.randn(2, PAGES, PAGE, HEADS, DIM)
    channels = torch.randperm(DIM)[:4]
    k[..., channels] = k[..., channels] * 8 + 10
    return k, v


def quantised(x: torch.Tensor, dim: int, bits: int, fits: int | None = None) -> torch.Tensor:
    """The same in float64, with scales and zeros in fp16; 2 bits' are fitted twice, or as often as said."""
    x = x.double()
    zero = x.amin(dim, keepdim=True).half().double()
    scale = ((x.amax(dim, keepdim=True) - zero) / (2**bits - 1)).half().double()
    for _ in range((2 if bits == 2 else 0) if fits is None else fits):
        codes = ((x - zero) / scale).round().clamp(0, 2**bits - 1)
        mean, mean_code = x.mean(dim, keepdim=True), codes.mean(dim, keepdim=True)
        slope = ((codes - mean_code) * x).sum(dim, keepdim=True) / (codes - mean_code).square().sum(dim, keepdim=True)
        zero = (mean - slope * mean_code).half().double()
        scale = (((x - zero) * codes).sum(dim, keepdim=True) / codes.square().sum(dim, keepdim=True)).half().double()
    return ((x - zero) / scale).round().clamp(0, 2**bits - 1) * scale + zero


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k, v = (x.double().flatten(0, 1).transpose(0, 1) for x in (k, v))
    return (q.double() @ k.transpose(-1, -2) * DIM**-0.5).softmax(-1) @ v


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("dim", [32, 96, 128, 256])
def test_channels_of_k_and_tokens_of_v_are_quantised(bits: int, dim: int) -> None:
    k, v = (torch.cat([x, x], -1)[..., :dim] for x in outlying())
    records = low_bit.pack(k, v, bits)
    assert records.shape == (PAGES, HEADS, 64 * 2 * dim * FORMATS[f"int{bits}"].bytes_with_scales(dim, dim))
    k_read, v_read = low_bit.unpack(records, bits, dim)
    for read, right, x in ((k_read, quantised(k, 1, bits), k), (v_read, quantised(v, 3, bits), v)):
        # A number halfway between two codes may become either; then fitted parameters are others.
        assert ((read - right).abs() < 1e-5).float().mean() > (0.999 if bits == 4 else 0.99)
        torch.testing.assert_close((read - x).norm(), (right - x).norm().float(), rtol=1e-3, atol=0)


def test_two_bits_are_fitted_to_the_numbers() -> None:
    """The range as a scale errs by a third more."""
    k, v = outlying()
    for read, x, dim in zip(low_bit.unpack(low_bit.pack(k, v, 2), 2, DIM), (k, v), (1, 3), strict=True):
        assert 1.2 * (read - x).norm() < (quantised(x, dim, 2, fits=0) - x).norm()


def test_what_cannot_be_fitted_keeps_its_range() -> None:
    """Numbers that 16 bits cannot have, sums beyond float32, and one code for all."""
    k = torch.zeros(1, PAGE, 1, 32)
    k[:, ::2, :, 0], k[:, ::2, :, 1], k[..., 2], k[:, :, :, 3] = 3e38, -3e38, 1e5, 1e-30
    k_read, v_read = low_bit.unpack(low_bit.pack(k, torch.zeros_like(k), 2), 2, 32)
    assert torch.isfinite(k_read).all() and (v_read == 0).all()
    torch.testing.assert_close(k_read[..., 2], k[..., 2], rtol=1e-3, atol=0)
    assert (k_read[:, ::2, :, 0] > 6e4).all() and (k_read[:, 1::2, :, 0] == 0).all()
    assert (k_read[:, ::2, :, 1] < -6e4).all()


def test_records_are_in_the_order_in_which_the_cuda_kernel_read_them() -> None:
    """That of benchmarks/csrc/lowbit, with which 4 bits were measured."""
    spec = importlib.util.spec_from_file_location("gate", GATE)
    assert spec is not None and spec.loader is not None
    gate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gate)
    records = low_bit.pack(*outlying(), 4)
    for read, right in zip(low_bit.unpack(records, 4, DIM), gate.from_records(records), strict=True):
        torch.testing.assert_close(read.double(), right.transpose(1, 2), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 2])
def test_outlying_channels_of_k_need_scales_of_their_own(bits: int) -> None:
    k, v = outlying()
    q = torch.randn(HEADS, 8, DIM)
    right = attention(q, k, v)
    by_channel = attention(q, low_bit.unpack(low_bit.pack(k, v, bits), bits, DIM)[0], v)
    by_token = attention(q, quantised(k, 3, bits), v)
    assert (2 if bits == 4 else 1.3) * (by_channel - right).norm() < (by_token - right).norm()


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_constants_are_exact_and_what_is_broken_stays_in_its_channel(bits: int, bad: float) -> None:
    k, v = outlying()
    k[..., 17], v[:, 3] = 2.5, -0.75
    k[1, 5, 1, 40] = bad
    k_read, v_read = low_bit.unpack(low_bit.pack(k, v, bits), bits, DIM)
    assert (k_read[..., 17] == 2.5).all() and (v_read[:, 3] == -0.75).all()
    where = torch.zeros(k.shape, dtype=torch.bool)
    where[1, :, 1, 40] = True
    assert (k_read.isnan() == where).all() and not v_read.isnan().any()


def test_padding_is_not_stored() -> None:
    """Page 0 is SGLang's for padding."""
    tails, records = torch.ones(2, 3, PAGE, 2, 32), torch.ones(3, 2, low_bit.record_bytes(4, 32), dtype=torch.uint8)
    kept = tails.clone(), records.clone()
    rows, lengths, slots = torch.tensor([0, 1, 1]), torch.tensor([1, PAGE, 1]), torch.tensor([0, PAGE - 1, 7])
    tokens = torch.zeros(3, 2, 32)
    low_bit.store(tokens, tokens, records, *tails, rows, lengths, slots, 4)
    assert torch.equal(tails, kept[0]) and torch.equal(records, kept[1])
    low_bit.store(tokens, tokens, records, *tails, rows, lengths, slots + PAGE, 4)
    # The last token is the first of row 1's next page.
    full = torch.ones(1, PAGE, 2, 32)
    full[:, -1] = 0
    assert (tails[:, :2, 0] == 0).all() and torch.equal(records[1], low_bit.pack(full, full, 4)[0])


def test_bad_pages_are_refused() -> None:
    k, v = outlying()
    for wrong, bits in (((k[:, :63], v[:, :63]), 4), ((k, v), 3), ((k[..., :48], v[..., :48]), 4), ((k, v[:1]), 2)):
        with pytest.raises(ValueError, match=r"page has 64|4 or 2 bits|fit each other"):
            low_bit.pack(*wrong, bits)


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
def test_rotated_attention_is_the_same(dim: int) -> None:
    torch.manual_seed(0)
    rotation = Rotation(dim, torch.float32, "cpu")
    q, k, v = torch.randn(3, 30, HEADS, dim)
    wide = torch.cat([k, v], -1)
    # Heads together or apart, contiguous or not.
    turned = [rotation.query(q), rotation.stored(wide[..., :dim]), rotation.stored(v.flatten(1)).view(v.shape)]
    scores, right = (torch.einsum("qhd,khd->hqk", x, y) * dim**-0.5 for x, y in (turned[:2], (q, k)))
    torch.testing.assert_close(scores, right, rtol=0, atol=1e-5)
    out, right = (torch.einsum("hqk,khd->qhd", right.softmax(-1), x) for x in (turned[2], v))
    torch.testing.assert_close(rotation.output(out), right, rtol=0, atol=1e-5)
    assert (turned[1] - k).norm() > 0.5 * k.norm()


def test_a_rotation_spreads_outlying_channels() -> None:
    """So fewer of a token's codes are wasted on them; and float16 holds what is stored."""
    v = torch.randn(PAGES, PAGE, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    v[..., 5] *= 30
    rotation = Rotation(DIM, torch.float32, "cpu")
    turned = rotation.stored(v)
    plain, rotated = (low_bit.unpack(low_bit.pack(x, x, 2), 2, DIM)[1] for x in (v, turned))
    assert (rotated - turned).norm() / turned.norm() < 0.9 * (plain - v).norm() / v.norm()
    most = torch.full((1, DIM), 65504.0 / DIM**0.5).half()
    assert torch.isfinite(Rotation(DIM, torch.float16, "cpu").stored(most)).all()


SHAPES = [(8, 2, 32), (6, 6, 64), (32, 8, 128), (5, 1, 96), (4, 2, 256)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", kernel_cases.TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_decode(form: str, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    batch = with_pages_for_tokens(random_batch(random.Random(dim), depth=2, fanout=2, length=3))
    case = kernel_cases.Case(batch, heads, kv_heads, dim, dim, dtype, page_size=PAGE, sinks=dim == 64)
    case.splits_heads = False
    written = Written(case, form, batch.seq_lens, case.rows)
    for policy in POLICIES if dim == 32 else ("optimal",):
        cap = 3.0 if dim == 96 else 0.0
        out = written.decode(case.plan(CPU_TILES, 3, policy), cap)
        assert written.error(out, cap) < kernel_cases.TOLERANCE[dtype], policy


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES[:2])
def test_extends_see_what_decode_steps_would(form: str, heads: int, kv_heads: int, dim: int) -> None:
    """Each new token sees the pages that are full in front of it in few bits, its own page as it was computed, wherever its extend begins."""
    # Extends begin with a page or amid one, and end likewise; the first eight share five pages.
    cached = Batch([320, 320, 384, 321, 340, 383, 384, 330, 0, 64], [Node(0, 320, list(range(8)))])
    added = [3, 1, 2, 3, 64, 1, 140, 2, 70, 64]
    case = kernel_cases.Extended(cached, added, heads, kv_heads, dim, dim, torch.float32, page_size=PAGE)
    case.splits_heads = False
    lengths = [before + new for before, new in zip(cached.seq_lens, added, strict=True)]
    rows = case.rows[torch.tensor([sum(added[:i]) for i in range(len(added))])]
    written = Written(case, form, lengths, rows)
    kept, tails, begin = [], [], 0
    for row, before, length, new in zip(rows.tolist(), cached.seq_lens, lengths, added, strict=True):
        full = before // PAGE * PAGE
        kept.append(case.table[row, full:length].long())
        tails += [begin - full] * new
        begin += length - full
    slots = torch.cat(kept)
    out = written.attention(case.plan(CPU_TILES, 2), case.k[slots], case.v[slots], torch.tensor(tails), 0.0)
    assert written.error(out) < 1e-6
    assert case.shared > 0


@pytest.mark.parametrize("form", FORMS)
def test_indices_that_there_are_not_are_refused(form: str) -> None:
    batch = Batch([130, 70, 64], [Node(0, 64, [0, 1, 2])])
    case = kernel_cases.Case(batch, 4, 2, 32, 32, torch.float32, page_size=PAGE)
    written = Written(case, form, batch.seq_lens, case.rows)
    plan, tails = case.plan(CPU_TILES, 2), case.rows * PAGE - low_bit.in_pages(case.seq_lens)
    k, v = written.tails.flatten(1, 2)
    assert written.error(written.attention(plan, k, v, tails, 0.0)) < 1e-6
    for wrong in (tails + len(k), tails - len(k), tails + 2**40, tails - 2**62):
        with pytest.raises(ValueError, match="behind the last full page are not in k and v"):
            written.attention(plan, k, v, wrong, 0.0)
    with pytest.raises(ValueError, match="tails must be"):
        written.attention(plan, k, v, tails[1:], 0.0)
    # A shared stretch that ends amid a page.
    shared = kernel_cases.Case(Batch([130, 130], [Node(0, 129, [0, 1])]), 4, 2, 32, 32, torch.float32, page_size=PAGE)
    amid = Written(shared, form, [130, 130], shared.rows)
    with pytest.raises(ValueError, match="several requests read a page that is not full"):
        amid.decode(shared.plan(CPU_TILES, 1, "naive"))
    case.table[case.rows[0], 0] = len(case.k)
    with pytest.raises(ValueError, match="a slot that the KV pool has not"):
        written.decode(plan)
    one = torch.zeros(1, dtype=torch.int64)
    token = torch.zeros(1, 2, 32)
    for row, length, slot in ((-1, 1, 0), (len(case.table), 1, 0), (0, 0, 0), (0, 64, -1), (0, 64, len(case.k))):
        with pytest.raises(ValueError, match="a row, a length or a slot that there is not"):
            low_bit.store(
                token, token, written.records, *written.tails, one + row, one + length, one + slot, written.bits
            )
    with pytest.raises(ValueError, match="has the wrong dtype"):
        low_bit.store(token.half(), token, written.records, *written.tails, one, one + 1, one, written.bits)


@pytest.mark.parametrize(
    ("dims", "window", "device", "problem"),
    [
        ((128, 128), 0, "cpu", None),
        ((48, 48), 0, "cpu", "a head dimension of 48 (multiples of 32 up to 256 are)"),
        ((192, 128), 0, "cpu", "head dimensions of 192 (K) and 128 (V)"),
        ((128, 128), 100, "cpu", "windows with a KV cache of int4"),
        ((128, 128), 0, "cuda", None),
        (
            (96, 96),
            0,
            "cuda",
            "head dimensions of 96 (K) and 96 (V) with a KV cache of int4 on a GPU (64 and 128 for both are)",
        ),
        ((128, 128), 100, "cuda", "windows, drafts and extends with a KV cache of int4 on a GPU"),
    ],
)
def test_what_is_not_kept_in_few_bits(
    dims: tuple[int, int], window: int, device: capabilities.Device, problem: str | None
) -> None:
    assert capabilities.refusal(AttentionSpec(8, 2, *dims, FORMATS["int4"], window), device) == problem
