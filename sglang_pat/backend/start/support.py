"""Checks at start: refuses what PAT cannot serve, in one sentence that says what to do instead."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from sglang_pat import compat
from sglang_pat.backend.errors import UnsupportedError, unsupported
from sglang_pat.backend.kv import choose
from sglang_pat.backend.start import features, layers
from sglang_pat.config import PatConfig
from sglang_pat.kernels import capabilities, cuda
from sglang_pat.model_config import latents_problem
from sglang_pat.packing import AttentionSpec
from sglang_pat.packing.cost import MAX_ROWS
from sglang_pat.packing.spec import MAX_WINDOW

logger = logging.getLogger(__name__)

_RELEASES = f"use SGLang {' or '.join(compat.TESTED)}"
_OTHER = "serve it with another one, for example --attention-backend"


def check_arguments(server_args: Any) -> None:
    """Raise UnsupportedError if `ServerArgs` or an environment variable asks for a refused feature (features.py)."""
    arguments = compat.arguments.resolved(server_args)
    for feature in features.REFUSED:
        if feature.asked is not None and feature.asked(arguments, os.environ):
            asked_by = feature.how.replace("`", "")
            raise unsupported(f"{feature.name} yet ({asked_by})", feature.instead)


def check_release(runner: Any) -> None:
    """Raise UnsupportedError if this SGLang does not count how often it hands out a row; warn if it is untested."""
    if not hasattr(runner.req_to_token_pool, "req_generation"):
        raise UnsupportedError(f"sglang-pat cannot tell requests of SGLang {compat.release()} apart: {_RELEASES}")
    if compat.release() not in compat.TESTED:
        logger.warning(
            "sglang-pat is tested with SGLang %s, but this is %s", " and ".join(compat.TESTED), compat.release()
        )


def check_guards(server_args: Any, environment: Mapping[str, str] = os.environ) -> None:
    """Raise UnsupportedError if this SGLang lacks what has to be hooked, or SGLang would size its memory wrongly."""
    # On a CPU its platform chooses the pool and the page size.
    on_gpu = compat.arguments.resolved(server_args).device != "cpu"
    problems = []
    if compat.arguments.draft_tokens(server_args):
        problems.append(("--speculative-algorithm", compat.registry.problem(compat.pool.ROW_HEADROOM)))
    if environment.get("SGLANG_PAT_KV"):
        targets = [compat.pool.CELL_SIZE, compat.pool.POOL_SIZES, *([compat.pool.POOL] if on_gpu else [])]
        problems += [("SGLANG_PAT_KV", compat.registry.problem(target)) for target in targets]
        if on_gpu:
            problems.append(("SGLANG_PAT_KV", compat.arguments.adjustments_problem()))
    for asked_by, problem in problems:
        if problem:
            raise UnsupportedError(
                f"sglang-pat cannot size memory for {asked_by}, as {problem}: leave it out, or {_RELEASES}"
            )


def check_rows(runner: Any) -> None:
    """Raise UnsupportedError if rows of `req_to_token` are too narrow for drafts: what SGLang writes behind one is another request's."""
    if not compat.arguments.draft_tokens(runner.server_args):
        return
    room, needed = compat.pool.row_tokens(runner), compat.pool.row_headroom()
    if room < needed:
        raise UnsupportedError(
            f"sglang-pat cannot serve with --speculative-algorithm, as rows of req_to_token have {room} tokens beyond the context where drafts "
            f"need {needed}: leave it out, or {_RELEASES} without other plugins"
        )


def check_device(runner: Any) -> None:
    """Raise UnsupportedError if there are no kernels for the runner's device."""
    if runner.device not in ("cpu", "cuda"):
        raise UnsupportedError(f"sglang-pat has no kernels for {runner.device}: use another --attention-backend")
    if runner.device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        if major < 8:
            raise UnsupportedError(
                f"sglang-pat needs a GPU of compute capability 8.0 or more, this one has {major}.{minor}: "
                "use another --attention-backend"
            )


def check_model(runner: Any, fallback: str) -> Counter[AttentionSpec]:
    """`layers.count` of the model. UnsupportedError, which suggests `fallback`, if it needs attention that PAT does not compute."""
    config, pool = runner.model_config, runner.token_to_kv_pool
    if compat.pool.kv_layout(pool) != "nhd":
        raise unsupported(f"the KV layout {compat.pool.kv_layout(pool)} yet", "use another --attention-backend")
    check_low_bit(runner)
    instead = f"{_OTHER} {fallback} or --decode-attention-backend {fallback}"
    name = _name(runner)
    _check_latents(config.hf_config, runner.use_mla_backend, runner.device)
    if compat.model.is_hybrid(runner):
        check_hybrid(runner, name)
    if config.is_multimodal and hasattr(runner.model, "prepare_attn_masks"):
        # SGLang passes such masks to its Triton backend only, and drops them for others.
        within = f"attention in both directions within an image, which {name} uses"
        raise unsupported(within, "serve it with --attention-backend triton")
    if config.is_encoder_decoder:
        raise unsupported(f"encoder-decoder models like {name}", instead)
    form = layers.format_of(runner)
    if not any(form.name in known for known in capabilities.KV_FORMATS.values()):
        other = "leave out --kv-cache-dtype, or use another --attention-backend"
        raise unsupported(f"a KV cache of {runner.kv_cache_dtype} yet", other)
    kept = runner.kv_cache_dtype == runner.dtype or form.bits <= 8
    if runner.device == "cuda" and not (runner.dtype in cuda.TYPES and kept):
        raise unsupported(
            f"{runner.dtype} with a KV cache of {runner.kv_cache_dtype} on a GPU",
            f"serve {name} with --dtype bfloat16 or float16, and leave out --kv-cache-dtype",
        )
    specs = layers.count(runner)
    _check_layers(runner, specs, f"which {name} uses: {instead}")
    if compat.arguments.is_deterministic(runner.server_args):
        _check_deterministic(runner, name)
    return specs


def _check_deterministic(runner: Any, name: str) -> None:
    """Raise UnsupportedError if not all of the model's attention can have the same bits in any batch."""
    flag = "--enable-deterministic-inference"
    if runner.use_mla_backend:
        # A stock backend prefills such models, and kernels of latents were not made for it.
        raise unsupported(f"{flag} for MLA models like {name}", "leave it out, or use another --attention-backend")
    if not all(map(compat.model.decodes, compat.model.attention_layers(runner))):
        raise unsupported(f"{flag} for encoders like {name}", "leave it out, or use another --attention-backend")


def _check_layers(runner: Any, specs: Iterable[AttentionSpec], ending: str) -> None:
    """Raise UnsupportedError if a layer, its KV pool, or a second backend beside PAT does not fit; `ending` ends the sentence."""
    from sglang.srt.configs.model_config import is_local_attention_model

    pool = runner.token_to_kv_pool
    problem = partner_problem(
        runner, any(spec.sinks for spec in specs), any(spec.head_dim != spec.v_head_dim for spec in specs)
    )
    if problem is not None:
        raise unsupported(f"{problem}, as a second backend", "let pat do both, by --attention-backend pat alone")
    problems = [_layer_problem(layer) or pool_problem(layer, pool) for layer in compat.model.attention_layers(runner)]
    if getattr(runner, "prefill_aware_swa", False):
        problems.append("windows that do not apply to prompts")
    if is_local_attention_model(runner.model_config.hf_config.architectures or []):
        # FA3 asks this, not the layers' `use_irope`, which other models set too (flashattention_backend.py).
        problems.append("attention in chunks (Llama 4)")
    if any(getattr(module, "enable_sink_attention", False) for module in compat.model.modules(runner)):
        # Such a module asks its layer for them (models/iquest_q1.py, `return_lse`); elsewhere it would fail in the first step.
        problems.append("log-sum-exps of scores given back to the model (IQuest-Q1)")
    if any(getattr(module, "learnable_sink_param", None) is not None for module in compat.model.modules(runner)):
        # SGLang passes these to backends of a list only, and drops them for others (forward_mla.py, `attn_sink`).
        problems.append("MLA with attention sinks")
    drafted = compat.arguments.draft_tokens(runner.server_args)
    problems += [_spec_problem(spec, runner.device, drafted) for spec in specs]
    problems += [f"a KV pool of the kind {type(part).__name__}" for part in choose.unread(pool)]
    for problem in filter(None, problems):
        raise UnsupportedError(f"--attention-backend pat does not support {problem}, {ending}")


def _name(runner: Any) -> str:
    """What the model is called in messages."""
    return ", ".join(runner.model_config.hf_config.architectures or [type(runner.model).__name__])


def _check_latents(hf_config: Any, latent: bool, device: str) -> None:
    """Raise UnsupportedError if a model has latents that PAT does not read."""
    problem = compat.model.sparse_latents(hf_config)
    if latent:
        # That it is one, SGLang says.
        read = {**vars(getattr(hf_config, "text_config", None) or hf_config), "kv_lora_rank": True}
        problem = problem or latents_problem(read, device != "cpu")
    if problem is not None:
        uses = f"{problem}, which {', '.join(hf_config.architectures)} uses"
        raise unsupported(uses, "leave it out, and SGLang chooses another one")


def check_latents(server_args: Any) -> None:
    """Raise UnsupportedError if an MLA model is not supported, before it is loaded: that takes long, and may fail where it is not."""
    config = compat.arguments.model_config(server_args)
    if config is not None:
        device = compat.arguments.resolved(server_args).device
        _check_latents(config.hf_config, compat.model.has_latents(config), device)


def check_low_bit(runner: Any, environment: Mapping[str, str] = os.environ) -> None:
    """Raise UnsupportedError where the user asks for KV of less than 8 bits, and this device or model cannot have it; warn of 2 bits."""
    asked = environment.get("SGLANG_PAT_KV")
    if not asked:
        return
    problem = _low_bit_problem(runner)
    if problem is not None:
        raise unsupported(f"a KV cache of {asked} (SGLANG_PAT_KV) {problem}", "unset it")
    most = runner.model_config.num_attention_layers
    unknown = [layer for layer in PatConfig.from_environment(environment).int4_layers if layer >= most]
    if unknown:
        raise UnsupportedError(
            f"SGLANG_PAT_INT4_LAYERS names layer {unknown[0]}, but the model has layers 0 to {most - 1}: leave it out"
        )
    if asked == "int2":
        logger.warning(
            "sglang-pat: SGLANG_PAT_KV=int2 loses accuracy (offline, SmolLM2-135M had a perplexity of 23.8 in place of 21.0, over 1,024 tokens): "
            "evaluate your model with it, name layers in SGLANG_PAT_INT4_LAYERS, or take int4"
        )


def _low_bit_problem(runner: Any) -> str | None:
    """Where KV of less than 8 bits is not supported; None if it is here."""
    on_gpu = runner.device != "cpu"
    if runner.use_mla_backend:
        return f"for MLA models like {_name(runner)}"
    if compat.pool.is_fp8(runner.kv_cache_dtype):
        return "for a checkpoint that wants 8 bits"
    if layers.format_of(runner).layout == "plain":
        return "where SGLang or another plugin keeps KV in pools of another kind, as SGLang does for windows"
    if on_gpu and compat.stock.prefill_backend(False, runner.kv_cache_dtype, scaled=False) == "triton":
        return "on this GPU without FlashInfer, whose attention its prefill needs"
    if not all(map(compat.model.decodes, compat.model.attention_layers(runner))):
        return "for encoders"
    return None


def check_hybrid(runner: Any, name: str) -> None:
    """Raise UnsupportedError if the other layers of a hybrid model cannot be served beside PAT."""
    if runner.use_mla_backend and runner.device != "cpu":
        raise unsupported(f"MLA in hybrid models like {name}", "use another --attention-backend")
    if runner.device == "cpu":
        raise UnsupportedError(
            f"sglang-pat does not support hybrid models like {name} on a CPU, where SGLang cannot run their other layers: "
            "serve it on a GPU"
        )
    if compat.pool.has_window_pool(runner.token_to_kv_pool):
        apart = f"hybrid models like {name} with a KV pool for windows"
        raise unsupported(apart, "use another --attention-backend")
    if compat.stock.lists_gdn_backends(runner):
        raise UnsupportedError(
            f"--attention-backend pat does not support {name} on a Blackwell GPU, where SGLang accepts its own backends only beside "
            "gated delta nets: use --attention-backend triton"
        )


def check_prefill(runner: Any, backend: str) -> None:
    """Raise UnsupportedError if this stock backend, which would prefill, cannot be made for the model; warn if it is known to answer wrongly."""
    if backend == "triton" and "LagunaForCausalLM" in (runner.model_config.hf_config.architectures or ()):
        logger.warning(
            "sglang-pat: prefill runs on triton, with which SGLang's cookbook reports wrong answers of Laguna (13 %% of GSM8K): serve it on a "
            "Hopper GPU, or compare with another --attention-backend"
        )
    if compat.stock.needs_first_layer(backend, runner):
        raise UnsupportedError(
            f"--attention-backend pat would prefill on {backend}, which SGLang {compat.release()} cannot make for a model whose first layer "
            "has no KV: install FlashInfer, leave out --kv-cache-dtype, or use another --attention-backend"
        )


def partner_problem(runner: Any, sinks: bool = False, unequal: bool = False) -> str | None:
    """Why a backend that the user chose for prefill or decode is wrong for this model and cache; None if both are right.

    Args:
        sinks: Whether layers have attention sinks.
        unequal: Whether V is narrower than K.
    """
    return next(_partner_problems(runner, sinks, unequal), None)


def _partner_problems(runner: Any, sinks: bool, unequal: bool) -> Iterator[str]:
    prefill, _ = chosen = compat.arguments.backends_chosen(runner.server_args)
    pool = runner.token_to_kv_pool
    if compat.pool.latent_dims(pool):
        yield from _latent_partner_problems(runner)
    if "fa3" in chosen and runner.kv_cache_dtype == torch.float8_e5m2:
        yield "fa3, which reads no fp8_e5m2"
    for name in chosen:
        if sinks and compat.stock.ignores_sinks(name):
            yield f"{name}, which computes no attention sinks"
        if compat.stock.ignores_window_pools(name) and compat.pool.has_window_pool(pool):
            yield f"{name}, which reads a KV pool for windows by wrong slots (--disable-hybrid-swa-memory leaves that pool out)"
        if unequal and compat.stock.assumes_equal_dims(name):
            yield f"{name}, which takes V to be as wide as K"
        if compat.stock.ignores_scales(name, prefill=name == prefill) and compat.model.has_scales(runner):
            yield f"{name}, which ignores the scales of an FP8 KV cache"


def _latent_partner_problems(runner: Any) -> Iterator[str]:
    prefill, decode = compat.arguments.backends_chosen(runner.server_args)
    if runner.device == "cpu":
        # Only these are given latents in prefill too (platform/cpu.py).
        known = {"pat", "torch_native"}
        yield from (f"{name}, which was not tried with latents" for name in (prefill, decode) if name not in known)
        return
    if decode != "pat":
        yield f"{decode} for decode steps of MLA models"
    if prefill != "pat" and prefill != (tried := compat.stock.latent_backend(runner)):
        yield f"{prefill} for prefill of MLA models (here {tried} is)"


def check_draft(specs: Iterable[AttentionSpec], backend: str, stock: str) -> None:
    """Raise UnsupportedError if a backend that the user named for a draft model on a GPU would be given its latents as another one is.

    0.5.17 does not tell models which backend runs a draft's steps: they treat it as `pat`, so as the stock backend that prefills.

    Args:
        specs: Of the draft's layers.
        backend: What the user named.
        stock: What `create.stock_name` says.
    """
    if backend != stock and any(spec.latent for spec in specs):
        asked = f"drafts of MLA models on {backend} (--speculative-draft-attention-backend)"
        raise unsupported(asked, f"leave it out, and they run on {stock}")


def pool_problem(layer: Any, pool: Any) -> str | None:
    """Why a layer's KV is in the wrong pool for its window, or does not fit there; None if all is well."""
    windowed, apart = layers.window(layer.sliding_window_size, MAX_WINDOW) > 0, compat.pool.in_window_pool(pool, layer)
    part = compat.pool.kv_pools(pool)[-1 if apart else 0]
    kept = compat.pool.kv_dims(part)
    if None not in kept and kept != (layer.qk_head_dim, layer.v_head_dim):
        # 0.5.17 makes such pools on a plugin's platform.
        return (
            f"K and V of {layer.qk_head_dim} and {layer.v_head_dim} dimensions in a KV pool of {kept[0]} and {kept[1]}"
        )
    if windowed == apart or not compat.pool.has_window_pool(pool):
        return None
    where = "without, beside one for windows" if windowed else "with one"
    return f"a layer {'with' if windowed else 'without'} a window whose KV is in the pool of those {where}"


def _spec_problem(spec: AttentionSpec, device: capabilities.Device, drafted: int) -> str | None:
    if 0 < spec.window < drafted:
        # The distance between two tokens of a draft would then depend on its branches.
        return f"drafts of {drafted} tokens, longer than a window of {spec.window}"
    if device == "cpu" and spec.query_heads > MAX_ROWS * spec.kv_heads:
        most = MAX_ROWS * spec.kv_heads // spec.heads
        return f"drafts of {spec.query_tokens} tokens with {spec.heads} heads over {spec.kv_heads} of KV on a CPU (at most {most})"
    if spec.sinks and spec.kv.layout == "pages" and device == "cuda":
        return f"attention sinks with a KV cache of {spec.kv.name} on a GPU"
    return capabilities.refusal(spec, device)


def _layer_problem(layer: Any) -> str | None:
    from sglang.srt.layers.radix_attention import AttentionType

    if layer.is_cross_attention:
        return "cross-attention"
    if layer.attn_type == AttentionType.ENCODER_ONLY and layer.sliding_window_size not in (None, -1):
        # Some stock backends ignore the window.
        return "encoder-only attention with a window"
    if layer.attn_type == AttentionType.DECODER_BIDIRECTIONAL:
        # Some stock backends treat it as causal (EmbeddingGemma).
        return "attention in both directions by a decoder"
    if (getattr(layer, "xai_temperature_len", None) or 0) > 0:
        return "temperature that grows with the context"
    return None
