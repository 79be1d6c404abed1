"""Extends over KV of few bits as GPUs run them: on a CPU with an attention of torch's, on a GPU with those that servers use."""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace

import kernel_cases
import pytest
import torch
from page_cases import PAGE, Written

from sglang_pat.backend.errors import UnsupportedError
from sglang_pat.backend.extends.low_bit_prefill import LowBitPrefill
from sglang_pat.backend.extends.page_tables import Blocks, unfinished_pages
from sglang_pat.backend.extends.paged_attention import ATTENTIONS
from sglang_pat.backend.kv.pages import pool_class
from sglang_pat.backend.start import low_bit as settings
from sglang_pat.kernels import capabilities, cuda, low_bit
from sglang_pat.packing import FORMATS, Batch, Node

pytestmark = pytest.mark.once

HEADS, KV_HEADS = 8, 2
PADDING = 3
CACHED = [320, 320, 384, 321, 340, 383, 384, 330, 0, 64, 0, 63, 5, 127]
ADDED = [3, 1, 2, 3, 64, 1, 140, 2, 70, 64, 64, 1, 58, 0]
"""Extends that begin and end with a page or amid one, some before their first page is full; eight share five pages."""


class OfTorch:
    """Causal and aligned at the last token, as FlashAttention with a page table."""

    def __init__(self) -> None:
        self.calls: list[Blocks] = []

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Blocks, scale: float, logit_cap: float
    ) -> torch.Tensor:
        self.calls.append(blocks)
        outs, group = [], q.shape[1] // k.shape[2]
        starts = blocks.starts.tolist()
        assert starts[-1] == len(q) and len(k) == len(v) == blocks.used
        assert torch.isfinite(k).all() and torch.isfinite(v).all()
        for i, length in enumerate(blocks.lengths.tolist()):
            own_q = q[starts[i] : starts[i + 1]].double()
            assert 0 < len(own_q) <= blocks.longest <= PAGE
            pages = blocks.table[i, : -(-length // PAGE)].long()
            assert (blocks.table[i, len(pages) :] == pages[-1]).all()
            own_k, own_v = (x[pages].flatten(0, 1)[:length].double().repeat_interleave(group, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", own_q, own_k) * scale
            hidden = torch.arange(length) > torch.arange(len(own_q))[:, None] + length - len(own_q)
            outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), own_v))
        return torch.cat(outs).to(q.dtype)


def unpack_to(records: torch.Tensor, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, bits: int) -> None:
    """`kernels.cuda.Decoder.unpack` on the CPU."""
    for to, numbers in zip((k, v), low_bit.unpack(records[pages], bits, k.shape[-1]), strict=True):
        to[: len(pages)] = numbers


class Server:
    """What a server has before an extend: a pool whose cached tokens are stored, and the new ones."""

    def __init__(
        self, form: str, dim: int, dtype: torch.dtype, cached: list[int], added: list[int], device: str = "cpu"
    ) -> None:
        batch = Batch(cached, [Node(0, 320, list(range(8)))])
        case = kernel_cases.Extended(batch, added, HEADS, KV_HEADS, dim, dim, dtype, page_size=PAGE)
        lengths = [before + new for before, new in zip(cached, added, strict=True)]
        # The first token of each request; of one without new tokens any row, which is nobody's.
        of = iter(case.rows.tolist())
        found = [[next(of) for _ in range(new)] for new in added]
        spare = [row for row in range(len(case.table)) if row not in case.rows]
        rows = torch.tensor([own[0] if own else spare.pop() for own in found])
        known = [row if new else None for row, new in zip(rows.tolist(), added, strict=True)]
        before = [length if row is not None else 0 for length, row in zip(cached, known, strict=True)]
        after = [length if row is not None else 0 for length, row in zip(lengths, known, strict=True)]
        self.case, self.cached, self.added, self.device = case, cached, added, device
        self.after = Written(case, form, after, rows)
        written = Written(case, form, before, rows)
        slots = torch.cat(
            [case.table[row, a:b].long() for row, a, b in zip(rows.tolist(), cached, lengths, strict=True) if a < b]
        )
        self.slots = torch.cat([slots, torch.zeros(PADDING, dtype=torch.int64)]).to(device)
        self.k, self.v = (pool[self.slots.cpu()].to(device) for pool in (case.k, case.v))
        make = pool_class(FORMATS[form])
        self.pool = make(len(case.k) - PAGE, PAGE, dtype, KV_HEADS, dim, 1, device, enable_memory_saver=False)
        self.pool.records[0].copy_(written.records)
        self.batch = SimpleNamespace(
            extend_prefix_lens_cpu=cached, extend_seq_lens_cpu=added, req_pool_indices=rows.to(device), out_cache_loc=self.slots,
            rids=None,
        )  # fmt: skip
        self.tails = written.tails
        self.form = FORMATS[form]
        self.layer = SimpleNamespace(
            layer_id=0, tp_q_head_num=HEADS, qk_head_dim=dim, scaling=case.scale, logit_cap=0.0
        )

    def prefill(self, room: int, attention: object, decoder: cuda.Decoder | None = None) -> LowBitPrefill:
        case = self.case
        store = decoder.store if decoder else functools.partial(low_bit.store, bits=self.form.bits)
        self.pool.make_tails(len(case.table), case.k.dtype, {self.form.name: store})
        self.pool._tails[:, 0] = self.tails
        workspace = torch.full((2, room, PAGE, KV_HEADS, case.k.shape[2]), torch.nan, dtype=case.k.dtype)
        unpack = decoder.unpack if decoder else functools.partial(unpack_to, bits=self.form.bits)
        table, workspace = case.table.to(self.device), workspace.to(self.device)
        return LowBitPrefill(
            self.pool, table, workspace, {self.form.name: unpack}, attention, lambda layer, **options: None
        )

    def run(self, prefill: LowBitPrefill) -> torch.Tensor:
        """Attention of the new tokens, [tokens, heads, head_dim] on the host; what is behind them is checked."""
        prefill.begin(self.batch)
        case = self.case
        q = torch.cat([case.q, torch.full_like(case.q[:PADDING], torch.nan)]).to(self.device)
        out = prefill.forward(q.flatten(1), self.k.flatten(1), self.v, self.layer, self.batch, True)
        assert out.shape == (len(q), q[0].numel()) and not out[-PADDING:].any()
        return out[:-PADDING].view(case.q.shape).cpu().float()

    def is_stored(self) -> bool:
        """Whether the pool has what the CPU's own store would have written, of everything that is of some request."""
        same = torch.equal(self.pool.records[0].cpu(), self.after.records)
        found = torch.stack(self.pool.tails(0)).cpu()
        written = ~self.after.tails.isnan()
        return same and torch.equal(found[written], self.after.tails[written])


@pytest.mark.parametrize("form", ["int4", "int2"])
@pytest.mark.parametrize("room", [300, 11])
def test_queries_see_what_decode_steps_would(form: str, room: int) -> None:
    """In one call, or in several where the workspace is small; shared pages are in it once."""
    generator = random.Random(0)
    cached = CACHED + [generator.randint(0, 200) for _ in range(6)]
    added = ADDED + [generator.choice([1, 2, 63, 64, 65, 129]) for _ in range(6)]
    server, attention = Server(form, 32, torch.float32, cached, added), OfTorch()
    out = server.run(server.prefill(room, attention))
    assert server.after.error(out) < 1e-6
    assert server.is_stored()
    assert len(attention.calls) == 1 if room == 300 else 5 < len(attention.calls) < len(added)
    assert all(blocks.used <= room for blocks in attention.calls)
    pages = attention.calls[0].pages
    assert len(pages) == len(pages.unique()) < int((attention.calls[0].lengths // PAGE).sum())


def test_a_broken_request_breaks_no_other() -> None:
    """What is behind a sequence's end in its last page is its own request's."""
    server = Server("int4", 32, torch.float32, CACHED, ADDED)
    server.k[0] = server.v[0] = torch.nan  # of the first request's first new token

    class Finite(OfTorch):
        def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Blocks, *scales: float) -> torch.Tensor:  # fmt: skip
            broken = ~torch.isfinite(k).flatten(1).all(1)
            assert broken.sum() == 1 and not broken[blocks.table[1:].long()].any()
            return torch.zeros_like(q)

    prefill = server.prefill(300, Finite())
    server.run(prefill)


def test_an_extend_without_requests_has_no_calls() -> None:
    server = Server("int4", 32, torch.float32, CACHED, ADDED)
    prefill = server.prefill(11, OfTorch())
    nothing = SimpleNamespace(
        extend_prefix_lens_cpu=[], extend_seq_lens_cpu=[], req_pool_indices=torch.empty(0), rids=None
    )
    prefill.begin(nothing)
    nothing.out_cache_loc = torch.zeros(2, dtype=torch.int64)
    q = torch.randn(2, HEADS * 32)
    out = prefill.forward(q, server.k[:2], server.v[:2], server.layer, nothing, True)
    assert out.shape == q.shape and not out.any()


def test_layers_without_kv_of_their_own_are_refused() -> None:
    server = Server("int4", 32, torch.float32, CACHED, ADDED)
    prefill = server.prefill(11, OfTorch())
    prefill.begin(server.batch)
    with pytest.raises(UnsupportedError, match="layer 0 reads KV that another layer wrote"):
        prefill.forward(server.case.q, None, None, server.layer, server.batch, False)


@pytest.mark.parametrize("context", [1, 64, 1000, 4096])
def test_the_workspace_has_room_for_any_request(context: int) -> None:
    """With rows a few tokens longer than the context, and any chunk."""
    generator = random.Random(context)
    for _ in range(300):
        step = generator.randint(1, context)
        added = generator.randint(1, step)
        cached = generator.randint(0, context + 4 - added)
        needed = (cached + added) // PAGE + unfinished_pages(cached, added)
        assert needed <= settings.workspace_pages(context, step)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["int4", "int2"])
@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("room", [300, 11])
def test_attention_on_a_gpu(name: str, form: str, room: int) -> None:
    if name == "fa3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs Hopper")
    server = Server(form, 128, torch.bfloat16, CACHED, ADDED, "cuda")
    device = torch.device("cuda", 0)
    tiles = capabilities.tile_table(cuda.arch_of(device), 128, kv=FORMATS["int4"])
    decoder = cuda.Decoder(server.case.spec, tiles, device, dtype=torch.bfloat16)
    out = server.run(server.prefill(room, ATTENTIONS[name](), decoder))
    # Numbers of pages, weights of V and the output are rounded to bfloat16.
    assert server.after.error(out) < 3 * kernel_cases.TOLERANCE[torch.bfloat16]
    assert server.is_stored()
