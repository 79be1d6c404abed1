"""The CUDA executor (csrc/cuda): multi-tile forward, and merge."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import msgspec
import torch

from sglang_pat import jit
from sglang_pat.kernels import capabilities
from sglang_pat.kernels.arguments import KvView, Scores, Tables
from sglang_pat.packing import AttentionSpec, TileTable

logger = logging.getLogger(__name__)

TYPES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
"""Dtypes of Q and of 16-bit KV, by their names in CUDA."""


class Variant(msgspec.Struct, frozen=True, order=True):
    """One native module: a forward kernel for some tiles, and the merge kernel.

    Attributes:
        dtype: Dtype of Q, a key of TYPES.
        kv: Dtype of KV: the same, or one of 8 bits. If KV is in pages of few bits, it is that of the tokens behind them.
        head_dim: K's, one of `capabilities.HEAD_DIMS`.
        v_head_dim: V's: the same, or as in `capabilities.UNEQUAL_HEAD_DIMS`. Of latents both are as in `capabilities.LATENT_DIMS`.
        arch: Compute capability, such as `8.0` or `9.0a`.
        query_tiles: Every m that the forward kernel runs.
        sinks: Whether heads have attention sinks.
        masks: Whether queries are drafts of several tokens.
        limits: Whether the queries of a work item see different spans of its KV: each up to its own end, and within its window.
        form: The format of KV by its name, where its layout is not plain.
        caps: Whether scores are capped.
        tails: Whether work items may have tails (`capabilities.has_tails`).
        latent: Whether V is the first columns of K.
        batch_invariant: Whether a query's result has the same bits in any batch, with plans in pieces (`PackConfig.piece`) of wide tiles.
        straddles: Whether queries may straddle work items (`capabilities.straddles`).
    """

    dtype: torch.dtype
    kv: torch.dtype
    head_dim: int
    v_head_dim: int
    arch: str
    query_tiles: tuple[int, ...]
    sinks: bool = False
    masks: bool = False
    limits: bool = False
    form: str = ""
    caps: bool = False
    tails: bool = False
    latent: bool = False
    batch_invariant: bool = False
    straddles: bool = False

    @classmethod
    def of(
        cls, spec: AttentionSpec, arch: str, query_tiles: tuple[int, ...] = (), dtype: torch.dtype | None = None,
        limits: bool = False, batch_invariant: bool = False,
    ) -> Variant:  # fmt: skip
        """The module for layers of a spec.

        Args:
            spec: What the layers compute.
            query_tiles: As above; empty for all that the architecture has.
            dtype: Dtype of Q, if KV has 8 bits or less; bfloat16 if None.
            limits: As above; drafts with a window always need them, and with `batch_invariant` every window: it begins within a piece.
            batch_invariant: As above; then the tiles are those of `capabilities.batch_invariant`.

        Raises:
            ValueError: There are no kernels for the spec, or not with this dtype of Q.
        """
        plain = spec.kv.layout == "plain"
        if spec.latent:
            refusal = capabilities.latent_spec_problem(spec)
        elif spec.kv.layout == "pages":
            refusal = capabilities.pages_problem(spec, arch, limits)
        else:
            refusal = capabilities.refusal(spec, "cuda")
        if refusal is not None:
            raise ValueError(f"the CUDA kernels do not compute {refusal}")
        if spec.head_dim > 128 and arch not in capabilities.LARGE_SHARED and not spec.latent:
            raise ValueError(
                f"the CUDA kernels for a head dimension of {spec.head_dim} take more shared memory than compute capability {arch} has"
            )
        all_tiles = capabilities.tiles_of(spec, arch)
        tiles = query_tiles or all_tiles
        if batch_invariant:
            tiles = capabilities.batch_invariant(TileTable(tiles)).query_tiles
            if not plain or spec.latent:
                raise ValueError(
                    "the CUDA kernels do not compute latents or KV of few bits with the same bits in any batch"
                )
        kv = getattr(torch, spec.kv.name) if plain else dtype or torch.bfloat16
        dtype = dtype or (kv if kv in TYPES else torch.bfloat16)
        if dtype not in TYPES or (kv in TYPES and kv != dtype):
            raise ValueError(f"the CUDA kernels do not compute Q of {dtype} with a KV cache of {kv}")
        masks = spec.query_tokens > 1
        rows = spec.query_heads // spec.kv_heads
        if masks:
            tiles = capabilities.tiles_for_drafts(tiles, rows)
        limits = limits or ((masks or batch_invariant) and spec.window > 0)
        # Of all tiles together, because a plan is made for all of them.
        tails = not (limits or spec.window or spec.latent or batch_invariant) and capabilities.has_tails(
            all_tiles, rows, spec.kv, spec.head_dim
        )
        straddles = not limits and capabilities.straddles(spec, query_tiles or all_tiles)
        return cls(
            dtype, kv, spec.head_dim, spec.v_head_dim, arch, tiles, spec.sinks, masks, limits, "" if plain else spec.kv.name, spec.capped, tails,
            spec.latent, batch_invariant, straddles,
        )  # fmt: skip

    @property
    def name(self) -> str:
        dtype = "_".join(str(one).removeprefix("torch.") for one in dict.fromkeys((self.dtype, self.kv)))
        tiles = "_".join(map(str, self.query_tiles))
        dims = f"{self.head_dim}" if self.v_head_dim == self.head_dim else f"{self.head_dim}_v{self.v_head_dim}"
        features = "".join(
            f"_{name}"
            for name in ("sinks", "masks", "limits", "caps", "tails", "latent", "batch_invariant", "straddles")
            if getattr(self, name)
        )
        form = f"_{self.form}" if self.form else ""
        return f"sglang_pat_{dtype}{form}_{dims}_sm{self.arch.replace('.', '')}_m{tiles}{features}"

    @property
    def flags(self) -> tuple[str, ...]:
        """Compiler flags: the macros that csrc/cuda/variant.cuh reads."""
        kv = self.form or ("same" if self.kv == self.dtype else str(self.kv).split(".")[-1])
        return (
            f"-DPAT_TYPE={TYPES[self.dtype]}",
            f"-DPAT_KV=pat::k{kv.capitalize()}",
            f"-DPAT_DIM={self.head_dim}",
            f"-DPAT_V_DIM={self.v_head_dim}",
            f"-DPAT_ARCH={''.join(filter(str.isdigit, self.arch))}0",
            f"-DPAT_QUERY_TILES={sum(1 << m // 8 for m in self.query_tiles)}",
            f"-DPAT_SINKS={int(self.sinks)}",
            f"-DPAT_MASKS={int(self.masks)}",
            f"-DPAT_LIMITS={int(self.limits)}",
            f"-DPAT_CAPS={int(self.caps)}",
            f"-DPAT_TAILS={int(self.tails)}",
            f"-DPAT_LATENT={int(self.latent)}",
            f"-DPAT_BATCH_INVARIANT={int(self.batch_invariant)}",
            f"-DPAT_STRADDLES={int(self.straddles)}",
        )


def arch_of(device: torch.device) -> str:
    """The architecture of this GPU."""
    return capabilities.arch_name(*torch.cuda.get_device_capability(device))


def variants(
    spec: AttentionSpec, arch: str, query_tiles: tuple[int, ...] = (), dtype: torch.dtype | None = None, extends: bool = False,
    batch_invariant: bool = False,
) -> list[Variant]:  # fmt: skip
    """The modules that a server loads for layers of a spec: one for its steps and, if it `extends` by plan too, one for that.

    Arguments and errors as for `Variant.of`.
    """
    both = (False, True) if extends else (False,)
    return [Variant.of(spec, arch, query_tiles, dtype, limits, batch_invariant) for limits in both]


def build(variants: Sequence[Variant]) -> None:
    """Compile the modules that are not in tvm-ffi's cache, in parallel.

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
    """Runs plans for layers of one spec, with one table of tiles.

    Attributes:
        workers: How many CTAs run bins (`PackConfig.workers`).
    """

    def __init__(
        self, spec: AttentionSpec, tiles: TileTable, device: torch.device, dtype: torch.dtype | None = None, limits: bool = False,
        batch_invariant: bool = False,
    ) -> None:  # fmt: skip
        """
        Args:
            spec: What the layers compute; the module works for any number of heads.
            tiles: The tiles that plans are made with; with `batch_invariant` those of `capabilities.batch_invariant`.
            device: A CUDA device.
            dtype: Dtype of Q, if KV has 8 bits or less; bfloat16 if None.
            limits: Whether plans are of extends. Each query then sees only what lies before its end in `seq_lens`, and of that the last
                `spec.window` tokens if the window is not 0 (`kernels.cpu.attention`).
            batch_invariant: Whether a query's result has the same bits in any batch, with plans in pieces of wide tiles (`capabilities.batch_invariant`): KV is added up in
                order by one warpgroup, parts are merged by one kernel, and a work item that begins where a window does begins at the multiple of 64
                positions in front of it.

        Raises:
            jit.BuildError: There is no CUDA compiler, or it failed.
            ValueError: There are no kernels for the spec.
        """
        variant = Variant.of(spec, arch_of(device), tiles.query_tiles, dtype, limits, batch_invariant)
        rows = spec.query_heads // spec.kv_heads
        if not (limits or spec.window or batch_invariant) and tiles.tails_queries(rows) > 1 and not variant.tails:
            raise ValueError(f"the CUDA kernels have no work items with tails for {rows} rows of a query")
        build([variant])
        self._tile_rows, self._kv = tiles.query_tiles[-1], variant.kv
        self._window = spec.window if variant.limits else 0
        self._module = _load(variant)
        self._no_sinks = torch.empty(0, dtype=torch.bfloat16, device=device)
        self._no_masks = torch.empty(0, 0, dtype=torch.int64, device=device)
        self._no_records = self._no_rope = torch.empty(0, 0, 0, dtype=torch.uint8, device=device)
        self.workers: int = self._module.workers(device.index or 0)

    def load(self, to: torch.Tensor, plan: torch.Tensor, copied: int) -> None:
        """Copy a plan to the GPU, on the current stream.

        Args:
            to: int32, on the GPU.
            plan: A plan (layout.py), int32, in host memory; in pinned memory the copy is asynchronous.
            copied: The handle of a CUDA event (`torch.cuda.Event.cuda_event`), recorded after the copy.

        Raises:
            ValueError: A tensor's device or dtype is not as above, or it is shorter than the plan.
        """
        self._module.load(to, plan, copied)

    def store(
        self, k: torch.Tensor, v: torch.Tensor, records: torch.Tensor, tail_k: torch.Tensor, tail_v: torch.Tensor, rows: torch.Tensor,
        seq_lens: torch.Tensor, slots: torch.Tensor,
    ) -> None:  # fmt: skip
        """Write new tokens where KV is in pages of few bits, on the current stream; can be captured in a CUDA graph.

        Arguments as for `kernels.low_bit.store`, on the GPU; it writes the same bytes. The tokens of each request follow one another. A token with
        an index out of range is passed over.

        Raises:
            ValueError: A tensor's device, dtype or shape is not as described there, or this decoder's KV is not in such pages.
        """
        self._module.store(k, v, records, tail_k, tail_v, rows, seq_lens, slots)

    def unpack(self, records: torch.Tensor, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write what pages of few bits say, rounded to Q's dtype, on the current stream: what `kernels.low_bit.unpack` reads.

        Numbers beyond the range of float16 become its largest. A page that there is not becomes zeros.

        Args:
            records: [pages of the pool, kv_heads, record_bytes], uint8, on the GPU like the others.
            pages: [pages], int64: which ones.
            k, v: [pages or more, 64, kv_heads, head_dim], contiguous, of Q's dtype: what is written.

        Raises:
            ValueError: A tensor's device, dtype or shape is not as above, or this decoder's KV is not in such pages.
        """
        self._module.unpack(records, pages, k, v)

    def decode(
        self, q: torch.Tensor, kv: KvView, tables: Tables, scores: Scores, out: torch.Tensor, plan: torch.Tensor, partial: torch.Tensor,
        lse: torch.Tensor, *, overlap: bool = True, merge: bool = True, early: bool = False, q_rope: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Decode attention of one layer, on the current stream; can be captured in a CUDA graph.

        Whatever may change between replays of a graph is read on the device. All tensors are on the GPU.

        Args:
            q: [tokens, heads, head_dim], or with `q_rope` [tokens, heads, v_head_dim]; the plan's batch first. A query is one token or, with masks, the consecutive tokens of a draft. With
                8-bit KV, Q is multiplied in float16; values beyond its range are clamped.
            kv: Of the spec's format; V has no scale unless it has 8 bits. Of latents V is a view of K's first columns. With pages, the plan's bounds must be multiples of 64, as `PackConfig.of` has
                them, but for the ends of requests.
            tables: With masks if the spec's queries are drafts. A query then has the heads of all its tokens.
            scores: With sinks, in bfloat16, and a logit cap if the spec has them.
            out: [tokens, heads, v_head_dim], contiguous. Rows after the plan's batch become zero.
            plan: A plan for this batch (layout.py), int32, made with this decoder's tiles.
            partial: [num_slots or more, heads of a query, v_head_dim], float16: workspace for parts.
            lse: [num_slots or more, heads of a query], float32: workspace for the parts' LSE, to base 2.
            overlap: Launch merge before forward ends (programmatic dependent launch), if the GPU can.
            merge: Whether to merge; otherwise parts stay in the workspace.
            early: Launch forward before the previous kernel on the stream ends, likewise, so that it looks up its work items meanwhile. That
                kernel must not write the plan or the tables.
            q_rope: [tokens, heads, head_dim - v_head_dim], with latents only: the rest of Q's columns, which `q` then lacks.

        Raises:
            ValueError: A tensor's device, dtype, shape or stride is not as above.
        """
        k, v = kv.k, kv.v
        for name, pool in (("k", k), ("v", v)):
            if pool.dtype != self._kv:
                raise ValueError(f"{name} has the wrong dtype: {pool.dtype}, not {self._kv}")
        if self._kv not in TYPES:
            k, v = k.view(torch.uint8), v.view(torch.uint8)
        self._module.decode(
            q, out, plan, partial, lse,
            k, v, self._no_records if kv.pages is None else kv.pages.records, kv.v_scale,
            tables.req_to_token, tables.rows, tables.seq_lens, self._no_masks if tables.masks is None else tables.masks,
            scores.scale * kv.k_scale, scores.logit_cap, self._no_sinks if scores.sinks is None else scores.sinks,
            self._window, self._tile_rows, merge, overlap, early, self._no_rope if q_rope is None else q_rope,
        )  # fmt: skip
