"""Tiny hybrid models with random weights: Qwen3-Next and Qwen 3.5 (gated delta nets), Nemotron-H and Granite 4 (Mamba 2), and LFM2 (convolutions)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint
import torch

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 512, 256, 256, 4, 8, 2
ATTENTION_LAYERS = 2
"""So many layers of each of these models have KV."""

Weights = dict[str, torch.Tensor]

BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 8192,
    "attention_bias": False, "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


class _Random:
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return checkpoint.matrix(self.generator, rows, columns, gain)

    def convolution(self, channels: int, width: int = 4) -> torch.Tensor:
        return torch.randn(channels, 1, width, generator=self.generator) * 0.5


def _memories(heads: int) -> Weights:
    """Steps by which states decay: some heads remember ten tokens, some hundreds."""
    return {"A_log": torch.zeros(heads), "dt_bias": torch.linspace(-6, -2, heads)}


def _named(prefix: str, weights: Weights) -> Weights:
    return {f"{prefix}.{name}": weight for name, weight in weights.items()}


def _save(folder: Path, tokenizer: Path, config: dict[str, Any], weights: Weights) -> Path:
    weights = {name: weight.bfloat16() for name, weight in weights.items()}
    return checkpoint.save(folder, tokenizer, BASE | config, weights)


STATES, STATE_KEYS, STATE_VALUES = 128, 2, 4
"""Of a gated delta net: dimensions of a state's keys and values, and heads of each."""

GATED_DELTA_NETS: dict[str, Any] = {
    "hidden_act": "silu", "head_dim": 256, "full_attention_interval": LAYERS // ATTENTION_LAYERS, "partial_rotary_factor": 0.25,
    "rope_theta": 1e6, "rms_norm_eps": 1e-6, "linear_conv_kernel_dim": 4, "linear_key_head_dim": STATES,
    "linear_value_head_dim": STATES, "linear_num_key_heads": STATE_KEYS, "linear_num_value_heads": STATE_VALUES,
}  # fmt: skip


def _mlp(random: _Random) -> Weights:
    return {
        "gate_proj.weight": random.matrix(INNER, HIDDEN), "up_proj.weight": random.matrix(INNER, HIDDEN),
        "down_proj.weight": random.matrix(HIDDEN, INNER),
    }  # fmt: skip


def _gated_attention(random: _Random) -> Weights:
    head_dim = GATED_DELTA_NETS["head_dim"]
    return {
        # Scores peaked enough that tokens far away matter. Q comes with its output's gate.
        "q_norm.weight": torch.ones(head_dim), "k_norm.weight": torch.ones(head_dim),
        "q_proj.weight": random.matrix(2 * HEADS * head_dim, HIDDEN),
        "k_proj.weight": random.matrix(KV_HEADS * head_dim, HIDDEN),
        "v_proj.weight": random.matrix(KV_HEADS * head_dim, HIDDEN, gain=4),
        "o_proj.weight": random.matrix(HIDDEN, HEADS * head_dim, gain=4),
    }  # fmt: skip


def _gated_delta_nets(random: _Random, mlp: Callable[[_Random], Weights], projections: dict[str, int]) -> Weights:
    """Weights of a model whose every second layer has KV; `projections` of the others by their rows."""
    # Norms scale by 1 and their weight.
    weights = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=random.generator),
        "lm_head.weight": random.matrix(VOCAB, HIDDEN, gain=2), "model.norm.weight": torch.zeros(HIDDEN),
    }  # fmt: skip
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": torch.zeros(HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": torch.zeros(HIDDEN),
            **_named(f"{prefix}.mlp", mlp(random)),
        }
        if (layer + 1) % GATED_DELTA_NETS["full_attention_interval"] == 0:
            weights |= _named(f"{prefix}.self_attn", _gated_attention(random))
        else:
            weights |= _named(f"{prefix}.linear_attn", {
                **{f"{name}.weight": random.matrix(rows, HIDDEN) for name, rows in projections.items()},
                "conv1d.weight": random.convolution((2 * STATE_KEYS + STATE_VALUES) * STATES),
                "norm.weight": torch.ones(STATES), "out_proj.weight": random.matrix(HIDDEN, STATE_VALUES * STATES),
                **_memories(STATE_VALUES),
            })  # fmt: skip
    return weights


ADDS = 0.08
"""How much the layers of a model that brings its draft, and the draft's, add to what comes in: less than they would. So a token says much about the next
one, and of the draft, which looks at little else, three in ten first tokens are accepted (transformers' Qwen3-Next, on a CPU, 2026-11-29)."""


def _with_draft(random: _Random, mlp: Callable[[_Random], Weights], weights: Weights) -> Weights:
    """The same model with a head for the token after the next (SGLang: models/qwen3_next_mtp.py)."""
    norms = (
        "norm",
        "pre_fc_norm_embedding",
        "pre_fc_norm_hidden",
        "layers.0.input_layernorm",
        "layers.0.post_attention_layernorm",
    )
    draft = {
        **{f"{norm}.weight": torch.zeros(HIDDEN) for norm in norms},
        "fc.weight": torch.cat([torch.eye(HIDDEN), random.matrix(HIDDEN, HIDDEN, gain=0.1)], dim=1),
        **_named("layers.0.self_attn", _gated_attention(random)), **_named("layers.0.mlp", mlp(random)),
    }  # fmt: skip
    added = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
    return {
        name: weight * (ADDS if name.endswith(added) else 1)
        for name, weight in (weights | _named("mtp", draft)).items()
    }


def qwen3_next(folder: Path, tokenizer: Path, drafts: bool = False) -> Path:
    """Write config, weights (bfloat16) and the tokenizer of another model to `folder`; returns it. Every second layer has KV. With `drafts` it has a head
    for drafts."""
    experts = 4
    config = GATED_DELTA_NETS | {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "num_experts": experts,
        "num_experts_per_tok": experts, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "moe_intermediate_size": INNER, "shared_expert_intermediate_size": INNER,
    }  # fmt: skip

    # A token goes to all experts: a choice would jump where two are close.
    def mlp(random: _Random) -> Weights:
        weights = {"gate.weight": random.matrix(experts, HIDDEN), "shared_expert_gate.weight": random.matrix(1, HIDDEN)}
        for name in ("shared_expert", *(f"experts.{expert}" for expert in range(experts))):
            weights |= _named(name, _mlp(random))
        return weights

    projections = {"in_proj_qkvz": 2 * (STATE_KEYS + STATE_VALUES) * STATES, "in_proj_ba": 2 * STATE_VALUES}
    random = _Random()
    weights = _gated_delta_nets(random, mlp, projections)
    return _save(folder, tokenizer, config, _with_draft(random, mlp, weights) if drafts else weights)


def qwen3_5(folder: Path, tokenizer: Path) -> Path:
    """The same for the text model of Qwen 3.5, without experts."""
    config = GATED_DELTA_NETS | {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
        "rope_parameters": {"rope_type": "default", "rope_theta": GATED_DELTA_NETS["rope_theta"]},
    }  # fmt: skip
    projections = {
        "in_proj_qkv": (2 * STATE_KEYS + STATE_VALUES) * STATES, "in_proj_z": STATE_VALUES * STATES,
        "in_proj_b": STATE_VALUES, "in_proj_a": STATE_VALUES,
    }  # fmt: skip
    return _save(folder, tokenizer, config, _gated_delta_nets(_Random(), _mlp, projections))


MAMBA_STATES, MAMBA_HEADS, MAMBA_DIM, MAMBA_GROUPS = 128, 8, 64, 2
"""Of a Mamba 2 layer: dimensions of a head's state, heads, their dimensions, and groups of heads."""


def _mamba(random: _Random) -> Weights:
    inner = MAMBA_HEADS * MAMBA_DIM
    channels = inner + 2 * MAMBA_GROUPS * MAMBA_STATES
    return {
        "in_proj.weight": random.matrix(inner + channels + MAMBA_HEADS, HIDDEN),
        "conv1d.weight": random.convolution(channels), "conv1d.bias": torch.zeros(channels), "D": torch.ones(MAMBA_HEADS),
        "norm.weight": torch.ones(inner), "out_proj.weight": random.matrix(HIDDEN, inner), **_memories(MAMBA_HEADS),
    }  # fmt: skip


def nemotron_h(folder: Path, tokenizer: Path, chunk: int = 128) -> Path:
    """The same for Nemotron-H. Its first layer has no KV, and a layer is attention, Mamba or an MLP: there are 5.

    States are kept after a multiple of `chunk` tokens.
    """
    head_dim, pattern = 128, "M*-M*"
    assert pattern.count("*") == ATTENTION_LAYERS
    config = {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern), "head_dim": head_dim, "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu",
        "layer_norm_epsilon": 1e-5, "ssm_state_size": MAMBA_STATES, "mamba_num_heads": MAMBA_HEADS, "mamba_head_dim": MAMBA_DIM,
        "n_groups": MAMBA_GROUPS, "mamba_n_groups": MAMBA_GROUPS, "conv_kernel": 4, "chunk_size": chunk, "expand": 2, "use_conv_bias": True,
        "mlp_bias": False, "use_bias": False, "mamba_proj_bias": False, "residual_in_fp32": False,
    }  # fmt: skip
    random = _Random()
    mixers: dict[str, Callable[[], Weights]] = {
        # There are no positions and no norms of Q and K.
        "*": lambda: {
            "q_proj.weight": random.matrix(HEADS * head_dim, HIDDEN, gain=2),
            "k_proj.weight": random.matrix(KV_HEADS * head_dim, HIDDEN, gain=2),
            "v_proj.weight": random.matrix(KV_HEADS * head_dim, HIDDEN, gain=4),
            "o_proj.weight": random.matrix(HIDDEN, HEADS * head_dim, gain=4),
        },
        "-": lambda: {"up_proj.weight": random.matrix(INNER, HIDDEN), "down_proj.weight": random.matrix(HIDDEN, INNER)},
        "M": lambda: _mamba(random),
    }  # fmt: skip
    weights = {
        "backbone.embeddings.weight": torch.randn(VOCAB, HIDDEN, generator=random.generator),
        "lm_head.weight": random.matrix(VOCAB, HIDDEN, gain=2), "backbone.norm_f.weight": torch.ones(HIDDEN),
    }  # fmt: skip
    for layer, kind in enumerate(pattern):
        weights[f"backbone.layers.{layer}.norm.weight"] = torch.ones(HIDDEN)
        weights |= _named(f"backbone.layers.{layer}.mixer", mixers[kind]())
    return _save(folder, tokenizer, config, weights)


def _interleaved(
    folder: Path, tokenizer: Path, config: dict[str, Any], norm: str, layer: Callable[[_Random, bool], Weights]
) -> Path:
    """Of models whose every second layer has KV, and the first one none: `layer` gives a layer's weights, by whether it has KV, and `norm` names the
    last one. They have 4 query heads of 64 dimensions."""
    random = _Random()
    weights = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=random.generator),
        "lm_head.weight": random.matrix(VOCAB, HIDDEN, gain=2), f"model.{norm}.weight": torch.ones(HIDDEN),
    }  # fmt: skip
    for number in range(LAYERS):
        weights |= _named(f"model.layers.{number}", layer(random, number % 2 == 1))
    return _save(folder, tokenizer, config | {"num_attention_heads": 4, "rope_theta": 1e6}, weights)


def _projections(random: _Random, output: str) -> Weights:
    rows = {"q_proj": HIDDEN, "k_proj": KV_HEADS * 64, "v_proj": KV_HEADS * 64, output: HIDDEN}
    gains = {"q_proj": 2, "k_proj": 2, "v_proj": 4, output: 4}
    return {f"self_attn.{name}.weight": random.matrix(count, HIDDEN, gain=gains[name]) for name, count in rows.items()}


def granite(folder: Path, tokenizer: Path) -> Path:
    """The same for Granite 4 without experts: there are no positions, and layers, scores and logits have factors."""
    config = {
        "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "hidden_act": "silu",
        "layer_types": ["mamba", "attention"] * ATTENTION_LAYERS, "rms_norm_eps": 1e-5, "position_embedding_type": "nope",
        "mamba_d_state": MAMBA_STATES, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_d_head": MAMBA_DIM, "mamba_n_heads": MAMBA_HEADS,
        "mamba_n_groups": MAMBA_GROUPS, "mamba_chunk_size": 128, "mamba_conv_bias": True, "mamba_proj_bias": False,
        "embedding_multiplier": 2.0, "logits_scaling": 0.5, "attention_multiplier": 0.1, "residual_multiplier": 0.7,
        "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": INNER,
    }  # fmt: skip

    def layer(random: _Random, has_kv: bool) -> Weights:
        return {
            "input_layernorm.weight": torch.ones(HIDDEN), "post_attention_layernorm.weight": torch.ones(HIDDEN),
            "shared_mlp.input_linear.weight": random.matrix(2 * INNER, HIDDEN),
            "shared_mlp.output_linear.weight": random.matrix(HIDDEN, INNER),
            **(_projections(random, "o_proj") if has_kv else _named("mamba", _mamba(random))),
        }  # fmt: skip

    return _interleaved(folder, tokenizer, config, "norm", layer)


def lfm2(folder: Path, tokenizer: Path) -> Path:
    """The same for LFM2, whose other layers are short convolutions."""
    config = {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "layer_types": ["conv", "full_attention"] * ATTENTION_LAYERS,
        "norm_eps": 1e-5, "conv_L_cache": 3, "conv_bias": False, "block_auto_adjust_ff_dim": False,
    }  # fmt: skip

    def layer(random: _Random, has_kv: bool) -> Weights:
        convolution = {
            "conv.in_proj.weight": random.matrix(3 * HIDDEN, HIDDEN), "conv.conv.weight": random.convolution(HIDDEN, 3),
            "conv.out_proj.weight": random.matrix(HIDDEN, HIDDEN),
        }  # fmt: skip
        attention = {
            **_projections(random, "out_proj"),
            "self_attn.q_layernorm.weight": torch.full((64,), 2.0), "self_attn.k_layernorm.weight": torch.full((64,), 1.5),
        }  # fmt: skip
        return {
            "operator_norm.weight": torch.ones(HIDDEN), "ffn_norm.weight": torch.ones(HIDDEN),
            "feed_forward.w1.weight": random.matrix(INNER, HIDDEN), "feed_forward.w2.weight": random.matrix(HIDDEN, INNER),
            "feed_forward.w3.weight": random.matrix(INNER, HIDDEN), **(attention if has_kv else convolution),
        }  # fmt: skip

    return _interleaved(folder, tokenizer, config, "embedding_norm", layer)


WRITERS = {"Qwen3-Next": qwen3_next, "Qwen 3.5": qwen3_5, "Nemotron-H": nemotron_h, "Granite 4": granite, "LFM2": lfm2}
