"""Lets SGLang's hierarchical cache run on a CPU, with `--hicache-io-backend direct`: copies between its tiers, which are sgl_kernel's on a GPU,
are made by torch, and are reported done some polls later, as those of a GPU's stream are.

Trees, cache controller and host pools are SGLang's own. Copies are made at once, and only reported late: KV that is read before it has come is right here.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch

POLLS = 2
"""How often a copy is asked after before it says that it is done."""


class Event(torch.cpu.Event):
    """Of a stream. SGLang times copies alone; whatever else it records is done as soon as a batch is."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._takes, self._polls = enable_timing * POLLS, 0

    def record(self, stream: Any = None) -> None:
        self._polls = self._takes

    def query(self) -> bool:
        self._polls -= 1
        return self._polls < 0

    def synchronize(self) -> None:
        self._polls = 0

    def elapsed_time(self, end: Event) -> float:
        return 0.0


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """From the host's buffers, [pages, layers, page size, …]."""
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[src_indices // page_size, layer_id, src_indices % page_size]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """To the same; `src_ptrs` has the layers of the first, then those of the next."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        target = dst_ptrs[number // layers]
        target[dst_indices // page_size, number % layers, dst_indices % page_size] = source[src_indices]


def register() -> None:
    """Make the copies, and allow the flag."""
    from sglang.srt.mem_cache.pool_host import base, common

    from sglang_pat.backend.start import features

    for name in ("memory_pool_host", "pool_host.mha", "pool_host.mamba"):
        try:
            module = importlib.import_module(f"sglang.srt.mem_cache.{name}")
        except ImportError:  # which 0.5.17 lacks
            continue
        for copy in (transfer_kv_direct, transfer_kv_per_layer_direct_pf_lf, transfer_kv_all_layer_direct_lf_pf):
            setattr(module, copy.__name__, copy)
    # In place of cudaHostRegister; unpinned.py makes it pin nothing.
    common.ALLOC_MEMORY_FUNCS["cpu"] = common.alloc_with_pin_memory
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0  # 10 GB
    torch.cpu.Event = Event  # type: ignore[misc]
    features.REFUSED = tuple(feature for feature in features.REFUSED if feature.name != "hierarchical cache on a CPU")
