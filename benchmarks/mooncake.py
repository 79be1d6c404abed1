"""Replays a request trace through SGLang's real RadixCache and observes it, to get batches as a server would have them.

Arrivals as timed; the prompt is in the cache at once, since only decode batches matter here; a decode step takes 30 ms.
Equal hash ids become equal tokens.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from traces import rows

from sglang_pat import compat
from sglang_pat.estimate.prompts import TRACE_BLOCK
from sglang_pat.packing import Batch, PackConfig
from sglang_pat.packing.native import NativeScheduler, batch_in
from sglang_pat.radix_bridge import Observer

STEP_MS = 30
CONTEXT = 131_072
POOL = 1_000_000
"""KV slots: about what an H200 holds beside an 8B model."""


class Request:
    """What RadixCache and the observer read of SGLang's `Req`."""

    extra_key = None
    priority = 0

    def __init__(self, rid: str, prompt: array[int], output: int) -> None:
        self.rid = rid
        self.origin_input_ids = prompt
        self.output_ids = array("q")
        self.output = output
        self.done = 0
        self.cache_protected_len = 0
        self.req_pool_idx = -1
        self.prefix_indices: Any = None
        self.last_node: Any = None

    def get_fill_ids(self) -> array[int]:
        return self.origin_input_ids

    def finished(self) -> bool:
        return False


class Replay:
    """A cache, its observer, and the requests that decode."""

    def __init__(self, trace: Path, config: PackConfig, max_batch: int = 256) -> None:
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.radix_cache import RadixCache

        self.lines = deque(rows(trace))
        self.max_batch = max_batch
        self.rows = ReqToTokenPool(max_batch, CONTEXT, "cpu", False)
        self.slots = TokenToKVPoolAllocator(POOL, torch.float16, "cpu", None, False)
        self.cache = RadixCache(CacheInitParams(False, self.rows, self.slots, 1))
        self.scheduler = NativeScheduler(config, max_batch)
        self.observer = Observer(self.scheduler)
        self.running: list[Request] = []
        self.served = 0

    def batches(self, minutes: float) -> Iterator[tuple[int, Batch]]:
        """(step, batch) after every change of the batch."""
        for step in range(int(minutes * 60_000 / STEP_MS)):
            changed = self._finish()
            while self.lines and self.lines[0]["timestamp"] <= step * STEP_MS and len(self.running) < self.max_batch:
                if not self._admit(self.lines[0]):
                    break
                self.lines.popleft()
                changed = True
            for request in self.running:
                request.done += 1
            if changed and self.running:
                yield step, self.batch()

    def batch(self) -> Batch:
        requests = [compat.requests.number(self.rows, request) for request in self.running]
        return batch_in(self.observer.scheduler, requests, [len(r.origin_input_ids) + r.done for r in self.running])

    def _admit(self, line: dict[str, Any]) -> bool:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        length = min(line["input_length"], CONTEXT - line["output_length"] - 1)
        prompt = array("q", (block * TRACE_BLOCK + i for block in line["hash_ids"] for i in range(TRACE_BLOCK)))[
            :length
        ]
        request = Request(f"r{self.served}", prompt, max(1, line["output_length"]))
        match = self.cache.match_prefix(MatchPrefixParams(key=RadixKey(prompt[:-1], None)))
        prefix = len(match.device_indices)
        needed = length - prefix + request.output
        self.cache.inc_lock_ref(match.last_device_node)
        if self.slots.available_size() < needed:
            self.cache.evict(EvictParams(num_tokens=needed - self.slots.available_size()))
        slots = self.slots.alloc(needed)
        if slots is None:
            self.cache.dec_lock_ref(match.last_device_node)
            return False
        request.req_pool_idx = self.rows.free_slots.pop()
        self.rows.req_generation[request.req_pool_idx] += 1
        request.last_node, request.prefix_indices = match.last_device_node, match.device_indices
        request.cache_protected_len = prefix
        self.rows.write((request.req_pool_idx, slice(0, prefix)), match.device_indices.int())
        self.rows.write((request.req_pool_idx, slice(prefix, length + request.output)), slots.int())
        self.cache.cache_unfinished_req(request)
        request.output_ids.append(-1 - self.served)
        self.observer.on_cached(self.cache, request)
        self.running.append(request)
        self.served += 1
        return True

    def _finish(self) -> bool:
        over = [request for request in self.running if request.done >= request.output]
        for request in over:
            # Its answer goes into the cache too; nobody else has the same.
            request.output_ids = array("q", [-1 - int(request.rid[1:])] * request.output)
            self.cache.cache_finished_req(request, kv_len_to_handle=len(request.origin_input_ids) + request.output)
            self.rows.free_slots.append(request.req_pool_idx)
            self.observer.on_released(compat.requests.number(self.rows, request))
            self.running.remove(request)
        return bool(over)
