"""The model: what its config.json says about layers, heads and weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from sglang_pat.estimate.errors import EstimateError, fault
from sglang_pat.estimate.prompts import first_given
from sglang_pat.model_config import find, language_model, latents_problem, read
from sglang_pat.packing import FORMATS, AttentionSpec
from sglang_pat.packing.cost import Count
from sglang_pat.packing.spec import MAX_WINDOW


class Model(msgspec.Struct):
    """What a model's config.json says.

    Attributes:
        layers: How many layers there are of each spec, with KV in bfloat16; layers without KV do not count.
        weight_bytes: How many bytes of weights a decode step reads; None for mixtures of experts, where it depends on the batch, and for
            hybrid and MLA models.
    """

    layers: Counter[AttentionSpec]
    weight_bytes: int | None


Size = Annotated[int, Meta(ge=1, le=1 << 31)]
Experts = Annotated[int, Meta(ge=0, le=1 << 16)] | list[int] | None


class Shape(msgspec.Struct):
    """The fields of a config.json that are read. Optional ones follow from others, or are in `model_config.DEFAULTS`."""

    num_attention_heads: Count
    num_hidden_layers: Count
    hidden_size: Size
    vocab_size: Size
    intermediate_size: Size | None = None
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    num_experts: Experts = None
    num_local_experts: Experts = None
    n_routed_experts: Experts = None
    moe_num_experts: Experts = None
    model_type: str = ""
    v_head_dim: Count | None = None
    kv_lora_rank: Count | None = None
    qk_rope_head_dim: Annotated[int, Meta(ge=0, le=4096)] | None = None
    layer_types: list[str] | None = None
    layers_block_type: list[str] | None = None
    hybrid_override_pattern: str | None = None
    full_attention_interval: Count | None = None
    full_attn_idxs: list[int] | None = None
    sliding_window: Annotated[int, Meta(le=MAX_WINDOW)] | None = None
    sliding_window_size: Annotated[int, Meta(le=MAX_WINDOW)] | None = None
    sliding_window_pattern: Annotated[int, Meta(ge=0, le=4096)] | str | None = None
    hybrid_layer_pattern: list[int] | None = None
    attention_chunk_size: Any = None
    swa_num_attention_heads: Count | None = None
    swa_num_key_value_heads: Count | None = None
    swa_head_dim: Count | None = None
    swa_v_head_dim: Count | None = None


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
WITH_KV = (FULL, SLIDING, "attention")
WITHOUT_KV = (LINEAR, "mamba", "conv", "mlp", "moe")
"""Kinds of layers without KV: in Qwen3-Next and Granite, in LFM2, and in Nemotron-H, whose layers are either attention or an MLP."""
SEE_ONE_MORE = ("cohere2", "cohere2_moe", "exaone_moe")
"""Models whose `sliding_window` SGLang takes not to include the decoded token (commandr.py); so it does for MiMo V2."""
UNREAD = (
    "attention_other_setting", "num_attention_heads_per_layer", "global_head_dim", "block_configs", "local_layer_ids",
    "zaya_layers",
)  # fmt: skip
"""Other fields that say how layers differ, which are not read here: Step 3.5, Laguna, Gemma 4, Nemotron NAS, Inkling, Zaya."""


def read_model(name: str | Path) -> Model:
    """Read a model's config.json, by the name of its folder, of the file, or in the cache of Hugging Face.

    Raises:
        ModelError: There is none.
        EstimateError: PAT does not serve this model, or its config.json says too little.
    """
    path = find(str(name))
    config = language_model(read(path))
    if (problem := latents_problem(config, on_gpu=True)) is not None:
        raise EstimateError(f"{path}: {problem} is not supported by --attention-backend pat")
    for field in UNREAD:
        if config.get(field) is not None:
            raise EstimateError(f"{path}: models whose layers differ by {field} cannot be estimated")
    try:
        return _model(path, msgspec.convert(config, Shape))
    except msgspec.ValidationError as error:
        raise EstimateError(fault(error, str(path), f"{path}: ")) from None


def _kinds(shape: Shape) -> list[str]:
    """The kind of each layer, in the words of `layer_types`; fewer than there are layers if config.json does not name all."""
    count = shape.num_hidden_layers
    kinds = first_given(shape.layer_types, shape.layers_block_type)
    if kinds is not None:
        return kinds[:count]
    if shape.hybrid_override_pattern is not None:
        return [FULL if kind == "*" else "mamba" for kind in shape.hybrid_override_pattern[:count]]
    if shape.hybrid_layer_pattern is not None:
        return [SLIDING if windowed else FULL for windowed in shape.hybrid_layer_pattern[:count]]
    if shape.attention_chunk_size is not None:  # Llama 4; SGLang ignores that of MiMo V2
        return ["chunked_attention"] * count
    if shape.full_attn_idxs is not None:
        return [FULL if layer in shape.full_attn_idxs else "conv" for layer in range(count)]
    every, other = shape.full_attention_interval, LINEAR
    if every is None:
        pattern, other = shape.sliding_window_pattern, SLIDING
        every = len(pattern) if isinstance(pattern, str) else pattern
    return [other if every and (layer + 1) % every else FULL for layer in range(count)]


def _spec(path: Path, shape: Shape, windowed: bool) -> AttentionSpec:
    """The spec of the layers with a window, or of those without: in MiMo V2 they have different heads. With MLA all heads read one latent."""
    hidden, window = shape.hidden_size, 0
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    dim, v_dim = shape.head_dim, shape.v_head_dim
    if windowed:
        heads, kv_heads = shape.swa_num_attention_heads or heads, shape.swa_num_key_value_heads or kv_heads
        dim, v_dim = shape.swa_head_dim or dim, shape.swa_v_head_dim or shape.swa_head_dim or v_dim
        window = first_given(shape.sliding_window_size, shape.sliding_window, 0)
        if window < 1:
            raise EstimateError(f"{path}: some layers have a sliding window, and sliding_window does not say how long")
        if shape.model_type in SEE_ONE_MORE or shape.hybrid_layer_pattern is not None:
            window = min(window + 1, MAX_WINDOW)
    if shape.kv_lora_rank is not None:
        kv_heads, v_dim = 1, shape.kv_lora_rank
        dim = v_dim + (shape.qk_rope_head_dim or 0)
    kv_heads = kv_heads or heads
    if heads % kv_heads:
        raise EstimateError(f"{path}: {heads} attention heads cannot share {kv_heads} KV heads evenly")
    if dim is None and hidden % heads:
        raise EstimateError(
            f"{path}: a hidden size of {hidden} is not a multiple of {heads} heads, and there is no head_dim"
        )
    dim = dim or hidden // heads
    latent = shape.kv_lora_rank is not None
    return AttentionSpec(heads, kv_heads, dim, v_dim or dim, FORMATS["bfloat16"], window, latent=latent)


def _model(path: Path, shape: Shape) -> Model:
    kinds = _kinds(shape)
    if len(kinds) < shape.num_hidden_layers:
        raise EstimateError(f"{path}: it names {len(kinds)} of its {shape.num_hidden_layers} layers")
    for kind in kinds:
        if kind not in WITH_KV + WITHOUT_KV:
            raise EstimateError(f"{path}: layers of the kind {kind[:40]!r} cannot be estimated")
    windowed = Counter(kind == SLIDING for kind in kinds if kind in WITH_KV)
    layers = Counter({_spec(path, shape, key): windowed[key] for key in sorted(windowed)})
    if not layers:
        raise EstimateError(f"{path}: no layer has KV")
    experts = shape.num_experts or shape.num_local_experts or shape.n_routed_experts or shape.moe_num_experts
    # Falcon-H1 has states beside the attention of every layer.
    hybrid = layers.total() < len(kinds) or shape.model_type == "falcon_h1"
    if experts or hybrid or shape.kv_lora_rank:
        return Model(layers, None)
    if shape.intermediate_size is None:
        raise EstimateError(f"{path} has no intermediate_size")
    hidden = shape.hidden_size
    attention = sum(
        count * hidden * (spec.heads + spec.kv_heads) * (spec.head_dim + spec.v_head_dim)
        for spec, count in layers.items()
    )
    dense = attention + shape.num_hidden_layers * 3 * hidden * shape.intermediate_size + shape.vocab_size * hidden
    return Model(layers, 2 * dense)
