"""A tiny Gemma-2-shaped model with random weights: layers with a window and layers without one take turns."""

from __future__ import annotations

import functools
from pathlib import Path

import checkpoint
import torch

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 512, 256, 512, 4, 8, 2


def write(folder: Path, tokenizer: Path, window: int, head_dim: int = 32) -> Path:
    """Write config, weights (float32) and the tokenizer of another model to `folder`; returns it."""
    config = {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": head_dim,
        "sliding_window": window, "query_pre_attn_scalar": head_dim, "final_logit_softcapping": None,
        "attn_logit_softcapping": 0.0, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
        "bos_token_id": 0, "eos_token_id": 0, "torch_dtype": "float32",
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    matrix = functools.partial(checkpoint.matrix, generator)
    # Norms add 1 to their weights, and embeddings are scaled by the root of the hidden size.
    weights = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "model.norm.weight": torch.zeros(HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            # What layers add must outweigh the token itself: its embedding is what it is compared with in the end.
            weights[f"{prefix}.{norm}_layernorm.weight"] = torch.full(
                (HIDDEN,), 3.0 if norm.startswith("post") else 0.0
            )
        weights |= {
            # Scores peaked enough that tokens far away matter.
            f"{prefix}.self_attn.q_proj.weight": matrix(HEADS * head_dim, HIDDEN, gain=2.0),
            f"{prefix}.self_attn.k_proj.weight": matrix(KV_HEADS * head_dim, HIDDEN, gain=2.0),
            f"{prefix}.self_attn.v_proj.weight": matrix(KV_HEADS * head_dim, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * head_dim),
            f"{prefix}.mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": matrix(INNER, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": matrix(HIDDEN, INNER),
        }
    return checkpoint.save(folder, tokenizer, config, weights)
