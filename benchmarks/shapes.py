"""Writes folders with the shape of real models, for servers with random weights (`--load-format dummy`):

    python benchmarks/shapes.py qwen3-8b gpt-oss-20b     # ./qwen3-8b and ./gpt-oss-20b
    python benchmarks/shapes.py                          # what there is

A folder has the model's configuration, as its makers published it, and a tokenizer in which a word is a token: text that a benchmark makes of N
random tokens is N tokens again. No weights, and no vocabulary of the model's. For Qwen 3.5 transformers takes that model's own code whatever the folder
says, which knows none of these words: serve that shape to benchmarks that send ids (agentic.py, serving.py's trace), and
with --skip-server-warmup, which agentic.py gives itself: SGLang's own first request is text, which has no token there (0.5.23 ended in its experts'
kernel at the first prefill).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

WORDS = 20_000
"""Tokens that the tokenizer has; no more than any model's vocabulary."""

COMMON = {
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": False,
}
GQA_8 = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "rms_norm_eps": 1e-6,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": 14336, "vocab_size": 128_256,
    "max_position_embeddings": 8192, "rope_theta": 5e5, **GQA_8, "rms_norm_eps": 1e-5,
}  # fmt: skip
MLA = {
    "hidden_size": 2048, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "first_k_dense_replace": 1, "n_routed_experts": 64, "n_group": 1,
    "topk_group": 1, "attention_bias": False,
}  # fmt: skip
V2_LITE = {
    **MLA, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_hidden_layers": 27, "intermediate_size": 10_944,
    "moe_intermediate_size": 1408, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_layer_freq": 1, "topk_method": "greedy",
    "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0, "num_attention_heads": 16, "num_key_value_heads": 16,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "v_head_dim": 128, "vocab_size": 102_400, "max_position_embeddings": 163_840,
    "rope_theta": 10_000, "rms_norm_eps": 1e-6,
    "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
                     "original_max_position_embeddings": 4096},
}  # fmt: skip
V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 36, "intermediate_size": 12_288,
        "vocab_size": 151_936, "max_position_embeddings": 40_960, "rope_theta": 1e6, **GQA_8,
    },
    "llama3-8b": {**LLAMA, "num_hidden_layers": 32},
    "llama3.1-70b-tp8": {
        **LLAMA, "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 1,
        "max_position_embeddings": 131_072,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    },
    "qwen3-8b-eagle": {
        **LLAMA, "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1, "intermediate_size": 12_288,
        "vocab_size": 151_936, "max_position_embeddings": 40_960, "rope_theta": 1e6,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960, "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
    },
    "qwen3.5-35b-a3b": {
        "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "num_hidden_layers": 40, "hidden_size": 2048,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10, "full_attention_interval": 4, "attn_output_gate": True,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "mtp_num_hidden_layers": 1,
        "vocab_size": 248_320, "max_position_embeddings": 262_144, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_hidden_layers": 24, "hidden_size": 2880,
        "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "swiglu_limit": 7.0,
        "attention_bias": True, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "vocab_size": 201_088, "max_position_embeddings": 131_072,
        "rope_theta": 150_000, "rms_norm_eps": 1e-5,
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                         "original_max_position_embeddings": 4096},
    },
    "deepseek-v2-lite": V2_LITE,
    "deepseek-v2-lite-nextn": {**V2_LITE, **V3},
    "glm-4.7-flash": {
        **MLA, "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "num_hidden_layers": 47, "intermediate_size": 10_240,
        "moe_intermediate_size": 1536, "n_shared_experts": 1, "num_experts_per_tok": 4, "topk_method": "noaux_tc", "norm_topk_prob": True,
        "routed_scaling_factor": 1.8, "num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": 768, "qk_nope_head_dim": 192,
        "v_head_dim": 256, "vocab_size": 154_880, "max_position_embeddings": 202_752, "partial_rotary_factor": 1.0, "rope_scaling": None,
        "rope_theta": 1_000_000, "rms_norm_eps": 1e-5,
    },
}  # fmt: skip
"""By the configurations on the models' own pages, but for `qwen3-8b-eagle`, a draft of one layer for `qwen3-8b`; `llama3.1-70b-tp8`, what tensor parallelism
leaves of Llama 3.1 70B on one of eight GPUs, with all of the vocabulary; and `deepseek-v2-lite-nextn`, a DeepSeek V3 as small as V2 Lite, which brings a draft."""


IDS_ONLY = {"qwen3.5-35b-a3b"}
"""Shapes whose tokenizer makes no tokens of text."""


def write(name: str, folder: Path) -> Path:
    """Write the shape `name`, one of SHAPES, to `folder`; returns it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    end = "<|endoftext|>"
    words = {end: 0, **{f"w{number}": number for number in range(1, WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir(parents=True, exist_ok=True)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**COMMON, **SHAPES[name]}, indent=1))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE")
    names = parser.parse_args().shapes
    for name in names:
        if name not in SHAPES:
            parser.error(f"{name} is none of {', '.join(SHAPES)}")
    print("\n".join([str(write(name, Path(name))) for name in names] or SHAPES))


if __name__ == "__main__":
    main()
