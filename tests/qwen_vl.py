"""A tiny Qwen2-VL-shaped model with random weights: it sees images, and answers depend on them."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import checkpoint
import torch
from safetensors.torch import load_file, save_file

from sglang_pat.demo import tiny_model

DEPTH, WIDTH, HEADS, PATCH = 2, 64, 2, 14
SPECIALS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
"""What stands for an image in a prompt."""

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}" + IMAGE + "{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}[assistant] "
)


def write(folder: Path, text_model: Path) -> Path:
    """Write config, weights (float32), tokenizer and processor to `folder`; returns it.

    Args:
        folder: To be made.
        text_model: A folder of `tiny_model`, whose weights and tokenizer it has too.
    """
    folder.mkdir()
    for file in text_model.glob("token*"):
        shutil.copy(file, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"pad_token": settings["eos_token"]}))
    ids = _name_specials(folder / "tokenizer.json")
    base = json.loads((text_model / "config.json").read_text())
    head_dim, hidden = base["head_dim"], base["hidden_size"]
    config = base | {
        "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl",
        "vision_start_token_id": ids[0], "vision_end_token_id": ids[1], "vision_token_id": ids[2],
        "image_token_id": ids[3], "video_token_id": ids[4],
        "rope_scaling": {"type": "mrope", "mrope_section": [head_dim // 8, head_dim * 3 // 16, head_dim * 3 // 16]},
        "vision_config": {
            "depth": DEPTH, "embed_dim": WIDTH, "hidden_size": hidden, "num_heads": HEADS, "mlp_ratio": 2, "in_chans": 3,
            "in_channels": 3, "patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "spatial_patch_size": PATCH,
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(
        json.dumps({
            "processor_class": "Qwen2VLProcessor", "image_processor_type": "Qwen2VLImageProcessor", "patch_size": PATCH,
            "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 3136, "max_pixels": 12845056,
        })
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    layer = functools.partial(checkpoint.linear, generator)

    def norm(name: str) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": torch.ones(WIDTH), f"{name}.bias": torch.zeros(WIDTH)}

    weights = load_file(text_model / "model.safetensors")
    # Qwen 2 has biases where Qwen 3 has norms.
    weights = {name: weight for name, weight in weights.items() if "_norm." not in name or "model.layers" not in name}
    for number in range(base["num_hidden_layers"]):
        for name in ("q_proj", "k_proj", "v_proj"):
            projection = f"model.layers.{number}.self_attn.{name}"
            weights[f"{projection}.bias"] = torch.zeros(len(weights[f"{projection}.weight"]))
            if name != "v_proj":
                weights[f"{projection}.weight"] *= tiny_model.QK_NORM_GAIN
    # 3 colours of 2 frames.
    patch = torch.randn(WIDTH, 3, 2, PATCH, PATCH, generator=generator) * (3 * 2 * PATCH**2) ** -0.5
    weights["visual.patch_embed.proj.weight"] = patch
    for number in range(DEPTH):
        block = f"visual.blocks.{number}"
        weights |= {
            **norm(f"{block}.norm1"), **norm(f"{block}.norm2"), **layer(f"{block}.attn.qkv", 3 * WIDTH, WIDTH),
            **layer(f"{block}.attn.proj", WIDTH, WIDTH), **layer(f"{block}.mlp.fc1", 2 * WIDTH, WIDTH),
            **layer(f"{block}.mlp.fc2", WIDTH, 2 * WIDTH),
        }  # fmt: skip
    weights |= norm("visual.merger.ln_q")
    weights |= layer("visual.merger.mlp.0", 4 * WIDTH, 4 * WIDTH) | layer("visual.merger.mlp.2", hidden, 4 * WIDTH, 2.0)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _name_specials(path: Path) -> list[int]:
    """Give unused tokens of a tokenizer the names of SPECIALS; returns their ids."""
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    ids = []
    for name in SPECIALS:
        unused = next(token for token in vocabulary if token.startswith("<|unused"))
        vocabulary[name] = vocabulary.pop(unused)
        ids.append(vocabulary[name])
        tokenizer["added_tokens"].append({
            "id": ids[-1], "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": True,
        })  # fmt: skip
    path.write_text(json.dumps(tokenizer))
    return ids


if __name__ == "__main__":
    import sys

    print(write(Path(sys.argv[1]), tiny_model.write(Path(sys.argv[1] + "-text"))))
