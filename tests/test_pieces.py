"""Plans that cut every request at the same positions, and that a query's result then has the same bits in every batch (`PackConfig.piece`)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import kernel_cases
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import make_plan
from test_extend_plans import Extend, extends, plan
from trees import batches, configs, random_batch

from sglang_pat.kernels import cpu
from sglang_pat.kernels.arguments import Tables
from sglang_pat.packing import CPU_TILES, Batch, Node, PackConfig, WorkItem, layout, native
from sglang_pat.packing.native import NativeScheduler, load

pytestmark = pytest.mark.once

Spans = list[tuple[int, int]]

pieced = st.builds(
    lambda config, factor: msgspec.structs.replace(config, piece=factor * config.grain), configs(), st.sampled_from([1, 3])
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
@settings(max_examples=300, deadline=None)
def test_plans_are_those_of_the_oracle(batch: Batch, config: PackConfig) -> None:
    room = 1 << 20
    scheduler = NativeScheduler(config, len(batch.seq_lens), buffers=[np.zeros(room, dtype=np.int32) for _ in range(2)])
    index, steps, _ = scheduler.take(load(scheduler, batch), np.array(batch.seq_lens), 0)
    data, made = scheduler.buffers[index], make_plan(batch, config)
    assert data[: layout.size(data)].tolist() == layout.flatten(made).tolist()
    assert (steps, scheduler.current()[:2]) == (made.steps, (made.kv_tokens, made.merged_parts))


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
    """A case's queries, some of them at a time. Those of drafts are requests, of several tokens each."""

    def __init__(self, case: kernel_cases.Case, piece: int) -> None:
        self.case, self.piece = case, piece
        self.q = case.q.view(len(case.seq_lens), -1, case.q.shape[-1]) if case.masks is None else _by_kv_head(case)

    def config(self, workers: int = 7) -> PackConfig:
        config = PackConfig.of(self.case.spec, CPU_TILES, workers)
        return msgspec.structs.replace(config, cost=self.case.spec.cost(), piece=self.piece)

    def run(self, queries: Sequence[int], made: np.ndarray, window: int = 0) -> torch.Tensor:
        """The bits of these queries' results, with a plan that was made for them."""
        case, ids = self.case, torch.tensor(queries)
        masks = None if case.masks is None else case.masks[ids]
        tables = Tables(case.table, case.rows[ids], case.seq_lens[ids], masks)
        out = cpu.attention(self.q[ids], case.kv, tables, case.scores(case.logit_cap), torch.from_numpy(made), window)
        assert torch.isfinite(out).all()
        return out.view(torch.int32)

    def decode(self, queries: Sequence[int], batch: Batch, workers: int = 7) -> torch.Tensor:
        # Of drafts, each token has a window of its own.
        window = self.case.spec.window if self.case.masks is not None else 0
        return self.run(queries, layout.flatten(native.make_plan(batch, self.config(workers))), window)

    def alone(self) -> torch.Tensor:
        lengths = self.case.seq_lens.tolist()
        return torch.cat([self.decode([query], Batch([length])) for query, length in enumerate(lengths)])


def _by_kv_head(case: kernel_cases.Case) -> torch.Tensor:
    """Q of drafts, as the backend gives it to executors: ordered by KV head, then by token."""
    kv_heads, tokens = case.k.shape[1], case.masks.shape[1]
    q = case.q.view(len(case.seq_lens), tokens, kv_heads, -1, case.q.shape[-1])
    return q.transpose(1, 2).flatten(1, 3)


def compared(same: Same, generator: random.Random, times: int = 50) -> list[bool]:
    """Whether queries have the bits that they have alone, in random batches of a case's requests in any order."""
    case, alone, found = same.case, same.alone(), []
    for _ in range(times):
        members = generator.sample(range(len(case.batch.seq_lens)), generator.randint(1, len(case.batch.seq_lens)))
        out = same.decode(members, part_of(case.batch, members), generator.choice([1, 7, 132]))
        found.append(torch.equal(out, alone[torch.tensor(members)]))
    return found


OPTIONS = [
    {},
    {"window": 100},
    {"page_size": 16, "sinks": True},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("piece", [64, 256])
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
    for request, cached in enumerate(batch.seq_lens):
        for token in range(tokens):
            one = kernel_cases.Case.__new__(kernel_cases.Case)
            one.__dict__ |= case.__dict__ | {"seq_lens": torch.tensor([cached + token + 1]), "rows": case.rows[[request]]}
            one.q = case.q.view(len(trees), tokens, 6, 40)[request, [token]]
            one.spec = msgspec.structs.replace(case.spec, query_tokens=1)
            decoded = Same(one, 64).alone().view(2, 3, 24)
            assert torch.equal(decoded, same.alone()[request].view(2, tokens, 3, 24)[:, token])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("piece", [64, 256])
def test_new_tokens_of_any_extend_as_if_decoded_alone(dtype: torch.dtype, options: dict, piece: int) -> None:
    generator = random.Random(piece)
    batch = random_batch(generator, depth=3, fanout=2, length=150)
    added = [generator.choice([1, 2, 7, 40, 90]) for _ in batch.seq_lens]
    case = kernel_cases.Extended(batch, added, 6, 2, 40, 24, dtype, q_dtype=torch.float32, **options)
    same = Same(case, piece)
    alone = same.alone()
    firsts = np.cumsum([0, *added]).tolist()
    for _ in range(25):
        members = generator.sample(range(len(added)), generator.randint(1, len(added)))
        # The first of their new tokens, and of these the first are cached already.
        last = [generator.randint(1, added[member]) for member in members]
        first = [generator.randrange(count) for count in last]
        part = part_of(batch, members)
        cached = np.array(part.seq_lens) + first
        scheduler = NativeScheduler(same.config(), len(members))
        made = scheduler.extend(load(scheduler, part), cached, np.array(last) - first)
        queries = [firsts[m] + j for m, a, b in zip(members, first, last, strict=True) for j in range(a, b)]
        assert torch.equal(same.run(queries, made.data, case.spec.window), alone[torch.tensor(queries)])
