"""The native pack scheduler (csrc/packing): events in, plans out, in memory that kernels read."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import msgspec
import numpy as np
import tvm_ffi

from sglang_pat.kernels import jit, layout
from sglang_pat.packing import POLICIES, PackConfig
from sglang_pat.packing.tree import InconsistentError


class PlanTooLargeError(Exception):
    """A plan does not fit its buffer or the workspace of parts."""


class Totals(msgspec.Struct):
    """Counts over all steps.

    Attributes:
        steps: Decode steps.
        requests: Requests decoded.
        work_items: Work items run.
        query_sizes: How many of them had 1, 2, 3 ... queries.
        parts: Parts that passed through memory.
        kv_tokens: KV tokens read, per layer.
        kv_tokens_unpacked: What one query per work item would have read.
    """

    steps: int = 0
    requests: int = 0
    work_items: int = 0
    query_sizes: Counter[int] = msgspec.field(default_factory=Counter)
    parts: int = 0
    kv_tokens: int = 0
    kv_tokens_unpacked: int = 0


class NativeScheduler:
    """The mirror of the running requests' paths, the batch expected next, and its plans.

    Requests are named by their ids. All methods are for one thread, the engine's; `prepare` makes the scheduler's own
    thread work ahead.

    Attributes:
        batch: Ids of the batch expected next, in order. It follows `join`, `expect`, `withdraw` and `release`.
        epoch: Changes with every event.
    """

    def __init__(
        self, config: PackConfig, max_batch: int, max_slots: int = 2**31 - 1, buffers: Sequence[Any] | None = None
    ) -> None:
        """
        Args:
            config: Device and model.
            max_batch: Requests of the largest batch.
            max_slots: Parts that the kernels' workspace holds.
            buffers: Two int32 host arrays of `layout.capacity(config, max_batch)` for the plans, NumPy's if None.

        Raises:
            jit.BuildError: There is no working C++ compiler.
        """
        self._module = _load()
        if buffers is None:
            buffers = [np.zeros(layout.capacity(config, max_batch), dtype=np.int32) for _ in range(2)]
        self.buffers = buffers
        self.batch: list[str] = []
        self.epoch = 0
        self._requests: dict[str, int] = {}
        self._rids: dict[int, str] = {}
        self._unbound: set[str] = set()
        self._scratch = np.zeros(max(8, 6 + config.max_queries), dtype=np.int64)
        self._out = tvm_ffi.from_dlpack(self._scratch)
        cost, tiles = config.cost, config.tiles
        numbers = [
            cost.token_bytes, cost.part_bytes, config.turn, cost.group, cost.kv_heads, config.workers, config.max_queries,
            config.few_queries, config.warp_queries, list(POLICIES).index(config.policy), max_batch, max_slots,
        ]  # fmt: skip
        prices = [
            [0, *(price(queries) for queries in range(1, config.max_queries + 1))]
            for price in (config.rate, config.item, config.short_tokens)
        ]
        arrays = [numbers, *prices, tiles.query_tiles, tiles.kv_tiles, tiles.kv_bounds]
        self._handle = self._module.create(*map(_int64, arrays), *map(tvm_ffi.from_dlpack, buffers))
        # The buffers must outlive the thread that writes them.
        weakref.finalize(self, lambda module, handle, *_: module.destroy(handle), self._module, self._handle, *buffers)

    # Radix-tree events.

    def insert(self, node: int, parent: int, length: int, head: bytes) -> None:
        """A node of `length` tokens below `parent`; `head`, 16 bytes, tells it from its siblings."""
        self._event(self._module.insert, node, parent, length, *_halves(head))

    def split(self, node: int, upper: int, length: int, head: bytes) -> None:
        """The first `length` tokens of `node` moved to the new node `upper`; `head` is the new head of `node`."""
        self._event(self._module.split, node, upper, length, *_halves(head))

    def evict(self, node: int) -> None:
        """The cache dropped a node; raises InconsistentError where requests were running on it."""
        self.epoch += 1
        released = np.empty(max(1, len(self._requests)), dtype=np.int64)
        count = self._module.evict(self._handle, node, tvm_ffi.from_dlpack(released))
        if count < 0:
            return
        for request in released[:count].tolist():
            self._unbound.add(self._rids[request])
            self._forget(request)
        raise InconsistentError(f"node {node} was evicted while requests were running on it")

    def reset(self) -> None:
        """The cache dropped everything."""
        self.epoch += 1
        self._requests.clear()
        self._rids.clear()
        self._unbound = set(self.batch)
        self._module.reset(self._handle)

    def bind(self, rid: str, row: int, node: int) -> None:
        """Request `rid` runs through `node`; it may be bound already."""
        request = self._requests.get(rid)
        if request is not None:
            self._event(self._module.move, request, node, row)
            return
        request = self._event(self._module.bind, node, row)
        self._requests[rid] = request
        self._rids[request] = rid
        if self._unbound and rid in self._unbound:
            self._unbound.remove(rid)
            self._module.adopt(self._handle, self.batch.index(rid), request)

    def release(self, rid: str) -> None:
        """Request `rid` gave its row back."""
        request = self._leave(rid, self._module.release)
        if request is not None:
            self._forget(request)

    def withdraw(self, rid: str) -> None:
        """Request `rid` is not in the next batch; what it is bound to stays as it is until it is released."""
        self._leave(rid, self._module.withdraw)

    # What the mirror knows.

    def __contains__(self, rid: str) -> bool:
        return rid in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def binding(self, rid: str) -> tuple[int, int, int] | None:
        """(node, row, end of the path) of a bound request."""
        request = self._requests.get(rid)
        if request is None:
            return None
        self._module.binding(self._handle, request, self._out)
        node, row, end = self._scratch[:3].tolist()
        return node, row, end

    def find(self, node: int) -> tuple[int, int] | None:
        """(parent, length) of a node."""
        if not self._module.find(self._handle, node, self._out):
            return None
        parent, length = self._scratch[:2].tolist()
        return parent, length

    def child(self, parent: int, head: bytes) -> int | None:
        """The node below `parent` that starts with `head`."""
        node = self._module.child(self._handle, parent, *_halves(head))
        return None if node < 0 else node

    def any_request(self, node: int) -> str:
        """A request whose path leads through `node`."""
        return self._rids[self._module.any_request(self._handle, node)]

    def prune(self, node: int) -> None:
        """Forget `node` and its ancestors as far as no request uses them."""
        self._module.prune(self._handle, node)

    @property
    def num_nodes(self) -> int:
        """Nodes that requests use."""
        return self._module.active_nodes(self._handle)

    @property
    def bytes(self) -> int:
        """Host memory of the mirror and of the scratch that grows with it, without the plans."""
        return self._module.bytes(self._handle)

    # Plans.

    @property
    def version(self) -> int:
        """Changes when the batch or the path of one of its requests does."""
        return self._module.version(self._handle)

    def set_batch(self, rids: Sequence[str]) -> None:
        """The next batch is `rids`, whatever was expected."""
        requests = np.fromiter(map(self._requests.get, rids, repeat(-1)), dtype=np.int32, count=len(rids))
        self._unbound = set()
        if len(requests) and requests.min() < 0:
            self._unbound = {rid for rid, request in zip(rids, requests.tolist(), strict=True) if request < 0}
        self._module.set_batch(self._handle, tvm_ffi.from_dlpack(requests))
        self.batch = list(rids)

    def join(self, rid: str, length: int) -> None:
        """Bound request `rid`, of `length` tokens, will be the last of the next batch, if it is not in it already.

        Until it decodes, the length told last counts: prompts come in chunks.
        """
        if self._module.join(self._handle, self._requests[rid], length):
            self.batch.append(rid)

    def expect(self, rid: str, length: int) -> None:
        """As `join`, for a request that need not be bound yet."""
        self.epoch += 1
        if rid in self._requests:
            self.join(rid, length)
            return
        if rid not in self._unbound:
            self._unbound.add(rid)
            self.batch.append(rid)
            position = len(self.batch) - 1
        else:
            position = self.batch.index(rid)
        self._module.expect(self._handle, position, length)

    def prepare(self, steps: int) -> None:
        """Start to plan the batch on the scheduler's own thread; its requests have `steps` tokens more than told last."""
        self._module.prepare(self._handle, steps)

    def take(self, seq_lens: Any, steps: int) -> tuple[int, int, bool]:
        """The batch's plan: the one prepared if it was made for this very batch, else one made now.

        Args:
            seq_lens: Tokens of each request, an int64 host array.
            steps: Steps run with the plan before.

        Returns:
            (index of the buffer that holds the plan, steps for which it stays good, whether it was prepared).

        Raises:
            PlanTooLargeError: The plan does not fit.
        """
        try:
            taken = self._module.take(self._handle, _tensor(seq_lens), steps, self._out)
        except ValueError as error:
            raise PlanTooLargeError(_reason(error)) from None
        return taken // 2, int(self._scratch[0]), bool(taken % 2)

    def fall_back(self, seq_lens: Any, steps: int) -> int:
        """One query per work item, for one step: the index of the buffer that holds this plan."""
        return self._module.fall_back(self._handle, _tensor(seq_lens), steps) // 2

    def totals(self, steps: int) -> Totals:
        """Counts up to now, of which `steps` steps with the current plan."""
        self._module.totals(self._handle, steps, self._out)
        steps, requests, items, parts, kv_tokens, unpacked, *sizes = self._scratch.tolist()
        counts = Counter({size: count for size, count in enumerate(sizes, 1) if count})
        return Totals(steps, requests, items, counts, parts, kv_tokens, unpacked)

    def current(self) -> tuple[int, int, int]:
        """(KV tokens of its first step, parts, cost of its longest bin) of the plan in use."""
        self._module.current(self._handle, self._out)
        kv_tokens, parts, longest = self._scratch[:3].tolist()
        return kv_tokens, parts, longest

    def set_delays(self, before_copy: int = 0, before_publish: int = 0) -> None:
        """For tests: microseconds that the scheduler's thread waits before it reads the batch and before it is done."""
        self._module.set_delays(self._handle, before_copy, before_publish)

    def _event(self, action: Any, *arguments: int) -> Any:
        self.epoch += 1
        try:
            return action(self._handle, *arguments)
        except RuntimeError as error:
            raise InconsistentError(_reason(error)) from None

    def _leave(self, rid: str, action: Any) -> int | None:
        """Take a request out of the batch, by `action` if it is bound; returns the request then."""
        self.epoch += 1
        request = self._requests.get(rid)
        position = -1
        if request is not None:
            position = action(self._handle, request)
        elif rid in self._unbound:
            self._unbound.remove(rid)
            position = self.batch.index(rid)
            self._module.drop(self._handle, position)
        if position >= 0:
            del self.batch[position]
        return request

    def _forget(self, request: int) -> None:
        del self._requests[self._rids.pop(request)]


@functools.cache
def _load() -> Any:
    module = jit.load("packing")
    # Events take under a microsecond: another thread that took the interpreter meanwhile would keep it for milliseconds.
    for name in "insert split bind move release withdraw find child join expect adopt drop version prepare".split():
        getattr(module, name).release_gil = False
    return module


def _halves(head: bytes) -> tuple[int, int]:
    return int.from_bytes(head[:8], "little", signed=True), int.from_bytes(head[8:16], "little", signed=True)


def _int64(values: Sequence[int]) -> Any:
    return tvm_ffi.from_dlpack(np.array(values, dtype=np.int64))


def _tensor(array: Any) -> Any:
    return tvm_ffi.from_dlpack(array) if isinstance(array, np.ndarray) else array


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0]
