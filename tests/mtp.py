"""A tiny MiMo-shaped model with random weights that brings its own draft, a head for the token after the next (SGLang: models/mimo.py, mimo_mtp.py).

A token says much about the next one: layers add less to it than they do in the tiny model. The head looks at little else, so many of its drafts
are accepted, and many are not.
"""

from __future__ import annotations

import functools
from pathlib import Path

import checkpoint
import torch
from transformers import AutoTokenizer

from sglang_pat.demo.tiny_model import PRINTABLE, SHAPE, VOCAB

GAIN = 0.4
"""How much a layer adds. With this some two steps in five accept drafts; answers still differ with each prompt."""

LOGITS = 3.0
"""Spread of the logits: wide enough that near-ties are rare (near_ties.py)."""


def write(folder: Path, tokenizer: Path, head_dim: int = SHAPE["head_dim"]) -> Path:
    """Write config, weights (float32) and the tokenizer of another model to `folder`; returns it."""
    hidden, inner, kv_heads = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["num_key_value_heads"]
    heads = hidden // head_dim  # SGLang's Qwen 2 computes the one from the other
    config = {
        # Its layers are Qwen 2's. The real model brings a class of its configuration that says no more than this.
        "architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "vocab_size": VOCAB, "hidden_act": "silu",
        "num_nextn_predict_layers": 1, "max_position_embeddings": 8192, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
        "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False, **SHAPE,
        "num_attention_heads": heads, "head_dim": head_dim,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    matrix = functools.partial(checkpoint.matrix, generator)

    def layer(prefix: str, gain: float) -> dict[str, torch.Tensor]:
        """Weights of a layer that adds so much to what comes in."""
        biases = {
            f"{prefix}.self_attn.{name}_proj.bias": torch.randn(count * head_dim, generator=generator) * 0.1
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        }
        return biases | {
            f"{prefix}.input_layernorm.weight": torch.ones(hidden),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden),
            # Scores peaked enough that tokens far away matter.
            f"{prefix}.self_attn.q_proj.weight": matrix(heads * head_dim, hidden, gain=2.0),
            f"{prefix}.self_attn.k_proj.weight": matrix(kv_heads * head_dim, hidden, gain=2.0),
            f"{prefix}.self_attn.v_proj.weight": matrix(kv_heads * head_dim, hidden),
            f"{prefix}.self_attn.o_proj.weight": matrix(hidden, heads * head_dim, gain),
            f"{prefix}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{prefix}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{prefix}.mlp.down_proj.weight": matrix(hidden, inner, gain),
        }

    weights = {
        "model.embed_tokens.weight": torch.randn(VOCAB, hidden, generator=generator),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": matrix(VOCAB, hidden, gain=LOGITS),
    }
    # As in the tiny model, only what can be printed is generated.
    tokens = AutoTokenizer.from_pretrained(tokenizer).convert_ids_to_tokens(range(VOCAB))
    weights["lm_head.weight"][[token not in PRINTABLE for token in tokens]] = 0
    for number in range(SHAPE["num_hidden_layers"]):
        weights |= layer(f"model.layers.{number}", GAIN)
    head = "model.mtp_layers.0"
    weights |= layer(head, 0.1) | {
        f"{head}.{norm}_layernorm.weight": torch.ones(hidden) for norm in ("token", "hidden", "final")
    }
    weights[f"{head}.input_proj.weight"] = torch.cat([matrix(hidden, hidden, gain=0.1), torch.eye(hidden)], dim=1)
    return checkpoint.save(folder, tokenizer, config, weights)
