"""A tiny EAGLE draft with random weights for the tiny model (SGLang: models/llama_eagle.py)."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import checkpoint
import torch
from safetensors.torch import save_file

from sglang_pat.demo.tiny_model import SHAPE, VOCAB


def write(folder: Path, target: Path, head_dim: int = SHAPE["head_dim"]) -> Path:
    """Write it to `folder`, with the tokenizer of `target`."""
    shutil.copytree(target, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    config = {
        "architectures": ["LlamaForCausalLMEagle"], "model_type": "llama", "vocab_size": VOCAB, "hidden_act": "silu",
        "max_position_embeddings": 8192, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "torch_dtype": "float32", "bos_token_id": 0,
        "eos_token_id": 0, "tie_word_embeddings": False, **SHAPE, "num_hidden_layers": 1, "head_dim": head_dim,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    hidden, inner, dim = SHAPE["hidden_size"], SHAPE["intermediate_size"], head_dim
    heads, kv_heads = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]
    generator = torch.Generator().manual_seed(1)
    matrix = functools.partial(checkpoint.matrix, generator)
    weights = {
        "embed_tokens.weight": matrix(VOCAB, hidden),
        "fc.weight": matrix(hidden, 2 * hidden),
        "fc.bias": torch.zeros(hidden),
        "layers.0.post_attention_layernorm.weight": torch.ones(hidden),
        "layers.0.self_attn.q_proj.weight": matrix(heads * dim, hidden),
        "layers.0.self_attn.k_proj.weight": matrix(kv_heads * dim, hidden),
        "layers.0.self_attn.v_proj.weight": matrix(kv_heads * dim, hidden),
        "layers.0.self_attn.o_proj.weight": matrix(hidden, heads * dim),
        "layers.0.mlp.gate_proj.weight": matrix(inner, hidden),
        "layers.0.mlp.up_proj.weight": matrix(inner, hidden),
        "layers.0.mlp.down_proj.weight": matrix(hidden, inner),
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
