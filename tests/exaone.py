"""A tiny Exaone-4-shaped model with random weights: every second layer sees everything, without positions; the others have a window."""

from __future__ import annotations

import functools
from pathlib import Path

import checkpoint
import torch

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 512, 256, 512, 4, 8, 2, 32


def write(folder: Path, tokenizer: Path, window: int) -> Path:
    """Write config, weights (float32) and the tokenizer of another model to `folder`; returns it."""
    config = {
        "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "hidden_act": "silu", "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "sliding_window": window, "sliding_window_pattern": "LG",
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2), "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6, "rope_theta": 1e4, "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False,
        "torch_dtype": "float32",
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
            f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}.post_feedforward_layernorm.weight": torch.ones(HIDDEN),
            # Scores peaked enough that tokens far away matter.
            f"{prefix}.self_attn.q_norm.weight": torch.full((HEAD_DIM,), 2.0),
            f"{prefix}.self_attn.k_norm.weight": torch.full((HEAD_DIM,), 1.5),
            f"{prefix}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}.mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": matrix(INNER, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": matrix(HIDDEN, INNER),
        }
    return checkpoint.save(folder, tokenizer, config, weights)
