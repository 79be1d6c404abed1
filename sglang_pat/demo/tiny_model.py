"""A tiny Qwen3-shaped model with random weights and a byte-level tokenizer, for demonstrations and tests.

With `--load-format dummy` weights are so small that attention hardly changes the logits, and wrong attention would go unnoticed. Here weights are
scaled so that every token of the context matters. Only printable characters can be generated, so equal texts mean equal tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

VOCAB = 512
PRINTABLE = {chr(code) for code in range(33, 127)}
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
# Attention scores of normalised q and k have unit variance; a gain of 2 each makes them peaked enough that
# changing a long prefix changes the greedy continuation (tests/test_server.py checks it).
QK_NORM_GAIN = 2.0


def write(folder: Path, seed: int = 0, head_dim: int = SHAPE["head_dim"]) -> Path:
    """Write config, weights (float32) and tokenizer to `folder` unless they are there; returns `folder`.

    The CUDA kernels begin at a `head_dim` of 64, twice what is enough on a CPU.
    """
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "max_position_embeddings": 8192,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "tie_word_embeddings": False,
        **SHAPE,
        "head_dim": head_dim,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))

    specials = ["<|endoftext|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(specials + alphabet)}
    for i in range(len(vocabulary), VOCAB):
        vocabulary[f"<|unused{i}|>"] = i
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=specials[0])
    fast.chat_template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant] "
    fast.save_pretrained(folder)

    generator = torch.Generator().manual_seed(seed)
    hidden, inner, heads = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["num_attention_heads"]
    kv_heads = SHAPE["num_key_value_heads"]

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * gain * columns**-0.5

    weights = {
        "model.embed_tokens.weight": torch.randn(VOCAB, hidden, generator=generator),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": matrix(VOCAB, hidden),
    }
    # A zero row's logit is 0, below the best of the others.
    printable = [token in PRINTABLE for token in vocabulary]
    weights["lm_head.weight"][~torch.tensor(printable)] = 0
    for layer in range(SHAPE["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": torch.ones(hidden),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{prefix}.self_attn.q_norm.weight": torch.full((head_dim,), QK_NORM_GAIN),
            f"{prefix}.self_attn.k_norm.weight": torch.full((head_dim,), QK_NORM_GAIN),
            f"{prefix}.self_attn.q_proj.weight": matrix(heads * head_dim, hidden),
            f"{prefix}.self_attn.k_proj.weight": matrix(kv_heads * head_dim, hidden),
            f"{prefix}.self_attn.v_proj.weight": matrix(kv_heads * head_dim, hidden, gain=4.0),
            f"{prefix}.self_attn.o_proj.weight": matrix(hidden, heads * head_dim, gain=4.0),
            f"{prefix}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{prefix}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{prefix}.mlp.down_proj.weight": matrix(hidden, inner),
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


if __name__ == "__main__":
    import sys

    print(write(Path(sys.argv[1])))
