"""Faults of the kernels that the emulator shall find, and how they are looked for: `python faults.py NAME` says what is found.

Without pytest, which would take longer to import than most faults take to be found.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import signal
import sys
from collections.abc import Callable
from functools import partial

import emulated
import torch
from kernel_cases import TOLERANCE, Case, Run, in_turns, of_latents, spec_of
from page_cases import Paged, Stored
from trees import random_batch

from sglang_pat.backend.start.layers import kv_format
from sglang_pat.kernels import capabilities
from sglang_pat.packing import FORMATS, AttentionSpec, Batch, Node, TileTable, layout

ARCH = "9.0a"
EQUAL, UNEQUAL = (128, 128), capabilities.UNEQUAL_HEAD_DIMS[0]
"""Dimensions of K and V."""

GROUP_MEETS = "sync_threads(kWarpgroupBarrier + warpgroup_, kWarpgroupThreads);"
"""Of one warpgroup that computes latents."""

CHANGES: dict[str, emulated.Change] = {
    "narrow: an item's last chunk is not waited for": ("kv/plain_narrow.cuh", "wait_copies<kNarrowStages - 1>();", ""),
    "narrow: only the first chunk of a pair is waited for": (
        "kv/plain_narrow.cuh", "wait_copies<kNarrowStages - 2>();", "wait_copies<kNarrowStages - 1>();",
    ),
    "narrow: a team sums up before all have written": (
        "narrow_rows.cuh", "statistics_.stage[warp] = last;\n    all_arrived();", "statistics_.stage[warp] = last;",
    ),
    "narrow: a team's memory is free before all have read": ("narrow_rows.cuh", "    all_arrived();\n  }\n", "\n  }\n"),
    "wide: V is not waited for": ("wide.cuh", "      stages.wait_full(true);", ""),
    "wide: K is not made visible to products": (
        "wide.cuh", "stages.wait_full(false);\n      fence_async_proxy();", "stages.wait_full(false);",
    ),
    "wide: V is not made visible to products": (
        "wide.cuh", "stages.wait_full(true);\n      fence_async_proxy();", "stages.wait_full(true);",
    ),
    "wide: scores are not waited for": ("wide.cuh", "P::template wait<1>();", ""),
    "wide: V is free while it is multiplied": (
        "wide.cuh", "P::template wait<0>();\n          release_v(stages, arrivals);\n          rescale",
        "release_v(stages, arrivals);\n          P::template wait<0>();\n          rescale",
    ),
    "wide: K is never freed": ("wide.cuh", "release_k(stages, arrivals);\n        softmax", "\n        softmax"),
    "wide: the first group that has read a stage frees it": ("wide.cuh", "kArrivals / (item.m / kWarpgroupRows)", "kArrivals"),
    "wide: groups add up before both have written": ("wide.cuh", "sync_threads(kWideBarrier, kAlternating * kWarpgroupThreads);", ""),
    "ring: V does not wait for an empty stage": ("kv/plain_copy.cuh", "    cursor.wait_empty();", "    if (!kIsV) cursor.wait_empty();"),
    "ring: Q does not wait for an empty buffer": ("ring.cuh", "queries_.wait_all_empty(item.m);", ""),
    "own queries: Q does not wait for an empty buffer": ("ring.cuh", "queries_.wait_all_empty(item.m);", ""),
    "own queries: they are not waited for": ("wide.cuh", "queries_.wait_full(warpgroup);", ""),
    "own queries: a group's buffer is as full as the next item's": ("ring.cuh", "(turn_ + (turn_ + buffer) % 2) / 2 % 2", "turn_ / 2 % 2"),
    "forward: narrow items do not wait for wide ones": (
        "forward.cuh", "run_wide(p, items, memory);\n        ran_wide", "run_wide(p, items, memory); single(), narrow();\n        ran_wide",
    ),
    "narrow first: wide items do not wait for them": ("forward.cuh", "__syncthreads();", ""),
    "narrow first: registers are taken back before the others have theirs": ("forward.cuh", "sync_threads(kGrownInNarrow, Format::kThreads);", ""),
    "forward: registers are taken back before the others have theirs": ("forward.cuh", "sync_threads(kGrownInWide, Format::kThreads);", ""),
    "narrow first: registers change twice and nobody waits between": ("forward.cuh", "sync_threads(kRegistersBarrier, Format::computing(wide));", ""),
    "narrow first: wide items are forgotten": ("forward.cuh", "!ran_wide & (items.count(kWide) > 0)", "false"),
    "forward: barriers are as the last look-up left them": (
        "forward.cuh", "Format::init_barriers(memory, from > 0);", "if (from == 0) Format::init_barriers(memory, from > 0);",
    ),
    "forward: teams of two kinds have one barrier": ("narrow_rows.cuh", "kKind * kMostTeams", "0"),
    "items: they are used before they are in order": (
        "assign.cuh", "(ItemKind(warp), number);\n    __syncthreads();", "(ItemKind(warp), number);",
    ),
    "items: one that is left over is forgotten": (
        "assign.cuh", "__popc(short_ones & before) >= extra_shared", "__popc(short_ones & before) >= extra_shared - 1",
    ),
    "merge: warps add up before all have written": ("merge.cuh", "__syncthreads();", ""),
    "8 bits: bytes are converted before they are there": ("kv/plain_convert.cuh", "wait_copies<kAhead - 1>();", ""),
    "8 bits: a stage is filled while it is in use": ("kv/plain_convert.cuh", "cursor_.wait_empty();", ""),
    "8 bits: slots are read before they are there": ("kv/plain_convert.cuh", "i == kSlotsOnly ? kLead : kAhead", "i == kSlotsOnly ? 1 : kAhead"),
    "8 bits: slots are overwritten while they are read": ("kv/plain_convert.cuh", "Memory::kSlotTiles - 1", "Memory::kSlotTiles - 2"),
    "8 bits: slots that other lanes asked for are not waited for": ("kv/plain_convert.cuh", "__syncwarp();", ""),
    "8 bits: Q is converted before it is there": ("ring.cuh", "wait_copies<0>();", ""),
    "8 bits: an item's last chunk is not waited for": ("kv/plain_narrow.cuh", "wait_copies<kNarrowStages - 1>();", ""),
    "pages: an item's last chunk is not waited for": ("kv/page_rows.cuh", "wait_copies<S::kStages - 1>();", ""),
    "pages: V of a tail is not zero behind its end": (
        "kv/page_load.cuh", "copy16_or_zero(address + S::kTile, v + (valid ? (first + row) * p_.v_slot : 0), valid);",
        "if (valid) copy16_or_zero(address + S::kTile, v + (first + row) * p_.v_slot, true);",
    ),
    "pages: a full page's tail is overwritten before it is read": ("kv/page_store.cuh", "if (!is_read) to_tail(own);", "to_tail(own);"),
    "pages, wide: a record is converted before it is there": ("kv/page_convert.cuh", "wait_copies<kAhead - 2>();", ""),
    "pages, wide: what other threads copied is not waited for": ("kv/page_convert.cuh", "sync_threads(kProducerBarrier, kThreads);", ""),
    "pages, wide: a stage is filled while it is in use": ("kv/page_convert.cuh", "cursor_.wait_empty();\n    Panels::keys", "\n    Panels::keys"),
    "pages, wide: a record is overwritten while it is read": ("kv/page_convert.cuh", "i < kAhead - 1", "i < kAhead"),
    "pages, wide: V of a tail is not zero behind its end": ("kv/page_convert.cuh", "first + i * kStride < left", "true"),
    "pages, wide: narrow items do not wait for wide ones": ("forward.cuh", "__syncthreads();", ""),
    "tails: the loader looks where they are before that is written": ("ring.cuh", "sync_threads(kProducerBarrier, kThreads);", ""),
    "tails: stages of one that has ended are not freed": ("wide.cuh", "tile < tiles_", "false"),
    "tails: what was summed up in front of them is not made smaller": (
        "wide.cuh", "if constexpr (Variant::kTails) rescale<P::kOutputs>(o, correction);", "",
    ),
    "tails of 8 bits: the second one is where the first one is": ("kv/plain_convert.cuh", "second ? item.second_tail : item.slots + item.tokens", "item.slots + item.tokens"),
    "tails of 8 bits: the second one is as long as the first one": ("kv/plain_convert.cuh", "item.tail_tokens[second]", "item.tail_tokens[0]"),
    "tails of 8 bits: they are not looked up": ("assign.cuh", "if (item.tails && item.kind == kWide) look_up_tails(item, end);", ""),
    "unequal, narrow: V is copied as if it were as wide as K": (
        "kv/plain_load.cuh", "lane % kVRowThreads", "lane % kRowThreads", "v_column < kVRowCopies", "v_column < kRowCopies",
    ),
    "unequal, narrow: V is copied from where K of another row is": (
        "kv/plain_load.cuh", "__shfl_sync(~0u, chunk.slot, v_first + i)", "__shfl_sync(~0u, chunk.slot, first + i)",
    ),
    "unequal, ring: V is copied as if it were as wide as K": (
        "kv/plain_copy.cuh", "column % kVRowThreads", "column", "at.column < kRowCopies", "at.column < kDim * int(sizeof(T)) / kCopyBytes",
    ),
    "unequal, ring: V is copied from where K of another row is": ("kv/plain_copy.cuh", "(kIsV ? turn() : 0)", "0"),
    "unequal, ring: V is not zero behind its end": ("kv/plain_copy.cuh", "left - first_row<kIsV>()", "left - first_row<false>()"),
    "unequal, 8 bits: V is loaded as if it were as wide as K": ("kv/plain_direct.cuh", "kVChunks == kChunks || panel < kVChunks || !is_v_", "true"),
    "unequal 8 bits by mma: V is copied as if it were as wide as K": ("kv/plain_convert.cuh", "(is_v ? kVDim : kDim)", "kDim"),
    "direct: a stage is filled while it is in use": ("kv/plain_direct.cuh", "ring_.wait_empty();", ""),
    "direct: what is behind the end is not made zero": ("kv/plain_direct.cuh", "if (left < kTokens) clear_rows(left);", ""),
    "direct: in each item a set begins with the same tile": ("kv/plain_direct.cuh", "tile -= tiles;", "tile = set() / 2;"),
    "direct: Q does not wait for an empty buffer": ("ring.cuh", "queries_.wait_all_empty(item.m);", ""),
    "direct: Q is converted before it is there": ("ring.cuh", "wait_copies<0>();", ""),
    "direct: sources are read before all are there": ("ring.cuh", "sync_threads(kProducerBarrier, kThreads);", ""),
    "direct: narrow items do not wait for wide ones": ("forward.cuh", "__syncthreads();", ""),
    "latents: the other group's weights are not waited for": ("kv/latent.cuh", "wait_published();\n      rows.receive(before);", "\n      rows.receive(before);"),
    "latents: the last tile's weights are not waited for": ("kv/latent.cuh", "wait_published();\n    rows.receive(last);", "\n    rows.receive(last);"),
    "latents: scores are not waited for": ("kv/latent.cuh", "wgmma_wait<0>();\n    rows.weigh(left, item);", "rows.weigh(left, item);"),
    "latents: the other group's tile is free while it is multiplied": (
        "kv/latent.cuh", "wgmma_wait<1>();\n    if (tile > 0) release(before);", "if (tile > 0) release(before);\n    wgmma_wait<1>();",
    ),
    "latents: a tile is free while it is multiplied": ("kv/latent.cuh", "wgmma_wait<0>();\n    release(own);", "release(own);\n    wgmma_wait<0>();"),
    "latents: barriers are as the last look-up left them": ("kv/latent.cuh", "memory.barriers.init(true);", ""),
    "latents: K is not waited for": ("kv/latent_ring.cuh", "stages.wait_full(piece);", ""),
    "latents: K is not made visible to products": ("kv/latent_ring.cuh", "fence_async_proxy();\n    wgmma_fence();", "\n    wgmma_fence();"),
    "latents: weights are stored where K is multiplied": ("kv/latent_wide.cuh", GROUP_MEETS, ""),
    "latents: what was summed up is not made smaller by the other group": ("kv/latent_wide.cuh", "rescale<kOutputs>(o_, correction);", ""),
    "latents: what was summed up is not made smaller by the own group": ("kv/latent_wide.cuh", "rescale<kOutputs>(o_, correction_);", ""),
    "latents: groups add up before both have written": ("kv/latent_wide.cuh", "sync_threads(kWideBarrier, kLatentComputing);", ""),
    "latents, narrow: K is not waited for": ("kv/latent_ring.cuh", "stages.wait_full(piece);", ""),
    "latents, narrow: K is not made visible to products": ("kv/latent_ring.cuh", "fence_async_proxy();\n    wgmma_fence();", "\n    wgmma_fence();"),
    "latents, narrow: maxima are read before all have written": (
        "kv/latent_narrow.cuh", f"{GROUP_MEETS}\n#pragma unroll\n    for (int i = 0;", "\n#pragma unroll\n    for (int i = 0;",
    ),
    "latents, narrow: weights are multiplied before all are there": ("kv/latent_narrow.cuh", f"fence_async_proxy();\n    {GROUP_MEETS}", "fence_async_proxy();"),
    "latents, narrow: weights are not made visible to products": (
        "kv/latent_narrow.cuh", f"fence_async_proxy();\n    {GROUP_MEETS}", f"\n    {GROUP_MEETS}",
        "fence_async_proxy();\n    const uint32_t tile", "\n    const uint32_t tile",
    ),
    "latents, narrow: what was summed up is not made smaller by the other group": ("kv/latent_narrow.cuh", "rescale_output(correction);", ""),
    "latents, narrow: what was summed up is not made smaller by the own group": ("kv/latent_narrow.cuh", "rescale_output(correction_);", ""),
    "latents, narrow: groups add up before both have written": ("kv/latent_narrow.cuh", "sync_threads(kWideBarrier, kLatentComputing);", ""),
    "latents, narrow: columns are written before all are there": (
        "kv/latent_narrow.cuh", f"{GROUP_MEETS}\n    constexpr int kChunks = Sizes::kHalfPanels * 8;", "\n    constexpr int kChunks = Sizes::kHalfPanels * 8;",
    ),
    "latents: a stage is filled while it is in use": ("kv/latent_ring.cuh", "ring_.wait_empty();", ""),
    "latents: Q does not wait for an empty slot": ("kv/latent_ring.cuh", "queries_.wait_empty(rows);", ""),
    "latents: rows are looked up where the item before the last has its own": (
        "kv/latent_ring.cuh", "if (narrow_before_) queries_.wait_empty(kSlotRows);", "",
    ),
    "latents, narrow: sums of the next item take the place of those that are read": (
        "kv/latent_narrow.cuh", "memory_.sums[item_ % 2]", "memory_.sums[0]",
    ),
    "latents: the first group that has read weights frees them": ("kv/latent_ring.cuh", "i % kPieces == kRope ? kLatentWarpgroups : 1", "1"),
    "latents: sources are read before all are there": ("kv/latent_ring.cuh", "sync_threads(kProducerBarrier, kThreads);", ""),
    "latents: an item begins with the first row of its first query": ("kv/latent_ring.cuh", "first_row_of(item) + row", "row"),
    "latents: parts are merged for rows that they do not have": ("merge.cuh", "part_rows != nullptr", "false"),
    "latents: parts are merged for rows behind theirs": ("merge.cuh", "row >= rows >> kPartEndShift", "false"),
    "latents: rows of the second set of heads are not counted from its first": ("merge.cuh", "(head + j) % p.group", "head + j"),
    "latents of 8 bits: a stage is filled while it is in use": ("kv/latent_ring.cuh", "ring_.wait_empty();", ""),
    "latents of 8 bits: Q is converted before it is there": ("kv/latent_ring.cuh", "wait_copies<0>();", ""),
    "latents by mma: a tile is loaded where another one is multiplied": ("kv/latent_mma.cuh", "wait_copies<0>();\n      __syncthreads();", "wait_copies<0>();"),
    "latents by mma: scores are read before all are there": ("kv/latent_mma.cuh", "__syncthreads();\n      weigh(left);", "\n      weigh(left);"),
    "latents by mma: weights are read before all are there": ("kv/latent_mma.cuh", "__syncthreads();\n      values(memory_.tiles[at]);", "\n      values(memory_.tiles[at]);"),
    "latents by mma: O is written where Q is multiplied": ("kv/latent_mma.cuh", "__syncthreads();\n    const int first = warp_id() * (kColumns / 8);", "\n    const int first = warp_id() * (kColumns / 8);"),
    "latents by mma: the next item does not wait for this one": ("kv/latent_mma.cuh", "if (i > 0) __syncthreads();", ""),
    "latents by mma: sources are read before all are there": ("kv/latent_mma.cuh", "__syncthreads();\n    load_q();", "\n    load_q();"),
}  # fmt: skip
"""Each takes out what keeps one part of the kernels from another's memory, or from what is nobody's. `emulated.Change` says what it is made of."""
FAULTS = tuple(dict.fromkeys(CHANGES.values()))


FOUND_BY: dict[str, tuple[int, str]] = {
    "narrow: a team's memory is free before all have read": (2, "optimal"),
    "wide: the first group that has read a stage frees it": (2, "optimal"),
    "ring: Q does not wait for an empty buffer": (6, "optimal"),
    "forward: teams of two kinds have one barrier": (3, "optimal"),
}
"""The case and policy that find a change (what this file prints), where it is not one of the first, which are short: it runs first."""


def kept(name: str) -> torch.dtype:
    """The dtype of KV with which a change shows."""
    return torch.float8_e4m3fn if "8 bits" in name else torch.bfloat16


def with_nothing_behind_v(case: Case) -> Case:
    """The same numbers, where memory behind the pool of V cannot be read, and the first token of all is the last in the pools."""
    last, first = len(case.v) - 1, int(case.table[case.rows[0], 0])
    for pool in (case.k, case.v):
        plain = pool.view(torch.uint8)
        plain[[last, first]] = plain[[first, last]]
    was = case.table.clone()
    case.table[was == first], case.table[was == last] = last, first
    pages = -(-case.v.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    behind = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + pages
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(behind), mmap.PAGESIZE, 0) == 0
    v = torch.frombuffer(memory, dtype=torch.uint8, count=case.v.nbytes, offset=pages - case.v.nbytes)
    v.copy_(case.v.view(torch.uint8).flatten())
    case.v = v.view(case.v.dtype).view(case.v.shape)
    return case


def cases(dtype: torch.dtype, dims: tuple[int, int]) -> list[Case]:
    """Items of every kind, shared by teams, by groups or by nobody, and each way to merge."""
    generator = random.Random(3)
    torch.manual_seed(0)
    shared = [Batch([600] * count, [Node(0, 500, list(range(count)))]) for count in (1, 8, 40)]
    short = [Node(0, 70, list(range(first, first + 12))) for first in range(0, 96, 12)]
    both = Batch([700] * 8, [Node(0, 400, list(range(first, first + 4))) for first in (0, 4)])
    left_over = Batch([300] * 20, [])
    ragged = Batch([generator.randint(1, 700) for _ in range(7)], [])
    trees = [random_batch(generator, 2, 4, 90) for _ in range(3)]
    found = [
        Case(batch, 8, 2, *dims, dtype) for batch in [*shared, both, left_over, ragged, Batch([71] * 96, short), *trees]
    ]
    found.append(Case(Batch([4000], []), 2, 1, *dims, dtype))
    return found if dims == EQUAL else [with_nothing_behind_v(case) for case in found]


def fault_of_run(run: Run, seeds: int) -> str:
    """What is wrong with its results in some order of threads, if anything."""
    try:
        run.check_in_any_order(TOLERANCE[torch.bfloat16], seeds)
    except (AssertionError, RuntimeError) as error:
        return str(error) or "wrong results"
    return ""


def decoder_with(
    change: emulated.Change | None,
    spec: AttentionSpec,
    tiles: TileTable,
    dtype: torch.dtype | None = None,
    arch: str = ARCH,
) -> emulated.Decoder:
    """All changes are compiled together, so that every fault has the same module."""
    return emulated.Decoder(spec, tiles, arch, dtype, changes=FAULTS, planted=change)


def run_for(workers: int, case: Case, change: emulated.Change | None) -> Run:
    """With a plan for so few workers."""
    tiles = capabilities.tile_table(ARCH, 128, kv=case.spec.kv)
    run = Run(case, decoder_with(change, case.spec, tiles, torch.bfloat16), tiles)
    run.plan = case.plan(tiles, workers)
    run.make_workspace(int(run.plan[2]))
    return run


def fault_of_pages(change: emulated.Change | None) -> str:
    """The same where KV is in pages of few bits. Q has the products' dtype: it is converted nowhere, which waits for all copies."""
    dtype = torch.float16
    tiles = TileTable(capabilities.query_tiles(ARCH, 128, kv=FORMATS["int4"]), warp_m=capabilities.NARROW_M)
    shared = Batch([230] * 4 + [70, 500], [Node(0, 192, [0, 1, 2, 3])])
    wide = Batch([1000] * 60, [Node(0, 960, list(range(40))), Node(0, 704, list(range(40, 60)))])
    for heads, kv_heads, batch in (
        (8, 2, shared),
        (8, 2, Batch([1500])),
        (8, 2, wide),
        (32, 1, Batch([130, 64, 300, 63, 100])),
    ):
        case = Paged(batch, heads, kv_heads, 128, "int4", dtype)
        run = Run(case, decoder_with(change, case.spec, tiles, dtype), tiles)
        if found := fault_of_run(run, seeds=3):
            return found
    for seed in range(8):
        stored = Stored("int4", 2, 4, run.decoder, dtype)
        run.decoder.seed(1000 * seed)
        for first, last in ((1, 40), (41, 110)):
            tokens = [(row, length, 128 * row + length - 1) for row in (0, 1) for length in range(first, last + 1)]
            stored.store(tokens, *stored.random(len(tokens)))
        if not stored.same():
            return f"seed {seed}: other bytes than the CPU's"
    return ""


def fault_of_tails(change: emulated.Change | None, dtype: torch.dtype = torch.bfloat16) -> str:
    """The same of work items with tails. Where KV is converted, its loaders look these up with the item."""
    batch = Batch([630, 650, 700, 701, 740, 608, 665], [Node(0, 600, list(range(7)))])
    case = Case(batch, 64, 1, 128, 128, dtype)
    own = case.table[case.rows[1:4], 600:640].long()
    case.k[own] = (case.k[own].float() * 8).to(dtype)
    run = run_for(1, case, change)
    assert any(item.tails for item in layout.work_items(run.plan.numpy()))
    return fault_of_run(run, seeds=4)


def fault_of_narrow_first(change: emulated.Change | None) -> str:
    """The same where every second worker runs narrow items first."""
    case = Case(Batch([340] * 40, [Node(0, 300, list(range(40)))]), 12, 3, 128, 128, torch.bfloat16)
    run = run_for(3, case, change)
    run.plan[layout.HEADER.index("narrow_first")] = 1
    return fault_of_run(run, seeds=4)


def fault_of_own_queries(change: emulated.Change | None) -> str:
    """The same where each of two warpgroups has a buffer of Q, by one worker."""
    tiles = TileTable((64, 128))
    for tokens in (90, 300):
        case = Case(in_turns(tokens), 8, 1, 256, 256, torch.bfloat16)
        decoder = decoder_with(change, case.spec, TileTable(capabilities.tiles_of(case.spec, ARCH)))
        run = Run(case, decoder, tiles, "naive")
        run.plan = case.plan(tiles, 1, "naive")
        run.make_workspace(int(run.plan[2]))
        if found := fault_of_run(run, seeds=3):
            return found
    return ""


def fault_of_direct(change: emulated.Change | None) -> str:
    """The same of KV of 8 bits and 256 dimensions, by one worker: items of 64 rows, of one to five tiles, and both kinds of items."""
    tiles = TileTable(capabilities.query_tiles(ARCH, 256, FORMATS["float8_e4m3fn"]))
    both = Batch([340 + i % 7 for i in range(40)], [Node(0, 300, list(range(40)))])
    for batch, chosen in ((in_turns(90), TileTable((64,))), (in_turns(300), TileTable((64,))), (both, tiles)):
        case = Case(batch, 8, 1, 256, 256, torch.float8_e4m3fn)
        run = Run(case, decoder_with(change, case.spec, tiles, torch.bfloat16), tiles)
        run.plan = case.plan(chosen, workers=1)
        run.make_workspace(int(run.plan[2]))
        if found := fault_of_run(run, seeds=3):
            return found
    return ""


def fault_of_latents(change: emulated.Change | None, dtype: torch.dtype = torch.bfloat16, arch: str = ARCH) -> str:
    """The same of latents, by one worker: wide and narrow items of several tiles, in some of which scores grow, and more items than it looks up."""
    torch.manual_seed(0)
    tiles = TileTable(capabilities.latent_query_tiles(arch))
    growing = Batch([330] * 3, [Node(0, 300, [0, 1, 2])])
    shared = Batch([150 + 7 * i for i in range(7)], [Node(0, 128, list(range(7)))])
    # So many tiles that the barriers end otherwise than they began.
    several = Batch([70] * 35 + [3] * 105)
    batches = [(20, growing), (8, growing), (20, shared), (8, Batch([64, 1, 65, 200, 128, 3, 129, 40])), (8, several)]
    straddling = [(40, shared), (80, shared)] if tiles.query_tiles[-1] == 64 else []
    for number, (rows, batch) in enumerate(batches + straddling):
        case = of_latents(Case(batch, rows, 1, *capabilities.LATENT_DIMS[1], dtype))
        case.dear_tokens = (rows, batch) in straddling
        if batch is growing:
            slots = case.table[case.rows].long()
            grown = case.k[slots].float() * torch.linspace(0.01, 6, slots.shape[1])[:, None, None]
            case.k[slots] = grown.to(dtype)
        run = Run(case, decoder_with(change, case.spec, tiles, torch.bfloat16, arch), tiles)
        run.plan = case.plan(tiles, workers=1)
        run.make_workspace(int(run.plan[2]))
        if found := fault_of_run(run, seeds=3):
            return f"case {number}: {found}"
    return ""


def several_look_ups(dtype: torch.dtype, dims: tuple[int, int]) -> list[Case]:
    """More wide items than a worker looks up at a time: slow (test_a_worker_with_more_items_than_threads is about them too)."""
    return [Case(Batch([3] * emulated.WORKERS * 600, []), 20, 1, *dims, dtype)]


def fault(
    change: emulated.Change | None,
    dtype: torch.dtype,
    dims: tuple[int, int],
    cases: Callable[[torch.dtype, tuple[int, int]], list[Case]] = cases,
    first: tuple[int, str] = (0, "optimal"),
    arch: str = ARCH,
) -> str:
    """The first one that is found, if any; by the `first` case and policy, or else by the others in order."""
    # Without prices, by which short packs would avoid wide tiles.
    tiles = TileTable(capabilities.query_tiles(arch, dims[0], kv_format(dtype)))
    decoder = decoder_with(change, spec_of(dtype, *dims), tiles, arch=arch)
    made = cases(dtype, dims)
    runs = [(number, policy) for number in range(len(made)) for policy in ("optimal", "naive")]
    for number, policy in sorted(runs, key=lambda one: one != first):
        if found := fault_of_run(Run(made[number], decoder, tiles, policy), seeds=3):
            return f"case {number}, {policy}: {found}"
    return ""


KINDS: dict[str, Callable[[emulated.Change | None], str]] = {
    "pages": fault_of_pages,
    "tails": fault_of_tails,
    "tails of 8 bits": partial(fault_of_tails, dtype=torch.float8_e4m3fn),
    "narrow first": fault_of_narrow_first,
    "own queries": fault_of_own_queries,
    "direct": fault_of_direct,
    "latents": fault_of_latents,
    "latents of 8 bits": partial(fault_of_latents, dtype=torch.float8_e4m3fn),
    "latents by mma": partial(fault_of_latents, arch="8.0"),
    "unequal 8 bits by mma": partial(fault, dtype=torch.float8_e4m3fn, dims=UNEQUAL, arch="8.0"),
}


SOUND = [*KINDS, "16 bits", "8 bits", "unequal, 16 bits", "unequal, 8 bits"]
"""Names with which nothing is missing."""


if __name__ == "__main__":
    name = sys.argv[1]
    dims = UNEQUAL if name.startswith("unequal") else EQUAL
    made = several_look_ups if "look-up" in name else cases
    of_kind = KINDS.get(name.partition(":")[0].partition(",")[0])
    first = FOUND_BY.get(name, (0, "optimal"))
    change = CHANGES.get(name)
    if change is not None:
        # A crash that is expected needs no backtrace, for which tvm-ffi reads the symbols of every library.
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    found = of_kind(change) if of_kind else fault(change, kept(name), dims, made, first)
    print("found:", found or "nothing")
