"""The CUDA kernels (csrc/cuda): multi-tile forward and merge."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Literal

import msgspec
import torch

from sglang_pat import jit
from sglang_pat.kernels import capabilities
from sglang_pat.packing import AttentionSpec, TileTable

logger = logging.getLogger(__name__)

TYPES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
"""Dtypes of Q, K and V, as CUDA names them."""

Mode = Literal["fused", "streams", "serial"]


class Variant(msgspec.Struct, frozen=True, order=True):
    """One native module: a forward kernel that knows some tiles, and the merge.

    Attributes:
        dtype: A key of TYPES.
        head_dim: One of `capabilities.HEAD_DIMS`.
        arch: Compute capability, such as `8.0` or `9.0a`.
        query_tiles: Every m that its forward kernel runs.
    """

    dtype: torch.dtype
    head_dim: int
    arch: str
    query_tiles: tuple[int, ...]

    @classmethod
    def of(cls, spec: AttentionSpec, arch: str, query_tiles: tuple[int, ...] = ()) -> Variant:
        """The module for layers of a spec, with all tiles that the architecture has for it if none are named.

        Raises:
            ValueError: There are no kernels for the spec.
        """
        refusal = capabilities.refusal(spec, "cuda")
        if refusal is not None:
            raise ValueError(f"the CUDA kernels do not compute {refusal}")
        tiles = query_tiles or capabilities.query_tiles(arch, spec.head_dim)
        return cls(getattr(torch, spec.kv.name), spec.head_dim, arch, tiles)

    @property
    def name(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        tiles = "_".join(map(str, self.query_tiles))
        return f"sglang_pat_{dtype}_{self.head_dim}_sm{self.arch.replace('.', '')}_m{tiles}"

    @property
    def flags(self) -> tuple[str, ...]:
        """For the compiler."""
        return (
            f"-DPAT_TYPE={TYPES[self.dtype]}",
            f"-DPAT_DIM={self.head_dim}",
            f"-DPAT_ARCH={''.join(filter(str.isdigit, self.arch))}0",
            f"-DPAT_QUERY_TILES={sum(1 << m // 8 for m in self.query_tiles)}",
        )


def arch_of(device: torch.device) -> str:
    """The architecture to compile for; Hopper's own instructions need its `a`."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"{major}.{minor}a" if major == 9 else f"{major}.{minor}"


def build(variants: Sequence[Variant]) -> None:
    """Compile what is not in tvm-ffi's cache yet, all at the same time.

    Raises:
        jit.BuildError: There is no CUDA compiler, or it failed.
    """
    began = time.monotonic()
    with ThreadPoolExecutor(max_workers=max(1, len(variants))) as pool:
        tasks = [pool.submit(_load, variant) for variant in variants]
        for done, task in enumerate(as_completed(tasks), 1):
            task.result()
            logger.info("sglang-pat kernels: %d of %d ready after %.0f s", done, len(tasks), time.monotonic() - began)


def _load(variant: Variant) -> Any:
    return jit.load_cuda(variant.name, variant.arch, variant.flags)


class Decoder:
    """Decode attention for layers of one spec, with one table of tiles.

    Attributes:
        workers: For `PackConfig`: CTAs that take bins.
    """

    def __init__(self, spec: AttentionSpec, tiles: TileTable, device: torch.device, mode: Mode = "fused") -> None:
        """
        Args:
            spec: Its KV format is Q's dtype too; any number of heads will do.
            tiles: What plans are made with.
            device: A CUDA device.
            mode: `fused` is one kernel for each n that switches its m from work item to work item; `streams` one kernel
                for each tile, each on a stream of its own (PAT §6); `serial` the same one after the other (§8.5).

        Raises:
            jit.BuildError: There is no CUDA compiler, or it failed.
            ValueError: There are no kernels for the spec.
        """
        modules = [tiles.query_tiles] if mode == "fused" else [(m,) for m in tiles.query_tiles]
        variants = [Variant.of(spec, arch_of(device), query_tiles) for query_tiles in modules]
        build(variants)
        self._tile_rows = tiles.query_tiles[-1]
        self._modules = [_load(variant) for variant in variants]
        self._streams = [torch.cuda.Stream(device) for _ in variants[1:]] if mode != "serial" else []
        self.workers: int = max(module.workers(device.index or 0) for module in self._modules)

    def load(self, to: torch.Tensor, plan: torch.Tensor, copied: int) -> None:
        """Copy a plan to the GPU, on the current stream.

        Args:
            to: int32, on the GPU.
            plan: A plan (layout.py), int32, in host memory; pinned for the copy to run beside the host.
            copied: The handle of a CUDA event (`torch.cuda.Event.cuda_event`), recorded behind the copy.

        Raises:
            ValueError: A tensor's device or dtype is none of the above, or it is shorter than the plan.
        """
        self._modules[0].load(to, plan, copied)

    def decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        req_to_token: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        plan: torch.Tensor,
        partial: torch.Tensor,
        lse: torch.Tensor,
        *,
        scale: float,
        logit_cap: float = 0.0,
        overlap: bool = True,
        merge: bool = True,
        early: bool = False,
    ) -> None:
        """Decode attention of one layer, on the current stream; it can be captured in a CUDA graph.

        Everything that may change between replays of a graph is read on the device. All tensors are on the GPU.

        Args:
            q: [rows, heads, head_dim]; the first of them are the plan's batch.
            k, v: [slots, kv_heads, head_dim], the layer's pools; `kv_heads` divides `heads`.
            out: [rows, heads, head_dim], contiguous. Rows behind the plan's batch become zero.
            req_to_token: [requests, context], int32: the slot of each position of each request.
            rows: [batch or more], int64: each query's row of `req_to_token`.
            seq_lens: [batch or more], int64: tokens of each query's request, its own included.
            plan: A plan for this batch (layout.py), int32, made with this decoder's tiles.
            partial: [num_slots or more, heads, head_dim], float32: the parts of queries that have several.
            lse: [num_slots or more, heads], float32: their LSE, to base 2.
            scale: Factor on q k^T.
            logit_cap: Scores become cap * tanh(score / cap); 0 for none.
            overlap: Launch merge before forward ends (programmatic dependent launch), where the GPU can.
            merge: Whether to merge; else parts stay in the workspace.
            early: Launch forward before the kernel in front of it on the stream has ended, likewise, to look up its work
                items meanwhile. That kernel must not write the plan, rows, seq_lens or req_to_token. Only in mode `fused`.

        Raises:
            ValueError: A tensor's device, dtype, shape or stride is none of the above.
        """
        arguments = (q, k, v, out, req_to_token, rows, seq_lens, plan, partial, lse, scale, logit_cap, self._tile_rows)
        first, *others = self._modules
        if not others:
            first.decode(*arguments, True, merge, overlap, early)
            return

        def run(module: Any, forward: bool) -> None:
            module.decode(*arguments, forward, merge and not forward, False, False)

        if not self._streams:
            for module in self._modules:
                run(module, forward=True)
            run(first, forward=False)
            return
        current = torch.cuda.current_stream(q.device)
        for module, stream in zip(others, self._streams, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                run(module, forward=True)
        run(first, forward=True)
        for stream in self._streams:
            current.wait_stream(stream)
        run(first, forward=False)
