"""What a model's config.json says of it before it is loaded: whether PAT serves it, and which kernels it needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from sglang_pat.jsonl import whole
from sglang_pat.kernels import capabilities
from sglang_pat.model_config import ModelError, is_hybrid, language_model, latents_problem
from sglang_pat.packing import FORMATS, AttentionSpec
from sglang_pat.text import printable

ARCHITECTURES = {
    "Llama4ForConditionalGeneration": "attention in chunks",
    "WhisperForConditionalGeneration": "encoder-decoder models",
    "MllamaForConditionalGeneration": "encoder-decoder models",
    "MossVLForConditionalGeneration": "encoder-decoder models",
    "Gemma4ForConditionalGeneration": "attention in both directions within an image",
    "Gemma4UnifiedForConditionalGeneration": "attention in both directions within an image",
    "EmbeddingGemmaModel": "attention in both directions by a decoder",
    "EmbeddingGemma2Model": "encoder-only attention with a window",
    "HrmTextForCausalLM": "attention in both directions by a decoder",
    "DiffusionGemmaForBlockDiffusion": "attention in both directions by a decoder",
    "UnlimitedOCRForCausalLM": "windows that do not apply to prompts",
    "DeepseekV4ForCausalLM": "the attention of DeepSeek V4",
}
"""What PAT does not compute, and `support.check_model` finds in SGLang's code for these rather than in config.json (configs/model_config.py,
models/*.py of 0.5.23)."""

GATED_DELTA_NETS = ("qwen3_next", "qwen3_5", "jet_nemotron", "jet_vlm", "intern_s2_preview")
"""How `model_type` begins where the other layers are gated delta nets (`hybrid_gdn_config` in SGLang's configs/hybrid_arch.py)."""

Verdict = Literal["supported", "refused", "unknown"]


class Needs(msgspec.Struct, frozen=True):
    """What a model's layers need of kernels.

    Attributes:
        dims: Pairs of head dimensions, of K and of V.
        sinks: Whether layers have attention sinks; both, if only some have.
        capped: Whether scores are capped.
        windows: Whether some layers have windows.
        dtype: What SGLang computes in with `--dtype auto`.
        latent: Whether V is part of K (MLA).
    """

    dims: tuple[tuple[int, int], ...]
    sinks: tuple[bool, ...]
    capped: bool
    windows: bool
    dtype: str
    latent: bool = False


def architectures(config: Mapping[str, Any]) -> list[str]:
    """The names in `architectures`."""
    names = config.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def needs(config: Mapping[str, Any]) -> Needs:
    """What the model's layers need.

    Raises:
        ModelError: config.json does not say how long heads are.
    """
    model = language_model(config)
    heads, hidden, dim = (_size(model, name) for name in ("num_attention_heads", "hidden_size", "head_dim"))
    rank = _size(model, "kv_lora_rank")
    if rank is not None:
        dim = rank + (_size(model, "qk_rope_head_dim") or 0 if model.get("qk_rope_head_dim") else 0)
    if dim is None:
        if heads is None or hidden is None or hidden % heads:
            raise ModelError("it does not say what head dimension there is")
        dim = hidden // heads
    v_dim = rank or _size(model, "v_head_dim") or dim
    dims = {(dim, v_dim): None}
    if (windowed := _size(model, "swa_head_dim")) is not None:
        dims[windowed, _size(model, "swa_v_head_dim") or windowed] = None
    if (unwindowed := _size(model, "global_head_dim")) is not None:  # Gemma 4
        dims[unwindowed, unwindowed] = None
    kind = str(model.get("model_type"))
    if kind == "gpt_oss":
        sinks: tuple[bool, ...] = (True,)
    else:
        some = ("add_swa_attention_sink_bias", "add_full_attention_sink_bias")  # MiMo V2
        of_some = [bool(model.get(name)) for name in some]
        sinks = (True,) if all(of_some) else (False, True) if any(of_some) else (False,)
    by_default = kind == "gemma2" or any(name.startswith("Grok1") for name in architectures(config))
    cap = model.get("attn_logit_softcapping", 1 if by_default else None)
    windows = any(model.get(name) for name in ("sliding_window", "sliding_window_size")) and (
        model.get("use_sliding_window") is not False
    )
    named = next((part[key] for part in (model, config) for key in ("dtype", "torch_dtype") if part.get(key)), None)
    # SGLang takes float16 in place of float32, and bfloat16 for Gemma (`_get_and_verify_dtype` in its configs/model_config.py).
    dtype = named if named in capabilities.CUDA_DTYPES else "bfloat16" if kind.startswith("gemma") else "float16"
    return Needs(tuple(dims), sinks, isinstance(cap, int | float) and cap > 0, windows, dtype, rank is not None)


def judge(config: Mapping[str, Any], device: capabilities.Device, arch: str = "") -> tuple[Verdict, str]:
    """Whether PAT serves a model, as far as its config.json says, and why.

    Args:
        config: What `model_config.read` returns.
        device: Where it shall be served.
        arch: The GPU's compute capability, such as `8.0` or `9.0a`; empty if it is not known.
    """
    names = architectures(config)
    refused = _refusal(config, device, arch)
    if refused is None:
        try:
            found = needs(config)
        except ModelError as error:
            return "unknown", str(error)
        refused = next(filter(None, (_dims_problem(dims, device, arch, found.latent) for dims in found.dims)), None)
    if refused is not None:
        return "refused", refused
    shown = " and ".join(f"{k}" if k == v else f"{k} (K) and {v} (V)" for k, v in found.dims)
    name = printable(", ".join(names))[:100] or "no architecture is named"
    reason = f"{name}, head dimension {shown}; flags and weights are looked at when a server starts"
    if "Gemma3ForConditionalGeneration" in names:
        reason += "; with --enable-multimodal it is refused"
    return "supported", reason


def _refusal(config: Mapping[str, Any], device: capabilities.Device, arch: str) -> str | None:
    """What PAT does not compute, of what does not depend on dimensions; None if there is nothing."""
    model, names = language_model(config), architectures(config)
    kind, hybrid, temperature = str(model.get("model_type")), is_hybrid(model), model.get("attn_temperature_len")
    blackwell, returns = arch.startswith(("10.", "12.")), model.get("enable_sink_attention", True)
    reasons = [
        (latents_problem(model, device == "cuda"), True),
        *((ARCHITECTURES[name], True) for name in names if name in ARCHITECTURES),
        ("encoder-decoder models", config.get("is_encoder_decoder") is True),
        ("attention in both directions by a decoder", model.get("use_bidirectional_attention") is True),
        ("temperature that grows with the context", isinstance(temperature, int) and temperature > 0),
        ("log-sum-exps of scores given back to the model", "IQuestQ1ForCausalLM" in names and returns),
        ("hybrid models on a CPU", hybrid and device == "cpu"),
        ("gpt-oss on a CPU, where SGLang cannot run its experts", kind == "gpt_oss" and device == "cpu"),
        ("gated delta nets on a Blackwell GPU", hybrid and blackwell and kind.startswith(GATED_DELTA_NETS)),
    ]
    return next((reason for reason, holds in reasons if reason and holds), None)


def _dims_problem(dims: tuple[int, int], device: capabilities.Device, arch: str, latent: bool) -> str | None:
    """What is not computed with these head dimensions, of K and of V; None if all is."""
    problem = capabilities.refusal(AttentionSpec(1, 1, *dims, FORMATS["bfloat16"], latent=latent), device)
    small = arch and arch not in capabilities.LARGE_SHARED
    if problem is None and device == "cuda" and small and dims[0] > 128 and not latent:
        return f"a head dimension of {dims[0]} on a GPU of compute capability {arch}"
    return problem


def _size(model: Mapping[str, Any], name: str) -> int | None:
    """A count in config.json; None if it is not there."""
    value = whole(model.get(name))
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 31:
        raise ModelError(f"its {name} is no count")
    return value
