"""Pages of KV in few bits: what is read is what float64 says, and how far it is from what was written."""

from __future__ import annotations

import pytest
import torch

from sglang_pat.kernels import low_bit

DIM, HEADS, PAGES = 128, 2, 5


def outlying(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """KV whose K has channels that are larger and away from zero, as real models' have (BitDecoding §2, KIVI)."""
    torch.manual_seed(seed)
    k, v = torch.randn(2, PAGES, low_bit.PAGE_TOKENS, HEADS, DIM)
    channels = torch.randperm(DIM)[:4]
    k[..., channels] = k[..., channels] * 8 + 10
    return k, v


def quantised(x: torch.Tensor, dim: int, bits: int) -> torch.Tensor:
    """The same in float64, with scales and zeros in fp16."""
    x = x.double()
    zero = x.amin(dim, keepdim=True).half().double()
    scale = ((x.amax(dim, keepdim=True) - zero) / (2**bits - 1)).half().double()
    return ((x - zero) / scale).round().clamp(0, 2**bits - 1) * scale + zero


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k, v = (x.double().flatten(0, 1).transpose(0, 1) for x in (k, v))
    return (q.double() @ k.transpose(-1, -2) * DIM**-0.5).softmax(-1) @ v


@pytest.mark.parametrize("bits", [4, 2])
def test_channels_of_k_and_tokens_of_v_are_quantised(bits: int) -> None:
    k, v = outlying()
    records = low_bit.pack(k, v, bits)
    assert records.shape == (PAGES, HEADS, {4: 8960, 2: 4864}[bits])
    k_read, v_read = low_bit.unpack(records, bits, DIM)
    for read, right, x in ((k_read, quantised(k, 1, bits), k), (v_read, quantised(v, 3, bits), v)):
        # A number halfway between two codes may become either.
        assert ((read - right).abs() < 1e-5).float().mean() > 0.999
        torch.testing.assert_close((read - x).norm(), (right - x).norm().float(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("bits", [4, 2])
def test_outlying_channels_of_k_need_scales_of_their_own(bits: int) -> None:
    k, v = outlying()
    q = torch.randn(HEADS, 8, DIM)
    right = attention(q, k, v)
    by_channel = attention(q, low_bit.unpack(low_bit.pack(k, v, bits), bits, DIM)[0], v)
    by_token = attention(q, quantised(k, 3, bits), v)
    assert 2 * (by_channel - right).norm() < (by_token - right).norm()


@pytest.mark.parametrize("bits", [4, 2])
def test_constants_are_exact_and_nan_stays_in_its_channel(bits: int) -> None:
    k, v = outlying()
    k[..., 17], v[:, 3] = 2.5, -0.75
    k[1, 5, 1, 40] = torch.nan
    k_read, v_read = low_bit.unpack(low_bit.pack(k, v, bits), bits, DIM)
    assert (k_read[..., 17] == 2.5).all() and (v_read[:, 3] == -0.75).all()
    where = torch.zeros(k.shape, dtype=torch.bool)
    where[1, :, 1, 40] = True
    assert (k_read.isnan() == where).all() and not v_read.isnan().any()


def test_bad_pages_are_refused() -> None:
    k, v = outlying()
    for wrong, bits in (((k[:, :63], v[:, :63]), 4), ((k, v), 3), ((k[..., :64], v[..., :64]), 4), ((k, v[:1]), 2)):
        with pytest.raises(ValueError, match=r"page has 64|4 or 2 bits|fit each other"):
            low_bit.pack(*wrong, bits)
