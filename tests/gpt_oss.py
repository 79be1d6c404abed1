"""A tiny gpt-oss-shaped model with random weights: attention sinks, experts, and windows in every second layer."""

from __future__ import annotations

import functools
from pathlib import Path

import checkpoint
import torch

VOCAB, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, EXPERTS = 512, 256, 256, 4, 8, 2, 64, 4


def write(folder: Path, tokenizer: Path, window: int) -> Path:
    """Write config, weights (bfloat16) and the tokenizer of another model to `folder`; returns it."""
    config = {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_act": "silu", "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "sliding_window": window, "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2, "experts_per_token": 2, "swiglu_limit": 7.0, "attention_bias": True,
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2), "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "rope_scaling": None, "bos_token_id": 0, "eos_token_id": 0,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * gain

    linear = functools.partial(checkpoint.linear, generator, bias=0.1)
    weights = {
        "model.embed_tokens.weight": random(VOCAB, HIDDEN), "lm_head.weight": random(VOCAB, HIDDEN, gain=HIDDEN**-0.5),
        "model.norm.weight": torch.ones(HIDDEN),
    }  # fmt: skip
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": torch.full((HIDDEN,), 2.0),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            **linear(f"{prefix}.self_attn.q_proj", HEADS * HEAD_DIM, HIDDEN),
            **linear(f"{prefix}.self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            **linear(f"{prefix}.self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN),
            **linear(f"{prefix}.self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM),
            # Some take nothing of a query's weight, some nearly all of it.
            f"{prefix}.self_attn.sinks": torch.linspace(-2, 9, HEADS),
            **linear(f"{prefix}.mlp.router", EXPERTS, HIDDEN),
            f"{prefix}.mlp.experts.gate_up_proj": random(EXPERTS, HIDDEN, 2 * INNER, gain=HIDDEN**-0.5),
            f"{prefix}.mlp.experts.gate_up_proj_bias": random(EXPERTS, 2 * INNER, gain=0.1),
            f"{prefix}.mlp.experts.down_proj": random(EXPERTS, INNER, HIDDEN, gain=INNER**-0.5),
            f"{prefix}.mlp.experts.down_proj_bias": random(EXPERTS, HIDDEN, gain=0.1),
        }
    weights = {name: weight.bfloat16() for name, weight in weights.items()}
    return checkpoint.save(folder, tokenizer, config, weights)
