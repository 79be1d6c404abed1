"""The table of a pool for windows, against the words that define it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from triton.runtime.interpreter import InterpretedFunction

from sglang_pat.backend.kv.windows import WindowTable, advice
from sglang_pat.kernels import translate

DEVICES = ["cpu", "interpreter", *(["cuda"] if torch.cuda.is_available() else [])]
CONTEXT, SLOTS = 900, 5000


def fill(device: str, *tensors: torch.Tensor) -> None:
    if device != "interpreter":
        translate.translate(*tensors)
        return
    req_to_token, rows, seq_lens, mapping, slots, firsts = tensors
    grid = (len(rows), -(-slots.shape[1] // translate.BLOCK))
    kernel = InterpretedFunction(translate._translate.fn)
    kernel[grid](
        req_to_token, req_to_token.stride(0), rows, seq_lens, mapping, slots, slots.storage_offset(), firsts, slots.shape[1],
        translate.BLOCK,
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [1, 40, 256, 700])
def test_a_table_has_what_each_window_sees(window: int, device: str) -> None:
    generator = torch.Generator().manual_seed(window)
    where = "cuda" if device == "cuda" else "cpu"
    req_to_token = torch.randint(SLOTS, (8, CONTEXT), generator=generator, dtype=torch.int32)
    mapping = torch.randperm(SLOTS, generator=generator)
    lengths = [1, window, window + 1, 41, 512, 513, CONTEXT]
    rows = torch.randint(8, (len(lengths),), generator=generator)
    # A batch may have fewer rows than the table, which keeps what was there.
    everything = torch.full((CONTEXT + 9 * window,), -7, dtype=torch.int32, device=where)
    slots, firsts = everything[CONTEXT:].view(9, window), torch.full((9,), -7, device=where)
    tensors = [tensor.to(where) for tensor in (req_to_token, rows, torch.tensor(lengths), mapping)]
    fill(device, *tensors, slots, firsts)
    for query, (row, length, first) in enumerate(zip(rows, lengths, firsts.tolist(), strict=False)):
        begin = max(0, length - window)
        found = everything[first + begin : first + length]
        assert found.tolist() == mapping[req_to_token[row, begin:length].long()].tolist()
        assert found.data_ptr() == slots[query].data_ptr()
    assert (slots[len(lengths) :] == -7).all()
    assert (firsts[len(lengths) :] == -7).all()


def test_a_batch_that_has_no_room_is_named() -> None:
    table, numbers = torch.zeros(4, 8, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(ValueError, match="a batch of 4 has no room in 3 rows of slots, 4 of firsts"):
        translate.translate(table, numbers, numbers, numbers, table[:3], numbers)


def test_a_graph_may_have_more_rows_than_there_are_requests() -> None:
    """SGLang pads batches to what its parallel ranks divide."""
    pool = ReqToTokenPool(size=4, max_context_len=64, device="cpu", enable_memory_saver=False)
    pool.req_to_token[:] = torch.arange(64)
    table = WindowTable(SimpleNamespace(req_to_token_pool=pool), 8)
    rows, lengths, mapping = torch.zeros(16, dtype=torch.int64), torch.full((16,), 20), torch.arange(100, 200)
    with pytest.raises(ValueError, match="a batch of 16 has no room"):
        table.fill(rows, lengths, mapping)
    table.reserve(16)
    table.fill(rows, lengths, mapping)
    slots, firsts = table.of_batch(16)
    assert slots[firsts, 12:20].tolist() == [list(range(112, 120))] * 16


def test_rows_of_a_table_have_room_for_every_position() -> None:
    pool = ReqToTokenPool(size=3, max_context_len=64, device="cpu", enable_memory_saver=False)
    pool.req_to_token[:] = torch.arange(64)
    for window in (8, 200):
        table = WindowTable(SimpleNamespace(req_to_token_pool=pool), window)
        longest = len(pool.req_to_token[0])
        lengths = torch.tensor([longest, 1, 5, longest][: len(pool.req_to_token)])
        table.fill(torch.arange(len(lengths)), lengths, torch.arange(100))
        slots, firsts = table.of_batch(len(lengths))
        for first, length in zip(firsts, lengths, strict=True):
            begin = max(0, int(length) - window)
            assert slots[first].shape == (longest,)
            assert slots[first, begin:length].tolist() == pool.req_to_token[0, begin:length].tolist()


def test_a_pool_that_may_hold_up_a_request_is_warned_of() -> None:
    """With 900 tokens requests hung, by windows of 400 and steps of 256; with 1,056 they did not."""
    found = advice(900, 400, 256)
    assert found is not None and "room for 900 tokens" in found and "--swa-full-tokens-ratio" in found
    assert advice(1056, 400, 256) is None
