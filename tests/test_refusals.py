"""What PAT does not serve yet is refused by a real server at start-up, in one sentence with the way out.

Flags are refused before anything starts, and settings when they are read: tests/test_platform.py, tests/test_config.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import selected
from forked import ForkedServer

from sglang_pat import compat

pytestmark = pytest.mark.server

BASE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "bos_token_id": 0, "eos_token_id": 0, "torch_dtype": "float32",
}  # fmt: skip

MODELS: dict[str, dict[str, Any]] = {
    "sparse attention": {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v3",
        "index_topk": 64,
        "index_head_dim": 16,
        "index_n_heads": 2,
        "hidden_act": "silu",
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 2,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 256,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "images": {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "image_token_index": 5,
        "boi_token_index": 6, "eoi_token_index": 7, "mm_tokens_per_image": 4,
        "text_config": {
            **BASE, "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 64,
            "sliding_window_pattern": 2, "query_pre_attn_scalar": 16, "rope_local_base_freq": 1e4,
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": 56, "patch_size": 14,
        },
    },
    "windows": {
        "architectures": ["MellumForCausalLM"], "model_type": "mellum", "hidden_act": "silu", "head_dim": 32, "attention_bias": False,
        "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"], "mlp_layer_types": ["dense", "dense"],
        "moe_intermediate_size": 64, "num_experts": 2, "num_experts_per_tok": 1, "norm_topk_prob": True,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("sliding_attention", "full_attention")},
    },
    "head dimension": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "head_dim": 12, "hidden_size": 48,
    },
}  # fmt: skip

PREPROCESSOR = {
    "processor_class": "Gemma3Processor",
    "image_processor_type": "Gemma3ImageProcessor",
    "size": {"height": 56, "width": 56},
}

TOKENS = {
    "extra_special_tokens": {"image_token": "<|unused300|>", "boi_token": "<|unused301|>", "eoi_token": "<|unused302|>"}
}

CASES: dict[str, tuple[str | None, list[str], dict[str, str], str]] = {
    "sparse attention": ("sparse attention", [], {}, "does not support sparse attention (DSA), which DeepseekV32ForCausalLM uses: leave it out, and SGLang chooses another one"),
    "images": ("images", ["--enable-multimodal"], {}, "pat does not support attention in both directions within an image, which Gemma3ForConditionalGeneration uses"),
    "windows in 4 bits": ("windows", [], {"SGLANG_PAT_KV": "int4"},
        "does not support windows with a KV cache of int4" if compat.arguments.has_one_pool() else
        "does not support a KV cache of int4 (SGLANG_PAT_KV) where SGLang or another plugin keeps KV in pools of another kind, as SGLang does for windows: unset it"),
    "head dimension": ("head dimension", [], {}, "--attention-backend pat does not support a head dimension of 12 (multiples of 8 up to 256 are), which LlamaForCausalLM uses: serve it"),
}  # fmt: skip


@pytest.fixture(scope="module")
def logs(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future]]:
    """The logs of all servers, which end by themselves; two run at a time."""
    folder = tmp_path_factory.mktemp("refusals")

    def start(name: str, kind: str | None, flags: list[str], environment: dict[str, str]) -> str:
        path = model
        if kind is not None:
            path = folder / name.replace(" ", "-")
            path.mkdir()
            (path / "config.json").write_text(json.dumps(BASE | MODELS[kind]))
            (path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
            for file in model.glob("token*"):
                (path / file.name).write_text(file.read_text())
            tokenizer = json.loads((path / "tokenizer_config.json").read_text())
            (path / "tokenizer_config.json").write_text(json.dumps(tokenizer | TOKENS))
            flags = [*flags, "--load-format", "dummy"]
        with ForkedServer(
            path, "pat", folder / f"{name}.log", ["--max-total-tokens", "512", *flags], environment
        ) as server:
            return server.wait_failed()

    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(start, name, *CASES[name][:3]) for name in selected(request, "name")}


@pytest.mark.parametrize("name", CASES)
def test_refused_in_one_sentence(name: str, logs: dict[str, Future]) -> None:
    log = logs[name].result()
    assert any(CASES[name][3] in line for line in log.splitlines()), log[-3000:]
