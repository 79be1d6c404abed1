"""KV of 4 and 2 bits: whether this server uses it, and how many tokens then fit in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_pat import compat
from sglang_pat.config import PatConfig
from sglang_pat.kernels import low_bit
from sglang_pat.packing import FORMATS
from sglang_pat.packing.spec import KVFormat

MOST_REQUESTS = 512
"""How many requests may run, if the user does not say. Each reserves memory for a tail of 64 tokens in the model's dtype (9 MB with 36 layers, 8 KV
heads of 128 dimensions and 16 bits)."""


def chosen(server_args: Any) -> KVFormat | None:
    """The format that `SGLANG_PAT_KV` asks for, if this server runs PAT on a CPU; None otherwise.

    Raises:
        ConfigError: A `SGLANG_PAT_*` variable is wrong.
    """
    if "pat" not in compat.arguments.backends_chosen(server_args):
        return None
    form = FORMATS.get(PatConfig.from_environment().kv)
    return form if form is None or compat.arguments.resolved(server_args).device == "cpu" else None


def cell_size(compute: Callable[..., int], configurator: Any, kvc: Any, num_layers: int) -> int:
    """Bytes of a token in all layers. Hooked around SGLang's own count, `compute` (radix_bridge/hooks.py lists it)."""
    form = chosen(kvc.server_args)
    if form is None:
        return compute(configurator, kvc, num_layers)
    heads, head_dim = compat.pool.kv_shape(kvc.model_config)
    requests = compat.arguments.resolved(kvc.server_args).max_running_requests or MOST_REQUESTS
    row = 2 * low_bit.PAGE_TOKENS * heads * head_dim * kvc.model_dtype.itemsize
    configurator.pat_tails_bytes = num_layers * row * (requests + 1)
    return num_layers * heads * low_bit.record_bytes(form.bits, head_dim) // low_bit.PAGE_TOKENS


def pool_sizes(calculate: Callable[..., Any], configurator: Any, available_bytes: int, page_size: int) -> Any:
    """How many tokens fit in memory, after the tails. Hooked likewise."""
    left = available_bytes - getattr(configurator, "pat_tails_bytes", 0)
    return calculate(configurator, max(0, left), page_size)
