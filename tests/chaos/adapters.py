"""LoRA adapters with random weights for the tiny model, strong enough that answers depend on them."""

from __future__ import annotations

import json
from pathlib import Path

from sglang_pat.demo.tiny_model import SHAPE

RANK = 8
TARGETS = ("q_proj", "v_proj")


def write(folder: Path, seed: int, head_dim: int = SHAPE["head_dim"]) -> Path:
    """Write an adapter in PEFT's format for `tiny_model.write(…, head_dim=head_dim)`; returns `folder`."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny",
        "r": RANK, "lora_alpha": 2 * RANK, "target_modules": TARGETS, "bias": "none",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    hidden = SHAPE["hidden_size"]
    outputs = dict(zip(TARGETS, (SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]), strict=True))
    weights = {}
    for layer in range(SHAPE["num_hidden_layers"]):
        for target, heads in outputs.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{target}"
            weights[f"{name}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator) * hidden**-0.5
            weights[f"{name}.lora_B.weight"] = torch.randn(heads * head_dim, RANK, generator=generator) * RANK**-0.5
    save_file(weights, folder / "adapter_model.safetensors")
    return folder
