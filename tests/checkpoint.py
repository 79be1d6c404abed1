"""How the tests' models are written: SGLang's files of a model folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def matrix(generator: torch.Generator, rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
    """A random one, [rows, columns], by which entries grow `gain` times on average."""
    return torch.randn(rows, columns, generator=generator) * gain * columns**-0.5


def linear(
    generator: torch.Generator, name: str, rows: int, columns: int, gain: float = 1.0, bias: float = 0.0
) -> dict[str, torch.Tensor]:
    """Weight and bias of a layer, whose biases are of size `bias` on average."""
    weight = matrix(generator, rows, columns, gain)
    biases = torch.randn(rows, generator=generator) * bias if bias else torch.zeros(rows)
    return {f"{name}.weight": weight, f"{name}.bias": biases}


def save(folder: Path, tokenizer: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    """Make `folder` of a config, weights and the tokenizer of another model; returns it."""
    folder.mkdir()
    for file in tokenizer.glob("token*"):
        shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
