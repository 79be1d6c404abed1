"""Checkpoints with scales for an FP8 cache, as ModelOpt writes them, each with a twin that needs none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

# Powers of two, so that dividing by them is exact. They move much of K and V among the subnormal numbers, where an FP8 cache without
# scales keeps other values.
K_SCALES, V_SCALES = (64.0, 2.0, 32.0, 0.25), (0.125, 128.0, 8.0, 64.0)

QUANTIZATION = {
    "quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8",
    "kv_cache_scheme": {"type": "float", "num_bits": 8}, "ignore": ["*"],
}  # fmt: skip
"""Nothing but the cache is quantized."""


def write(folder: Path, model: Path) -> tuple[Path, Path]:
    """Write a Llama-shaped model with scales to `folder`, and its twin; returns both.

    Their weights are those of a tiny Qwen3 model (demo/tiny_model.py), of whose kind SGLang loads no scales. The twin's make K and V
    that are divided by the scales already, and a Q and an output projection that are multiplied by them: both have the same FP8 caches
    and the same logits, to the bit.
    """
    scaled, twin = folder / "scaled", folder / "twin"
    weights = load_file(model / "model.safetensors")
    for name in [name for name in weights if name.endswith(("q_norm.weight", "k_norm.weight"))]:
        gain = weights.pop(name)[0]
        weights[name.replace("norm", "proj")] *= gain
    scales = {
        f"model.layers.{layer}.self_attn.{name}_proj.{name}_scale": torch.tensor(value)
        for name, values in (("k", K_SCALES), ("v", V_SCALES))
        for layer, value in enumerate(values)
    }
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    _save(scaled, model, weights | scales, config | {"quantization_config": QUANTIZATION})
    for layer, (k_scale, v_scale) in enumerate(zip(K_SCALES, V_SCALES, strict=True)):
        prefix = f"model.layers.{layer}.self_attn"
        weights[f"{prefix}.k_proj.weight"] /= k_scale
        weights[f"{prefix}.q_proj.weight"] *= k_scale
        weights[f"{prefix}.v_proj.weight"] /= v_scale
        weights[f"{prefix}.o_proj.weight"] *= v_scale
    _save(twin, model, weights, config)
    return scaled, twin


def _save(folder: Path, model: Path, weights: dict[str, torch.Tensor], config: dict) -> None:
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
