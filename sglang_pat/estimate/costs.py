"""Times of a decode step with and without packing, from coefficients fitted to measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from sglang_pat.estimate.errors import EstimateError
from sglang_pat.estimate.models import Model
from sglang_pat.estimate.prompts import Prompt
from sglang_pat.kernels import capabilities
from sglang_pat.packing import FORMATS, AttentionSpec, Batch, Node, PackConfig
from sglang_pat.packing.native import Inspection, inspect
from sglang_pat.packing.spec import KVFormat
from sglang_pat.packing.tree import in_windows, walk


class Baseline(msgspec.Struct, frozen=True):
    """Coefficients of a backend that does not pack, on one GPU; times in microseconds.

    One layer's attention takes `base + unique * (time to read the KV once) + repeated * (time to read the rest of it, partly from L2) +
    item * (queries * KV heads / SMs)`.
    """

    base: float
    unique: float
    repeated: float
    item: float


ARCH = "9.0a"
"""Of all GPUs that there are coefficients for."""


DIMS, LARGE_DIMS, LATENT_DIMS = (128, 128), (256, 256), capabilities.LATENT_DIMS[0]
"""Of K and V: those that were measured."""


class Measured(NamedTuple):
    """What coefficients are of: dimensions of K and V, bits of an element of KV, tokens that a request has in a step."""

    dims: tuple[int, int]
    bits: int = 16
    tokens: int = 1


LATENTS_8BIT = Measured(LATENT_DIMS, 8)
"""Where SGLang's backends for FA3 and FlashInfer copy the whole pool to 16 bits in each layer, which is no part of their coefficients."""
COPY_US = 0.0017
"""Microseconds of that copy for each token of the pool, at least: 850 to 900 of 500,000 (results/mla-h200.json, `fa3` less `fa3_copied`; 16 heads, H200)."""


class Gpu(msgspec.Struct, frozen=True):
    """Coefficients of a GPU for KV of so many bits and heads of such dimensions, fitted by `python benchmarks/calibrate.py`; times in microseconds.

    One layer's attention takes `base + longest * (time of the busiest SM, at its share of the bandwidth) + merge * (time to move the parts)`
    with PAT, and with others what `Baseline` says.

    The rest of a dense model's decode step takes `rest_ms + request_us * batch`, and the matrix products with the weights: the time to
    read them or to compute, whichever is longer. Each backend has its own `rest_ms`, as launches overlap in a step.

    Attributes:
        name: What its table of tiles is found by.
        tbps: Memory bandwidth that reads reach, in TB/s (benchmarks/kernels.py).
        tflops: Throughput that matrix products reach (benchmarks/kernels.py). It was measured on an H200, and an H100 has the same SMs: there
            batches of up to 256 wait for memory.
        memory_gb: Memory, from the data sheet.
        sms: Streaming multiprocessors; each runs one CTA.
        baselines: The backends that were measured beside PAT, by SGLang's names. The first is SGLang's default on this GPU.
        measured: What `base`, `longest`, `merge` and `baselines` are of.
    """

    name: str
    tbps: float
    tflops: float
    memory_gb: int
    sms: int
    base: float
    longest: float
    merge: float
    rest_ms: dict[str, float]
    request_us: float
    baselines: dict[str, Baseline]
    measured: Measured = Measured(DIMS)


RESERVED_MIB = 13_904
"""What SGLang leaves for activations and CUDA graphs by default, on one GPU of 60 to 160 GiB (`handle_gpu_memory_settings` in its
arg_groups/memory_hook.py, release 0.5.23): 512 + 1.5 * 8192 tokens of a prefill + 1024 / 8 + 2 * 256 decode requests + 8 * 58 prefill graphs."""


def static_fraction(gpu: Gpu) -> float:
    """The part of the memory that holds weights and KV: SGLang's default `--mem-fraction-static`. It takes the data sheet's GB for GiB, as drivers do."""
    return round(1 - RESERVED_MIB / (gpu.memory_gb << 10), 3)


H200 = Gpu(
    name="H200", tbps=4.4, tflops=790, memory_gb=141, sms=132, base=12.19, longest=0.873, merge=0.0,
    rest_ms={"pat": 1.239, "fa3": 0.912, "flashinfer": 1.324}, request_us=7.919,
    baselines={"fa3": Baseline(24.63, 0.902, 0.556, 1.916), "flashinfer": Baseline(14.75, 0.911, 0.456, 2.691)},
)  # fmt: skip
H100 = Gpu(
    name="H100", tbps=3.08, tflops=790, memory_gb=80, sms=132, base=11.51, longest=0.903, merge=0.0,
    rest_ms={"pat": 1.249, "fa3": 1.072, "flashinfer": 1.503}, request_us=8.765,
    baselines={"fa3": Baseline(24.29, 0.866, 0.392, 1.607), "flashinfer": Baseline(13.41, 0.882, 0.323, 2.376)},
)  # fmt: skip


def fitted(gpu: Gpu, measured: Measured, pat: Sequence[float], **others: Sequence[float]) -> Gpu:
    """The GPU with what else was measured there: base, longest and merge of PAT, and of each other backend what `Baseline` has."""
    base, longest, merge = pat
    baselines = {name: Baseline(*coefficients) for name, coefficients in others.items()}
    return msgspec.structs.replace(gpu, measured=measured, base=base, longest=longest, merge=merge, baselines=baselines)


_MEASURED = {
    "h200": (
        H200,
        fitted(H200, Measured(DIMS, 8), (14.12, 1.037, 0.172), fa3=(15.63, 1.771, 1.486, 1.845), flashinfer=(16.20, 1.619, 1.500, 4.674)),
        fitted(H200, Measured(DIMS, 16, 4), (11.14, 0.811, 0.000), fa3=(15.30, 0.933, 0.583, 2.019)),
        fitted(H200, Measured(DIMS, 8, 4), (20.50, 0.962, 0.562), fa3=(26.74, 1.839, 1.494, 1.982)),
        fitted(H200, Measured(LARGE_DIMS), (12.35, 1.025, 0.144), fa3=(15.89, 1.046, 0.726, 3.908), flashinfer=(15.78, 1.020, 0.505, 3.170)),
        fitted(H200, Measured(LARGE_DIMS, 8), (18.13, 1.027, 0.918), fa3=(20.00, 1.279, 1.192, 4.236), flashinfer=(17.96, 1.448, 1.392, 4.553)),
        fitted(H200, Measured(LARGE_DIMS, 16, 4), (9.81, 0.858, 1.068), fa3=(20.51, 1.032, 0.732, 3.580), flashinfer=(15.54, 1.045, 0.899, 2.917)),
        fitted(H200, Measured(LARGE_DIMS, 8, 4), (13.47, 0.973, 1.315), fa3=(22.57, 1.281, 1.197, 4.821), flashinfer=(16.56, 2.846, 2.741, 3.452)),
        # Of as many heads as are packed. What others than PAT take does not depend on them.
        fitted(H200, Measured(LATENT_DIMS), (15.11, 0.826, 1.260), fa3=(19.58, 0.988, 0.773, 4.106), flashinfer=(31.95, 0.933, 0.780, 0.0)),
        fitted(H200, LATENTS_8BIT, (8.94, 1.000, 1.296), fa3=(20.00, 1.962, 1.524, 4.451)),
    ),
    "h100": (H100,),
}  # fmt: skip
GPUS = {name: {gpu.measured: gpu for gpu in gpus} for name, gpus in _MEASURED.items()}
"""By name: only what was measured."""
NAMES = {"fa3": "FA3", "flashinfer": "FlashInfer", "pat": "PAT"}
AT_A_TIME = 256
"""Requests of a job that are shown together."""


def gpu_for(model: Model, name: str, kv: KVFormat, tokens: int) -> Gpu:
    """The coefficients of a GPU for a model with such a KV cache and so many tokens of a request in a step.

    Raises:
        EstimateError: There are none.
    """
    if name not in GPUS:
        raise EstimateError(f"--gpu {name}: there are measurements for {', '.join(GPUS)} only")
    if any(spec.latent for spec in model.layers):
        dims = LATENT_DIMS
    else:
        dims = LARGE_DIMS if all(spec.head_dim > DIMS[0] for spec in model.layers) else DIMS
    measured = Measured(dims, kv.bits, tokens)
    if measured == LATENTS_8BIT and kv.name != "float8_e4m3fn":
        raise EstimateError(
            "MLA was measured with --kv-cache-dtype fp8_e4m3 and auto: SGLang decodes others with Triton"
        )
    if measured in GPUS[name]:
        return GPUS[name][measured]
    if dims == LATENT_DIMS:
        raise EstimateError("MLA was measured on an H200 and without drafts only: leave out --gpu and --draft-tokens")
    if tokens > 1:
        raise EstimateError(f"--draft-tokens {tokens}: drafts of 4 tokens were measured on an H200, and no others")
    if Measured(dims) not in GPUS[name]:
        raise EstimateError(
            f"--gpu {name} was not measured with heads of more than {DIMS[0]} dimensions: give --gpu h200"
        )
    raise EstimateError(
        f"--gpu {name} was not measured with a KV cache of {kv.bits} bits: leave out --kv-cache-dtype, or give --gpu h200"
    )


def layers_of(model: Model, kv: KVFormat, tokens: int) -> dict[AttentionSpec, int]:
    """How many layers the model has of each spec, with such a KV cache and so many tokens of a request in a step.

    Raises:
        EstimateError: There is no kernel for the model, or no measurement of what other backends take.
    """
    for spec in model.layers:
        if not capabilities.holds_several(spec, ARCH):
            why = "is not estimated" if capabilities.packs(spec, ARCH) else "packs nothing"
            raise EstimateError(
                f"MLA with {spec.heads} heads on a GPU {why}: estimates are for one GPU, and up to {capabilities.latent_query_tiles(ARCH)[-1] // 2} heads"
            )
    layers = {msgspec.structs.replace(spec, kv=kv, query_tokens=tokens): count for spec, count in model.layers.items()}
    for refusal in (capabilities.refusal(spec, "cuda") for spec in layers):
        if refusal is not None:
            raise EstimateError(f"there are no kernels for {refusal}")
    return layers


class Step(msgspec.Struct):
    """The attention of one decode step, over all layers.

    Attributes:
        unpacked_bytes: Bytes of KV read without packing.
        packed_bytes: The same with packing.
        kept_bytes: Bytes of KV that memory must hold at least.
        attention_us: Microseconds with each backend, PAT last.
    """

    unpacked_bytes: float
    packed_bytes: float
    kept_bytes: float
    attention_us: dict[str, float]


def pack_config(spec: AttentionSpec, gpu: Gpu) -> PackConfig:
    return PackConfig.of(spec, capabilities.tile_table_of(spec, ARCH, gpu.name), workers=gpu.sms)


def step(batch: Batch, configs: list[tuple[PackConfig, int]], gpu: Gpu) -> Step:
    """What a batch's decode step reads, and how long its attention takes.

    Raises:
        ValueError: The planner does not take such a batch.
    """
    result = Step(0, 0, 0, dict.fromkeys([*gpu.baselines, "pat"], 0.0))
    tokens = sum(batch.seq_lens) - repeated(batch.roots)
    # A pool has at least the batch's tokens.
    copy = COPY_US * tokens if gpu.measured == LATENTS_8BIT else 0
    for config, layers in configs:
        found, seen = inspect(batch, config), in_windows(batch, config.window)
        token_bytes = layers * config.cost.token_bytes
        result.unpacked_bytes += token_bytes * sum(seen.seq_lens)
        result.packed_bytes += token_bytes * found.plan.kv_tokens
        # KV that every window has left behind can be dropped.
        result.kept_bytes += token_bytes * min(tokens, sum(seen.seq_lens) - repeated(seen.roots))
        for name, baseline in gpu.baselines.items():
            result.attention_us[name] += layers * (unpacked_us(seen, config, gpu, baseline) + copy)
        result.attention_us["pat"] += layers * attention_us(found, gpu)
    return result


def attention_us(found: Inspection, gpu: Gpu) -> float:
    """Time of one layer's decode attention with this plan."""
    longest, merge = features(found, gpu)
    return gpu.base + gpu.longest * longest + gpu.merge * merge


def features(found: Inspection, gpu: Gpu) -> tuple[float, float]:
    """Microseconds of the busiest SM at its share of the bandwidth, and of moving the parts at the full bandwidth."""
    per_us = gpu.tbps * 1e6
    longest = found.makespan * gpu.sms / per_us
    return longest, found.plan.merged_parts * found.config.cost.part_bytes / per_us


def unpacked_us(batch: Batch, config: PackConfig, gpu: Gpu, baseline: Baseline) -> float:
    """Time of one layer's decode attention without packing."""
    unique, again, items = unpacked_features(batch, config, gpu)
    return baseline.base + baseline.unique * unique + baseline.repeated * again + baseline.item * items


def unpacked_features(batch: Batch, config: PackConfig, gpu: Gpu) -> tuple[float, float, float]:
    """Microseconds to read the KV once and to read the rest of it again; and queries * KV heads / SMs."""
    again, per_us = repeated(batch.roots), gpu.tbps * 1e6 / config.cost.token_bytes
    items = len(batch.seq_lens) * config.cost.kv_heads / gpu.sms
    return (sum(batch.seq_lens) - again) / per_us, again / per_us, items


def repeated(nodes: list[Node]) -> int:
    """Tokens read again where every request reads its own KV: all reads but the first of each token."""
    return sum((len(node.queries) - 1) * (node.end - node.start) for node in walk(nodes))


def rest_ms(batch: int, weight_bytes: int, gpu: Gpu) -> dict[str, float]:
    """A dense model's decode step without attention, in milliseconds, with each backend. Weights have two bytes, and two operations per request."""
    products = max(1 / gpu.tbps, batch / gpu.tflops) * weight_bytes * 1e-9
    return {name: rest + gpu.request_us * batch / 1e3 + products for name, rest in gpu.rest_ms.items()}


def job(prompts: list[Prompt], model: Model, gpu_name: str) -> tuple[PackConfig, int, list[list[int]]]:
    """The prefix tree of an offline job (`sglang-pat batch`) before it runs, as batches for the planner.

    Args:
        prompts: All of the job's.
        model: What serves them; of several kinds of layers, the most frequent one is used.
        gpu_name: One of GPUS.

    Returns:
        How it is packed; the number of layers; and the places in `prompts` in the order of the tree, AT_A_TIME at a time.

    Raises:
        EstimateError: There are no measurements for the GPU, or no kernel for the model; or agents' sessions are no job.
    """
    if any(prompt.session is not None for prompt in prompts):
        raise EstimateError("turns of agents' sessions follow one another: they are no job")
    kv = FORMATS["bfloat16"]
    layers, gpu = layers_of(model, kv, 1), gpu_for(model, gpu_name, kv, 1)
    spec = max(layers, key=layers.__getitem__)
    order = sorted(range(len(prompts)), key=lambda place: (prompts[place].block, prompts[place].blocks))
    places = [order[start : start + AT_A_TIME] for start in range(0, len(order), AT_A_TIME)]
    return pack_config(spec, gpu), layers[spec], places
