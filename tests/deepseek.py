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


def write(folder: Path, tokenizer: Path, **config: Any) -> Path:
    """Write config, weights (float32) and the tokenizer of another model to `folder`; returns it. `config` changes entries of CONFIG."""
    matrix = functools.partial(checkpoint.matrix, torch.Generator().manual_seed(0))
    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN, gain=HIDDEN**0.5), "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": matrix(VOCAB, HIDDEN, gain=2.0),
    }  # fmt: skip
    # As in the tiny model, only what can be printed is generated.
    tokens = AutoTokenizer.from_pretrained(tokenizer).convert_ids_to_tokens(range(VOCAB))
    weights["lm_head.weight"][[token not in PRINTABLE for token in tokens]] = 0
    for number in range(LAYERS):
        layer = {
            "input_layernorm.weight": torch.ones(HIDDEN),
            "post_attention_layernorm.weight": torch.ones(HIDDEN),
            # Scores peaked enough that tokens far away matter.
            "self_attn.q_proj.weight": matrix(HEADS * (NOPE + ROPE), HIDDEN, gain=2.0),
            "self_attn.kv_a_proj_with_mqa.weight": matrix(RANK + ROPE, HIDDEN, gain=2.0),
            "self_attn.kv_a_layernorm.weight": torch.full((RANK,), 1.5),
            "self_attn.kv_b_proj.weight": matrix(HEADS * (NOPE + V_DIM), RANK),
            "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * V_DIM, gain=4.0),
            "mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            "mlp.up_proj.weight": matrix(INNER, HIDDEN),
            "mlp.down_proj.weight": matrix(HIDDEN, INNER),
        }
        weights |= {f"model.layers.{number}.{name}": weight for name, weight in layer.items()}
    return checkpoint.save(folder, tokenizer, CONFIG | config, weights)


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
