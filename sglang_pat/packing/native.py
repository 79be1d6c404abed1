"""The native pack scheduler (csrc/packing): takes events, writes plans into memory that kernels read."""

from __future__ import annotations

import functools
import os
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from sglang_pat import jit
from sglang_pat.packing import POLICIES, PackConfig, layout
from sglang_pat.packing.constants import LEAST_STEPS
from sglang_pat.packing.plan import OPEN, Plan
from sglang_pat.packing.tree import ROOT, Batch, InconsistentError, Node

MOST_NODES = 1 << 20
"""Nodes on the paths of a batch's requests together: batches list the requests of each node. Where each of 1,447 requests is one node longer than
the one before there are as many: `explain` takes 11 s and 0.7 GB for it (tests/test_explain.py, `chain`)."""


class PlanTooLargeError(Exception):
    """A plan does not fit its buffer, or its parts do not fit the workspace."""


class TooDeepError(Exception):
    """The paths of a batch's requests have more nodes than MOST_NODES; the message says so."""


@functools.cache
def _ffi() -> Any:
    """The library that calls native code. It imports torch, so it is imported when a scheduler is made: commands start two seconds earlier."""
    import tvm_ffi

    # The native code raises both by name.
    for error in (PlanTooLargeError, InconsistentError):
        tvm_ffi.register_error(error)
    return tvm_ffi


class Totals(msgspec.Struct):
    """Counts over all steps.

    Attributes:
        steps: Decode steps.
        requests: Requests decoded.
        unshared: Steps that packed nothing, as no requests share KV that they see.
        unpaid: Steps that packed nothing, as packing what is shared would cost more.
        work_items: Work items run.
        query_sizes: How many work items had 1, 2, 3 ... queries.
        kv_by_queries: KV tokens read for 1, 2, 3 ... queries at once, per layer; their sum is `kv_tokens`.
        parts: Parts written to memory and merged.
        kv_tokens: KV tokens read, per layer.
        kv_tokens_unpacked: What one query per work item would have read, per layer.
    """

    steps: int = 0
    requests: int = 0
    unshared: int = 0
    unpaid: int = 0
    work_items: int = 0
    query_sizes: Counter[int] = msgspec.field(default_factory=Counter)
    kv_by_queries: Counter[int] = msgspec.field(default_factory=Counter)
    parts: int = 0
    kv_tokens: int = 0
    kv_tokens_unpacked: int = 0


class ExtendPlan(msgspec.Struct):
    """What `NativeScheduler.extend` makes.

    Attributes:
        data: The plan (layout.py), int32. Its queries are the new tokens; the length of each is what it sees, itself included.
        shared: Prefixes that several requests read together.
        price: Its price (`PackConfig`).
        alone: The price of reading each request's KV for that request alone. It counts traffic only, so it is the least that such an
            attention costs.
    """

    data: np.ndarray
    shared: int
    price: int
    alone: int


class Pack(msgspec.Struct):
    """Queries that read KV positions [start, end) together, before it is laid out in bins.

    Attributes:
        node: The prefix that it is made at: its place in `tree.compact`, for a batch in its windows.
        start, end: Positions in that batch. None is the end of the request.
        queries: Batch positions. Packs of the same span and prefix were one, if it has more queries than a work item.
        tails: Whether each query then reads its own tail in the same work item.
    """

    node: int
    start: int
    end: int | None
    queries: list[int]
    tails: bool


class Inspection(msgspec.Struct):
    """What tools are told of a plan. Prices are those in bins (`PackConfig.for_bins`), for all KV heads.

    Attributes:
        plan: The plan.
        config: What it was made with: the config, or its `wide_only`.
        packs: What its work items are cut from.
        prices: Of each work item, without its tails.
        tail_price: Of a token of a tail in a work item with tails.
        turn_price: What a bin costs besides, if it has work items of single warps and others.
        makespan: When the last worker is done, as a price for one KV head. Bins are dealt to the workers in turn.
    """

    plan: Plan
    config: PackConfig
    packs: list[Pack]
    prices: list[int]
    tail_price: int
    turn_price: int
    makespan: int


class NativeScheduler:
    """Mirrors the paths of the running requests, tracks the next batch, and makes its plans.

    A request is an int64: its row of `req_to_token` in the lower 32 bits, and how often that row has been handed out in the upper ones. So the
    number says where its KV is, and no client can choose it. A row has one request at a time: binding or expecting a new one forgets the old
    one. Call all methods from one thread, the engine's; `prepare` makes the scheduler's own thread work ahead. In a process that was forked from this
    one, they raise ValueError.

    Attributes:
        epoch: Changes with every event.
        gained: The fewest tokens that a request of the batch that was taken last had gained since `take` was told its length before; 0 if there
            was none.
    """

    def __init__(
        self, config: PackConfig, max_batch: int, max_slots: int = 2**31 - 1, buffers: Sequence[Any] | None = None
    ) -> None:
        """
        Args:
            config: Device and model.
            max_batch: Requests of the largest batch.
            max_slots: How many parts the kernels' workspace holds.
            buffers: Two int32 host arrays of `layout.capacity(config, max_batch)` for the plans; NumPy arrays if None.

        Raises:
            ValueError: A number in the config is out of range.
            jit.BuildError: There is no working C++ compiler.
        """
        self._module = self.load_module()
        if buffers is None:
            buffers = [np.zeros(layout.capacity(config, max_batch), dtype=np.int32) for _ in range(2)]
        self.buffers = buffers
        self.epoch = self.gained = 0
        self._scratch = np.zeros(8 + 2 * config.max_queries, dtype=np.int64)
        self._out = _ffi().from_dlpack(self._scratch)
        limits = {name: [limit] for name, limit in config.wide_limits.items()}
        values = _values(config), _values(config.wide_only or config), limits
        self._handle = self._module.create(*values, max_batch, max_slots, *map(_ffi().from_dlpack, buffers))
        # The buffers must outlive the thread that writes to them.
        weakref.finalize(self, lambda module, handle, *_: module.destroy(handle), self._module, self._handle, *buffers)

    @staticmethod
    @functools.cache
    def load_module() -> Any:
        """The native module.

        Raises:
            jit.BuildError: There is no working C++ compiler.
        """
        _ffi()
        module = jit.load("packing")
        # Events take less than a microsecond; released meanwhile, the GIL could be gone for milliseconds.
        short = "insert split bind release withdraw find child any_request binding expect stands version prepare"
        for name in short.split():
            getattr(module, name).release_gil = False
        os.register_at_fork(after_in_child=module.abandon)
        return module

    # Radix-tree events.

    def insert(self, node: int, parent: int, length: int, head: bytes) -> None:
        """Add a node of `length` tokens below `parent`; `head`, 16 bytes, distinguishes it from its siblings."""
        self._event(self._module.insert, node, parent, length, *_halves(head))

    def split(self, node: int, upper: int, length: int, head: bytes) -> None:
        """Move the first `length` tokens of `node` to the new node `upper`; `head` is the new head of `node`."""
        self._event(self._module.split, node, upper, length, *_halves(head))

    def evict(self, node: int) -> None:
        """The cache dropped a node. Raises InconsistentError if requests were running on it; they then share nothing."""
        self._event(self._module.evict, node)

    def reset(self) -> None:
        """The cache dropped everything; requests share nothing from then on."""
        self._event(self._module.reset)

    def bind(self, request: int, node: int) -> None:
        """The path of `request` ends with `node`; with ROOT it shares nothing. It may be bound already."""
        self._event(self._module.bind, request, node)

    def release(self, request: int) -> None:
        """`request` gave its row back."""
        self._event(self._module.release, request)

    def withdraw(self, request: int) -> None:
        """`request` is not in the next batch. Its path stays bound until it is released."""
        self._event(self._module.withdraw, request)

    def expect(self, request: int, length: int) -> None:
        """`request`, with `length` tokens, joins the end of the next batch, if it is not in it already.

        Prompts come in chunks: until the request decodes, its latest length counts. Until it is bound it shares nothing.
        """
        self._event(self._module.expect, request, length)

    # The mirror.

    def __len__(self) -> int:
        """How many requests were bound or expected and not yet released."""
        return self._module.active_requests(self._handle)

    def binding(self, request: int) -> tuple[int, int] | None:
        """(node, end of the path) of a request; None if it is not known."""
        if not self._module.binding(self._handle, request, self._out):
            return None
        node, end = self._scratch[:2].tolist()
        return node, end

    def find(self, node: int) -> tuple[int, int] | None:
        """(parent, length) of a node; None if it is not known."""
        if not self._module.find(self._handle, node, self._out):
            return None
        parent, length = self._scratch[:2].tolist()
        return parent, length

    def child(self, parent: int, head: bytes) -> int | None:
        """The child of `parent` that starts with `head`; None if there is none."""
        node = self._module.child(self._handle, parent, *_halves(head))
        return None if node < 0 else node

    def any_request(self, node: int) -> int:
        """A request whose path passes through `node`; raises InconsistentError if there is none."""
        return self._module.any_request(self._handle, node)

    @property
    def num_nodes(self) -> int:
        """How many nodes are on the paths of requests."""
        return self._module.active_nodes(self._handle)

    @property
    def bytes(self) -> int:
        """Host memory of the mirror and of its scratch, without the plans."""
        return self._module.bytes(self._handle)

    # Plans.

    @property
    def version(self) -> int:
        """Changes when the batch or the path of one of its requests does."""
        return self._module.version(self._handle)

    def stands(self, requests: Any) -> bool:
        """Whether the plan in use is still valid for the batch `requests`, an int64 host array."""
        return self._module.stands(self._handle, _tensor(requests))

    def prepare(self, tokens: int, spread: int = LEAST_STEPS) -> None:
        """Start to plan the next batch on the scheduler's own thread.

        Args:
            tokens: How many more each of its requests has than `take` was last told. The plan is not used if one has fewer.
            spread: If they have more, by how many tokens these numbers may differ.
        """
        self._module.prepare(self._handle, tokens, spread)

    def take(self, requests: Any, seq_lens: Any, steps: int, aside: bool = False) -> tuple[int, int, bool]:
        """A batch's plan: the prepared one if it was made for this very batch, else a new one.

        Args:
            requests: The batch, an int64 host array. Unknown requests share nothing.
            seq_lens: Tokens of each request, likewise.
            steps: How many steps the previous plan was used for.
            aside: The batch runs for one step only; the next batch stays what it was.

        Returns:
            (index of the buffer that holds the plan, how many steps it is good for, whether it was prepared).

        Raises:
            PlanTooLargeError: Not even a plan that packs nothing fits; see `levels`.
            ValueError: The numbers of lengths and requests differ, or a number is out of range.
        """
        taken = self._module.take(self._handle, _tensor(requests), _tensor(seq_lens), steps, aside, self._out)
        good, self.gained = self._scratch[:2].tolist()
        return taken // 2, good, bool(taken % 2)

    def fall_back(self, seq_lens: Any, steps: int, stands: bool = False) -> tuple[int, int]:
        """Make a plan of one query per work item, in which nothing is cut, so that it needs no workspace.

        Args:
            seq_lens, steps: As for `take`.
            stands: It is for the batch that `take` was just asked for, and may be used again while that stands; otherwise for one step only.

        Returns:
            (index of the buffer that holds the plan, how many steps it is good for).
        """
        taken = self._module.fall_back(self._handle, _tensor(seq_lens), steps, stands, self._out)
        return taken // 2, int(self._scratch[0])

    def extend(self, requests: Any, cached: Any, added: Any) -> ExtendPlan:
        """The plan of an extend. Its queries are the new tokens, request by request.

        The next decode batch does not change. Work items hold several tokens of one request, or of several requests where these share KV. If
        an item with several tokens has an open end, they belong to one request, and its last token comes first.

        Args:
            requests: The extended requests, an int64 host array. Requests that are not bound share nothing.
            cached: Cached tokens of each request, likewise.
            added: New tokens of each request, likewise.

        Raises:
            PlanTooLargeError: It needs more than 2^31 slots.
            ValueError: The arrays differ in length, or a number is out of range.
        """
        plan = np.empty(self._module.extend(self._handle, *map(_tensor, (requests, cached, added))), dtype=np.int32)
        self._module.extended(self._handle, _tensor(plan), self._out)
        return ExtendPlan(plan, *self._scratch[:3].tolist())

    def totals(self, steps: int) -> Totals:
        """Counts up to now; the current plan was used for `steps` steps."""
        self._module.totals(self._handle, steps, self._out)
        steps, requests, unshared, unpaid, items, parts, kv_tokens, unpacked, *sizes = self._scratch.tolist()
        half = len(sizes) // 2
        counts, read = (
            Counter({size: count for size, count in enumerate(numbers, 1) if count})
            for numbers in (sizes[:half], sizes[half:])
        )
        return Totals(steps, requests, unshared, unpaid, items, counts, read, parts, kv_tokens, unpacked)

    @property
    def levels(self) -> int | None:
        """How many levels of its batch's tree the plan in use packs (`constants.LEVELS`), where not all of them fit; None for all."""
        self._module.current(self._handle, self._out)
        levels = int(self._scratch[3])
        return None if levels < 0 else levels

    def current(self) -> tuple[int, int, int]:
        """Of the plan in use: (KV tokens that its first step reads, parts, price of its longest bin)."""
        self._module.current(self._handle, self._out)
        kv_tokens, parts, longest = self._scratch[:3].tolist()
        return kv_tokens, parts, longest

    def inspected(self) -> list[int]:
        """Of the plan that was made last, what `inspect` reads (`PlanMaker::inspect` in csrc/packing/plan_maker.h)."""
        found = np.empty(self._module.inspect(self._handle, _int64([])), dtype=np.int64)
        self._module.inspect(self._handle, _tensor(found))
        return found.tolist()

    def _event(self, action: Any, *arguments: Any) -> None:
        self.epoch += 1
        action(self._handle, *arguments)


def make_plan(batch: Batch, config: PackConfig) -> Plan:
    """The plan that serving would make for a batch, for tools that have a whole batch instead of events.

    Args:
        batch: Lengths (at least one token each) and prefix tree.
        config: Device and model.

    Raises:
        ValueError: A number in the batch or the config is out of range.
        jit.BuildError: There is no working C++ compiler.
    """
    return _planned(batch, config)[1]


def inspect(batch: Batch, config: PackConfig) -> Inspection:
    """The same with its packs and prices; raises what `make_plan` raises."""
    scheduler, plan = _planned(batch, config)
    wide_only, tail_price, turn_price, makespan, items, *numbers = scheduler.inspected()
    packs, place = [], items
    while place < len(numbers):
        node, start, end, tails, count = numbers[place : place + 5]
        place += 5 + count
        packs.append(Pack(node, start, None if end == OPEN else end, numbers[place - count : place], bool(tails)))
    planned = config.wide_only or config if wide_only else config
    return Inspection(plan, planned, packs, numbers[:items], tail_price, turn_price, makespan)


def _planned(batch: Batch, config: PackConfig) -> tuple[NativeScheduler, Plan]:
    """A batch's plan, and the scheduler that has just made it."""
    size = len(batch.seq_lens)
    room = layout.capacity(config, size)
    while True:
        scheduler = NativeScheduler(config, size, buffers=[np.zeros(room, dtype=np.int32) for _ in range(2)])
        try:
            index, _, _ = scheduler.take(load(scheduler, batch), np.array(batch.seq_lens, dtype=np.int64), 0)
        except PlanTooLargeError:
            index = None
        if index is not None and scheduler.levels is None:
            return scheduler, layout.read(scheduler.buffers[index], scheduler.current()[0])
        room *= 2  # The capacity is for batches that servers have.


def load(scheduler: NativeScheduler, batch: Batch, requests: Sequence[int] = ()) -> np.ndarray:
    """Tell a scheduler the batch's tree, event by event. Returns its requests, [batch] int64: 0, 1, 2 … unless given."""
    requests = list(requests) or list(range(len(batch.seq_lens)))
    last = [ROOT] * len(batch.seq_lens)
    number = 0
    stack = [(node, ROOT) for node in reversed(batch.roots)]
    while stack:
        node, parent = stack.pop()
        number += 1
        scheduler.insert(number, parent, node.end - node.start, number.to_bytes(16, "little"))
        for query in node.queries:
            last[query] = number
        stack.extend((child, number) for child in reversed(node.children))
    for request, lowest in zip(requests, last, strict=True):
        scheduler.bind(request, lowest)
    return np.array(requests, dtype=np.int64)


def batch_in(scheduler: NativeScheduler, requests: Sequence[int], seq_lens: list[int]) -> Batch:
    """A batch with the prefix tree that the scheduler has of it.

    A request that is shorter than its path shares nothing. If a request occurs twice, the second occurrence shares nothing.

    Raises:
        TooDeepError: Their paths are too long.
    """
    made: dict[int, tuple[Node, int]] = {}  # with their parents
    roots: list[Node] = []
    seen: set[int] = set()
    nodes = 0
    for query, request in enumerate(requests):
        number, end = scheduler.binding(request) or (ROOT, 0)
        again = request in seen
        seen.add(request)
        if again or end > seq_lens[query]:
            continue
        below: Node | None = None
        while number != ROOT:
            is_new = number not in made
            if is_new:
                found = scheduler.find(number)
                assert found is not None
                made[number] = Node(end - found[1], end, [], []), found[0]
                if found[0] == ROOT:
                    roots.append(made[number][0])
            node, number = made[number]
            node.queries.append(query)
            if below is not None:
                node.children.append(below)
            below, end = node if is_new else None, node.start
            nodes += 1
        if nodes > MOST_NODES:
            raise TooDeepError(
                f"the paths of the batch's {len(requests):,} requests have more than {MOST_NODES:,} nodes together, too many for this command"
            )
    return Batch(seq_lens, roots)


def _halves(head: bytes) -> tuple[int, int]:
    return int.from_bytes(head[:8], "little", signed=True), int.from_bytes(head[8:16], "little", signed=True)


def _values(config: PackConfig) -> dict[str, list[int]]:
    """A config as `config_of` in csrc/packing/module.cpp reads it."""
    cost, tiles, bins = config.cost, config.tiles, config.for_bins
    of_config = (
        "turn_price bin_end_price wave_price narrow_first_price workers piece straddled_rows max_queries few_queries warp_queries rebalance_queries tails_queries window "
        "grain slices_tokens slices_token_price slices_start_price"
    )
    named = ((cost, "token_bytes part_bytes group runs"), (tiles, "warp_tokens kv_tile"), (config, of_config))
    numbers = {name: getattr(owner, name) for owner, names in named for name in names.split()} | {
        "policy": POLICIES.index(config.policy),
        "slice_rows": tiles.warp_m,
        "bin_slices_token_price": bins.slices_token_price,
        "bin_slices_start_price": bins.slices_start_price,
    }
    for_each_size = {
        "token_prices": config.token_price,
        "start_prices": config.start_price,
        "short_tokens": config.short_tokens,
        "bin_token_prices": bins.token_price,
        "bin_start_prices": bins.start_price,
    }
    return {
        **{name: [number] for name, number in numbers.items()},
        **{name: [0, *map(price, range(1, config.max_queries + 1))] for name, price in for_each_size.items()},
        "query_tiles": list(tiles.query_tiles),
    }


def _int64(values: Sequence[int]) -> Any:
    return _ffi().from_dlpack(np.array(values, dtype=np.int64))


def _tensor(array: Any) -> Any:
    return _ffi().from_dlpack(array) if isinstance(array, np.ndarray) else array
