"""`ModelRunner`: attention layers, their heads, this process's rank, and what all ranks agree on."""

from __future__ import annotations

import logging
from typing import Any

from sglang_pat.compat.pool import is_fp8, kv_scales, latent_dims, layers_with_kv

logger = logging.getLogger(__name__)

LOAD = "sglang.srt.model_executor.model_runner:ModelRunner.load_model"
"""The step that makes a model and loads its weights."""


def modules(runner: Any) -> list[Any]:
    """All modules of the runner's model; none where there is no model, as in some of SGLang's tests."""
    model = getattr(runner, "model", None)
    return [] if model is None else list(model.modules())


def attention_layers(runner: Any) -> list[Any]:
    """This process's attention layers that have KV; a pipeline stage has only some of the model's.

    The linear layers of a hybrid model have no KV, and in some models (Bailing) they are of the same class. MLA models have two layers of one id: one
    reads latents, the other K and V that are made of them, for prefill on other backends.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    found = {id(module): module for module in modules(runner) if isinstance(module, RadixAttention)}
    # Models that run on transformers' code keep their layers in a dict, which `modules` does not visit.
    for instances in (getattr(module, "attention_instances", None) for module in modules(runner)):
        if isinstance(instances, dict):
            found |= {id(layer): layer for layer in instances.values() if isinstance(layer, RadixAttention)}
    pool = getattr(runner, "token_to_kv_pool", None)
    kept, latent = layers_with_kv(pool), latent_dims(pool)
    layers = [layer for layer in found.values() if kept is None or layer.layer_id in kept]
    reads = {
        id(layer) for layer in layers if (layer.qk_head_dim, layer.v_head_dim) == latent and layer.tp_k_head_num == 1
    }
    twins = {layer.layer_id for layer in layers if id(layer) in reads}
    return [layer for layer in layers if id(layer) in reads or layer.layer_id not in twins]


def decodes(layer: Any) -> bool:
    """Whether this is a decoder's layer. In encoder-only layers all tokens of a request see each other."""
    from sglang.srt.layers.radix_attention import AttentionType

    return layer.attn_type != AttentionType.ENCODER_ONLY


def has_scales(runner: Any) -> bool:
    """Whether the KV cache is FP8 and some layers have scales."""
    if not is_fp8(runner.kv_cache_dtype) or latent_dims(runner.token_to_kv_pool):  # SGLang gives latents none
        return False
    return any(kv_scales(layer) != (1.0, 1.0) for layer in attention_layers(runner))


def sparse_latents(hf_config: Any) -> str | None:
    """The kind of attention in which a query sees some tokens only, of its own choice, over latents; None if the model's is not of that kind."""
    from sglang.srt.configs.model_config import is_deepseek_dsa, is_deepseek_v4

    if is_deepseek_v4(hf_config):
        return "the attention of DeepSeek V4"
    return "sparse attention (DSA)" if is_deepseek_dsa(hf_config) else None


def has_latents(model_config: Any) -> bool:
    """Whether a model is an MLA model."""
    from sglang.srt.configs.model_config import AttentionArch

    return model_config.attention_arch == AttentionArch.MLA


def give_latents(*backends: str) -> None:
    """Have MLA models give these backends latents in every step.

    Without a handler of their own both would prefill over K and V that are made of latents, while `torch_native` reads what is in the pool (SGLang #16486).
    """
    try:
        from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
        from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
    except ImportError as error:
        logger.warning("sglang-pat: MLA models are not served right on a CPU with this SGLang: %s", error)
        return
    for backend in backends:
        AttentionBackendRegistry.register(backend, lambda attention, forward_batch: AttnForwardMethod.MLA)


def treat_as(backend: str, stock: str) -> None:
    """Have MLA models give this backend, on a GPU, what they would give SGLang's backend `stock`: latents, or K and V that are made of them, according to the
    step; and Q and K of latents whole or in two tensors (`q_rope`, `k_rope`).

    The models ask these lists in every layer, so it is early enough while the backend is made. Both are in all releases.
    """
    from sglang.srt.models.deepseek_common import utils
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry

    AttentionBackendRegistry.register(backend, AttentionBackendRegistry.get_handler(stock))
    listed = utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
    if stock in listed and backend not in listed:
        listed.append(backend)


def asks_lists(runner: Any) -> bool:
    """Whether an MLA model asks SGLang's lists what to give a backend, as `treat_as` needs: its attention has the code of `deepseek_common`. MiniCPM3's
    passes Q and K whole to any backend, and Sarvam's asks lists of its own (sarvam_moe.py), which have defaults for backends that they do not know."""
    return any(hasattr(module, "dispatch_attn_forward_method") for module in modules(runner))


def is_hybrid(runner: Any) -> bool:
    """Whether some of the model's layers have states instead of KV."""
    return hasattr(runner.req_to_token_pool, "mamba_pool")


def replica(runner: Any) -> int | None:
    """Which replica (of those that serve different requests) this process belongs to; None if another rank plans the same batches."""
    if hasattr(runner, "ps"):
        ranks = runner.ps
    else:
        from sglang.srt.runtime_context import get_parallel

        ranks = get_parallel()
    if ranks.attn_tp_rank or ranks.pp_rank:
        return None
    return (getattr(ranks, "dp_rank", None) or 0) or ranks.attn_dp_rank


def wanted_by_all(wanted: bool) -> bool:
    """Whether every rank of this replica wants something; all of them must ask. Ranks on other machines may have other settings, and if one
    let requests wait where another does not, they would form different batches."""
    import torch
    from sglang.srt.distributed.parallel_state import get_world_group

    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return wanted
    found = torch.tensor([wanted], dtype=torch.int32)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN, group=get_world_group().cpu_group)
    return bool(found)


def logit_cap(layer: Any) -> float:
    """What a layer caps its scores at; 0 if at nothing, for which some models' configurations say null."""
    return max(0.0, float(layer.logit_cap or 0))
