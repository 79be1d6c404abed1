"""Times of a decode step with and without packing, from coefficients fitted to measurements."""

from __future__ import annotations

import msgspec

from sglang_pat.estimate.errors import EstimateError
from sglang_pat.estimate.models import Model
from sglang_pat.kernels import capabilities
from sglang_pat.packing import AttentionSpec, Batch, Node, PackConfig, Plan
from sglang_pat.packing.native import make_plan
from sglang_pat.packing.oracle import for_batch, makespan
from sglang_pat.packing.spec import KVFormat
from sglang_pat.packing.tree import in_windows, walk


class Gpu(msgspec.Struct, frozen=True):
    """Coefficients of a GPU, fitted by `python benchmarks/calibrate.py`; times in microseconds.

    One layer's attention takes

    - with PAT: `base + longest * (time of the busiest SM, at its share of the bandwidth) + merge * (time to move the parts)`;
    - with FlashInfer: `other_base + unique * (time to read the KV once) + repeated * (time to read the rest of it, partly from L2) +
      other_item * (queries * KV heads / SMs)`.

    The rest of a dense model's decode step takes `rest_ms + request_us * batch`, and the matrix products with the weights: the time to
    read them or to compute, whichever is longer.

    Attributes:
        tbps: Memory bandwidth that reads reach, in TB/s.
        tflops: Throughput that matrix products reach (benchmarks/kernels.py).
        memory_gb: Memory, from the data sheet.
        sms: Streaming multiprocessors; each runs one CTA.
        arch: Compute capability.
    """

    tbps: float
    tflops: float
    memory_gb: int
    sms: int
    arch: str
    base: float
    longest: float
    merge: float
    other_base: float
    unique: float
    repeated: float
    other_item: float
    rest_ms: float
    request_us: float


GPUS = {
    "h200": Gpu(
        tbps=4.4, tflops=790, memory_gb=141, sms=132, arch="9.0a", base=12.19, longest=0.873, merge=0.0, other_base=14.75,
        unique=0.911, repeated=0.456, other_item=2.691, rest_ms=1.446, request_us=9.890,
    ),
}  # fmt: skip
GPUS_8BIT = {
    "h200": msgspec.structs.replace(
        GPUS["h200"], base=14.12, longest=1.037, merge=0.172, other_base=16.20, unique=1.619, repeated=1.500, other_item=4.674,
    ),
}  # fmt: skip
"""The same for KV of 8 bits."""


def layers_on(gpu_name: str, model: Model, kv: KVFormat) -> dict[AttentionSpec, int]:
    """How many layers the model has of each spec, with such a KV cache.

    Raises:
        EstimateError: There are no measurements for the GPU, or no kernel for the model.
    """
    if gpu_name not in GPUS:
        raise EstimateError(f"--gpu {gpu_name}: there are measurements for {', '.join(GPUS)} only")
    layers = {msgspec.structs.replace(spec, kv=kv): count for spec, count in model.layers.items()}
    for refusal in (capabilities.refusal(spec, "cuda") for spec in layers):
        if refusal is not None:
            raise EstimateError(f"there are no kernels for {refusal}")
    return layers


def pack_config(spec: AttentionSpec, gpu: Gpu) -> PackConfig:
    return PackConfig.of(spec, capabilities.tile_table(gpu.arch, spec.head_dim, kv_bits=spec.kv.bits), workers=gpu.sms)


def step(batch: Batch, configs: list[tuple[PackConfig, int]], gpu: Gpu) -> tuple[float, float, float, float, float]:
    """The attention of one decode step, over all layers.

    Args:
        batch: Its requests.
        configs: For each kind of layer, its config and how many layers there are.
        gpu: What it runs on.

    Returns:
        (bytes of KV read without packing, with packing, bytes of KV that memory must hold at least, microseconds without packing, with
        packing).

    Raises:
        ValueError: The planner does not take such a batch.
    """
    read = packed = kept = other = time = 0.0
    tokens = sum(batch.seq_lens) - repeated(batch.roots)
    for config, layers in configs:
        plan, seen = make_plan(batch, config), in_windows(batch, config.window)
        token_bytes = layers * config.cost.token_bytes
        read += token_bytes * sum(seen.seq_lens)
        packed += token_bytes * plan.kv_tokens
        # KV that every window has left behind can be dropped.
        kept += token_bytes * min(tokens, sum(seen.seq_lens) - repeated(seen.roots))
        other += layers * unpacked_us(seen, config, gpu)
        time += layers * attention_us(plan, batch, config, gpu)
    return read, packed, kept, other, time


def attention_us(plan: Plan, batch: Batch, config: PackConfig, gpu: Gpu) -> float:
    """Time of one layer's decode attention with this plan."""
    longest, merge = features(plan, batch, config, gpu)
    return gpu.base + gpu.longest * longest + gpu.merge * merge


def features(plan: Plan, batch: Batch, config: PackConfig, gpu: Gpu) -> tuple[float, float]:
    """Microseconds of the busiest SM at its share of the bandwidth, and of moving the parts at the full bandwidth."""
    per_us = gpu.tbps * 1e6
    longest = makespan(plan, batch.seq_lens, for_batch(batch, config)) * gpu.sms / per_us
    return longest, plan.merged_parts * config.cost.part_bytes / per_us


def unpacked_us(batch: Batch, config: PackConfig, gpu: Gpu) -> float:
    """Time of one layer's decode attention without packing, by FlashInfer."""
    unique, again, items = unpacked_features(batch, config, gpu)
    return gpu.other_base + gpu.unique * unique + gpu.repeated * again + gpu.other_item * items


def unpacked_features(batch: Batch, config: PackConfig, gpu: Gpu) -> tuple[float, float, float]:
    """Microseconds to read the KV once and to read the rest of it again; and queries * KV heads / SMs."""
    again, per_us = repeated(batch.roots), gpu.tbps * 1e6 / config.cost.token_bytes
    items = len(batch.seq_lens) * config.cost.kv_heads / gpu.sms
    return (sum(batch.seq_lens) - again) / per_us, again / per_us, items


def repeated(nodes: list[Node]) -> int:
    """Tokens read again where every request reads its own KV: all reads but the first of each token."""
    return sum((len(node.queries) - 1) * (node.end - node.start) for node in walk(nodes))


def rest_ms(batch: int, weight_bytes: int, gpu: Gpu) -> float:
    """A dense model's decode step without attention, in milliseconds. Weights have two bytes, and two operations per request."""
    products = max(1 / gpu.tbps, batch / gpu.tflops) * weight_bytes * 1e-9
    return gpu.rest_ms + gpu.request_us * batch / 1e3 + products
