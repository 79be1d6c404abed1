"""A tiny model of GLM-4.5's shape with random weights: biases of Q, K and V, norms of Q and K, and positions of half of a head. All layers are dense: no
expert is needed to test attention."""

from __future__ import annotations

import functools
from pathlib import Path

import checkpoint
import torch

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 512, 256, 512, 3, 12, 1, 32


def write(folder: Path, tokenizer: Path) -> Path:
    """Write config, weights (float32) and the tokenizer of another model to `folder`; returns it."""
    config = {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_act": "silu", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "moe_intermediate_size": INNER, "num_hidden_layers": LAYERS, "first_k_dense_replace": LAYERS,
        "n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 1.0, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5, "rope_theta": 1e4, "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6, "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    matrix = functools.partial(checkpoint.matrix, generator)
    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "lm_head.weight": matrix(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }  # fmt: skip
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            weights[f"{prefix}.self_attn.{name}_proj.weight"] = matrix(heads * HEAD_DIM, HIDDEN)
            weights[f"{prefix}.self_attn.{name}_proj.bias"] = torch.randn(heads * HEAD_DIM, generator=generator)
        weights |= {
            f"{prefix}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            # Scores peaked enough that tokens far away matter.
            f"{prefix}.self_attn.q_norm.weight": torch.full((HEAD_DIM,), 2.0),
            f"{prefix}.self_attn.k_norm.weight": torch.full((HEAD_DIM,), 1.5),
            f"{prefix}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}.mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": matrix(INNER, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": matrix(HIDDEN, INNER),
        }
    return checkpoint.save(folder, tokenizer, config, weights)
