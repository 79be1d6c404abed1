"""What SGLang calls for `--attention-backend pat`: checks what is asked for, and makes the backend with its parts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_pat import compat, jit
from sglang_pat.backend import executors
from sglang_pat.backend.attention import PatAttnBackend
from sglang_pat.backend.groups import LayerGroup, LayerGroups
from sglang_pat.backend.start import layers, support
from sglang_pat.config import PatConfig
from sglang_pat.kernels import cuda
from sglang_pat.packing import AttentionSpec
from sglang_pat.radix_bridge import hooks
from sglang_pat.radix_bridge.trace import FORMAT, Header, TraceWriter

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Give what is raised within a line of the log: SGLang prints a traceback."""
    try:
        yield
    except (ValueError, jit.BuildError) as error:
        logger.error("%s", error)
        raise


def create(runner: ModelRunner) -> AttentionBackend:
    """The attention backend of a model runner. Draft models, and encoders, which decode nothing, get a stock backend.

    Raises:
        UnsupportedError: A flag or the model needs what PAT does not do.
        ConfigError: A `SGLANG_PAT_*` variable is wrong.
        BuildError: The kernels cannot be compiled here.
        TraceError: The file of `SGLANG_PAT_TRACE` cannot be written.
    """
    with explained():
        support.check_arguments(runner.server_args)
        support.check_release(runner)
        support.check_device(runner)
        if runner.is_draft_worker and runner.device != "cpu":
            # None of its layers is ours to compute, so none is refused. On CPUs drafts are still checked: no others were tried there.
            return stock_backend(runner, layers.count(runner))
        specs = support.check_model(runner, fallback="torch_native" if runner.device == "cpu" else "triton")
        if runner.is_draft_worker or not specs:
            logger.info("sglang-pat: %s runs on a stock backend", type(runner.model).__name__)
            return stock_backend(runner, [])
        support.check_guards(runner.server_args)
        support.check_rows(runner)
        config = PatConfig.from_environment()
        jit.load("packing")
        if runner.device == "cpu":
            jit.load("cpu")
        # None where the user chose another backend for prefill.
        prefills = compat.arguments.backends_chosen(runner.server_args)[0] == "pat"
        if runner.device != "cpu" and layers.format_of(runner).layout == "pages":
            prefills = False  # on neither a stock backend nor plans (extends/low_bit_prefill.py)
        inner = stock_backend(runner, specs) if prefills else None
        latent = runner.device != "cpu" and any(spec.latent for spec in specs)
        drafted = compat.arguments.draft_tokens(runner.server_args)
        if (
            inner is not None
            and latent
            and executors.left_to_stock(specs, cuda.arch_of(torch.device("cuda")), drafted, config.policy)
        ):
            logger.info("sglang-pat: a request has so many heads that nothing is packed: decode steps run there too")
            return inner
        if latent and not prefills:
            # The user named it (`support.partner_problem`); in decode steps too it is what models treat PAT as.
            compat.model.treat_as("pat", compat.stock.latent_backend(runner))
        # On a GPU prefill over latents comes in forms of its own, decoding requests of mixed steps too: it stays whole.
        groups = LayerGroups(runner, config, specs, extends=prefills and not latent)
        return PatAttnBackend(runner, config, groups, inner, trace_writer(runner, config, groups.steps[0]))


def stock_backend(runner: ModelRunner, specs: Collection[AttentionSpec]) -> AttentionBackend:
    """SGLang's backend that runs prefill and everything else that is not plain decode."""
    if runner.device == "cpu":
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        return TorchNativeAttnBackend(runner)
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    name = stock_name(runner, specs)
    support.check_prefill(runner, name)
    logger.info("sglang-pat: %s runs on %s", "a draft model" if runner.is_draft_worker else "prefill", name)
    if any(spec.latent for spec in specs):
        compat.model.treat_as("pat", name)
    return ATTENTION_BACKENDS[name](runner)


def stock_name(runner: ModelRunner, specs: Collection[AttentionSpec]) -> str:
    """Which of SGLang's backends that is on a GPU."""
    windows, sinks = any(spec.window for spec in specs), any(spec.sinks for spec in specs)
    unequal = any(spec.head_dim != spec.v_head_dim for spec in specs)
    if any(spec.latent for spec in specs):
        return compat.stock.latent_backend(runner)
    scaled = compat.model.has_scales(runner)
    name = compat.stock.prefill_backend(windows, runner.kv_cache_dtype, scaled, sinks, unequal)
    if name == "flashinfer" and compat.arguments.is_deterministic(runner.server_args) and not runner.is_draft_worker:
        # Nothing of the model runs on it then (`PackConfig.piece`), and FlashInfer would take 2 GiB for its workspace.
        return "triton"
    return name


def trace_writer(runner: ModelRunner, config: PatConfig, group: LayerGroup) -> TraceWriter | None:
    """Records what `SGLANG_PAT_TRACE` asks for: one file per replica (`--dp-size`), whose ranks all make the same plans.

    Raises:
        TraceError: The file cannot be written.
    """
    if not config.trace or hooks.followers():
        # Another backend of this process records.
        return None
    if group.executor.pack_config.piece:
        logger.warning("sglang-pat: nothing is recorded (SGLANG_PAT_TRACE) with --enable-deterministic-inference")
        return None
    replica = compat.model.replica(runner)
    if replica is None:
        return None
    path = Path(config.trace if replica == 0 else f"{config.trace}.dp{replica}")
    header = Header(FORMAT, group.executor.pack_config, runner.req_to_token_pool.size, group.layers)
    return TraceWriter(path, header, config.trace_mb * 1_000_000)
