"""A tiny Mellum-shaped model with random weights: three layers in four have a window, and SGLang keeps their KV in a pool of its own."""

from __future__ import annotations

import functools
from pathlib import Path

import checkpoint
import torch

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 512, 256, 512, 4, 8, 2


def write(folder: Path, tokenizer: Path, window: int, head_dim: int = 32) -> Path:
    """Write config, weights (float32) and the tokenizer of another model to `folder`; returns it."""
    rope = {"rope_type": "default", "rope_theta": 1e4}
    config = {
        "architectures": ["MellumForCausalLM"], "model_type": "mellum", "hidden_act": "silu", "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "intermediate_size": INNER, "moe_intermediate_size": INNER, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": head_dim, "sliding_window": window,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense"] * LAYERS, "num_experts": 2, "num_experts_per_tok": 1, "norm_topk_prob": True,
        "attention_bias": False, "rope_parameters": {"sliding_attention": rope, "full_attention": rope},
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "bos_token_id": 0, "eos_token_id": 0,
        "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    matrix = functools.partial(checkpoint.matrix, generator)
    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "lm_head.weight": matrix(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }  # fmt: skip
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            # Scores peaked enough that tokens far away matter.
            f"{prefix}.self_attn.q_norm.weight": torch.full((head_dim,), 2.0),
            f"{prefix}.self_attn.k_norm.weight": torch.full((head_dim,), 1.5),
            f"{prefix}.self_attn.q_proj.weight": matrix(HEADS * head_dim, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": matrix(KV_HEADS * head_dim, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": matrix(KV_HEADS * head_dim, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * head_dim),
            f"{prefix}.mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": matrix(INNER, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": matrix(HIDDEN, INNER),
        }
    return checkpoint.save(folder, tokenizer, config, weights)
