"""`sglang-pat estimate`: what packing would bring a workload, from its prompts and a model's config.json."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from sglang_pat.kernels import capabilities
from sglang_pat.packing import FORMATS, AttentionSpec, Batch, Node, PackConfig, Plan
from sglang_pat.packing.cost import Count
from sglang_pat.packing.native import make_plan
from sglang_pat.packing.oracle import makespan
from sglang_pat.packing.spec import MAX_WINDOW, KVFormat
from sglang_pat.packing.tree import in_windows, walk
from sglang_pat.radix_bridge.events import Tokens

CHARS_PER_TOKEN = 4
"""Of English text with the usual vocabularies; prompts that come as tokens or lengths need no guess."""
BLOCK = 16
"""Prefixes are compared in blocks of so many tokens."""
TRACE_BLOCK = 512
"""Tokens of a hash id in Mooncake's traces."""
WINDOWS = 8
"""Batches looked at for each size: consecutive requests, spread evenly over the file."""
AT_A_TIME = 256
"""Requests of a job that are shown side by side."""
KV_CACHES = {"auto": "bfloat16", "bf16": "bfloat16", "bfloat16": "bfloat16", **capabilities.FP8}
"""Formats of a KV cache, as SGLang's `--kv-cache-dtype` names them; `auto` is what a model in bfloat16 has."""
LONGEST = 1 << 27
"""Bytes of a line, and of a config.json."""
LOGGED = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] (?=\{)")
"""What SGLang puts in front of each line of its request log, and of nothing else."""
LOGGED_AS_TEXT = re.compile(r"\[[-\d]+ [:\d]+\] Receive: obj=")
"""Likewise with --log-requests-format text, which is the default."""
LOGGED_PART = 2048
"""Characters of a prompt that --log-requests-level 2 keeps, half of them from its end, with `...` in between; of tokens likewise."""
WHOLE = "SGLang logs whole prompts with --log-requests-level 3"
JSON = re.compile(r'\s*(\{\s*(["}]|$)|\[\s*(\{|$))')
"""How a file begins that is JSON, or meant to be: prompts may begin with a bracket too."""


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
        tbps=4.4, tflops=790, memory_gb=141, sms=132, arch="9.0a", base=13.35, longest=0.954, merge=0.0, other_base=15.73,
        unique=0.898, repeated=0.459, other_item=2.606, rest_ms=1.228, request_us=9.503,
    ),
}  # fmt: skip

GPUS_8BIT = {
    "h200": msgspec.structs.replace(
        GPUS["h200"], base=13.67, longest=0.991, merge=0.446, other_base=16.07, unique=1.620, repeated=1.489, other_item=4.654,
    ),
}  # fmt: skip
"""With KV of 8 bits."""


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


class HashedRequest(msgspec.Struct):
    """A line of a Mooncake trace."""

    input_length: Tokens
    hash_ids: list[int]
    output_length: Tokens | None = None


class Part(msgspec.Struct):
    """A piece of a message; pictures have no text."""

    text: str | None = None


class Message(msgspec.Struct):
    """A message of a chat."""

    role: str
    content: str | list[Part] | None = None


class Sampling(msgspec.Struct):
    """SGLang's own parameters."""

    max_new_tokens: Tokens | None = None


Token = Annotated[int, Meta(ge=0)]
Prompts = str | list[Token | str | list[Token]]
"""A text, its tokens, or several of either."""


class Request(msgspec.Struct):
    """What an OpenAI client or one of SGLang's sends, as far as it matters here."""

    input_ids: Prompts | None = None
    prompt: Prompts | None = None
    text: Prompts | None = None
    messages: list[Message] | None = None
    tools: Any = ""
    max_completion_tokens: Tokens | None = None
    max_tokens: Tokens | None = None
    sampling_params: Sampling | list[Sampling] | None = None


def read(path: Path, output: int) -> list[Prompt]:
    """Requests of an OpenAI batch file, SGLang's request log (--log-requests-format json --log-requests-level 3), a
    Mooncake trace, or a text file with a prompt on each line. The first line says which; lines of a log may be anywhere.

    Args:
        path: The file.
        output: Tokens generated where the file does not say.

    Raises:
        EstimateError: It cannot be read, a line is no request, which is named, or there is none.
    """
    lines = list(_lines(path))
    logged = [(number, line[found.end() :]) for number, line in lines if (found := LOGGED.match(line))]
    if not logged and any(LOGGED_AS_TEXT.match(line) for _, line in lines):
        raise EstimateError(f"{path} is a log in text: SGLang writes JSON with --log-requests-format json")
    prompts: list[Prompt] = []
    for number, line in logged or lines:
        try:
            prompts += _of_row(line, output) if logged or JSON.match(lines[0][1]) else [_of_text(line, output)]
        except (EstimateError, msgspec.ValidationError, RecursionError) as error:
            raise EstimateError(f"{path}, line {number}: {error}") from None
    if not prompts:
        raise EstimateError(f"{path} has no request: give an OpenAI batch, a request log, a trace, or prompts")
    return prompts


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that are not empty, with their numbers.

    Raises:
        EstimateError: The file cannot be read, or is no text.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(LONGEST + 1), b""), 1):
                if len(line) > LONGEST:
                    raise EstimateError(f"{path}, line {number}: more than {LONGEST >> 20} MiB")
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                if "\0" in text:
                    raise EstimateError(f"{path}, line {number}: no text, but zero bytes")
                if text.strip():
                    yield number, text
    except OSError as error:
        raise EstimateError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise EstimateError(f"{path}, line {number}: no UTF-8") from None


def _of_row(line: str, output: int) -> list[Prompt]:
    """The requests of a line of JSON: one, several in one, or none where a log tells something else.

    Raises:
        EstimateError: It has no prompt, or not all of it.
        ValidationError: It has something that no server would take.
        RecursionError: It is nested too deeply.
    """
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise EstimateError("no whole JSON object")
    if "hash_ids" in row:
        hashed = msgspec.convert(row, HashedRequest)
        blocks = hashed.hash_ids[: hashed.input_length // TRACE_BLOCK]
        return [Prompt(blocks, TRACE_BLOCK, hashed.input_length, _first(hashed.output_length, output))]
    logged = "event" in row
    if logged and row["event"] != "request.received":
        return []
    request = msgspec.convert(row.get("obj") if logged else row.get("body", row), Request)
    prompts = _prompts(request)
    if logged and any(_is_cut(prompt) for prompt in prompts):
        raise EstimateError(f"a part of a prompt; {WHOLE}")
    sampling = request.sampling_params
    samplings = sampling if isinstance(sampling, list) else [sampling or Sampling()] * len(prompts)
    if len(samplings) != len(prompts):
        raise EstimateError(f"{len(prompts)} prompts and {len(samplings)} sampling_params")
    limit = _first(request.max_completion_tokens, request.max_tokens, output)
    limits = [_first(its.max_new_tokens, limit) for its in samplings]
    return [
        _of_text(prompt, most) if isinstance(prompt, str) else _of_tokens(prompt, most)
        for prompt, most in zip(prompts, limits, strict=True)
    ]


def _first(*values: Any) -> Any:
    """The first value that is given."""
    return next((value for value in values if value is not None), None)


def _prompts(request: Request) -> list[str | list[int]]:
    """
    Raises:
        EstimateError: There is none, or something else among tokens.
    """
    given = _first(request.input_ids, request.prompt, request.text)
    if given is None and request.messages:
        given = _chat(request.messages, request.tools)
    if given is None:
        raise EstimateError(f"no prompt, messages, text or input_ids; {WHOLE}")
    if isinstance(given, str):
        return [given]
    tokens = [piece for piece in given if isinstance(piece, int)]
    others = [piece for piece in given if not isinstance(piece, int)]
    if bool(tokens) == bool(others):
        raise EstimateError(f"a prompt must be a text, or tokens and nothing else; {WHOLE}")
    return [tokens] if tokens else others


def _chat(messages: list[Message], tools: Any) -> str:
    parts = [json.dumps(tools)]
    for message in messages:
        content = message.content or ""
        if not isinstance(content, str):
            content = "".join(part.text or "" for part in content)
        parts.append(f"{message.role}: {content}")
    return "\n".join(parts)


def _is_cut(prompt: str | list[int]) -> bool:
    return len(prompt) == LOGGED_PART + 3 and prompt[LOGGED_PART // 2 :][:3] == "..."


def _of_tokens(tokens: list[int], output: int) -> Prompt:
    keys = [hash(tuple(tokens[i : i + BLOCK])) for i in range(0, len(tokens) - BLOCK + 1, BLOCK)]
    return Prompt(keys, BLOCK, len(tokens), output)


def _of_text(text: str, output: int) -> Prompt:
    size = BLOCK * CHARS_PER_TOKEN
    # JSON may have halves of a character.
    pieces = (text[i : i + size].encode(errors="surrogatepass") for i in range(0, len(text) - size + 1, size))
    return Prompt([zlib.crc32(piece) for piece in pieces], BLOCK, max(1, len(text) // CHARS_PER_TOKEN), output)


def batch_of(prompts: list[Prompt]) -> Batch:
    """The requests side by side, each half way through its answer."""
    roots: list[Node] = []
    stack = [(list(range(len(prompts))), 0, roots)]
    while stack:
        queries, index, siblings = stack.pop()
        groups = defaultdict(list)
        for query in queries:
            if index < len(prompts[query].blocks):
                groups[prompts[query].block, prompts[query].blocks[index]].append(query)
        for (block, _), group in groups.items():
            if len(group) < 2:
                continue
            first, end = prompts[group[0]].blocks, index + 1
            while all(prompts[query].blocks[end : end + 1] == first[end : end + 1] != [] for query in group):
                end += 1
            node = Node(index * block, end * block, group)
            siblings.append(node)
            stack.append((group, end, node.children))
    return Batch([p.tokens + max(1, p.output // 2) for p in prompts], roots)


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
    """What a model's config.json says.

    Attributes:
        layers: How many of its layers have KV, by what their attention is, with KV in bfloat16.
        weight_bytes: Read in a decode step; None where they depend on the experts chosen, or some layers are no attention.
    """

    layers: Counter[AttentionSpec]
    weight_bytes: int | None


Size = Annotated[int, Meta(ge=1, le=1 << 31)]


class Shape(msgspec.Struct):
    """What is read of a config.json. Its numbers may be missing where they follow from others, or are in DEFAULTS."""

    num_attention_heads: Count
    num_hidden_layers: Count
    hidden_size: Size
    intermediate_size: Size
    vocab_size: Size
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    num_experts: Any = None
    num_local_experts: Any = None
    n_routed_experts: Any = None
    model_type: str = ""
    v_head_dim: Count | None = None
    layer_types: list[str] | None = None
    layers_block_type: list[str] | None = None
    hybrid_override_pattern: str | None = None
    full_attention_interval: Count | None = None
    full_attn_idxs: list[int] | None = None
    sliding_window: Annotated[int, Meta(le=MAX_WINDOW)] | None = None
    sliding_window_size: Annotated[int, Meta(le=MAX_WINDOW)] | None = None
    sliding_window_pattern: Annotated[int, Meta(ge=0, le=4096)] | str | None = None
    hybrid_layer_pattern: list[int] | None = None
    attention_chunk_size: Any = None
    swa_num_attention_heads: Count | None = None
    swa_num_key_value_heads: Count | None = None
    swa_head_dim: Count | None = None
    swa_v_head_dim: Count | None = None


FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
WITH_KV = (FULL, SLIDING, "attention")
WITHOUT_KV = (LINEAR, "mamba", "conv", "mlp", "moe")
"""Kinds of layers: those of Qwen3-Next and Granite, LFM2, and Nemotron-H, of which each is attention or an MLP and not both."""
DEFAULTS = {
    "cohere2": {"sliding_window_pattern": 4},
    "gemma2": {"head_dim": 256, "sliding_window_pattern": 2},
    "gemma3_text": {
        "head_dim": 256, "sliding_window_pattern": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208,
    },
    "nemotron_h": {"head_dim": 128},
    "olmo3": {"sliding_window_pattern": 4},
    "qwen3_next": {"head_dim": 256, "full_attention_interval": 4},
}  # fmt: skip
"""What config.json may leave out, as transformers has it for each `model_type`."""
SEE_ONE_MORE = ("cohere2", "cohere2_moe", "exaone_moe")
"""Models of which SGLang counts `sliding_window` without the token that is decoded (commandr.py), as it does MiMo V2's."""
UNREAD = (
    "attention_other_setting", "num_attention_heads_per_layer", "global_head_dim", "block_configs", "local_layer_ids",
    "zaya_layers",
)  # fmt: skip
"""Where models say in other ways how their layers differ: Step 3.5, Laguna, Gemma 4, Nemotron NAS, Inkling, Zaya."""


def read_model(path: Path) -> Model:
    """A model's shape, from its folder or config.json.

    Raises:
        EstimateError: It is no model that PAT serves, or not a config.json.
    """
    path = path / "config.json" if os.path.isdir(path) else path
    try:
        shape = _shape(path)
    except OSError as error:
        fault = error.strerror
    except msgspec.ValidationError as error:
        fault = str(error)
    except (ValueError, RecursionError):
        fault = "no JSON"
    else:
        return _model(path, shape)
    raise EstimateError(f"{path} is not a model's config.json ({fault}): give the model's folder")


def _shape(path: Path) -> Shape:
    with path.open("rb") as file:
        config = json.loads(file.read(LONGEST))
    if isinstance(config, dict):
        config = config.get("text_config") or config
    if isinstance(config, dict):
        if config.get("kv_lora_rank") is not None:
            raise EstimateError(f"{path}: MLA models are not supported by --attention-backend pat")
        for name in UNREAD:
            if config.get(name) is not None:
                raise EstimateError(f"{path}: models whose layers differ by {name} cannot be estimated")
        config = {**DEFAULTS.get(str(config.get("model_type")), {}), **config}
    return msgspec.convert(config, Shape)


def _kinds(shape: Shape) -> list[str]:
    """What each layer is, as `layer_types` says it; fewer than there are layers if config.json says no more."""
    count = shape.num_hidden_layers
    kinds = _first(shape.layer_types, shape.layers_block_type)
    if kinds is not None:
        return kinds[:count]
    if shape.hybrid_override_pattern is not None:
        return [FULL if kind == "*" else "mamba" for kind in shape.hybrid_override_pattern[:count]]
    if shape.hybrid_layer_pattern is not None:
        return [SLIDING if windowed else FULL for windowed in shape.hybrid_layer_pattern[:count]]
    if shape.attention_chunk_size is not None:  # Llama 4; MiMo V2 has one too, of which SGLang takes no notice
        return ["chunked_attention"] * count
    if shape.full_attn_idxs is not None:
        return [FULL if layer in shape.full_attn_idxs else "conv" for layer in range(count)]
    every, other = shape.full_attention_interval, LINEAR
    if every is None:
        pattern, other = shape.sliding_window_pattern, SLIDING
        every = len(pattern) if isinstance(pattern, str) else pattern
    return [other if every and (layer + 1) % every else FULL for layer in range(count)]


def _spec(path: Path, shape: Shape, windowed: bool) -> AttentionSpec:
    """What the attention of layers with a window is, or of the others: MiMo V2 has more KV heads there.

    Raises:
        EstimateError: No model has such heads, or it does not say how long its windows are.
    """
    hidden, window = shape.hidden_size, 0
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    dim, v_dim = shape.head_dim, shape.v_head_dim
    if windowed:
        heads, kv_heads = shape.swa_num_attention_heads or heads, shape.swa_num_key_value_heads or kv_heads
        dim, v_dim = shape.swa_head_dim or dim, shape.swa_v_head_dim or shape.swa_head_dim or v_dim
        window = _first(shape.sliding_window_size, shape.sliding_window, 0)
        if window < 1:
            raise EstimateError(f"{path}: some layers have a sliding window, and sliding_window does not say how long")
        if shape.model_type in SEE_ONE_MORE or shape.hybrid_layer_pattern is not None:
            window = min(window + 1, MAX_WINDOW)
    kv_heads = kv_heads or heads
    if heads % kv_heads:
        raise EstimateError(f"{path}: {heads} attention heads cannot share {kv_heads} KV heads evenly")
    if dim is None and hidden % heads:
        raise EstimateError(
            f"{path}: a hidden size of {hidden} is no multiple of {heads} heads, and there is no head_dim"
        )
    dim = dim or hidden // heads
    return AttentionSpec(heads, kv_heads, dim, v_dim or dim, FORMATS["bfloat16"], window)


def _model(path: Path, shape: Shape) -> Model:
    kinds = _kinds(shape)
    if len(kinds) < shape.num_hidden_layers:
        raise EstimateError(f"{path}: it says what {len(kinds)} of its {shape.num_hidden_layers} layers are")
    for kind in kinds:
        if kind not in WITH_KV + WITHOUT_KV:
            raise EstimateError(f"{path}: layers of the kind {kind!r} cannot be estimated")
    windowed = Counter(kind == SLIDING for kind in kinds if kind in WITH_KV)
    layers = Counter({_spec(path, shape, key): windowed[key] for key in sorted(windowed)})
    if not layers:
        raise EstimateError(f"{path}: no layer has KV")
    hidden = shape.hidden_size
    attention = sum(
        count * hidden * (spec.heads + spec.kv_heads) * (spec.head_dim + spec.v_head_dim)
        for spec, count in layers.items()
    )
    dense = attention + shape.num_hidden_layers * 3 * hidden * shape.intermediate_size + shape.vocab_size * hidden
    experts = shape.num_experts or shape.num_local_experts or shape.n_routed_experts
    # Falcon-H1 has states beside the attention of every layer.
    hybrid = layers.total() < len(kinds) or shape.model_type == "falcon_h1"
    return Model(layers, None if experts or hybrid else 2 * dense)


def estimate(prompts: list[Prompt], model: Model, gpu_name: str, sizes: list[int], kv_cache: str = "auto") -> list[str]:
    """The lines that the command prints.

    Args:
        prompts: All of the workload's.
        model: What serves them.
        gpu_name: One of GPUS.
        sizes: Of batches.
        kv_cache: One of KV_CACHES.

    Raises:
        EstimateError: There are no measurements for the GPU, or no kernel for the model.
    """
    kv = FORMATS[KV_CACHES[kv_cache]]
    layers = _layers(model, gpu_name, kv)
    gpu = (GPUS_8BIT if kv.bytes == 1 else GPUS)[gpu_name]
    configs = [(_config(spec, gpu), count) for spec, count in layers.items()]
    total = sum(p.tokens for p in prompts)
    lines = [
        f"{len(prompts):,} requests, {total / len(prompts):,.0f} tokens of prompt and "
        f"{sum(p.output for p in prompts) / len(prompts):,.0f} of answer on average",
        "",
        f"{'batch':>6}{'shared':>8}{'KV a step, GB':>16}{'packed':>8}{'attention, us':>15}{'packed':>8}{'TPOT, ms':>10}{'packed':>8}",
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
        line = f"{size:>6}{shared:>8.0%}{read / 1e9:>16.2f}{packed / 1e9:>8.2f}"
        line += f"{other / model.layers.total():>15.0f}{time / model.layers.total():>8.0f}"
        if model.weight_bytes is not None:
            rest = rest_ms(size, model.weight_bytes, gpu)
            line += f"{rest + other / 1e3:>10.1f}{rest + time / 1e3:>8.1f}"
        if kept + (model.weight_bytes or 0) > gpu.memory_gb * 1e9:
            line += f"  more than {gpu.memory_gb} GB"
        lines.append(line)
    return [
        *lines,
        "",
        f"Layers with KV: {', '.join(f'{count} of {spec}' for spec, count in layers.items())}.",
        "shared: tokens that another request of the batch has too. Attention is one layer's with KV, on average; unpacked is "
        "FlashInfer.",
        f"Computed once each, as `sglang-pat batch` does, prompts are {total - computed_before(prompts):,} tokens of {total:,}.",
        f"Assumed: consecutive requests run side by side, half way through their answers; {CHARS_PER_TOKEN} characters a "
        f"token in text; {_measured(kv, layers)}; one {gpu_name.upper()}; a step of a dense model takes {gpu.rest_ms} ms "
        f"and {gpu.request_us} us a request beside attention and the products with its weights"
        + (" (unknown for experts and hybrid models)." if model.weight_bytes is None else "."),
    ]


def _layers(model: Model, gpu_name: str, kv: KVFormat) -> dict[AttentionSpec, int]:
    """
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


def computed_before(prompts: list[Prompt]) -> int:
    """Tokens of all prompts that an endless cache would have had."""
    nodes: dict[tuple[int, int, int], int] = {}  # by the node above, and a block below it
    found = 0
    for prompt in prompts:
        node = -1
        for key in prompt.blocks:
            known = len(nodes)
            node = nodes.setdefault((node, prompt.block, key), known)
            found += prompt.block if node < known else 0
    return found


def job(prompts: list[Prompt], model: Model, gpu_name: str) -> tuple[PackConfig, int, list[tuple[list[int], Batch]]]:
    """What a job's tree looks like to the planner.

    Args:
        prompts: All of the job's.
        model: What serves them; of several kinds of layers the most frequent is taken.
        gpu_name: One of GPUS.

    Returns:
        How it is packed; the number of layers; and in the order of the tree, AT_A_TIME requests each, their places in `prompts` and a
        batch of them.

    Raises:
        EstimateError: There are no measurements for the GPU, or no kernel for the model.
    """
    layers = _layers(model, gpu_name, FORMATS["bfloat16"])
    spec = max(layers, key=layers.__getitem__)
    order = sorted(range(len(prompts)), key=lambda place: (prompts[place].block, prompts[place].blocks))
    places = [order[start : start + AT_A_TIME] for start in range(0, len(order), AT_A_TIME)]
    return (
        _config(spec, GPUS[gpu_name]),
        layers[spec],
        [(some, batch_of([prompts[i] for i in some])) for some in places],
    )


def _config(spec: AttentionSpec, gpu: Gpu) -> PackConfig:
    return PackConfig.of(
        spec, capabilities.tile_table(gpu.arch, spec.head_dim, kv_bytes=spec.kv.bytes), workers=gpu.sms
    )


def step(batch: Batch, configs: list[tuple[PackConfig, int]], gpu: Gpu) -> tuple[float, float, float, float, float]:
    """A decode step's attention, all layers together: bytes of KV read without packing, with it, and held in memory at least;
    microseconds without packing, and with it.

    Args:
        batch: Its requests.
        configs: Of each kind of layer, with how many there are.
        gpu: What it runs on.

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
        # What a window has left need not be kept.
        kept += token_bytes * min(tokens, sum(seen.seq_lens) - repeated(seen.roots))
        other += layers * unpacked_us(seen, config, gpu)
        time += layers * attention_us(plan, batch, config, gpu)
    return read, packed, kept, other, time


def _measured(kv: KVFormat, layers: Iterable[AttentionSpec]) -> str:
    """The KV cache, and what is taken for granted of layers of which none were measured."""
    unlike = any((spec.head_dim, spec.v_head_dim, spec.window) != (128, 128, 0) for spec in layers)
    return f"KV in {kv.name}" + (", by the byte as fast as heads of 128 without windows, as measured" if unlike else "")


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
    return sum((len(node.queries) - 1) * (node.end - node.start) for node in walk(nodes))
