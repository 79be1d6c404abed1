"""What the command finds, and how it is printed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby

import msgspec

from sglang_pat.estimate import costs
from sglang_pat.estimate.errors import EstimateError
from sglang_pat.estimate.models import Model
from sglang_pat.estimate.prompts import CHARS_PER_TOKEN, Prompt, batch_of
from sglang_pat.kernels import capabilities
from sglang_pat.packing import FORMATS

KV_CACHES = {"auto": "bfloat16", "bf16": "bfloat16", "bfloat16": "bfloat16", **capabilities.FP8}
"""Formats of a KV cache, as SGLang's `--kv-cache-dtype` names them; `auto` is what a model in bfloat16 has."""
WINDOWS = 8
"""How many batches of each size are looked at: consecutive requests, spread evenly over the file."""
GOLDEN = (5**0.5 - 1) / 2
"""Its multiples, without their whole parts, are spread evenly between 0 and 1 however many there are."""


class Row(msgspec.Struct):
    """One batch size; means over the batches that were looked at (`Estimate`)."""

    batch: int
    shared: float
    kv_bytes: dict[str, int]
    attention_us: dict[str, float]
    step_ms: dict[str, float] | None
    faster: dict[str, float]
    needed_bytes: int
    fits: bool


class Layers(msgspec.Struct):
    """Layers of one kind."""

    count: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int


class Estimate(msgspec.Struct):
    """What packing would bring a workload; with `--json` all of this is printed (docs/estimate.md, "JSON", says what each is)."""

    requests: int
    prompt_tokens: int
    answer_tokens: int
    prompt_tokens_once: int
    gpu: str
    kv_cache: str
    static_bytes: int
    baseline: str
    layers: list[Layers]
    batches: list[Row]
    verdict: str
    assumptions: list[str]
    source: str = ""
    warnings: list[str] = []

    def lines(self) -> Iterator[str]:
        """The table that the command prints."""
        backends = list(self.batches[0].attention_us)
        times = ["attention a layer, us"] + ["step, ms"] * (self.batches[0].step_ms is not None)
        widths = [max(7, len(costs.NAMES[name]) + 2) for name in backends]
        widths[0] = max(widths[0], len(times[0]) + 2 - sum(widths[1:]))
        if self.source:
            yield self.source
        yield from (f"warning: {warning}" for warning in self.warnings)
        yield (
            f"{self.requests:,} request{'s' * (self.requests > 1)} with {self.prompt_tokens / self.requests:,.0f} tokens of prompt and "
            f"{self.answer_tokens / self.requests:,.0f} of answer on average, on one {self.gpu}"
        )
        yield ""
        yield f"{'':>14}{'KV a step, GB':>20}" + "".join(f"{head:>{sum(widths)}}" for head in times)
        names = "".join(f"{costs.NAMES[name]:>{width}}" for name, width in zip(backends, widths, strict=True))
        yield f"{'batch':>6}{'shared':>8}{'unpacked':>11}{'PAT':>9}" + names * len(times) + f"{'faster':>9}"
        for row in self.batches:
            line = f"{row.batch:>6}{row.shared:>8.0%}"
            line += f"{row.kv_bytes['unpacked'] / 1e9:>11.2f}{row.kv_bytes['pat'] / 1e9:>9.2f}"
            for values, digits in ((row.attention_us, 0), (row.step_ms or {}, 1)):
                line += "".join(f"{value:>{w}.{digits}f}" for value, w in zip(values.values(), widths, strict=False))
            line += f"{row.faster[self.baseline]:>8.2f}x"
            yield line + ("" if row.fits else f"  needs {row.needed_bytes / 1e9:,.0f} GB: does not fit")
        yield ""
        time = "step" if self.batches[0].step_ms else "attention"
        yield "shared: tokens that need not be read, as the same are read for another request. step: one decode step."
        yield f"faster: {time} time of {costs.NAMES[self.baseline]}, SGLang's default on this GPU, divided by PAT's."
        yield f"If each prefix is computed once, as by sglang-pat batch, {self.prompt_tokens_once:,} of {self.prompt_tokens:,} prompt tokens are."
        yield ""
        yield "Assumptions:"
        yield from (f"- {sentence}" for sentence in self.assumptions)
        yield ""
        yield self.verdict


def estimate(
    prompts: list[Prompt], model: Model, gpu_name: str, sizes: list[int], kv_cache: str = "auto", draft_tokens: int = 1
) -> Estimate:
    """What packing would bring, if each request has `draft_tokens` tokens in a step.

    Raises:
        EstimateError: There are no measurements for the GPU, or no kernel for the model.
    """
    kv = FORMATS[KV_CACHES[kv_cache]]
    layers = costs.layers_of(model, kv, draft_tokens)
    gpu = costs.gpu_for(model, gpu_name, kv, draft_tokens)
    configs = [(costs.pack_config(spec, gpu), count) for spec, count in layers.items()]
    rows, together = [], _at_once(prompts)
    for size in sorted({min(size, len(together)) for size in sizes}):
        starts = {round(i * (len(together) - size) / max(1, WINDOWS - 1)) for i in range(WINDOWS)}
        batches = [batch_of(together[start : start + size]) for start in sorted(starts)]
        shared = sum(costs.repeated(batch.roots) for batch in batches) / sum(sum(batch.seq_lens) for batch in batches)
        try:
            steps = [costs.step(batch, configs, gpu) for batch in batches]
        except ValueError as error:
            raise EstimateError(f"no server takes such a batch: {error}") from None
        rows.append(_row(size, shared, steps, model, gpu))
    baseline = next(iter(gpu.baselines))
    return Estimate(
        requests=len(prompts),
        prompt_tokens=(total := sum(p.tokens for p in prompts)),
        answer_tokens=sum(p.output for p in prompts),
        prompt_tokens_once=total
        - sum(p.kept for p in prompts)
        - costs.repeated(batch_of([p for p in prompts if not p.kept]).roots),
        gpu=gpu.name,
        kv_cache=kv.name,
        static_bytes=round(_static_gb(gpu) * 1e9),
        baseline=baseline,
        layers=[
            Layers(count, spec.heads, spec.kv_heads, spec.head_dim, spec.v_head_dim, spec.window)
            for spec, count in layers.items()
        ],
        batches=rows,
        verdict=f"{_verdict(rows, baseline)}{_memory(rows, model, gpu)}",
        assumptions=[
            "One GPU; with --tp-size the gain is smaller.",
            _side_by_side(prompts),
            f"Text has {CHARS_PER_TOKEN} characters a token.",
            f"Layers with KV: {', '.join(f'{count} of {spec}' for spec, count in layers.items())}.",
            f"Weights and KV have {_place(gpu)}, as SGLang's default --mem-fraction-static is {costs.static_fraction(gpu):.2f}; "
            f"{_weights(model)}, and KV up to {_kv_gb(rows, model):,.1f}.",
            *_of_times([(s.head_dim, s.v_head_dim, s.window) for s in layers], model, gpu),
        ],
    )


def _at_once(prompts: Sequence[Prompt]) -> list[Prompt]:
    """What can run side by side: all prompts, but of each session only one turn. That is where it is at some moment of its answers."""
    found: list[Prompt] = []
    for session, group in groupby(prompts, lambda prompt: prompt.session):
        turns = list(group)
        if session is None:
            found += turns
            continue
        ends = list(accumulate(turn.output for turn in turns))
        found.append(turns[min(bisect_right(ends, len(found) * GOLDEN % 1 * ends[-1]), len(turns) - 1)])
    return found


def _side_by_side(prompts: list[Prompt]) -> str:
    if any(prompt.session is not None for prompt in prompts):
        return "Consecutive sessions of the file run at once, each half way through one of its answers, the likelier the longer it is."
    return "Consecutive requests of the file run at once, half way through their answers."


def _row(size: int, shared: float, steps: list[costs.Step], model: Model, gpu: costs.Gpu) -> Row:
    """The means of a batch size."""
    needed = sum(one.kept_bytes for one in steps) / len(steps) + (model.weight_bytes or 0)
    whole = {name: sum(one.attention_us[name] for one in steps) / len(steps) for name in steps[0].attention_us}
    times, step_ms = whole, None
    if model.weight_bytes is not None and gpu.measured.tokens == 1:
        rest = costs.rest_ms(size, model.weight_bytes, gpu)
        times = step_ms = {name: rest[name] + us / 1e3 for name, us in whole.items()}
    return Row(
        batch=size,
        shared=round(shared, 4),
        kv_bytes={
            "unpacked": round(sum(one.unpacked_bytes for one in steps) / len(steps)),
            "pat": round(sum(one.packed_bytes for one in steps) / len(steps)),
        },
        attention_us={name: round(us / model.layers.total(), 2) for name, us in whole.items()},
        step_ms=None if step_ms is None else {name: round(ms, 3) for name, ms in step_ms.items()},
        faster={name: round(times[name] / times["pat"], 3) for name in gpu.baselines},
        needed_bytes=round(needed),
        fits=needed <= _static_gb(gpu) * 1e9,
    )


def _static_gb(gpu: costs.Gpu) -> float:
    return gpu.memory_gb * costs.static_fraction(gpu)


def _place(gpu: costs.Gpu) -> str:
    return f"{_static_gb(gpu):.0f} of {gpu.memory_gb} GB"


def _weights(model: Model) -> str:
    return (
        "the weights are not counted" if model.weight_bytes is None else f"weights take {model.weight_bytes / 1e9:.0f}"
    )


def _kv_gb(rows: list[Row], model: Model) -> float:
    return max(row.needed_bytes - (model.weight_bytes or 0) for row in rows) / 1e9


def _memory(rows: list[Row], model: Model, gpu: costs.Gpu) -> str:
    """What does not fit, in a sentence; empty if all does."""
    large, weights = [row for row in rows if not row.fits], model.weight_bytes or 0
    if weights > _static_gb(gpu) * 1e9:
        return f" The weights alone ({weights / 1e9:.0f} GB in bfloat16) do not fit in the {_place(gpu)} that SGLang takes for them and KV."
    if not large:
        return ""
    requests = f"{_listed([f'{row.batch:,}' for row in large])} request{'' if large[-1].batch == 1 else 's'}"
    beside = f" beside {weights / 1e9:.0f} GB of weights" if weights else ""
    return f" The KV of {requests} does not fit in the {_place(gpu)} that SGLang takes for weights and KV: {_kv_gb(large, model):,.0f} GB{beside}."


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1])] * (len(words) > 1) + words[-1:])


def _verdict(rows: list[Row], baseline: str) -> str:
    """The table in words. A gain that rounds to 1.0 is none: without sharing, estimated gains of steps are up to 0.04 off (benchmarks/calibrate.py)."""
    sizes: dict[str, list[str]] = {}
    for row in rows:
        ratio = f"{row.faster[baseline]:.1f}"
        words = f"{ratio}x " + ("faster" if row.faster[baseline] > 1 else "as fast")
        sizes.setdefault("no gain" if ratio == "1.0" else words, []).append(f"{row.batch:,}")
    parts = [f"{gain} with {_listed(batches)}" for gain, batches in sizes.items()]
    parts[0] += " request at once" if next(iter(sizes.values())) == ["1"] else " requests at once"
    return f"{'Decode steps' if rows[0].step_ms else 'Attention'} compared with {costs.NAMES[baseline]}: {', '.join(parts)}."


def _of_times(kinds: list[tuple[int, int, int]], model: Model, gpu: costs.Gpu) -> Iterator[str]:
    """What is assumed about times, of layers with these dimensions and windows."""
    dims, tokens = gpu.measured.dims, gpu.measured.tokens
    if gpu.measured == costs.LATENTS_8BIT:
        yield (
            f"For FA3 SGLang copies the whole pool to 16 bits in each layer, {1e3 * costs.COPY_US:.1f} ms for 1,000,000 tokens: its times are those of a pool that holds no more than these requests."
        )
        yield "FlashMLA copies nothing, and may be faster where little is shared: it is not in the table."
    if any(kind != (*dims, 0) for kind in kinds):
        yield f"These times are of heads of {dims[0]} without windows: other layers are taken to be as fast per byte."
    if model.weight_bytes is not None and tokens == 1:
        yield (
            f"Beside attention and the products with the weights a step takes {gpu.rest_ms['pat']:.1f} ms and {gpu.request_us:.0f} us a request."
        )
    else:
        if tokens > 1:
            yield f"A step gives a request up to {tokens} tokens. What it takes beside attention is not known: drafts are part of it."
        else:
            yield "What a step of this model takes beside attention is not known: it has experts, latents, or layers without KV."
        # By the kernels' results (docs/estimate.md, "How far off is it?").
        if dims == costs.LATENT_DIMS:
            yield "Attention's times are 1 to 5 % off in the median, up to 11 at worst."
        else:
            yield "Attention's times are 3 to 11 % off in the median, up to 40 at worst: for hundreds of short requests that share nothing PAT's are too low."
    yield "Clients see a longer time per token than a step: they wait for the prefill of other requests too."
