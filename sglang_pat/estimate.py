"""`sglang-pat estimate`: what packing would bring a workload, from its prompts and a model's config.json."""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sglang_pat.kernels import gpu_tiles
from sglang_pat.packing import Batch, Node, PackConfig, Plan, make_plan
from sglang_pat.packing.scheduler import makespan

CHARS_PER_TOKEN = 4
"""Of English text with the usual vocabularies; prompts that come as tokens or lengths need no guess."""
BLOCK = 16
"""Prefixes are compared in blocks of so many tokens."""
TRACE_BLOCK = 512
"""Tokens of a hash id in Mooncake's traces."""
WINDOWS = 8
"""Batches looked at for each size: consecutive requests, spread evenly over the file."""


class EstimateError(Exception):
    """The file, the model or the GPU cannot be estimated; the message says why."""


class Gpu(msgspec.Struct, frozen=True):
    """What `python benchmarks/calibrate.py` finds for a GPU; times in microseconds.

    A layer's attention takes `base + longest * (what the plan gives the SM with most, at its share of the bandwidth) +
    merge * (the parts' bytes)`; FlashInfer's takes `other_base + unique * (the KV once) + repeated * (what is read again) +
    other_item * (queries times KV heads, for each SM)`: what is read again comes from the L2 cache in part. The rest of a dense
    model's decode step takes `rest_ms + request_us * batch`, and the matrix products with the weights: reading these or the
    arithmetic, whichever is longer.

    Attributes:
        tbps: What it reads from memory.
        tflops: What its matrix products reach (benchmarks/kernels.py).
        memory_gb: By its data sheet.
        sms: CTAs at a time.
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
        tbps=4.4, tflops=790, memory_gb=141, sms=132, arch="9.0a", base=13.01, longest=0.958, merge=0.0, other_base=15.73,
        unique=0.898, repeated=0.459, other_item=2.606, rest_ms=1.207, request_us=9.617,
    ),
}  # fmt: skip


class Prompt(msgspec.Struct):
    """A request.

    Attributes:
        blocks: Keys of its full blocks: two prompts share a prefix as far as these are equal.
        block: Tokens of each.
        tokens: Of the whole prompt.
        output: Tokens that it generates.
    """

    blocks: list[int]
    block: int
    tokens: int
    output: int


def read(path: Path, output: int) -> list[Prompt]:
    """Requests of an OpenAI batch file, SGLang's request log (--log-requests-format json --log-requests-level 3), a
    Mooncake trace, or a text file with a prompt on each line.

    Args:
        path: The file.
        output: Tokens generated where the file does not say.

    Raises:
        EstimateError: There is no request in it.
    """
    try:
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    except OSError as error:
        raise EstimateError(f"{path} cannot be read: {error.strerror}") from error
    prompts = [prompt for line in lines if (prompt := _parse(line, output)) is not None]
    if not prompts:
        raise EstimateError(f"{path} has no request: give an OpenAI batch, a request log, a trace, or prompts")
    return prompts


def _parse(line: str, output: int) -> Prompt | None:
    if not line.lstrip().startswith("{"):
        return _of_text(line, output)
    try:
        row = json.loads(line)
    except ValueError:
        return _of_text(line, output)
    if "hash_ids" in row:
        full = row["input_length"] // TRACE_BLOCK
        return Prompt(row["hash_ids"][:full], TRACE_BLOCK, row["input_length"], row.get("output_length", output))
    if "event" in row:  # of a log
        if row["event"] != "request.received":
            return None
        row = row["obj"]
        output = (row.get("sampling_params") or {}).get("max_new_tokens") or output
    body = row.get("body", row)
    output = body.get("max_completion_tokens") or body.get("max_tokens") or output
    prompt = body.get("input_ids") or body.get("prompt") or body.get("text")
    if prompt is None and "messages" in body:
        parts = [json.dumps(body.get("tools", ""))]
        for message in body["messages"]:
            content = message.get("content") or ""
            if not isinstance(content, str):
                content = "".join(part.get("text", "") for part in content)
            parts.append(f"{message['role']}: {content}")
        prompt = "\n".join(parts)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        keys = [hash(tuple(prompt[i : i + BLOCK])) for i in range(0, len(prompt) - BLOCK + 1, BLOCK)]
        return Prompt(keys, BLOCK, len(prompt), output)
    return _of_text(prompt, output) if isinstance(prompt, str) else None


def _of_text(text: str, output: int) -> Prompt:
    size = BLOCK * CHARS_PER_TOKEN
    keys = [zlib.crc32(text[i : i + size].encode()) for i in range(0, len(text) - size + 1, size)]
    return Prompt(keys, BLOCK, max(1, len(text) // CHARS_PER_TOKEN), output)


def batch_of(prompts: list[Prompt]) -> Batch:
    """The requests side by side, each half way through its answer."""

    def grow(queries: list[int], index: int) -> Iterator[Node]:
        groups = defaultdict(list)
        for query in queries:
            if index < len(prompts[query].blocks):
                groups[prompts[query].blocks[index]].append(query)
        for group in groups.values():
            if len(group) < 2:
                continue
            first, end = prompts[group[0]].blocks, index + 1
            while all(prompts[query].blocks[end : end + 1] == first[end : end + 1] != [] for query in group):
                end += 1
            block = prompts[group[0]].block
            yield Node(index * block, end * block, group, list(grow(group, end)))

    return Batch([p.tokens + max(1, p.output // 2) for p in prompts], list(grow(list(range(len(prompts))), 0)))


def attention_us(plan: Plan, batch: Batch, config: PackConfig, gpu: Gpu) -> float:
    """One layer's decode attention, by the model."""
    longest, merge = features(plan, batch, config, gpu)
    return gpu.base + gpu.longest * longest + gpu.merge * merge


def features(plan: Plan, batch: Batch, config: PackConfig, gpu: Gpu) -> tuple[float, float]:
    """Microseconds of the SM with most to do, at its share of the bandwidth; and of moving the parts."""
    per_us = gpu.tbps * 1e6
    longest = makespan(plan, batch.seq_lens, config) * gpu.sms / per_us
    return longest, plan.merged_parts * config.cost.part_bytes / per_us


class Model(msgspec.Struct):
    """What a model's config.json says."""

    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    weight_bytes: int | None
    """Read in a decode step; None where they depend on the experts chosen."""


def read_model(path: Path) -> Model:
    """A model's shape, from its folder or config.json.

    Raises:
        EstimateError: It is no model that PAT serves, or not a config.json.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
        config = config.get("text_config", config)
        if "kv_lora_rank" in config:
            raise EstimateError(f"{path}: MLA models are not supported by --attention-backend pat")
        heads, layers, hidden = (config[name] for name in ("num_attention_heads", "num_hidden_layers", "hidden_size"))
        kv_heads = config.get("num_key_value_heads") or heads
        dim = config.get("head_dim") or hidden // heads
        experts = any(config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
        attention = 2 * hidden * (heads + kv_heads) * dim
        dense = layers * (attention + 3 * hidden * config["intermediate_size"]) + config["vocab_size"] * hidden
    except (OSError, ValueError, KeyError) as error:
        raise EstimateError(f"{path} is not a model's config.json ({error!r}): give the model's folder") from error
    return Model(heads, kv_heads, dim, layers, None if experts else 2 * dense)


def estimate(prompts: list[Prompt], model: Model, gpu_name: str, sizes: list[int]) -> list[str]:
    """The lines that the command prints.

    Raises:
        EstimateError: There are no measurements for the GPU, or no kernel for the model.
    """
    if gpu_name not in GPUS:
        raise EstimateError(f"--gpu {gpu_name}: there are measurements for {', '.join(GPUS)} only")
    if model.head_dim not in gpu_tiles.HEAD_DIMS:
        raise EstimateError(f"head dimension {model.head_dim}: there are kernels for {gpu_tiles.HEAD_DIMS} only")
    gpu = GPUS[gpu_name]
    cost = gpu_tiles.cost_model(model.heads, model.kv_heads, model.head_dim)
    config = PackConfig(cost, gpu_tiles.tile_table(gpu.arch, model.head_dim), workers=gpu.sms)
    lines = [
        f"{len(prompts):,} requests, {sum(p.tokens for p in prompts) / len(prompts):,.0f} tokens of prompt and "
        f"{sum(p.output for p in prompts) / len(prompts):,.0f} of answer on average",
        "",
        f"{'batch':>6}{'shared':>8}{'KV a step, GB':>16}{'packed':>8}{'attention, us':>15}{'packed':>8}{'TPOT, ms':>10}{'packed':>8}",
    ]
    for size in sorted({min(size, len(prompts)) for size in sizes}):
        starts = {round(i * (len(prompts) - size) / max(1, WINDOWS - 1)) for i in range(WINDOWS)}
        whole = unique = packed = 0
        times, others = [], []
        for start in sorted(starts):
            batch = batch_of(prompts[start : start + size])
            plan = make_plan(batch, config)
            whole += sum(batch.seq_lens)
            unique += sum(batch.seq_lens) - repeated(batch.roots)
            packed += plan.kv_tokens
            times.append(attention_us(plan, batch, config, gpu))
            others.append(unpacked_us(batch, config, gpu))
        step = cost.token_bytes * model.layers / len(starts) / 1e9
        time, other = sum(times) / len(times), sum(others) / len(others)
        line = (
            f"{size:>6}{1 - unique / whole:>8.0%}{whole * step:>16.2f}{packed * step:>8.2f}{other:>15.0f}{time:>8.0f}"
        )
        if model.weight_bytes is not None:
            rest = rest_ms(size, model.weight_bytes, gpu)
            line += f"{rest + model.layers * other / 1e3:>10.1f}{rest + model.layers * time / 1e3:>8.1f}"
        if unique * step + (model.weight_bytes or 0) / 1e9 > gpu.memory_gb:
            line += f"  more than {gpu.memory_gb} GB"
        lines.append(line)
    return [
        *lines,
        "",
        "shared: tokens that another request of the batch has too. Attention is one layer's; unpacked is FlashInfer.",
        f"Assumed: consecutive requests run side by side, half way through their answers; {CHARS_PER_TOKEN} characters a "
        f"token in text; bfloat16; one {gpu_name.upper()}; a step of a dense model takes {gpu.rest_ms} ms "
        f"and {gpu.request_us} us a request beside attention and the products with its weights"
        + (" (unknown for experts)." if model.weight_bytes is None else "."),
    ]


def rest_ms(batch: int, weight_bytes: int, gpu: Gpu) -> float:
    """A decode step of a dense model without attention; weights of two bytes, each for one multiplication and addition."""
    products = max(1 / gpu.tbps, batch / gpu.tflops) * weight_bytes * 1e-9
    return gpu.rest_ms + gpu.request_us * batch / 1e3 + products


def unpacked_us(batch: Batch, config: PackConfig, gpu: Gpu) -> float:
    """One layer's decode attention without packing, as FlashInfer does it."""
    unique, again, items = unpacked_features(batch, config, gpu)
    return gpu.other_base + gpu.unique * unique + gpu.repeated * again + gpu.other_item * items


def unpacked_features(batch: Batch, config: PackConfig, gpu: Gpu) -> tuple[float, float, float]:
    """Microseconds of reading the KV once, and of what is read again; queries times KV heads, for each SM."""
    again, per_us = repeated(batch.roots), gpu.tbps * 1e6 / config.cost.token_bytes
    items = len(batch.seq_lens) * config.cost.kv_heads / gpu.sms
    return (sum(batch.seq_lens) - again) / per_us, again / per_us, items


def repeated(nodes: list[Node]) -> int:
    """Tokens that are read more than once where every request reads its own, without the first time."""
    return sum((len(n.queries) - 1) * (n.end - n.start) + repeated(n.children) for n in nodes)
