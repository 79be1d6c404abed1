"""A tiny DeepSeek-V2-shaped model (MLA) with random weights: all heads read one latent of 64 numbers, beside 16 that know the position. All its layers are
dense: no expert is needed to test attention."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import checkpoint
import torch
from transformers import AutoTokenizer

from sglang_pat.demo.tiny_model import PRINTABLE, VOCAB

HIDDEN, INNER, LAYERS, HEADS = 256, 512, 3, 4
RANK, ROPE, NOPE, V_DIM = 64, 16, 32, 32

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_act": "silu", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": None,
    "kv_lora_rank": RANK, "qk_rope_head_dim": ROPE, "qk_nope_head_dim": NOPE, "v_head_dim": V_DIM, "attention_bias": False,
    "first_k_dense_replace": LAYERS, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "moe_layer_freq": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": False,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "bos_token_id": 0, "eos_token_id": 0,
    "tie_word_embeddings": False, "torch_dtype": "float32",
    # SGLang has no other positions for these models on a CPU. The scores keep their scale, which transformers 5.12 does not change where SGLang does.
    "rope_scaling": {
        "type": "yarn", "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 0.0, "mscale_all_dim": 0.0, "attention_factor": 1.0,
    },
}  # fmt: skip


V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "first_k_dense_replace": LAYERS - 1, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "num_nextn_predict_layers": 1,
}  # fmt: skip
"""Entries that make it one of DeepSeek V3's shape: its last layer has experts, and it brings a draft (NEXTN) of one more such layer."""

OF_GPUS: dict[str, Any] = {
    "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "hidden_size": 1280,
}  # fmt: skip
"""Entries that give it the heads of DeepSeek V2 Lite, which the CUDA kernels have. Transformers wants a multiple of 16, 20 and 64 heads, SGLang's kernel for
drafts one of 256."""


def write(folder: Path, tokenizer: Path, gain: float = 4.0, **config: Any) -> Path:
    """Write config, weights (float32) and the tokenizer of another model to `folder`; returns it.

    Args:
        folder: Is made.
        tokenizer: A model's folder.
        gain: How much attention adds; a draft finds more tokens where that is little.
        config: Changes entries of CONFIG.
    """
    config = CONFIG | config
    names = "hidden_size", "num_attention_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"
    hidden, heads, rank, rope, nope, v_dim = (config[name] for name in names)
    matrix = functools.partial(checkpoint.matrix, torch.Generator().manual_seed(0))

    def mlp(name: str, inner: int) -> dict[str, torch.Tensor]:
        return {
            f"{name}.gate_proj.weight": matrix(inner, hidden),
            f"{name}.up_proj.weight": matrix(inner, hidden),
            f"{name}.down_proj.weight": matrix(hidden, inner),
        }

    def experts(name: str) -> dict[str, torch.Tensor]:
        count, inner = config["n_routed_experts"], config["moe_intermediate_size"]
        gate = {
            f"{name}.gate.weight": matrix(count, hidden),
            f"{name}.gate.e_score_correction_bias": torch.zeros(count),
        }
        one_each = [mlp(f"{name}.experts.{expert}", inner) for expert in range(count)]
        return functools.reduce(dict.__or__, [gate, *one_each, mlp(f"{name}.shared_experts", inner)])

    def layer(name: str, gain: float, routed: bool) -> dict[str, torch.Tensor]:
        """Weights of a layer whose attention adds so much to what comes in."""
        found = {
            "input_layernorm.weight": torch.ones(hidden),
            "post_attention_layernorm.weight": torch.ones(hidden),
            # Scores peaked enough that tokens far away matter.
            "self_attn.q_proj.weight": matrix(heads * (nope + rope), hidden, gain=2.0),
            "self_attn.kv_a_proj_with_mqa.weight": matrix(rank + rope, hidden, gain=2.0),
            "self_attn.kv_a_layernorm.weight": torch.full((rank,), 1.5),
            "self_attn.kv_b_proj.weight": matrix(heads * (nope + v_dim), rank),
            "self_attn.o_proj.weight": matrix(hidden, heads * v_dim, gain),
            **(experts("mlp") if routed else mlp("mlp", INNER)),
        }
        return {f"{name}.{part}": weight for part, weight in found.items()}

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, hidden, gain=hidden**0.5), "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": matrix(VOCAB, hidden, gain=2.0),
    }  # fmt: skip
    # As in the tiny model, only what can be printed is generated.
    tokens = AutoTokenizer.from_pretrained(tokenizer).convert_ids_to_tokens(range(VOCAB))
    weights["lm_head.weight"][[token not in PRINTABLE for token in tokens]] = 0
    for number in range(LAYERS):
        weights |= layer(f"model.layers.{number}", gain, number >= config["first_k_dense_replace"])
    if config.get("num_nextn_predict_layers"):
        # It looks at the last token, which says much about the next one, more than at the model's last state.
        draft = f"model.layers.{LAYERS}"
        weights |= layer(draft, 0.1, True) | {
            f"{draft}.{norm}.weight": torch.ones(hidden) for norm in ("enorm", "hnorm", "shared_head.norm")
        }
        weights[f"{draft}.eh_proj.weight"] = torch.cat([torch.eye(hidden), matrix(hidden, hidden, gain=0.1)], dim=1)
    return checkpoint.save(folder, tokenizer, config, weights)


@torch.inference_mode()
def greedy(model: Path, prompts: list[str], tokens: int) -> list[list[int]]:
    """The answers of transformers, which makes K and V of the latents: greedy output ids."""
    from transformers import AutoModelForCausalLM

    encode = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        ids, cache, answer = torch.tensor([encode(prompt)["input_ids"]]), None, []
        for _ in range(tokens):
            found = loaded(ids, past_key_values=cache, use_cache=True)
            cache, ids = found.past_key_values, found.logits[:, -1:].argmax(-1)
            answer.append(ids.item())
        answers.append(answer)
    return answers
