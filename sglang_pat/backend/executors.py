"""What runs a plan: the kernels of a device, with the memory that they need."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from sglang_pat.backend import verify
from sglang_pat.config import PatConfig
from sglang_pat.kernels import capabilities, cpu, cuda
from sglang_pat.kernels.low_bit import Pages
from sglang_pat.packing import CPU_TILES, AttentionSpec, PackConfig, devices, layout

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

WORKSPACE_BYTES = 192 << 20
"""At most this much GPU memory holds the parts of queries that have several; a plan with more of them is not packed."""

PARTS_OF_A_REQUEST = 8
"""Parts that the workspace holds for each request, where the limit above allows: more levels of a tree than systems have
that nest tools, documents and turns in a prompt."""


class Executor(Protocol):
    """Runs plans.

    Attributes:
        pack_config: What plans for it are made with.
        max_slots: Parts that its workspace holds.
        buffers: Two host arrays for plans, int32.
        description: For the log.
    """

    pack_config: PackConfig
    max_slots: int
    buffers: list[torch.Tensor]
    description: str

    def before_plan(self) -> None:
        """Called before a plan is asked for: from then on the buffer of the plan before may be written."""

    def load(self, plan: torch.Tensor | None) -> None:
        """The plan to run from now on, one of `buffers`; None for one that decodes nothing."""

    def decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, req_to_token: torch.Tensor, rows: torch.Tensor,
        seq_lens: torch.Tensor, *, scale: float, logit_cap: float, v_scale: float = 1.0, sinks: torch.Tensor | None = None,
        masks: torch.Tensor | None = None, pages: Pages | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of Q [tokens, heads, head_dim]: [tokens, heads, v_head_dim], zero behind the plan's batch.

        A query is a token. With `masks`, [queries, draft] (`kernels.cpu.attention`), it is a draft, and its tokens lie one behind the
        other. There may be more queries than the plan has. `scale` is the factor on q k^T, `v_scale` that on the result: what K
        and V are kept divided by is in them. `sinks`, [heads], are logits without values. `pages` as for `kernels.cpu.attention`.
        """

    def extend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, req_to_token: torch.Tensor, rows: torch.Tensor,
        seq_lens: torch.Tensor, plan: torch.Tensor, *, scale: float, logit_cap: float, v_scale: float = 1.0,
        sinks: torch.Tensor | None = None, pages: Pages | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The same for new tokens, whose plan is one of `NativeScheduler.extend`, where Q is: [tokens, heads, v_head_dim].

        Each token is a query: `rows` and `seq_lens`, [tokens], are its request's row and what it sees, itself included.
        """


def workspace_slots(pack_config: PackConfig, max_batch: int) -> int:
    """Parts that a GPU's workspace holds: those of deep trees, and those that the ends of bins add.

    One query per work item always fits, whatever the batch: only the ends of bins cut, and each cuts one query.
    """
    slot_bytes = pack_config.cost.part_bytes // 2  # which counts writing and reading it
    wanted = PARTS_OF_A_REQUEST * max_batch + 2 * pack_config.max_bins * pack_config.max_queries
    return min(WORKSPACE_BYTES // slot_bytes, wanted)


def _capacity(pack_config: PackConfig, runner: ModelRunner) -> int:
    return layout.capacity(pack_config, runner.req_to_token_pool.size)


class CpuExecutor:
    """On this process's threads."""

    max_slots = 2**31 - 1

    def __init__(self, runner: ModelRunner, config: PatConfig, spec: AttentionSpec) -> None:
        workers = torch.get_num_threads()
        self._spec = spec
        self.pack_config = PackConfig(spec.cost(), CPU_TILES, workers, config.policy, spec.planned_window)
        size = _capacity(self.pack_config, runner)
        self.buffers = [torch.zeros(size, dtype=torch.int32) for _ in range(2)]
        self.description = f"{torch.get_num_threads()} threads"
        self._plan: torch.Tensor | None = None
        self._loaded = False

    def before_plan(self) -> None:
        pass

    def load(self, plan: torch.Tensor | None) -> None:
        self._plan, self._loaded = plan, True

    def decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, req_to_token: torch.Tensor, rows: torch.Tensor,
        seq_lens: torch.Tensor, *, scale: float, logit_cap: float, v_scale: float = 1.0, sinks: torch.Tensor | None = None,
        masks: torch.Tensor | None = None, pages: Pages | None = None,
    ) -> torch.Tensor:  # fmt: skip
        assert self._loaded
        out = q.new_zeros(*q.shape[:2], v.shape[-1])
        if self._plan is None:
            return out
        queries, tokens, kv_heads = len(rows), 1 if masks is None else masks.shape[1], k.shape[1]
        q, window = q[: queries * tokens], 0
        if masks is not None:
            q, sinks = verify.gather(q, tokens, kv_heads), verify.spread(sinks, tokens, kv_heads)
            masks, window = masks[:queries], self._spec.window
        found = cpu.attention(
            q, k, v, req_to_token, rows, seq_lens, self._plan, scale=scale, logit_cap=logit_cap, v_scale=v_scale, sinks=sinks,
            masks=masks, window=window, pages=pages,
        )  # fmt: skip
        out[: queries * tokens] = found if masks is None else verify.scatter(found, tokens, kv_heads)
        return out

    def extend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, req_to_token: torch.Tensor, rows: torch.Tensor,
        seq_lens: torch.Tensor, plan: torch.Tensor, *, scale: float, logit_cap: float, v_scale: float = 1.0,
        sinks: torch.Tensor | None = None, pages: Pages | None = None,
    ) -> torch.Tensor:  # fmt: skip
        return cpu.attention(
            q, k, v, req_to_token, rows, seq_lens, plan, scale=scale, logit_cap=logit_cap, v_scale=v_scale, sinks=sinks,
            window=self._spec.window, pages=pages,
        )  # fmt: skip


class CudaExecutor:
    """On a GPU. Everything that a captured graph reads stays where it is; a new plan is one copy in front of a step."""

    def __init__(self, runner: ModelRunner, config: PatConfig, spec: AttentionSpec, extends: bool = False) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        table = devices.load(Path(config.tiles)) if config.tiles else None
        tiles = capabilities.tile_table(
            cuda.arch_of(device), spec.head_dim, torch.cuda.get_device_name(device), table, spec.kv.bytes
        )
        if extends:
            # Both at the same time.
            arch = cuda.arch_of(device)
            cuda.build(
                [cuda.Variant.of(spec, arch, tiles.query_tiles, runner.dtype, limits) for limits in (False, True)]
            )
        self._decoder = cuda.Decoder(spec, tiles, device, dtype=runner.dtype)
        self._extender = cuda.Decoder(spec, tiles, device, dtype=runner.dtype, limits=True) if extends else None
        self.pack_config = PackConfig.of(spec, tiles, self._decoder.workers, config.policy)
        size = _capacity(self.pack_config, runner)
        self.buffers = [torch.zeros(size, dtype=torch.int32, pin_memory=True) for _ in range(2)]
        self.max_slots = workspace_slots(self.pack_config, runner.req_to_token_pool.size)
        self._plan = torch.zeros(size, dtype=torch.int32, device=device)
        self._shape = (self.max_slots, spec.query_heads, spec.v_head_dim)
        self._partial = self._lse = torch.empty(0, device=device)
        self._copied = torch.cuda.Event()
        self._copied.record()  # which makes its handle
        self._copying = False
        held = (self._plan.nbytes + self.workspace_bytes) / 2**20
        self.description = f"{self._decoder.workers} workers, {held:.0f} MiB of GPU memory"

    @property
    def workspace_bytes(self) -> int:
        """Of parts in float16 and their LSE in float32."""
        slots, heads, dim = self._shape
        return slots * heads * (2 * dim + 4)

    def attach(self, workspace: torch.Tensor) -> None:
        """Keep parts in these `workspace_bytes` or more, uint8. Layers run one after the other, so that all may share them."""
        slots, heads, dim = self._shape
        size = slots * heads * dim * 2
        self._partial = workspace[:size].view(torch.float16).view(self._shape)
        self._lse = workspace[size : self.workspace_bytes].view(torch.float32).view(slots, heads)

    def before_plan(self) -> None:
        # Only while a new plan's copy waits behind the step before.
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
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, req_to_token: torch.Tensor, rows: torch.Tensor,
        seq_lens: torch.Tensor, *, scale: float, logit_cap: float, v_scale: float = 1.0, sinks: torch.Tensor | None = None,
        masks: torch.Tensor | None = None, pages: Pages | None = None,
    ) -> torch.Tensor:  # fmt: skip
        assert pages is None  # which is refused (features.py)
        out = torch.empty(*q.shape[:2], v.shape[-1], dtype=q.dtype, device=q.device)
        # Early: in front of every layer's attention are the kernels that make its Q; the plan and the lengths were there before.
        self._decoder.decode(
            q, k, v, out, req_to_token, rows, seq_lens, self._plan, self._partial, self._lse, scale=scale,
            logit_cap=logit_cap, v_scale=v_scale, sinks=None if sinks is None else sinks.bfloat16(), masks=masks, early=True,
        )  # fmt: skip
        return out

    def extend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, req_to_token: torch.Tensor, rows: torch.Tensor,
        seq_lens: torch.Tensor, plan: torch.Tensor, *, scale: float, logit_cap: float, v_scale: float = 1.0,
        sinks: torch.Tensor | None = None, pages: Pages | None = None,
    ) -> torch.Tensor:  # fmt: skip
        assert self._extender is not None
        assert pages is None  # which is refused (features.py)
        out = torch.empty(*q.shape[:2], v.shape[-1], dtype=q.dtype, device=q.device)
        self._extender.decode(
            q, k, v, out, req_to_token, rows, seq_lens, plan, self._partial, self._lse, scale=scale, logit_cap=logit_cap,
            v_scale=v_scale, sinks=None if sinks is None else sinks.bfloat16(), early=True,
        )  # fmt: skip
        return out


def create(
    runner: ModelRunner, config: PatConfig, specs: Iterable[AttentionSpec], extends: bool = False
) -> list[Executor]:
    """The executors of the runner's device for layers of these specs; whether they run extends too."""
    if runner.device != "cuda":
        return [CpuExecutor(runner, config, spec) for spec in specs]
    made = [CudaExecutor(runner, config, spec, extends) for spec in specs]
    workspace = torch.empty(max(executor.workspace_bytes for executor in made), dtype=torch.uint8, device="cuda")
    for executor in made:
        executor.attach(workspace)
    return [*made]
