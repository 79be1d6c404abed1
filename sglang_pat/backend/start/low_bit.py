"""KV of 4 and 2 bits: whether this server uses it, its arguments, how many tokens then fit in memory, and its pool."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_pat import compat
from sglang_pat.backend.start import support
from sglang_pat.config import PatConfig
from sglang_pat.kernels import low_bit
from sglang_pat.packing import FORMATS
from sglang_pat.packing.spec import KVFormat

logger = logging.getLogger(__name__)

MOST_REQUESTS = 512
"""How many requests may run, if the user does not say. Each reserves memory for a tail of 64 tokens in the model's dtype (9 MB with 36 layers, 8 KV
heads of 128 dimensions and 16 bits)."""


def chosen(server_args: Any) -> KVFormat | None:
    """The format that `SGLANG_PAT_KV` asks for, if this server runs PAT on a CPU or on a GPU of NVIDIA; None otherwise.

    Raises:
        ConfigError: A `SGLANG_PAT_*` variable is wrong.
    """
    if "pat" not in compat.arguments.backends_chosen(server_args):
        return None
    form = FORMATS.get(PatConfig.from_environment().kv)
    return form if form is None or compat.arguments.resolved(server_args).device in ("cpu", "cuda") else None


def int4_layers() -> tuple[int, ...]:
    """The ids of layers that keep 4 bits beside 2."""
    return PatConfig.from_environment().int4_layers


def choose_defaults(server_args: Any) -> None:
    """The arguments that KV of few bits needs, where the user gave none."""
    given = compat.arguments.resolved(server_args)
    compat.arguments.decide(
        server_args,
        page_size=given.page_size or low_bit.PAGE_TOKENS,
        max_running_requests=given.max_running_requests or MOST_REQUESTS,
    )


def prepare(server_args: Any) -> None:
    """Prepare the arguments of a server on a GPU, while SGLang resolves them. On a CPU its platform does so (platform/cpu.py).

    Raises:
        ConfigError: A `SGLANG_PAT_*` variable is wrong.
        UnsupportedError: They ask for what is refused.
    """
    form = chosen(server_args)
    if form is None or compat.arguments.resolved(server_args).device == "cpu":
        return
    support.check_arguments(server_args)
    choose_defaults(server_args)
    # A graph would have the number of pages fixed, and what waits for it on the host.
    compat.arguments.disable_graphs(server_args, "prefill")
    logger.info("sglang-pat: a KV cache of %s: prefill runs without CUDA graphs", form.name)


def workspace_pages(context: int, step: int) -> int:
    """Pages in the model's dtype that an extend needs on a GPU, for one request of any length (`low_bit_prefill.LowBitPrefill`).

    Args:
        context: The most tokens that a request may have.
        step: The most tokens that one extend adds to it.

    Returns:
        Those of the context, an unfinished one for each block of queries, and one more, as rows are a few tokens longer than the context.
    """
    return -(-context // low_bit.PAGE_TOKENS) + -(-step // low_bit.PAGE_TOKENS) + 3


def cell_size(compute: Callable[..., int], configurator: Any, kvc: Any, num_layers: int) -> int:
    """Bytes of a token in all layers. Hooked around SGLang's own count, `compute` (radix_bridge/hooks.py lists it)."""
    form = chosen(kvc.server_args)
    if form is None:
        return compute(configurator, kvc, num_layers)
    arguments = compat.arguments.resolved(kvc.server_args)
    on_gpu = arguments.device != "cpu"
    if on_gpu and compat.pool.is_of_another_kind(kvc):
        return compute(configurator, kvc, num_layers)  # `support.check_low_bit` refuses it when the pool is made
    heads, head_dim = compat.pool.kv_shape(kvc.model_config)
    page = 2 * low_bit.PAGE_TOKENS * heads * head_dim * kvc.model_dtype.itemsize
    requests = (arguments.max_running_requests or MOST_REQUESTS) // compat.pool.attention_replicas()
    configurator.pat_bytes = num_layers * page * (requests + 1)
    if on_gpu:
        context = kvc.model_config.context_len
        step = compat.arguments.prefill_step(kvc.server_args, context)
        configurator.pat_bytes += page * workspace_pages(context, step)
    first = compat.pool.first_layer(kvc)
    four = sum(first <= layer < first + num_layers for layer in int4_layers())
    sizes = low_bit.record_bytes(4, head_dim), low_bit.record_bytes(form.bits, head_dim)
    return heads * (four * sizes[0] + (num_layers - four) * sizes[1]) // low_bit.PAGE_TOKENS


def pool_sizes(calculate: Callable[..., Any], configurator: Any, available_bytes: int, page_size: int) -> Any:
    """How many tokens fit in memory, after the tails and the workspace of extends. Hooked likewise."""
    left = available_bytes - getattr(configurator, "pat_bytes", 0)
    return calculate(configurator, max(0, left), page_size)


def make_pool(build: Callable[..., Any], configurator: Any, **arguments: Any) -> Any:
    """The KV pool of a model whose layers all have K and V of one kind. Hooked likewise."""
    form = chosen(configurator.server_args)
    if form is not None:
        # Imported here, as SGLang's pools are.
        from sglang_pat.backend.kv.pages import pool_class

        arguments["mha_pool_class"] = pool_class(form, int4_layers())
    return build(configurator, **arguments)
