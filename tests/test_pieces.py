"""Plans that cut every request at the same positions, and that a query's result then has the same bits in every batch (`PackConfig.piece`)."""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import emulated
import kernel_cases
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import make_plan
from test_cuda_kernel import ARCHS, DEVICE, ON_GPU, emulated_slowly
from test_extend_plans import Extend, extends, plan
from trees import batches, configs, random_batch

from sglang_pat.backend.kv.windows import WindowTable
from sglang_pat.backend.start.layers import kv_format
from sglang_pat.kernels import capabilities, cpu, cuda
from sglang_pat.kernels.arguments import Tables
from sglang_pat.packing import CPU_TILES, Batch, Node, PackConfig, TileTable, WorkItem, layout, native
from sglang_pat.packing.native import NativeScheduler, load

pytestmark = pytest.mark.once

Spans = list[tuple[int, int]]

pieced = st.builds(
    lambda config, factor: msgspec.structs.replace(config, piece=factor * config.grain),
    configs(),
    st.sampled_from([1, 3]),
)


def pieces(length: int, config: PackConfig) -> Spans:
    """What a query of this length reads, piece by piece, whatever else is in its batch."""
    start, spans = max(0, length - config.window) if config.window else 0, []
    while start < length:
        end = min(length, (start // config.piece + 1) * config.piece)
        spans.append((start, end))
        start = end
    return spans


def read_by(items: list[WorkItem], lengths: list[int], window: int) -> list[Spans]:
    """What each query sees of its work items, in the order in which they are merged."""
    found: list[dict[int, tuple[int, int]]] = [{} for _ in lengths]
    for item in items:
        start, end = item.span(lengths)
        for query, part in zip(item.queries, item.parts, strict=True):
            unseen = max(0, lengths[query] - window) if window else 0
            assert part not in found[query]
            found[query][part] = max(start, unseen), min(end, lengths[query])
    return [[spans[part] for part in sorted(spans)] for spans in found]


@given(batches(), pieced)
@settings(max_examples=400, deadline=None)
def test_what_a_request_reads_together_depends_on_its_length_alone(batch: Batch, config: PackConfig) -> None:
    made = make_plan(batch, config)
    for step in {0, min(made.steps - 1, 300)}:
        lengths = [length + step for length in batch.seq_lens]
        assert read_by(made.items, lengths, config.window) == [pieces(length, config) for length in lengths]


@given(batches(max_queries=40, max_length=300), pieced)
@settings(max_examples=100, deadline=None)
def test_plans_are_those_of_the_oracle(batch: Batch, config: PackConfig) -> None:
    room = 1 << 20
    scheduler = NativeScheduler(config, len(batch.seq_lens), buffers=[np.zeros(room, dtype=np.int32) for _ in range(2)])
    index, steps, _ = scheduler.take(load(scheduler, batch), np.array(batch.seq_lens), 0)
    data, made = scheduler.buffers[index], make_plan(batch, config)
    assert data[: layout.sections(data).header["size"]].tolist() == layout.flatten(made, merge_all=True).tolist()
    assert (steps, scheduler.current()[:2]) == (made.steps, (made.kv_tokens, sum(made.num_parts)))


@given(batches(max_queries=20, max_length=300), pieced)
@settings(max_examples=100, deadline=None)
def test_requests_count_with_what_they_see(batch: Batch, config: PackConfig) -> None:
    scheduler = NativeScheduler(
        config, len(batch.seq_lens), buffers=[np.zeros(1 << 20, dtype=np.int32) for _ in range(2)]
    )
    steps = scheduler.take(load(scheduler, batch), np.array(batch.seq_lens), 0)[1]
    counts, window = scheduler.totals(steps), config.window or 2**31
    seen = sum(min(length + step, window) for length in batch.seq_lens for step in range(steps))
    assert counts.kv_tokens <= counts.kv_tokens_unpacked == seen
    if not batch.roots:
        assert counts.kv_tokens == seen


@given(batches(max_queries=20, max_length=300), pieced)
@settings(max_examples=60, deadline=None)
def test_what_a_request_reads_together_is_the_same_in_a_fall_back(batch: Batch, config: PackConfig) -> None:
    room = layout.capacity(config, len(batch.seq_lens), max(batch.seq_lens))
    scheduler = NativeScheduler(config, len(batch.seq_lens), buffers=[np.zeros(room, dtype=np.int32) for _ in range(2)])
    lengths = np.array(batch.seq_lens)
    scheduler.take(load(scheduler, batch), lengths, 0)  # fits too
    items = layout.work_items(scheduler.buffers[scheduler.fall_back(lengths, 0)[0]])
    assert all(len(item.queries) == 1 for item in items)
    assert read_by(items, batch.seq_lens, config.window) == [pieces(length, config) for length in batch.seq_lens]


@given(extends(), pieced)
@settings(max_examples=300, deadline=None)
def test_what_a_new_token_reads_together_depends_on_its_position_alone(extend: Extend, config: PackConfig) -> None:
    lengths, items = extend.lengths, plan(extend, config)[0]
    assert read_by(items, lengths, config.window) == [pieces(length, config) for length in lengths]
    for item in items:
        unseen = min(max(0, lengths[query] - config.window) if config.window else 0 for query in item.queries)
        assert item.start >= unseen, "what no query sees may be somebody else's by now"


def test_whole_pieces_that_requests_share_are_read_once() -> None:
    config = PackConfig(kernel_cases.spec_of(torch.float16, 64).cost(), CPU_TILES, workers=4, piece=64)
    batch = Batch([300, 310, 320], [Node(0, 250, [0, 1, 2], [Node(250, 290, [0, 1])])])
    items = native.make_plan(batch, config).items
    together = {item.start: (item.end, item.queries) for item in items if len(item.queries) > 1}
    assert together == {0: (64, [2, 0, 1]), 64: (128, [2, 0, 1]), 128: (192, [2, 0, 1]), 192: (256, [0, 1])}


def test_a_piece_that_cuts_pages_is_refused() -> None:
    config = PackConfig(kernel_cases.spec_of(torch.float16, 64).cost(), CPU_TILES, workers=4, grain=64, piece=96)
    with pytest.raises(ValueError, match="a piece must be a multiple of the positions between cuts"):
        NativeScheduler(config, 4)


# The same bits.


def part_of(batch: Batch, members: Sequence[int]) -> Batch:
    """Some of a batch's requests, in another order."""
    place = {query: i for i, query in enumerate(members)}

    def below(nodes: list[Node]) -> list[Node]:
        kept = [(node, [place[query] for query in node.queries if query in place]) for node in nodes]
        return [Node(node.start, node.end, queries, below(node.children)) for node, queries in kept if queries]

    return Batch([batch.seq_lens[query] for query in members], below(batch.roots))


class Same:
    """A case's queries, some of them at a time, on the CPU. Those of drafts are requests, of several tokens each."""

    def __init__(self, case: kernel_cases.Case, piece: int, tiles: TileTable = CPU_TILES) -> None:
        self.case, self.piece, self.tiles = case, piece, tiles
        self.drafted = 1 if case.masks is None else case.masks.shape[1]
        self.q = case.q.view(len(case.seq_lens), self.drafted, *case.q.shape[1:])

    def config(self, workers: int = 7) -> PackConfig:
        config = PackConfig.of(self.case.spec, self.tiles, workers)
        return msgspec.structs.replace(config, cost=self.case.spec.cost(), piece=self.piece)

    def run(self, queries: Sequence[int], made: np.ndarray, extends: bool = False) -> torch.Tensor:
        """The bits of these queries' results, [queries, tokens of each, heads, v_head_dim], with a plan that was made for them."""
        case, ids = self.case, torch.tensor(queries, device=self.case.q.device)
        masks = None if case.masks is None else case.masks[ids]
        out = self.compute(self.q[ids], Tables(case.table, case.rows[ids], case.seq_lens[ids], masks), made, extends)
        assert torch.isfinite(out).all()
        return out.view(torch.int32 if out.dtype == torch.float32 else torch.int16).cpu()

    def compute(self, q: torch.Tensor, tables: Tables, made: np.ndarray, extends: bool) -> torch.Tensor:
        case, kv_heads = self.case, self.case.k.shape[1]
        # Of drafts, heads are ordered by KV head, then by token; and each token has a window of its own.
        by_kv_head = q.unflatten(2, (kv_heads, -1)).transpose(1, 2).flatten(1, 3)
        window = case.spec.window if extends or case.masks is not None else 0
        scores, ints = case.scores(case.logit_cap), torch.from_numpy(made)
        out = cpu.attention(by_kv_head, case.kv, tables, scores, ints, window)
        return out.unflatten(1, (kv_heads, self.drafted, -1)).transpose(1, 2).flatten(2, 3)

    def decode(self, queries: Sequence[int], batch: Batch, workers: int = 7) -> torch.Tensor:
        return self.run(queries, layout.flatten(native.make_plan(batch, self.config(workers)), self.piece > 0))

    def extend(self, queries: Sequence[int], batch: Batch, cached: Sequence[int], added: Sequence[int]) -> torch.Tensor:
        scheduler = NativeScheduler(self.config(), len(added))
        made = scheduler.extend(load(scheduler, batch), np.array(cached), np.array(added))
        return self.run(queries, made.data, extends=True)

    def alone(self) -> torch.Tensor:
        lengths = self.case.seq_lens.tolist()
        return torch.cat([self.decode([query], Batch([length])) for query, length in enumerate(lengths)])


class OnGpu(Same):
    """The same by the CUDA kernels. Where there is no GPU, an emulated one runs them."""

    def __init__(
        self,
        case: kernel_cases.Case,
        piece: int,
        query_tiles: Sequence[int],
        batch_invariant: bool = True,
        arch: str = "9.0a",
    ) -> None:
        known = capabilities.tile_table_of(case.spec, arch)
        super().__init__(case, piece, TileTable(tuple(query_tiles)))
        options = {"device": case.q.device} if ON_GPU else {"arch": arch}
        make = cuda.Decoder if ON_GPU else emulated.Decoder
        # Where a window begins within a piece, rows of one work item see different spans of it.
        self.decoders = [
            make(
                case.spec,
                known,
                dtype=case.q.dtype,
                limits=limits or case.spec.window > 0,
                batch_invariant=batch_invariant,
                **options,
            )
            for limits in {False, case.limits}
        ]

    def compute(self, q: torch.Tensor, tables: Tables, made: np.ndarray, extends: bool) -> torch.Tensor:
        case, slots = self.case, layout.num_slots(made)
        out = torch.full((*q.shape[:-1], case.spec.v_head_dim), math.nan, dtype=q.dtype, device=q.device).flatten(0, 1)
        partial, lse = (
            torch.full((max(1, slots), case.spec.query_heads, *dim), math.nan, device=q.device)
            for dim in ((case.spec.v_head_dim,), ())
        )
        self.decoders[extends].decode(
            q.flatten(0, 1),
            case.kv,
            tables,
            case.scores(),
            out,
            torch.from_numpy(made).to(q.device),
            partial.half(),
            lse,
        )
        return out.unflatten(0, (-1, self.drafted))


class InItsOwnPool(Same):
    """Over a KV pool for windows, anew in each run: slots have other numbers there, and what no window of the batch sees is freed. Somebody else's KV is in
    its place, or NaN."""

    def compute(self, q: torch.Tensor, tables: Tables, made: np.ndarray, extends: bool) -> torch.Tensor:
        one_pool, case = self.case, copy.copy(self.case)
        table = WindowTable(SimpleNamespace(req_to_token_pool=tables), case.spec.planned_window)
        mapping = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randperm(len(case.k) - 1) + 1]).to(q.device)
        seen = torch.zeros(len(mapping), dtype=torch.bool, device=q.device)
        for row, length in zip(tables.rows.tolist(), tables.seq_lens.tolist(), strict=True):
            seen[tables.req_to_token[row, max(0, length - case.spec.planned_window) : length].long()] = True
        theirs = random.random() < 0.5
        for name in ("k", "v"):
            pool = getattr(case, name)
            wide = pool.to(torch.float32, copy=True)
            wide[~seen] = torch.randn_like(wide[~seen]) if theirs else math.nan
            wide[0] = math.nan
            setattr(case, name, wide[mapping.argsort()].to(pool.dtype))
        mapping[~seen] = 0
        table.fill(tables.rows, tables.seq_lens, mapping)
        self.case = case
        try:
            return super().compute(q, self.looked_up(table, tables), made, extends)
        finally:
            self.case = one_pool

    def looked_up(self, table: WindowTable, tables: Tables) -> Tables:
        return Tables(*table.of_batch(len(tables.rows)), tables.seq_lens, tables.masks)


class InItsOwnPoolOnGpu(InItsOwnPool, OnGpu):
    """By the CUDA kernels."""


def compared(same: Same, generator: random.Random, times: int = 50) -> list[bool]:
    """Whether queries have the bits that they have alone, in random batches of a case's requests in any order."""
    case, alone, found = same.case, same.alone(), []
    for _ in range(times):
        members = generator.sample(range(len(case.batch.seq_lens)), generator.randint(1, len(case.batch.seq_lens)))
        out = same.decode(members, part_of(case.batch, members), generator.choice([1, 7, 132]))
        found.append(torch.equal(out, alone[torch.tensor(members)]))
    return found


def as_decoded(case: kernel_cases.Drafts, request: int, token: int) -> kernel_cases.Case:
    """A draft's token, if the draft is a chain, as a decode step would have it."""
    one = kernel_cases.Case.__new__(kernel_cases.Case)
    length = torch.tensor([int(case.cached[request]) + token + 1], device=case.q.device)
    one.__dict__ |= case.__dict__ | {"seq_lens": length, "rows": case.rows[[request]]}
    one.q = case.q.view(len(case.trees), case.tokens, *case.q.shape[1:])[request, [token]]
    one.spec = msgspec.structs.replace(case.spec, query_tokens=1)
    return one


def extended(same: Same, generator: random.Random, times: int) -> bool:
    """Whether new tokens have the bits that they have alone in a decode step, in extends of any of them in any order."""
    case, alone = same.case, same.alone()
    firsts = np.cumsum([0, *case.added]).tolist()
    for _ in range(times):
        members = generator.sample(range(len(case.added)), generator.randint(1, len(case.added)))
        # Of a request's new tokens those from the first to the last; what is in front of them is cached already.
        last = [generator.randint(1, case.added[member]) for member in members]
        first = [generator.randrange(count) for count in last]
        batch = part_of(case.cached, members)
        cached = [length + count for length, count in zip(batch.seq_lens, first, strict=True)]
        queries = [firsts[m] + j for m, a, b in zip(members, first, last, strict=True) for j in range(a, b)]
        out = same.extend(queries, batch, cached, [b - a for a, b in zip(first, last, strict=True)])
        if not torch.equal(out, alone[torch.tensor(queries)]):
            return False
    return True


OPTIONS = [
    {},
    {"window": 100},
    {"page_size": 16, "sinks": True},
]

each_case = pytest.mark.parametrize(
    ("dtype", "options", "piece"),
    [
        (dtype, options, piece)
        for dtype in (torch.float32, torch.bfloat16)
        for options in OPTIONS
        for piece in (64, 256)
    ],
    ids=str,
)


@each_case
def test_decoded_alone_and_in_any_batch(dtype: torch.dtype, options: dict, piece: int) -> None:
    generator = random.Random(piece)
    batch = random_batch(generator, depth=3, fanout=3, length=150)
    case = kernel_cases.Case(batch, 6, 2, 40, 24, dtype, q_dtype=torch.float32, **options)
    assert all(compared(Same(case, piece), generator))


def test_a_plan_that_depends_on_the_batch_is_found_out() -> None:
    generator = random.Random(0)
    case = kernel_cases.Case(random_batch(generator, 3, 3, 150), 6, 2, 40, 24, torch.float32)
    assert not all(compared(Same(case, 0), generator))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 100])
def test_drafts_in_any_batch_and_in_a_chain_as_if_decoded(dtype: torch.dtype, window: int) -> None:
    generator = random.Random(window)
    batch, tokens = random_batch(generator, depth=3, fanout=2, length=150), 4
    trees = kernel_cases.random_trees(generator, batch, tokens)
    chains = torch.ones(tokens, tokens, dtype=torch.bool).tril().expand(len(trees), -1, -1)
    for seen in (trees, chains):
        case = kernel_cases.Drafts(batch, seen, 6, 2, 40, 24, dtype, window=window, q_dtype=torch.float32)
        same = Same(case, 64)
        assert all(compared(same, generator))
    alone = same.alone()
    for request in range(len(trees)):
        for token in range(tokens):
            assert torch.equal(Same(as_decoded(case, request, token), 64).alone()[0, 0], alone[request, token])


@each_case
def test_new_tokens_of_any_extend_as_if_decoded_alone(dtype: torch.dtype, options: dict, piece: int) -> None:
    generator = random.Random(piece)
    batch = random_batch(generator, depth=3, fanout=2, length=150)
    added = [generator.choice([1, 2, 7, 40, 90]) for _ in batch.seq_lens]
    case = kernel_cases.Extended(batch, added, 6, 2, 40, 24, dtype, q_dtype=torch.float32, **options)
    assert extended(Same(case, piece), generator, 25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "piece"), [(100, 64), (100, 256), (64, 64), (400, 128), (1, 64)])
def test_windows_in_a_pool_of_their_own(dtype: torch.dtype, window: int, piece: int) -> None:
    """The bits are also those of one pool for all layers."""
    generator = random.Random(window + piece)
    batch = random_batch(generator, depth=3, fanout=3, length=150)
    case = kernel_cases.Case(batch, 6, 2, 40, 24, dtype, window=window, q_dtype=torch.float32, sinks=window == 64)
    assert torch.equal(InItsOwnPool(case, piece).alone(), Same(case, piece).alone())
    assert all(compared(InItsOwnPool(case, piece), generator))


@pytest.mark.parametrize("window", [7, 64, 100])
def test_drafts_whose_windows_are_in_a_pool_of_their_own(window: int) -> None:
    generator = random.Random(window)
    batch, tokens = random_batch(generator, depth=3, fanout=2, length=150), 4
    chains = torch.ones(tokens, tokens, dtype=torch.bool).tril().expand(len(batch.seq_lens), -1, -1)
    case = kernel_cases.Drafts(batch, chains, 6, 2, 40, 24, torch.float32, window=window)
    assert torch.equal(InItsOwnPool(case, 64).alone(), Same(case, 64).alone())
    assert all(compared(InItsOwnPool(case, 64), generator))


def test_a_plan_lives_on_while_windows_in_a_pool_of_their_own_move() -> None:
    """Some begin to move, or leave what two requests share, within these steps; a plan ends where one of them leaves a piece."""
    batch, spread = Batch([40, 70, 94, 60, 250], [Node(0, 30, [0, 3])]), 40
    longest = Batch([length + spread for length in batch.seq_lens], batch.roots)
    case = kernel_cases.Case(longest, 4, 2, 40, 24, torch.float32)
    case.spec = msgspec.structs.replace(case.spec, window=80)
    same, everyone, planned, lived = InItsOwnPool(case, 64), range(5), 0, []
    made, begun = None, 0
    for step in range(spread):
        case.seq_lens = torch.tensor([length + step for length in batch.seq_lens])
        now = Batch(case.seq_lens.tolist(), batch.roots)
        if made is None or step - begun >= made.steps:
            made, begun, planned = native.make_plan(now, same.config()), step, planned + 1
        lived.append(step - begun)
        assert torch.equal(same.run(everyone, layout.flatten(made, True)), same.alone())
    assert 1 < planned < spread and max(lived) > 3


def holds(comparison: Callable[[], bool]) -> bool:
    """Whether a comparison says so; NaN, at which a run stops, does not."""
    try:
        return comparison()
    except AssertionError:
        return False


class FromWhereWindowsBegin(InItsOwnPool):
    """A fault: the table's rows begin where windows do."""

    def looked_up(self, table: WindowTable, tables: Tables) -> Tables:
        found = super().looked_up(table, tables)
        moved = (tables.seq_lens - self.case.spec.planned_window).clamp(min=0)
        return msgspec.structs.replace(found, rows=found.rows + moved)


class OfTheStepBefore(InItsOwnPool):
    """A fault: the table is that of a token less."""

    def looked_up(self, table: WindowTable, tables: Tables) -> Tables:
        found = super().looked_up(table, tables)
        return msgspec.structs.replace(found, rows=found.rows + (tables.seq_lens > self.case.spec.planned_window))


@pytest.mark.parametrize("fault", [FromWhereWindowsBegin, OfTheStepBefore])
def test_a_wrong_table_of_windows_is_found_out(fault: type[InItsOwnPool]) -> None:
    generator = random.Random(0)
    case = kernel_cases.Case(random_batch(generator, 3, 3, 150), 6, 2, 40, 24, torch.float32, window=100)
    right = Same(case, 64).alone()
    assert not holds(lambda: torch.equal(fault(case, 64).alone(), right))


# By the CUDA kernels of Hopper. There it takes more than pieces: modules of their own (`Variant.batch_invariant`) and wide tiles.

hopper = pytest.mark.skipif(ON_GPU and not ARCHS[0].startswith("9."), reason="wgmma is Hopper's")

each_piece = pytest.mark.parametrize(
    ("piece", "query_tiles"),
    [(256, (64, 128, 192)), (512, (64, 128, 192)), (512, (128, 192))],
    ids=["short pieces", "longer than two warpgroups share", "no tile has 64 rows"],
)


def on_gpu(
    window: int = 0, dtype: torch.dtype = torch.float16, dim: int = 128, v_dim: int = 128, heads: int = 16
) -> kernel_cases.Case:
    """Nine requests share more than the largest piece. Of the smallest they have more than the four that merge kernels add up at once."""
    torch.manual_seed(0)
    threes = [Node(600, 1_100, [i, i + 1, i + 2]) for i in (0, 3, 6)]
    batch = Batch([1_110 + 40 * i for i in range(9)], [Node(0, 600, list(range(9)), threes)])
    return kernel_cases.Case(batch, heads, 1, dim, v_dim, dtype, window=window, device=DEVICE)


each_format_and_window = pytest.mark.parametrize(
    ("dtype", "window"),
    [
        # Where a window begins within a KV tile depends on no format.
        (dtype, window) if dtype == torch.float16 and window <= 100 else emulated_slowly(dtype, window)
        for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn)
        for window in (0, 100, 700, 1_250)
    ],
    ids=str,
)
TIMES = 50 if ON_GPU else 3
"""Random batches; an emulated GPU takes seconds for each."""


@hopper
@each_piece
def test_kernels_decode_alone_and_in_any_batch(piece: int, query_tiles: tuple[int, ...]) -> None:
    assert all(compared(OnGpu(on_gpu(), piece, query_tiles), random.Random(0), 6))


@hopper
@pytest.mark.parametrize(
    ("piece", "query_tiles", "batch_invariant"),
    [(0, (128, 192), True), (64, (64, 128, 192), False)],
    ids=["cut where bins end", "the fastest merge"],
)
def test_kernels_that_depend_on_the_batch_are_found_out(
    piece: int, query_tiles: tuple[int, ...], batch_invariant: bool
) -> None:
    if ON_GPU and not batch_invariant:
        pytest.skip("both merge kernels had the same bits on an H200, 2026-11-30; nothing promises that")
    assert not all(compared(OnGpu(on_gpu(), piece, query_tiles, batch_invariant), random.Random(0), 6))


@pytest.mark.skipif(ON_GPU, reason="faults are planted in the emulator")
def test_two_warpgroups_that_take_turns_are_found_out() -> None:
    case, turns = on_gpu(), ("ring.cuh", "!Variant::kBatchInvariant", "true")
    same, known = OnGpu(case, 512, (64, 128, 192)), capabilities.tile_table("9.0a", 128)
    same.decoders = [emulated.Decoder(case.spec, known, "9.0a", batch_invariant=True, changes=(turns,), planted=turns)]
    assert not all(compared(same, random.Random(0), 6))


def tiles_of(dtype: torch.dtype, dim: int = 128, arch: str = ARCHS[0]) -> tuple[int, ...]:
    """Those that add up alike, as servers have them."""
    return capabilities.batch_invariant(capabilities.tile_table(arch, dim, kv=kv_format(dtype))).query_tiles


@pytest.mark.parametrize(
    ("arch", "dim", "v_dim", "heads"),
    [
        # `make test` runs the usual dimension.
        (arch, *dims, heads) if dims[0] == 128 else emulated_slowly(arch, *dims, heads)
        for arch in ARCHS
        for dims, heads in [
            ((64, 64), 16), ((128, 128), 16), ((256, 256), 16), *((dims, 16) for dims in capabilities.UNEQUAL_HEAD_DIMS)
        ]
    ],
    ids=str,
)  # fmt: skip
def test_tiles_that_servers_have_add_up_alike(arch: str, dim: int, v_dim: int, heads: int) -> None:
    """In pieces in which a single warp, or two warpgroups by turns, would add up otherwise."""
    case = on_gpu(dtype=torch.bfloat16, dim=dim, v_dim=v_dim, heads=heads)
    tiles = tiles_of(torch.bfloat16, dim, arch)
    assert all(compared(OnGpu(case, 512, tiles, arch=arch), random.Random(0), TIMES))


def test_tiles_of_single_warps_are_left_out() -> None:
    found = [tiles_of(torch.bfloat16, dim, "9.0a") for dim in (128, 192, 256)]
    assert found == [(64, 128, 192), (64, 128), (64, 128)]
    assert (
        cuda.Variant.of(kernel_cases.spec_of(torch.bfloat16, 128), "9.0a", batch_invariant=True).query_tiles == found[0]
    )


@hopper
@each_format_and_window
def test_kernels_decode_windows_and_formats_alone_and_in_any_batch(window: int, dtype: torch.dtype) -> None:
    assert all(compared(OnGpu(on_gpu(window, dtype), 512, tiles_of(dtype)), random.Random(0), TIMES))


@hopper
@pytest.mark.parametrize(("window", "dtype"), [(100, torch.float16), (700, torch.float8_e4m3fn)], ids=str)
def test_kernels_decode_windows_in_a_pool_of_their_own(window: int, dtype: torch.dtype) -> None:
    case, tiles = on_gpu(window, dtype), tiles_of(dtype)
    same = InItsOwnPoolOnGpu(case, 512, tiles)
    assert torch.equal(same.alone(), OnGpu(case, 512, tiles).alone())
    assert all(compared(same, random.Random(0), TIMES))


@hopper
@each_format_and_window
def test_kernels_of_drafts_and_extends_compute_what_those_of_decode_steps_do(window: int, dtype: torch.dtype) -> None:
    check_drafts_and_extends(512, window, dtype)


@hopper
def test_kernels_of_drafts_and_extends_in_short_pieces() -> None:
    check_drafts_and_extends(256)


large = pytest.mark.parametrize(
    ("dtype", "window", "dims", "heads"),
    [
        *(
            emulated_slowly(*case)
            for case in (
                (torch.float8_e4m3fn, 100, (256, 256), 8),
                (torch.float8_e4m3fn, 0, (256, 256), 4),
                (torch.float8_e4m3fn, 100, (192, 128), 8),
                (torch.bfloat16, 0, (256, 256), 4),
                (torch.bfloat16, 100, (256, 256), 8),
            )
        ),
    ],
    ids=str,
)


@hopper
@large
def test_kernels_of_drafts_and_extends_of_larger_dimensions(
    dtype: torch.dtype, window: int, dims: tuple[int, int], heads: int
) -> None:
    """Where other warpgroups compute and convert."""
    check_drafts_and_extends(512, window, dtype, dims, heads)


@hopper
@large
def test_kernels_of_larger_dimensions_decode_alone_and_in_any_batch(
    dtype: torch.dtype, window: int, dims: tuple[int, int], heads: int
) -> None:
    tiles = tiles_of(dtype, dims[0])
    assert all(compared(OnGpu(on_gpu(window, dtype, *dims, heads), 512, tiles), random.Random(0), TIMES))


@hopper
def test_extends_whose_tiles_begin_where_windows_do_are_found_out() -> None:
    batch = Batch([592, 700, 1_022, 1_030], [Node(0, 590, [0, 1, 2, 3])])
    case = kernel_cases.Extended(batch, [3, 9, 5, 1], 4, 1, 128, 128, torch.float16, window=100, device=DEVICE)
    alone = OnGpu(case, 512, (128, 192)).alone()
    same = OnGpu(case, 512, (128, 192), batch_invariant=False)
    assert not torch.equal(same.extend(range(18), batch, batch.seq_lens, case.added), alone)


FAULTS: dict[str, emulated.Change] = {
    "tiles begin where windows do": ("assign.cuh", "Variant::kBatchInvariant && item.tokens > 0 ? start % kTokens : 0", "0"),
    "what is in front of windows is read": ("ring.cuh", "max(row, int(item.kv.hidden))", "row"),
    "a window that begins within a piece begins with it": (
        "assign.cuh", "max(0, int(p_.seq_lens[item.query]) - kOpen + row[kStart])", "max(0, row[kEnd] - 256)",
    ),
}  # fmt: skip
"""Of the kernels. What a window has left behind is NaN."""


@pytest.mark.skipif(ON_GPU, reason="faults are planted in the emulator")
@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.float16, 128), pytest.param(torch.float8_e4m3fn, 256, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_windows_in_kernels_are_found(fault: str, dtype: torch.dtype, dim: int) -> None:
    batch = Batch([592, 700, 1_022, 1_030], [Node(0, 590, [0, 1, 2, 3])])
    case = kernel_cases.Extended(batch, [3, 9, 5, 1], 4, 1, dim, dim, dtype, window=100)
    same = OnGpu(case, 512, tiles_of(dtype, dim))
    known, changes = capabilities.tile_table_of(case.spec, "9.0a"), tuple(FAULTS.values())
    make = functools.partial(
        emulated.Decoder, case.spec, known, "9.0a", limits=True, batch_invariant=True, changes=changes
    )
    same.decoders = [make()] * 2
    queries = list(range(18))
    assert torch.equal(same.extend(queries, batch, batch.seq_lens, case.added), same.alone()), "nothing is planted"
    same.decoders = [make(planted=FAULTS[fault])] * 2
    assert not holds(lambda: torch.equal(same.extend(queries, batch, batch.seq_lens, case.added), same.alone()))


@pytest.mark.skipif(ON_GPU, reason="faults are planted in the emulator")
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_windows_in_a_pool_of_their_own_are_found(fault: str) -> None:
    """In decode steps. What is in front of the first request's window is nobody's, of the others it is the windows of those in front."""
    batch = Batch([592, 700, 1_022, 1_030])
    case = kernel_cases.Case(batch, 4, 1, 128, 128, torch.float16, window=100)
    same = InItsOwnPoolOnGpu(case, 512, tiles_of(torch.float16))
    known, changes = capabilities.tile_table_of(case.spec, "9.0a"), tuple(FAULTS.values())
    make = functools.partial(
        emulated.Decoder, case.spec, known, "9.0a", limits=True, batch_invariant=True, changes=changes
    )
    same.decoders = [make()]
    right = same.alone()
    assert torch.equal(same.decode(range(4), batch), right), "nothing is planted"
    same.decoders = [make(planted=FAULTS[fault])]
    assert not holds(lambda: torch.equal(same.decode(range(4), batch), right))


def check_drafts_and_extends(
    piece: int, window: int = 0, dtype: torch.dtype = torch.float16, dims: tuple[int, int] = (128, 128), heads: int = 4
) -> None:
    generator, shared = random.Random(1), Node(0, 590, [0, 1, 2, 3])
    batch = Batch([592, 700, 1_022, 1_030], [shared])
    tiles = tiles_of(dtype, dims[0])
    case = kernel_cases.Extended(batch, [3, 9, 5, 1], heads, 1, *dims, dtype, window=window, device=DEVICE)
    assert extended(OnGpu(case, piece, tiles), generator, TIMES)
    batch, tokens = Batch([254, 510, 592, 1_022], [Node(0, 250, [0, 1, 2, 3], [Node(250, 500, [1, 2])])]), 4
    chains = torch.ones(tokens, tokens, dtype=torch.bool).tril().expand(4, -1, -1)
    case = kernel_cases.Drafts(batch, chains, heads, 1, *dims, dtype, window=window, device=DEVICE)
    same = OnGpu(case, piece, tiles)
    assert all(compared(same, generator, TIMES))
    alone = same.alone()
    if window:
        assert torch.equal(InItsOwnPoolOnGpu(case, piece, tiles).decode(range(4), case.batch), alone)
    for request in range(4):
        for token in range(tokens):
            decoded = OnGpu(as_decoded(case, request, token), piece, tiles).alone()[0, 0]
            assert torch.equal(decoded, alone[request, token])
