"""KV of 4 and 2 bits: whether a server keeps it so, and for how many tokens there is memory then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_pat import compat
from sglang_pat.config import PatConfig
from sglang_pat.kernels import low_bit
from sglang_pat.packing import FORMATS
from sglang_pat.packing.spec import KVFormat

MOST_REQUESTS = 512
"""Where a user does not say how many may run: each has a tail of 64 tokens in 16 bits, whether it runs or not (9 MB for a model of 8B with
8 KV heads)."""


def chosen(server_args: Any) -> KVFormat | None:
    """The format of few bits in which this server keeps KV, if it does: `SGLANG_PAT_KV` where PAT runs on a CPU.

    Raises:
        ConfigError: A `SGLANG_PAT_*` variable is wrong.
    """
    arguments = compat.arguments.resolved(server_args)
    if "pat" not in compat.arguments.backends_chosen(server_args) or arguments.device != "cpu":
        return None
    return FORMATS.get(PatConfig.from_environment().kv)


def cell_size(compute: Callable[..., int], configurator: Any, kvc: Any, num_layers: int) -> int:
    """SGLang's count of the bytes of a token in all layers, around which this is hooked (radix_bridge/hooks.py lists it)."""
    form = chosen(kvc.server_args)
    if form is None:
        return compute(configurator, kvc, num_layers)
    heads, head_dim = compat.pool.kv_shape(kvc.model_config)
    requests = compat.arguments.resolved(kvc.server_args).max_running_requests or MOST_REQUESTS
    row = 2 * low_bit.PAGE_TOKENS * heads * head_dim * kvc.model_dtype.itemsize
    configurator.pat_tails_bytes = num_layers * row * (requests + 1)
    return num_layers * heads * low_bit.record_bytes(form.bits, head_dim) // low_bit.PAGE_TOKENS


def pool_sizes(calculate: Callable[..., Any], configurator: Any, available_bytes: int, page_size: int) -> Any:
    """SGLang's count of the tokens for which there is memory, likewise: without that of the tails."""
    left = available_bytes - getattr(configurator, "pat_tails_bytes", 0)
    return calculate(configurator, max(0, left), page_size)
