"""Tiny models, with random weights, of families whose attention is nothing new, but whose code is their own. Where it can be, all layers are dense: no
expert is needed to test attention."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint
import torch

VOCAB, HIDDEN, INNER, LAYERS = 512, 256, 512, 3
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]

Weights = dict[str, torch.Tensor]
Matrix = Callable[..., torch.Tensor]

BASE: dict[str, Any] = {
    "hidden_act": "silu", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "moe_intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "attention_bias": False,
    "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip


def _save(
    folder: Path, tokenizer: Path, config: dict[str, Any], layer: Callable[[Matrix, int], Weights], scale: float = 1.0
) -> Path:
    """Write config, weights (float32) and the tokenizer of another model to `folder`; returns it.

    Args:
        folder, tokenizer, config: Of `checkpoint.save`; BASE is in the config too.
        layer: Weights of a layer by its number, from random matrices.
        scale: Weight of the last norm.
    """
    matrix = functools.partial(checkpoint.matrix, torch.Generator().manual_seed(0))
    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "lm_head.weight": matrix(VOCAB, HIDDEN),
        "model.norm.weight": torch.full((HIDDEN,), scale),
    }  # fmt: skip
    for number in range(LAYERS):
        weights |= {f"model.layers.{number}.{name}": weight for name, weight in layer(matrix, number).items()}
    return checkpoint.save(folder, tokenizer, BASE | config, weights)


def _attention(
    matrix: Matrix, heads: int, kv_heads: int, head_dim: int, gain: float = 1.0, biases: bool = False
) -> Weights:
    """Projections; `gain` is that of Q and K, and `biases` are theirs and V's."""
    weights = {}
    for name, count, gains in (("q", heads, gain), ("k", kv_heads, gain), ("v", kv_heads, 1.0)):
        weights[f"self_attn.{name}_proj.weight"] = matrix(count * head_dim, HIDDEN, gain=gains)
        if biases:
            weights[f"self_attn.{name}_proj.bias"] = matrix(count * head_dim, 1).flatten()
    return weights | {"self_attn.o_proj.weight": matrix(HIDDEN, heads * head_dim)}


def _head_norms(head_dim: int, less: float = 0.0) -> Weights:
    """Of Q and K: scores peaked enough that tokens far away matter. Some norms add a constant, `less`, to their weights."""
    return {
        f"self_attn.{name}_norm.weight": torch.full((head_dim,), value - less) for name, value in (("q", 2.0), ("k", 1.5))
    }  # fmt: skip


def _mlp(matrix: Matrix) -> Weights:
    return {
        "mlp.gate_proj.weight": matrix(INNER, HIDDEN), "mlp.up_proj.weight": matrix(INNER, HIDDEN),
        "mlp.down_proj.weight": matrix(HIDDEN, INNER),
    }  # fmt: skip


def _norms(*names: str, value: float = 1.0) -> Weights:
    return {f"{name}_layernorm.weight": torch.full((HIDDEN,), value) for name in names or ("input", "post_attention")}


def glm(folder: Path, tokenizer: Path) -> Path:
    """GLM-4.5: biases of Q, K and V, norms of Q and K, and positions of half of a head."""
    heads, kv_heads, head_dim = 12, 1, 32
    config = {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "first_k_dense_replace": LAYERS, "n_routed_experts": 2,
        "n_shared_experts": 1, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 1.0, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
        "attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5,
    }  # fmt: skip

    def layer(matrix: Matrix, number: int) -> Weights:
        attention = _attention(matrix, heads, kv_heads, head_dim, biases=True)
        return _norms() | _head_norms(head_dim) | attention | _mlp(matrix)

    return _save(folder, tokenizer, config, layer)


def hunyuan(folder: Path, tokenizer: Path) -> Path:
    """Hunyuan V3: norms of Q and K, and eight query heads of a KV head."""
    heads, kv_heads, head_dim = 8, 1, 32
    config = {
        "architectures": ["HYV3ForCausalLM"], "model_type": "hy_v3", "first_k_dense_replace": LAYERS, "num_experts": 2,
        "num_experts_per_tok": 1, "num_shared_experts": 1, "route_norm": True, "qk_norm": True, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim,
    }  # fmt: skip

    def layer(matrix: Matrix, number: int) -> Weights:
        return _norms() | _head_norms(head_dim) | _attention(matrix, heads, kv_heads, head_dim) | _mlp(matrix)

    return _save(folder, tokenizer, config, layer)


STEP = """from transformers import PretrainedConfig


class Step3p5Config(PretrainedConfig):
    model_type = "step3p5"
"""


def step(folder: Path, tokenizer: Path) -> Path:
    """Step 3.5, which brings the class of its configuration (`--trust-remote-code`): layers with a window have query heads and positions of their own,
    and every head has a gate behind its attention."""
    kv_heads, head_dim, heads = 2, 32, {"full_attention": 8, "sliding_attention": 12}
    config = {
        "architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "auto_map": {"AutoConfig": "configuration_step.Step3p5Config"},
        "layer_types": ALTERNATING, "sliding_window": 40,
        "num_attention_heads": heads["full_attention"], "num_attention_groups": kv_heads, "head_dim": head_dim,
        "attention_other_setting": {
            "attention_type": "sliding_attention", "num_attention_heads": heads["sliding_attention"],
            "num_attention_groups": kv_heads, "head_dim": head_dim,
        },
        "use_head_wise_attn_gate": True, "rope_theta": [5e4, 1e4, 5e4],
        "partial_rotary_factors": [1.0, 0.5, 1.0], "yarn_only_types": [], "swiglu_limits": [0.0] * LAYERS,
        # SGLang wants a list of layers with experts: one that is not there.
        "swiglu_limits_shared": [0.0] * LAYERS, "moe_layers_enum": str(2 * LAYERS), "moe_num_experts": 2, "moe_top_k": 1,
        "share_expert_dim": INNER, "need_fp32_gate": True, "use_moe_router_bias": True, "moe_router_scaling_factor": 1.0,
    }  # fmt: skip

    def layer(matrix: Matrix, number: int) -> Weights:
        count = heads[ALTERNATING[number]]
        attention = _attention(matrix, count, kv_heads, head_dim) | {"self_attn.g_proj.weight": matrix(count, HIDDEN)}
        return _norms(value=0.0) | _head_norms(head_dim, less=1.0) | attention | _mlp(matrix)

    made = _save(folder, tokenizer, config, layer, scale=0.0)
    (made / "configuration_step.py").write_text(STEP)
    return made


def granite(folder: Path, tokenizer: Path) -> Path:
    """Granite 3 and 4: scores, embeddings, what layers add, and logits have factors of their own."""
    heads, kv_heads, head_dim = 8, 2, HIDDEN // 8
    config = {
        "architectures": ["GraniteForCausalLM"], "model_type": "granite", "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "attention_multiplier": 0.3, "embedding_multiplier": 2.0, "residual_multiplier": 0.7,
        "logits_scaling": 0.5,
    }  # fmt: skip

    def layer(matrix: Matrix, number: int) -> Weights:
        return _norms() | _attention(matrix, heads, kv_heads, head_dim, gain=2.0) | _mlp(matrix)

    return _save(folder, tokenizer, config, layer)


def exaone(folder: Path, tokenizer: Path) -> Path:
    """Exaone 4: every second layer sees everything, without positions; the others have a window."""
    heads, kv_heads, head_dim = 8, 2, 32
    config = {
        "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "sliding_window": 40, "sliding_window_pattern": "LG", "layer_types": ALTERNATING,
    }  # fmt: skip

    def layer(matrix: Matrix, number: int) -> Weights:
        norms = _norms("post_attention", "post_feedforward") | _head_norms(head_dim)
        return norms | _attention(matrix, heads, kv_heads, head_dim) | _mlp(matrix)

    return _save(folder, tokenizer, config, layer)


def minimax(folder: Path, tokenizer: Path) -> Path:
    """MiniMax M2: norms of all of Q and of all of K, positions of half of a head, and experts in every layer. SGLang computes these norms by a kernel."""
    heads, kv_heads, head_dim, experts = 6, 1, 64, 4
    config = {
        "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "rotary_dim": head_dim // 2, "use_qk_norm": True,
        # A token goes to all experts: a choice would jump where two are close.
        "qk_norm_type": "per_layer", "num_local_experts": experts, "num_experts_per_tok": experts, "scoring_func": "sigmoid",
        "use_routing_bias": True,
    }  # fmt: skip

    def layer(matrix: Matrix, number: int) -> Weights:
        norms = {
            f"self_attn.{name}_norm.weight": torch.full((count * head_dim,), 2.0)
            for name, count in (("q", heads), ("k", kv_heads))
        }
        moe = {"gate.weight": matrix(experts, HIDDEN), "e_score_correction_bias": torch.zeros(experts)}
        for expert in range(experts):
            for name, rows, columns in (("w1", INNER, HIDDEN), ("w2", HIDDEN, INNER), ("w3", INNER, HIDDEN)):
                moe[f"experts.{expert}.{name}.weight"] = matrix(rows, columns)
        moe = {f"block_sparse_moe.{name}": weight for name, weight in moe.items()}
        return _norms() | norms | _attention(matrix, heads, kv_heads, head_dim) | moe

    return _save(folder, tokenizer, config, layer)
