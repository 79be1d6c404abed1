"""Executors: run plans on a device, and own the memory for that."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import torch

from sglang_pat.backend import verify
from sglang_pat.config import PatConfig
from sglang_pat.kernels import capabilities, cpu, cuda, low_bit
from sglang_pat.kernels.arguments import KvView, Scores, Tables
from sglang_pat.packing import CPU_TILES, AttentionSpec, PackConfig, devices, layout
from sglang_pat.packing.prices import Policy

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

WORKSPACE_BYTES = 192 << 20
"""The most GPU memory for parts. A batch whose plan needs more is packed in part."""

PARTS_OF_A_REQUEST = 8
"""How many parts the workspace holds per request, within the limit above: more than the levels of prefixes in systems that nest tools,
documents and turns in a prompt."""


class Executor(Protocol):
    """Runs plans.

    Attributes:
        pack_config: The config to make its plans with.
        max_slots: How many parts its workspace holds.
        buffers: Two int32 host arrays for plans.
        description: For the log.
        table: The user's table of tiles (`SGLANG_PAT_TILES`) that the config has its prices from; empty if there is none.
        store: Writes new tokens to a pool of few bits; arguments as for `kernels.low_bit.store`, without `bits`. On a GPU a graph may capture it.
    """

    pack_config: PackConfig
    max_slots: int
    table: str
    buffers: list[torch.Tensor]
    description: str
    store: Callable[..., None]

    def before_plan(self) -> None:
        """Call this before asking for a plan: afterwards the previous plan's buffer may be overwritten."""

    def load(self, plan: torch.Tensor | None) -> None:
        """Run this plan, one of `buffers`, from now on; None to decode nothing."""

    def decode(
        self, q: torch.Tensor, kv: KvView, tables: Tables, scores: Scores, q_rope: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention of Q [tokens, heads, head_dim]: [tokens, heads, v_head_dim], zero after the plan's batch.

        A query is a token or, with masks, the consecutive tokens of a draft. There may be more queries than the plan has. With latents Q may come
        in two tensors, of which `q_rope`, [tokens, heads, head_dim - v_head_dim], has the last columns.
        """

    def extend(self, q: torch.Tensor, kv: KvView, tables: Tables, scores: Scores, plan: torch.Tensor) -> torch.Tensor:
        """The same for the new tokens of an extend, with a plan of `NativeScheduler.extend` on Q's device.

        Each token is a query. The tables have its request's row, and how many tokens it sees, itself included.
        """


def slot_bytes(query_heads: int, v_head_dim: int) -> int:
    """Bytes of a query's part: its output in float16, its LSE in float32."""
    return query_heads * (2 * v_head_dim + 4)


def workspace_slots(spec: AttentionSpec, pack_config: PackConfig, max_batch: int, context: int = 0) -> int:
    """How many parts a GPU's workspace holds: those of deep trees, and those from cuts at the ends of bins.

    A plan of one query per work item always fits: only the ends of bins cut, and each cuts one query. With pieces every plan fits that requests of up to
    `context` tokens need, and as much as without: of an extend each new token needs its pieces' parts, or it takes many rounds.
    """
    most = WORKSPACE_BYTES // slot_bytes(spec.query_heads, spec.v_head_dim)
    if pack_config.piece:
        return max(most, max_batch * -(-context // pack_config.piece))
    return min(most, PARTS_OF_A_REQUEST * max_batch + 2 * pack_config.max_bins * pack_config.max_queries)


def left_to_stock(specs: Iterable[AttentionSpec], arch: str, tokens: int, policy: Policy) -> bool:
    """Whether the stock backend that prefills on a GPU shall run everything: nothing is packed, and it decodes latents of 16 bits a little faster. Those of
    8 bits it copies, all of the pool in each layer.

    Args:
        arch: The GPU's, such as `9.0a`.
        tokens: Of a draft; 0 without speculation.
        policy: What the user says: with another than the default PAT decodes, for who wants to time it.
    """
    steps = [msgspec.structs.replace(spec, query_tokens=tokens or 1) for spec in specs]
    return policy == "optimal" and all(
        spec.latent and spec.kv.bits == 16 and not capabilities.packs(spec, arch) for spec in steps
    )


def policy_of(spec: AttentionSpec, arch: str, policy: Policy) -> Policy:
    """How a GPU packs queries of this spec, where the user says `policy`: others than the default stay."""
    return policy if capabilities.packs(spec, arch) or policy != "optimal" else "query"


def remark(spec: AttentionSpec, arch: str, policy: Policy) -> str:
    """What to add to a GPU executor's description: that requests are decoded each by itself though the user did not ask for it; empty if they are not."""
    return "" if policy_of(spec, arch, policy) == policy else ", nothing is packed"


def _capacity(pack_config: PackConfig, runner: ModelRunner) -> int:
    return layout.capacity(pack_config, runner.req_to_token_pool.size, runner.req_to_token_pool.req_to_token.shape[1])


LEAST_PIECE = 256
"""Tokens of a piece, at least (`PackConfig.piece`). On an H200 shared trees took 1.65 times as long as without pieces with 256, 1.69 with 512, 1.81 with 128, and with
256 they were ahead of all others (benchmarks/notes/deterministic.md, "How long pieces are")."""

PIECES_BYTES = 512 << 20
"""The most GPU memory for parts where requests are cut in pieces. Every batch that a server takes has to fit: one whose plan does not could only be computed
with other bits."""


def piece_of(runner: ModelRunner, specs: Iterable[AttentionSpec]) -> int:
    """Tokens of a piece, the same for all layers, with which the parts of any batch fit PIECES_BYTES, or the context: decode and verify steps have to cut
    alike."""
    requests, context = runner.req_to_token_pool.size, runner.req_to_token_pool.req_to_token.shape[1]
    most = PIECES_BYTES // max(slot_bytes(spec.query_heads, spec.v_head_dim) for spec in specs)
    piece = LEAST_PIECE
    while requests * -(-context // piece) > most and piece < context:
        piece *= 2
    logger.log(
        logging.INFO if piece == LEAST_PIECE else logging.WARNING,
        "sglang-pat: deterministic: requests are cut into pieces of %d tokens, which %d requests of %d tokens leave room for%s",
        piece, requests, context,
        "" if piece == LEAST_PIECE else ": shorter prefixes are not shared; --max-running-requests and --context-length make pieces shorter",
    )  # fmt: skip
    return piece


class CpuExecutor:
    """Runs plans on this process's threads."""

    max_slots = 2**31 - 1
    table = ""

    def __init__(self, runner: ModelRunner, config: PatConfig, spec: AttentionSpec, piece: int = 0) -> None:
        workers = torch.get_num_threads()
        self._spec = spec
        self.pack_config = PackConfig(spec.cost(), CPU_TILES, workers, config.policy, spec.planned_window, piece=piece)
        size = _capacity(self.pack_config, runner)
        self.buffers = [torch.zeros(size, dtype=torch.int32) for _ in range(2)]
        self.description = f"{workers} threads"
        self.store: Callable[..., None] = functools.partial(low_bit.store, bits=spec.kv.bits)
        self._plan: torch.Tensor | None = None
        self._loaded = False

    def before_plan(self) -> None:
        pass

    def load(self, plan: torch.Tensor | None) -> None:
        self._plan, self._loaded = plan, True

    def decode(
        self, q: torch.Tensor, kv: KvView, tables: Tables, scores: Scores, q_rope: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert self._loaded
        if q_rope is not None:
            q = torch.cat([q, q_rope], -1)
        out = q.new_zeros(*q.shape[:2], kv.v.shape[-1])
        if self._plan is None:
            return out
        queries, kv_heads = len(tables.rows), kv.k.shape[1]
        if tables.masks is None:
            out[:queries] = cpu.attention(q[:queries], kv, tables, scores, self._plan)
            return out
        tokens = tables.masks.shape[1]
        tables = msgspec.structs.replace(tables, masks=tables.masks[:queries])
        scores = msgspec.structs.replace(scores, sinks=verify.spread(scores.sinks, tokens, kv_heads))
        gathered = verify.gather(q[: queries * tokens], tokens, kv_heads)
        found = cpu.attention(gathered, kv, tables, scores, self._plan, self._spec.window)
        out[: queries * tokens] = verify.scatter(found, tokens, kv_heads)
        return out

    def extend(self, q: torch.Tensor, kv: KvView, tables: Tables, scores: Scores, plan: torch.Tensor) -> torch.Tensor:
        return cpu.attention(q, kv, tables, scores, plan, self._spec.window)


class CudaExecutor:
    """Runs plans on a GPU. Whatever a captured graph reads stays at its address; a new plan is one copy before a step.

    Attributes:
        unpack: `kernels.cuda.Decoder.unpack` of its KV.
    """

    def __init__(
        self, runner: ModelRunner, config: PatConfig, spec: AttentionSpec, extends: bool = False, piece: int = 0
    ) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        arch = cuda.arch_of(device)
        self.table = config.tiles
        table = devices.load(Path(self.table), "SGLANG_PAT_TILES") if self.table else None
        with devices.used(self.table):
            tiles = capabilities.tile_table_of(spec, arch, torch.cuda.get_device_name(device), table)
        batch_invariant = piece > 0
        if batch_invariant:
            tiles = capabilities.batch_invariant(tiles)
        if extends:
            # Compile both modules in parallel.
            cuda.build(cuda.variants(spec, arch, tiles.query_tiles, runner.dtype, extends, batch_invariant))
        self._decoder = cuda.Decoder(spec, tiles, device, dtype=runner.dtype, batch_invariant=batch_invariant)
        self.store: Callable[..., None] = self._decoder.store
        self.unpack: Callable[..., None] = self._decoder.unpack
        self._extender = None
        if extends:
            self._extender = cuda.Decoder(
                spec, tiles, device, dtype=runner.dtype, limits=True, batch_invariant=batch_invariant
            )
        policy = policy_of(spec, arch, config.policy)
        self.pack_config = PackConfig.of(spec, tiles, self._decoder.workers, policy, piece)
        size = _capacity(self.pack_config, runner)
        self.buffers = [torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(2)]
        pools = runner.req_to_token_pool
        self.max_slots = workspace_slots(spec, self.pack_config, pools.size, pools.req_to_token.shape[1])
        self._plan = torch.zeros(size, dtype=torch.int32, device=device)
        self._shape = (self.max_slots, spec.query_heads, spec.v_head_dim)
        self._partial = self._lse = torch.empty(0, device=device)
        self._copied = torch.cuda.Event()
        self._copied.record()  # creates its handle
        self._copying = False
        held = (self._plan.nbytes + self.workspace_bytes) / 2**20
        self.description = (
            f"{self._decoder.workers} workers, {held:.0f} MiB of GPU memory{remark(spec, arch, config.policy)}"
        )

    @property
    def device(self) -> torch.device:
        """Where plans run."""
        return self._plan.device

    @property
    def workspace_bytes(self) -> int:
        """Bytes for parts in all slots."""
        slots, *shape = self._shape
        return slots * slot_bytes(*shape)

    def attach(self, workspace: torch.Tensor) -> None:
        """Use this uint8 tensor of at least `workspace_bytes` for parts."""
        slots, heads, dim = self._shape
        size = slots * heads * dim * 2
        self._partial = workspace[:size].view(torch.float16).view(self._shape)
        self._lse = workspace[size : self.workspace_bytes].view(torch.float32).view(slots, heads)

    def before_plan(self) -> None:
        # The copy of a plan may still be waiting for the previous step.
        if self._copying:
            self._copied.synchronize()
            self._copying = False

    def load(self, plan: torch.Tensor | None) -> None:
        if plan is None:
            self._plan.zero_()
            return
        self._decoder.load(self._plan, plan, self._copied.cuda_event)
        self._copying = True

    def decode(
        self, q: torch.Tensor, kv: KvView, tables: Tables, scores: Scores, q_rope: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._run(self._decoder, q, kv, tables, scores, self._plan, q_rope)

    def extend(self, q: torch.Tensor, kv: KvView, tables: Tables, scores: Scores, plan: torch.Tensor) -> torch.Tensor:
        assert self._extender is not None
        assert kv.pages is None  # of which `extends.low_bit_prefill.LowBitPrefill` runs extends
        return self._run(self._extender, q, kv, tables, scores, plan)

    def _run(
        self, decoder: cuda.Decoder, q: torch.Tensor, kv: KvView, tables: Tables, scores: Scores, plan: torch.Tensor,
        q_rope: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        out = torch.empty(*q.shape[:2], kv.v.shape[-1], dtype=q.dtype, device=q.device)
        if scores.sinks is not None:
            scores = msgspec.structs.replace(scores, sinks=scores.sinks.bfloat16())
        # Early is safe: the kernels before a layer's attention make its Q or store its KV; plan and lengths were written earlier.
        decoder.decode(q, kv, tables, scores, out, plan, self._partial, self._lse, early=True, q_rope=q_rope)
        return out


def create(
    runner: ModelRunner, config: PatConfig, specs: Iterable[AttentionSpec], extends: bool = False, piece: int = 0
) -> list[Executor]:
    """An executor for each spec, on the runner's device. `extends`: whether they run extends too. On a GPU `share_workspace` must follow.

    With `piece` (`PackConfig.piece`) a query's result has the same bits in any batch.

    Raises:
        TablesError: `SGLANG_PAT_TILES` is not a table.
    """
    if runner.device != "cuda":
        if config.tiles:
            devices.load(Path(config.tiles), "SGLANG_PAT_TILES")  # of no use here, and wrong all the same
        return [CpuExecutor(runner, config, spec, piece) for spec in specs]
    return [CudaExecutor(runner, config, spec, extends, piece) for spec in specs]


def share_workspace(executors: Iterable[Executor]) -> None:
    """Give all executors of a model one workspace, as large as the largest needs. Call this once, before they run: layers run one after the other, and
    so do verify steps and extends, on one stream."""
    on_gpu = [executor for executor in executors if isinstance(executor, CudaExecutor)]
    if not on_gpu:
        return
    size = max(executor.workspace_bytes for executor in on_gpu)
    workspace = torch.empty(size, dtype=torch.uint8, device=on_gpu[0].device)
    for executor in on_gpu:
        executor.attach(workspace)
