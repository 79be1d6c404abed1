"""KV pools: sizes, formats, layouts, pools for sliding windows, and how K and V are written."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from sglang_pat.compat import arguments

if TYPE_CHECKING:
    import torch


_CONFIGURATOR = "sglang.srt.model_executor.pool_configurator:DefaultPoolConfigurator"
CELL_SIZE, POOL_SIZES = f"{_CONFIGURATOR}._compute_cell_size", f"{_CONFIGURATOR}.calculate_pool_sizes"
POOL = "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator._build_mha_kv_pool"
ROW_HEADROOM = "sglang.srt.mem_cache.allocation_sizing:.get_req_to_token_extra_context_len"
"""What is hooked of SGLang's pools: its counts of the bytes of a token, and of the tokens that fit in so many bytes; what makes the pool of a model
whose layers all have K and V of one kind; and the tokens that a row of `req_to_token` holds beyond the context, counted for the `ServerArgs` that the
call has (0.5.17) or for those of this process."""


def is_of_another_kind(configurator: Any) -> bool:
    """Whether `DefaultPoolConfigurator` counts for a pool that POOL does not make: with MLA, states, or sparse attention
    (kv_cache_configurator.py, `_build_token_to_kv_pool`)."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import is_minimax_sparse

    model = configurator.model_config
    return configurator.use_mla_backend or mambaish_config(model) is not None or is_minimax_sparse(model.hf_config)


def kv_shape(model_config: Any) -> tuple[int, int]:
    """(KV heads of this rank, head dimension of K), before there is a pool."""
    from sglang.srt.runtime_context import get_parallel

    return model_config.get_num_kv_heads(get_parallel().attn_tp_size), model_config.head_dim


def first_layer(configurator: Any) -> int:
    """The id of the first layer of this rank, before there is a pool."""
    return int(configurator.layer_info.start_layer)


def attention_replicas() -> int:
    """Among how many data-parallel ranks of attention SGLang divides `--max-running-requests`."""
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().attn_dp_size)


def is_fp8(kv_cache: torch.dtype) -> bool:
    """Whether K and V have one byte per element; they are then stored divided by their layer's scales."""
    return kv_cache.itemsize == 1 and kv_cache.is_floating_point


def kv_pools(pool: Any) -> list[Any]:
    """The pools that hold K and V: those inside a composite pool, else the pool itself.

    A hybrid model's pool wraps the pool of the layers that have KV. Only the exact classes are unwrapped: classes derived from them may
    have another kind of slots (unified memory), or belong to one of SGLang's own backends (qsa_kv_pool.py).
    """
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    if type(pool) is HybridLinearKVPool:
        return [pool.full_kv_pool]
    return [pool.full_kv_pool, pool.swa_kv_pool] if type(pool) is SWAKVPool else [pool]


def latent_dims(pool: Any) -> tuple[int, int] | None:
    """The dimensions of K and V in a pool of latents (MLA), in which V is the first columns of K; None for other pools, those of sparse attention too."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    if not isinstance(pool, MLATokenToKVPool) or pool.use_dsa:
        return None
    return pool.kv_lora_rank + pool.qk_rope_head_dim, pool.kv_lora_rank


@functools.cache
def latent_pool() -> type:
    """SGLang's pool of latents, for 0.5.17, which gives a pool of a plugin's platform an argument that only sparse attention needs."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    class LatentKVPool(MLATokenToKVPool):
        def __init__(self, *args: Any, index_head_dim: int | None = None, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    return LatentKVPool


def kv_dims(pool: Any) -> tuple[int | None, int | None]:
    """The dimensions of K and V in a pool of `kv_pools`; None if it does not say."""
    return latent_dims(pool) or (getattr(pool, "head_dim", None), getattr(pool, "v_head_dim", None))


def kv_layout(pool: Any) -> str:
    """How the pool is laid out: `nhd` is [slots, heads, dim]."""
    return getattr(getattr(pool, "full_kv_pool", pool), "kv_cache_layout", "nhd")


def has_window_pool(pool: Any) -> bool:
    """Whether layers with windows have a KV pool of their own, with slot numbers of its own."""
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    return isinstance(pool, SWAKVPool) and pool.swa_layer_nums > 0


def window_pool_tokens(pool: Any) -> int:
    """How many tokens the pool for windows has room for."""
    return int(pool.size_swa)


def in_window_pool(pool: Any, layer: Any) -> bool:
    """Whether this layer's KV is in the pool for windows."""
    return has_window_pool(pool) and pool.layers_mapping[layer.layer_id][1]


def window_mapping(pool: Any) -> torch.Tensor:
    """For each slot of the full pool, its slot in the pool for windows: [slots], int64."""
    return pool.full_to_swa_index_mapping


def layers_with_kv(pool: Any) -> Collection[int] | None:
    """The ids of a hybrid model's layers that have KV; None where all layers do."""
    return getattr(pool, "full_attention_layer_id_mapping", None)


def kv_scales(layer: Any) -> tuple[float, float]:
    """The scales that an FP8 pool divides this layer's K and V by; 1 where its checkpoint has none."""
    return _number(layer.k_scale_float, layer.k_scale), _number(layer.v_scale_float, layer.v_scale)


def _number(number: float | None, scale: Any) -> float:
    # `--quantization-param-path` sets `scale` to a number, and does not set the float beside it.
    return number if number is not None else 1.0 if scale is None else float(scale)


def save_kv(pool: Any, layer: Any, slots: Any, k: Any, v: Any, window_slots: Any = None) -> None:
    """Write the new tokens' K and V to the pool.

    An FP8 pool divides `k` and `v` by the layer's scales in place: do not read them afterwards. Other pools get no scales: they would
    divide by them, but only where their dtype differs from K's.

    Args:
        pool: SGLang's KV pool.
        layer: Whose K and V.
        slots: [tokens], of the full pool.
        k: [tokens, kv_heads, head_dim].
        v: [tokens, kv_heads, v_head_dim].
        window_slots: The same slots in the pool for windows, if there is one.
    """
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    scales = (layer.k_scale, layer.v_scale) if is_fp8(pool.dtype) else (None, None)
    pool.set_kv_buffer(layer, KVWriteLoc(slots, window_slots), k, v, *scales)


def save_latents(pool: Any, layer: Any, slots: Any, k: Any, k_rope: Any = None) -> None:
    """Write the new tokens' latents to a pool of them: one of 8 bits rounds them as they are, without scales.

    Args:
        pool: SGLang's pool of latents.
        layer: Whose latents.
        slots: [tokens], of the pool.
        k: [tokens, 1, head_dim], or with `k_rope` [tokens, 1, v_head_dim].
        k_rope: [tokens, 1, head_dim - v_head_dim]: the rest of the columns, on a GPU only, where SGLang's kernel writes both.
    """
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    if k_rope is not None:
        pool.set_mla_kv_buffer(layer, slots, k, k_rope)
        return
    pool.set_kv_buffer(layer, KVWriteLoc(slots), k, k[..., : pool.kv_lora_rank])


def row_headroom(*given: Any) -> int:
    """How many that must be for the slots that SGLang gives a request before each step: with drafts those of two steps, in whole pages.

    Args:
        given: The `ServerArgs` that ROW_HEADROOM was called with, if it was.
    """
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    served = given[0] if given else arguments.of_this_process()
    return int(get_alloc_reserve_per_decode(*given)) + arguments.resolved(served).page_size - 1


def row_tokens(runner: Any) -> int:
    """How many tokens a row of `req_to_token` holds beyond the context of the runner's model."""
    return int(runner.req_to_token_pool.req_to_token.shape[1]) - runner.model_config.context_len
