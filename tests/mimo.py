"""A tiny MiMo-V2-shaped model with random weights: V is narrower than K, and layers with windows have sinks, and KV heads and a KV pool
of their own."""

from __future__ import annotations

import functools
from pathlib import Path

import checkpoint
import torch

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 512, 256, 512, 4, 8, 2
HEAD_DIM, V_HEAD_DIM = 192, 128
PATTERN = [0, 1, 1, 0]
"""1 where a layer has a window."""

CONFIGURATION = """from transformers import PretrainedConfig


class MiMoV2Config(PretrainedConfig):
    model_type = "mimo_v2_flash"
"""
"""Like the real model, this one brings the class of its configuration: `--trust-remote-code`."""


def write(folder: Path, tokenizer: Path, window: int, window_kv_heads: int = 4, sinks: bool = True) -> Path:
    """Write config, weights (bfloat16) and the tokenizer of another model to `folder`; returns it."""
    config = {
        "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "hidden_act": "silu",
        "auto_map": {"AutoConfig": "configuration_mimo.MiMoV2Config"}, "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "moe_intermediate_size": INNER, "num_hidden_layers": LAYERS, "n_routed_experts": 2,
        "num_experts_per_tok": 1, "moe_layer_freq": [0] * LAYERS, "hybrid_layer_pattern": PATTERN,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "v_head_dim": V_HEAD_DIM,
        "swa_num_attention_heads": HEADS, "swa_num_key_value_heads": window_kv_heads, "swa_head_dim": HEAD_DIM,
        "swa_v_head_dim": V_HEAD_DIM, "sliding_window": window, "sliding_window_size": window, "attention_bias": False,
        "add_swa_attention_sink_bias": sinks, "add_full_attention_sink_bias": False, "partial_rotary_factor": 0.334,
        "rope_theta": 1e4, "swa_rope_theta": 1e4, "layernorm_epsilon": 1e-6, "max_position_embeddings": 8192,
        "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    matrix = functools.partial(checkpoint.matrix, generator)
    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN, gain=16), "lm_head.weight": matrix(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }  # fmt: skip
    for layer, windowed in enumerate(PATTERN):
        prefix, kv_heads = f"model.layers.{layer}", window_kv_heads if windowed else KV_HEADS
        weights |= {
            # Scores peaked enough that tokens far away matter.
            f"{prefix}.input_layernorm.weight": torch.full((HIDDEN,), 1.7),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": matrix(kv_heads * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": matrix(kv_heads * V_HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * V_HEAD_DIM),
            f"{prefix}.mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": matrix(INNER, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": matrix(HIDDEN, INNER),
        }
        if windowed and sinks:
            # Some take nothing of a query's weight, some nearly all of it.
            weights[f"{prefix}.self_attn.attention_sink_bias"] = torch.linspace(-2, 9, HEADS)
    weights = {name: weight.bfloat16() for name, weight in weights.items()}
    made = checkpoint.save(folder, tokenizer, config, weights)
    (made / "configuration_mimo.py").write_text(CONFIGURATION)
    return made
