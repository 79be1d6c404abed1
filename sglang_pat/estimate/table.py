"""What the command prints."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_pat.estimate.costs import GPUS, GPUS_8BIT, layers_on, pack_config, repeated, rest_ms, step
from sglang_pat.estimate.errors import EstimateError
from sglang_pat.estimate.models import Model
from sglang_pat.estimate.prompts import CHARS_PER_TOKEN, Prompt, batch_of
from sglang_pat.kernels import capabilities
from sglang_pat.packing import FORMATS, AttentionSpec
from sglang_pat.packing.spec import KVFormat

KV_CACHES = {"auto": "bfloat16", "bf16": "bfloat16", "bfloat16": "bfloat16", **capabilities.FP8}
"""Formats of a KV cache, as SGLang's `--kv-cache-dtype` names them; `auto` is what a model in bfloat16 has."""
WINDOWS = 8
"""How many batches of each size are looked at: consecutive requests, spread evenly over the file."""


def estimate(prompts: list[Prompt], model: Model, gpu_name: str, sizes: list[int], kv_cache: str = "auto") -> list[str]:
    """The lines that the command prints.

    Args:
        prompts: The whole workload.
        model: The model that serves it.
        gpu_name: One of GPUS.
        sizes: Batch sizes.
        kv_cache: One of KV_CACHES.

    Raises:
        EstimateError: There are no measurements for the GPU, or no kernel for the model.
    """
    kv = FORMATS[KV_CACHES[kv_cache]]
    layers = layers_on(gpu_name, model, kv)
    gpu = (GPUS_8BIT if kv.bits == 8 else GPUS)[gpu_name]
    configs = [(pack_config(spec, gpu), count) for spec, count in layers.items()]
    total = sum(p.tokens for p in prompts)
    groups = ["KV a step, GB", "attention a layer, us", *(["step, ms"] if model.weight_bytes is not None else [])]
    lines = [
        f"{len(prompts):,} requests, {total / len(prompts):,.0f} tokens of prompt and "
        f"{sum(p.output for p in prompts) / len(prompts):,.0f} of answer on average",
        "",
        f"{'':>14}" + "".join(f"{group:>24}" for group in groups),
        f"{'batch':>6}{'shared':>8}" + f"{'FlashInfer':>15}{'PAT':>9}" * len(groups),
    ]
    for size in sorted({min(size, len(prompts)) for size in sizes}):
        starts = {round(i * (len(prompts) - size) / max(1, WINDOWS - 1)) for i in range(WINDOWS)}
        batches = [batch_of(prompts[start : start + size]) for start in sorted(starts)]
        tokens = sum(sum(batch.seq_lens) for batch in batches)
        shared = sum(repeated(batch.roots) for batch in batches) / tokens
        try:
            steps = [step(batch, configs, gpu) for batch in batches]
        except ValueError as error:
            raise EstimateError(f"no server takes such a batch: {error}") from None
        read, packed, kept, other, time = (sum(values) / len(steps) for values in zip(*steps, strict=True))
        line = f"{size:>6}{shared:>8.0%}{read / 1e9:>15.2f}{packed / 1e9:>9.2f}"
        line += f"{other / model.layers.total():>15.0f}{time / model.layers.total():>9.0f}"
        if model.weight_bytes is not None:
            rest = rest_ms(size, model.weight_bytes, gpu)
            line += f"{rest + other / 1e3:>15.1f}{rest + time / 1e3:>9.1f}"
        if kept + (model.weight_bytes or 0) > gpu.memory_gb * 1e9:
            line += f"  more than {gpu.memory_gb} GB"
        lines.append(line)
    return [
        *lines,
        "",
        f"Layers with KV: {', '.join(f'{count} of {spec}' for spec, count in layers.items())}.",
        "shared: tokens that another request of the batch has too. A step is a decode step: clients see a longer time per token, by the prefill of "
        "other requests.",
        f"If each prefix is computed once, as by `sglang-pat batch`, {total - repeated(batch_of(prompts).roots):,} of {total:,} tokens of prompts are computed.",
        f"Assumed: consecutive requests run side by side, half way through their answers; {CHARS_PER_TOKEN} characters a "
        f"token in text; {_measured(kv, layers)}; one {gpu_name.upper()}; a step of a dense model takes {gpu.rest_ms} ms "
        f"and {gpu.request_us} us a request beside attention and the products with its weights"
        + (" (unknown for experts and hybrid models)." if model.weight_bytes is None else "."),
    ]


def _measured(kv: KVFormat, layers: Iterable[AttentionSpec]) -> str:
    """What the estimate assumes about the KV cache, and about layers of kinds that were not measured."""
    unlike = any((spec.head_dim, spec.v_head_dim, spec.window) != (128, 128, 0) for spec in layers)
    return f"KV in {kv.name}" + (", by the byte as fast as heads of 128 without windows, as measured" if unlike else "")
