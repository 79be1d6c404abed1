"""A tiny EAGLE3 draft with random weights for models of the tiny one's width (SGLang: models/llama_eagle3.py). It sees what three layers of the
model make of a token, and proposes only some of the vocabulary."""

from __future__ import annotations

import functools
from pathlib import Path

import checkpoint
import torch

from sglang_pat.demo.tiny_model import SHAPE, VOCAB

LAYERS = [0, 1, 2]
"""The model's layers whose outputs it sees. SGLang's default (`set_eagle3_layers_to_capture`) needs more layers than the tiny models have."""

PROPOSED = range(33, 161)
"""Ids of the model's vocabulary that it may propose; not from 0 on, so that its own ids are others."""


def write(folder: Path, target: Path, head_dim: int = SHAPE["head_dim"]) -> Path:
    """Write it to `folder`, with the tokenizer of `target`; returns it."""
    hidden, inner, dim = SHAPE["hidden_size"], SHAPE["intermediate_size"], head_dim
    heads, kv_heads = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": VOCAB, "hidden_act": "silu",
        "draft_vocab_size": len(PROPOSED), "eagle_config": {"eagle_aux_hidden_state_layer_ids": LAYERS},
        "max_position_embeddings": 8192, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "torch_dtype": "float32", "bos_token_id": 0,
        "eos_token_id": 0, "tie_word_embeddings": False, **SHAPE, "num_hidden_layers": 1, "head_dim": dim,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    matrix = functools.partial(checkpoint.matrix, generator)
    proposed = torch.tensor(PROPOSED)
    weights = {
        "fc.weight": matrix(hidden, len(LAYERS) * hidden),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "midlayer.post_attention_layernorm.weight": torch.ones(hidden),
        "midlayer.self_attn.q_proj.weight": matrix(heads * dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": matrix(kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": matrix(kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": matrix(hidden, heads * dim),
        "midlayer.mlp.gate_proj.weight": matrix(inner, hidden),
        "midlayer.mlp.up_proj.weight": matrix(inner, hidden),
        "midlayer.mlp.down_proj.weight": matrix(hidden, inner),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": matrix(len(PROPOSED), hidden),
        # What to add to its ids, and which ids of the model it has.
        "d2t": proposed - torch.arange(len(PROPOSED)),
        "t2d": torch.isin(torch.arange(VOCAB), proposed),
    }
    return checkpoint.save(folder, target, config, weights)
