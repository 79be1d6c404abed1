"""What the host computes for an extend, and in which form it gets to a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_pat.backend import tensors

pytestmark = pytest.mark.once

REQUESTS = st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 5), st.integers(0, 2**20)), max_size=6)
SHAPES = st.lists(
    st.tuples(st.sampled_from([torch.int64, torch.int32, torch.uint8]), st.integers(0, 40), st.integers(0, 3))
)


@given(REQUESTS)
@settings(deadline=None)
def test_tokens_of_an_extend(requests: list[tuple[int, int, int]]) -> None:
    cached, added, rows = ([request[i] for request in requests] for i in range(3))
    wanted = [before + new + 1 for before, more, _ in requests for new in range(more)]
    found = tensors.lengths(cached, added)
    assert found.dtype == torch.int64 and found.tolist() == wanted
    found = tensors.by_token(rows, added)
    assert found.dtype == torch.int64 and found.tolist() == [row for _, more, row in requests for _ in range(more)]


@given(SHAPES)
@settings(deadline=None)
def test_what_is_packed_is_unpacked(shapes: list[tuple[torch.dtype, int, int]]) -> None:
    made = [torch.randint(0, 200, (rows, columns), dtype=dtype) for dtype, rows, columns in shapes]
    if made:
        made.append(made[0].t())
    packed = tensors.pack(made)
    found = tensors.unpack(packed.clone(), made)
    for one, right in zip(found, made, strict=True):
        assert one.dtype == right.dtype and torch.equal(one, right) and one.is_contiguous()
        assert one.storage_offset() * one.itemsize % tensors.ALIGNMENT == 0


@pytest.mark.gpu
def test_what_is_on_a_gpu() -> None:
    """Also of copies that wait for the GPU, while pinned memory could be used again."""
    made = [
        [torch.arange(i, i + 100), torch.full((7,), i, dtype=torch.int32), torch.empty(0, dtype=torch.int64)]
        for i in range(20)
    ]
    torch.cuda._sleep(10**8)
    found = [tensors.to_device(torch.device("cuda"), *each) for each in made]
    for one, right in zip(itertools.chain(*found), itertools.chain(*made), strict=True):
        assert one.device.type == "cuda" and torch.equal(one.cpu(), right)
