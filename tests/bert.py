"""A tiny BERT with random weights: every token sees all of its text, and the first one's output is the embedding."""

from __future__ import annotations

import functools
from pathlib import Path

import checkpoint
import torch

VOCAB, HIDDEN, INNER, LAYERS, HEADS, POSITIONS = 512, 128, 256, 3, 4, 512


def write(folder: Path, tokenizer: Path) -> Path:
    """Write config, weights (float32) and the tokenizer of another model to `folder`; returns it."""
    config = {
        "architectures": ["BertModel"], "model_type": "bert", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_act": "gelu",
        "max_position_embeddings": POSITIONS, "type_vocab_size": 2, "layer_norm_eps": 1e-6,
        "position_embedding_type": "absolute", "pad_token_id": 0, "torch_dtype": "float32",
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    layer = functools.partial(checkpoint.linear, generator)

    def norm(name: str) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": torch.ones(HIDDEN), f"{name}.bias": torch.zeros(HIDDEN)}

    rows = {"word": VOCAB, "position": POSITIONS, "token_type": 2}
    weights = {
        f"embeddings.{name}_embeddings.weight": torch.randn(size, HIDDEN, generator=generator)
        for name, size in rows.items()
    }
    weights |= norm("embeddings.LayerNorm")
    for number in range(LAYERS):
        prefix = f"encoder.layer.{number}"
        # Scores peaked enough, and values large enough, that every token matters.
        weights |= {
            **layer(f"{prefix}.attention.self.query", HIDDEN, HIDDEN, 2.0),
            **layer(f"{prefix}.attention.self.key", HIDDEN, HIDDEN, 2.0),
            **layer(f"{prefix}.attention.self.value", HIDDEN, HIDDEN, 4.0),
            **layer(f"{prefix}.attention.output.dense", HIDDEN, HIDDEN),
            **norm(f"{prefix}.attention.output.LayerNorm"),
            **layer(f"{prefix}.intermediate.dense", INNER, HIDDEN), **layer(f"{prefix}.output.dense", HIDDEN, INNER),
            **norm(f"{prefix}.output.LayerNorm"),
        }  # fmt: skip
    return checkpoint.save(folder, tokenizer, config, weights)
