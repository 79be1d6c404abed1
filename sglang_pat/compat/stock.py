"""SGLang's own attention backends: which one prefills beside PAT, and what each gets wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_pat.compat.model import asks_lists
from sglang_pat.compat.pool import layers_with_kv
from sglang_pat.compat.releases import release

if TYPE_CHECKING:
    import torch

DRAFT_BACKEND = "sglang.srt.speculative.draft_utils:DraftBackendFactory._create_backend"
"""The step that makes an attention backend for drafts."""

PREFILL_ATTRIBUTES = (
    "extend_dummy_seqs_capped_by_req_pool",
    "extend_attention_block_m",
    "supports_prefill_cuda_graph_max_context_size",
    "init_mha_chunk_metadata",
)
"""What of a backend says how it can prefill, in graphs and in dry runs; each release has some of it. All are values but the last, a method that MLA
models call before they prefill behind a cached prefix, where a backend has it (forward_mha.py); FlashInfer's does."""


def prefill_backend(
    windows: bool, kv_cache: torch.dtype, scaled: bool, sinks: bool = False, unequal: bool = False
) -> str:
    """The stock attention backend to prefill with on this GPU: SGLang's own choice, if it is installed and right for the model.

    For layers with windows SGLang takes FA3 or Triton (arg_groups/overrides.py, `_olmo2_overrides`; for Exaone server_args.py accepts
    nothing else). FA3 reads e4m3 but not e5m2 (overrides.py, `_attention_backend_fa3_fp8_fallback`). Triton comes last: with an FP8
    cache it casts Q and the weights of V to FP8 for a cached prefix (extend_attention.py); FlashInfer does not.

    Args:
        windows: Whether some layers have a sliding window.
        kv_cache: The dtype of K and V in the cache.
        scaled: Whether K and V have scales.
        sinks: Whether heads have attention sinks, which FlashInfer's backend ignores (flashinfer_backend.py).
        unequal: Whether V is narrower than K; FlashInfer's backend assumes one dimension (flashinfer_backend.py, `v.view`).
    """
    from sglang.srt.utils import is_flashinfer_available

    if _has_fa3(kv_cache):
        return "fa3"
    wrong = windows or sinks or unequal or (scaled and ignores_scales("flashinfer", prefill=True))
    return "flashinfer" if is_flashinfer_available() and not wrong else "triton"


def latent_backend(runner: Any) -> str:
    """The stock attention backend to prefill with on this GPU for an MLA model, or for a draft that is one: SGLang's own choice (`_get_default_attn_backend`
    in 0.5.17's server_args.py, `get_default_attn_backend` in 0.5.23's arg_groups/model_override_base.py), if it is installed. It is Triton's, which takes
    Q and K whole, where the model cannot be told of another one (`asks_lists`).
    """
    import torch
    from sglang.srt.utils import is_flashinfer_available

    if not asks_lists(runner):
        return "triton"
    if _has_fa3(runner.kv_cache_dtype):
        return "fa3"
    return "flashinfer" if torch.cuda.get_device_capability()[0] == 10 and is_flashinfer_available() else "triton"


def _has_fa3(kv_cache: torch.dtype) -> bool:
    """Whether FA3 is installed, and reads such a cache on this GPU."""
    import importlib.util

    import torch

    on_hopper = torch.cuda.get_device_capability()[0] == 9 and importlib.util.find_spec("sgl_kernel.flash_ops")
    return bool(on_hopper) and kv_cache != torch.float8_e5m2


def ignores_sinks(backend: str | None) -> bool:
    """Whether this stock backend, if one was chosen, ignores attention sinks."""
    return backend is not None and backend not in ("pat", "fa3", "fa4", "triton", "trtllm_mha", "intel_amx")


def assumes_equal_dims(backend: str | None) -> bool:
    """Whether this stock backend assumes that V is as wide as K: FlashInfer's (flashinfer_backend.py, `v.view`) and TRT-LLM's
    (server_args.py, where SGLang chooses a backend for `has_asymmetric_kv`)."""
    return backend in ("flashinfer", "trtllm_mha")


def ignores_window_pools(backend: str | None) -> bool:
    """Whether this stock backend reads a pool for windows with the slot numbers of the full pool."""
    return backend in ("torch_native", "flex_attention")


def ignores_scales(backend: str | None, prefill: bool) -> bool:
    """Whether this stock backend ignores a checkpoint's scales when it writes or reads an FP8 cache, in prefill or in decode.

    FA4's prefill does (flashattention_backend.py, `fa_impl_ver`). So does FlashInfer's on 0.5.17, for a cached prefix
    (flashinfer_backend.py, `o2`).
    """
    scaleless = {"torch_native", "flex_attention"}
    if prefill:
        scaleless |= {"fa4", "flashinfer"} if release() == "0.5.17" else {"fa4"}
    return backend in scaleless


def needs_first_layer(backend: str, runner: Any) -> bool:
    """Whether this stock backend needs the V of the first layer, which has none: 0.5.17's Triton does (triton_backend.py,
    `get_value_buffer(0)`)."""
    if backend != "triton" or release() != "0.5.17":
        return False
    from sglang.srt.configs.hybrid_arch import mamba2_config

    kept = layers_with_kv(runner.token_to_kv_pool)
    return mamba2_config(runner.model_config) is not None and kept is not None and 0 not in kept


def lists_gdn_backends(runner: Any) -> bool:
    """Whether SGLang accepts only its own backends beside gated delta nets on this GPU (attention_registry.py)."""
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config
    from sglang.srt.utils import is_blackwell

    return is_blackwell() and hybrid_gdn_config(runner.model_config) is not None
