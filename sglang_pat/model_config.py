"""Reads a model's config.json."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LONGEST = 1 << 24
"""The most bytes of a config.json that are read: they have some kilobytes, and nested lists take 44 times as much memory (88 bytes for
two brackets: `tracemalloc` around `json.loads`, Python 3.11)."""

INNER = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where the language model's part is, in config.json of a multimodal one."""

DEFAULTS = {
    "cohere2": {"sliding_window_pattern": 4},
    "gemma2": {"head_dim": 256, "sliding_window_pattern": 2},
    "gemma3_text": {
        "head_dim": 256, "sliding_window_pattern": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208,
    },
    "nemotron_h": {"head_dim": 128},
    "olmo3": {"sliding_window_pattern": 4},
    "qwen3_next": {"head_dim": 256, "full_attention_interval": 4},
    "qwen3_5_text": {"head_dim": 256, "full_attention_interval": 4},
    "qwen3_5_moe_text": {"head_dim": 256, "full_attention_interval": 4},
}  # fmt: skip
"""What config.json may leave out: the defaults of transformers for each `model_type`."""

LATENTS_ON_GPUS = True
"""Whether servers on GPUs decode latents (MLA) by plan; False refuses them at start, in one sentence, and changes nothing else."""

STATES = ("linear_attention", "mamba", "mamba2", "conv", "recurrent")
"""Kinds of layers that have states in place of KV."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)


class ModelError(ValueError):
    """There is no config.json; the message says what is there instead."""


def find(name: str) -> Path:
    """The config.json of a model's folder, or of a name in the cache of Hugging Face. Nothing is downloaded.

    Raises:
        ModelError: There is none.
    """
    path = Path(name)
    try:
        if path.is_dir():
            return path / "config.json"
        if os.path.lexists(path) or not _HUB_NAME.fullmatch(name):
            return path
    except (OSError, ValueError):
        return path
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json")
    except Exception as error:  # it may be missing, or refuse the name, in any way
        raise ModelError(f"{name} is no folder here, and the cache of Hugging Face cannot be read: {error}") from None
    if isinstance(found, str):
        return Path(found)
    raise ModelError(
        f"{name} is neither a folder here nor in the cache of Hugging Face, and nothing is downloaded: `hf download {name} config.json` is enough, or give the model's folder"
    )


def read(path: Path) -> dict[str, Any]:
    """The config.json at a path that `find` returned.

    Raises:
        ModelError: There is none.
    """
    try:
        # Opening a pipe would wait for a writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ModelError(f"{path} is not a file")
            data = file.read(LONGEST + 1)
        if len(data) > LONGEST:
            raise ModelError(f"{path} is too long for a model's config.json: more than {LONGEST >> 20} MiB")
        config = json.loads(data)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except ModelError:
        raise
    except (ValueError, RecursionError):
        raise ModelError(f"{path} is not a model's config.json: not JSON") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} is not a model's config.json: not a JSON object")
    return config


def language_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a config.json that describes the language model, with defaults of transformers."""
    inner = dict(config)
    for _ in INNER:
        inner = next((inner[name] for name in INNER if isinstance(inner.get(name), dict) and inner[name]), inner)
    return {**DEFAULTS.get(str(inner.get("model_type")), {}), **inner}


def is_hybrid(model: Mapping[str, Any]) -> bool:
    """Whether some layers of what `language_model` returns have states in place of KV."""
    for name in ("layer_types", "layers_block_type"):
        kinds = model.get(name)
        if isinstance(kinds, list) and any(kind in STATES for kind in kinds if isinstance(kind, str)):
            return True
    others = ("hybrid_override_pattern", "full_attention_interval", "full_attn_idxs", "linear_attn_config")
    return any(model.get(name) for name in others)


def latents_problem(model: Mapping[str, Any], on_gpu: bool) -> str | None:
    """What keeps the latents of an MLA model from being read; None if nothing does, or if it is no MLA model.

    Args:
        model: What `language_model` returns.
        on_gpu: Whether it shall be served on a GPU.
    """
    if model.get("kv_lora_rank") is None:
        return None
    if model.get("index_topk") is not None:
        return "sparse attention (DSA)"
    if model.get("swa_kv_lora_rank") is not None:
        return "MLA with sliding windows"
    if on_gpu:
        problems = {
            "MLA in hybrid models": is_hybrid(model),
            # SGLang multiplies Q by it only where it passes Q whole (forward_mla.py, `forward_absorb_core`).
            "MLA with scaling by position (Mistral Large 3)": model.get("llama_4_scaling") is not None,
            "MLA on a GPU": not LATENTS_ON_GPUS,
        }
        return next((problem for problem, holds in problems.items() if holds), None)
    # SGLang's `get_rope_cpu`, which only DeepSeek's code calls, has no other positions.
    rope = model.get("rope_scaling") or model.get("rope_parameters")
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, Mapping) else None
    if str(model.get("model_type")).startswith(("deepseek", "kimi_k2")) and kind not in ("yarn", "deepseek_yarn"):
        return "DeepSeek's attention without YaRN on a CPU, where SGLang has no other positions for it,"
    return None
