"""Fits `sglang-pat estimate`'s model of a GPU to what was measured on it, and says how far off it is:

    python benchmarks/calibrate.py

Reads the results of kernels, steps and servers; writes results/estimate-h200.json and estimate-h100.json. The coefficients belong in
`sglang_pat/estimate/costs.py` (tests/test_estimate.py compares).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tables
import trees

from sglang_pat.estimate import KV_CACHES, costs
from sglang_pat.kernels import capabilities
from sglang_pat.packing import FORMATS, AttentionSpec, Batch
from sglang_pat.packing.native import inspect

BENCHMARKS = {
    "calibrate": {"what": "fits `sglang-pat estimate` to the results", "minutes": 0.1, "results": "estimate-*.json"},
}
"""For run.py, which reads it without importing this file."""

LAYERS, WEIGHT_BYTES = 36, 2 * (36 * (2 * 4096 * 40 * 128 + 3 * 4096 * 12288) + 151936 * 4096)
"""Of the Qwen3-8B shape that benchmarks/serving.py served."""

TREES = {
    "gsp-8x32x2048": "8,256_3544,351", "gsp-32x8x1024": "32,256_1784,351", "gsp-4x64x8192": "4,256_14246,351",
    "gsp-1x128x16384": "1,128_28719,351", "random-128": str(trees.RECORDED / "random-128"),
}  # fmt: skip
"""Of its workloads, half way through the answers of 256 tokens, and with as many tokens in the prompts as the model folder's own
tokenizer makes of them (benchmarks/notes/servers.md, "What the workloads really are")."""

NOMINAL = {"gsp-8x32x2048": "8,256_2048,256", "gsp-4x64x8192": "4,256_8192,256"}
"""The same where prompts have as many tokens as the names say."""

M, DIMS, LARGE_DIMS = costs.Measured, costs.DIMS, costs.LARGE_DIMS
KERNELS = {
    "h200": {
        M(DIMS): "kernels-h200.json", M(DIMS, 8): "kernels-fp8-h200.json", M(DIMS, 16, 4): "verify-h200.json", M(DIMS, 8, 4): "verify-fp8-h200.json",
        **{M(LARGE_DIMS, bits, tokens): "kernels-dim256-h200.json" for bits in (16, 8) for tokens in (1, 4)},
        **{M(costs.LATENT_DIMS, bits): "mla-h200.json" for bits in (16, 8)},
    },
    "h100": {M(DIMS): "kernels-h100.json"},
}  # fmt: skip
"""Results of attention alone."""
KV = {16: "bfloat16", 8: "float8_e4m3fn"}
SERVED = {
    "h200": {"serving-h200.json": TREES, "serving-nominal-h200.json": NOMINAL},
    "h100": {"serving-nominal-h100.json": NOMINAL},
}
"""Results of servers, and the trees of those of their workloads whose trees are known."""

SERVED_RESTS = ("pat", "flashinfer")
"""The backends whose served steps say what a step takes beside attention. Where much is shared, FA3's kernels take longer in a server than in their
benchmark: that is no rest, so its constant comes from the model runner's steps alone."""


def spec_of(heads: str | int, measured: costs.Measured) -> AttentionSpec:
    """Of latents there are query heads only."""
    query_heads, kv_heads = (heads, 1) if isinstance(heads, int) else map(int, heads.split("/"))
    kv = FORMATS[KV[measured.bits]]
    latent = measured.dims == costs.LATENT_DIMS
    return AttentionSpec(query_heads, kv_heads, *measured.dims, kv, query_tokens=measured.tokens, latent=latent)


def features(tree: str, heads: str | int, gpu: costs.Gpu) -> dict[str, list[float]]:
    """What each backend's time for a tree is a sum of, with the coefficients to be found; in microseconds."""
    batch = trees.of_cell(trees.LATENTS.get(tree, tree))
    config = costs.pack_config(spec_of(heads, gpu.measured), gpu)
    unpacked = [1, *costs.unpacked_features(batch, config, gpu)]
    packed = [1, *costs.features(inspect(batch, config), gpu)]
    return {"pat": packed, **dict.fromkeys(gpu.baselines, unpacked)}


def attention_ms(batch: Batch, backend: str, gpu: costs.Gpu) -> float:
    """All layers' attention in a step of the served model."""
    config = costs.pack_config(spec_of("32/8", M(DIMS)), gpu)
    if backend == "pat":
        return LAYERS * costs.attention_us(inspect(batch, config), gpu) / 1e3
    return LAYERS * costs.unpacked_us(batch, config, gpu, gpu.baselines[backend]) / 1e3


def fit(columns: list[list[float]], times: list[float]) -> tuple[list[float], dict[str, float]]:
    """Least squares of the relative error; coefficients, none of them negative, and its median and greatest value."""
    x, y = np.array(columns), np.array(times)
    coefficients = np.zeros(x.shape[1])
    used = list(range(x.shape[1]))
    while True:
        coefficients[used] = np.linalg.lstsq(x[:, used] / y[:, None], np.ones(len(y)), rcond=None)[0]
        if (coefficients >= 0).all():
            break
        # What the data do not show to cost anything is left out.
        used = [i for i in used if coefficients[i] >= 0]
        coefficients[:] = 0
    errors = np.abs(x @ coefficients / y - 1)
    return coefficients.tolist(), {"median": float(np.median(errors)), "most": float(errors.max())}


OF_PAT = ("base", "longest", "merge")
"""Of `costs.Gpu`, in the order of `features`. Those of others are all of `costs.Baseline`."""


def is_of(record: dict[str, Any], measured: costs.Measured) -> bool:
    """Whether a record is one of those that coefficients are fitted to. Of latents there are those of as many heads as are packed."""
    if record["page_size"] != 1 or record.get("tokens", 1) != measured.tokens:
        return False
    if "kv" in record and FORMATS[KV_CACHES.get(record["kv"], record["kv"])].bits != measured.bits:
        return False
    if measured.dims == costs.LATENT_DIMS:
        return capabilities.holds_several(spec_of(record["heads"], measured), costs.ARCH)
    return (record.get("dim", DIMS[0]), record.get("v_dim", DIMS[1])) == measured.dims


def rival_us(rivals: dict[str, float], backend: str) -> float | None:
    """Microseconds; of FP8 latents without the copy of the pool, which does not depend on the batch."""
    return rivals.get(f"{backend}_copied", rivals.get(backend))


def kernels(file: str, gpu: costs.Gpu) -> dict[str, Any]:
    """The coefficients of each backend's kernels, and how far off they are."""
    records = [record for record in tables.load(file)["records"] if is_of(record, gpu.measured)]
    known = [(record, features(record["tree"], record["heads"], gpu)) for record in records]
    found = {}
    for backend in ("pat", *gpu.baselines):
        names = OF_PAT if backend == "pat" else costs.Baseline.__struct_fields__
        times = [record["pat_us"] if backend == "pat" else rival_us(record["rivals"], backend) for record, _ in known]
        timed = [(numbers[backend], us) for (_, numbers), us in zip(known, times, strict=True) if us]
        coefficients, error = fit(*map(list, zip(*timed, strict=True)))
        found[backend] = {**dict(zip(names, coefficients, strict=True)), "error": error}
    return found


def calibrate(name: str) -> dict[str, Any]:
    """What is found of a GPU."""
    known = costs.GPUS[name]
    result: dict[str, Any] = {
        "device": tables.load(KERNELS[name][M(DIMS)])["device"],
        "kernels": [
            {**measured._asdict(), **kernels(file, known[measured])} for measured, file in KERNELS[name].items()
        ],
    }
    gpu, found = known[M(DIMS)], result["kernels"][0]
    others = {
        backend: [found[backend][field] for field in costs.Baseline.__struct_fields__] for backend in gpu.baselines
    }
    gpu = costs.fitted(gpu, gpu.measured, [found["pat"][field] for field in OF_PAT], **others)

    # (file if it was served, workload, tree, milliseconds, backend)
    steps = [
        ("", r["cell"], r["cell"], r["step_ms"], r["backend"]) for r in tables.load(f"steps-{name}.json")["records"]
    ]
    steps += [
        (file, r["workload"], of[r["workload"]], r["step_ms"][len(r["step_ms"]) // 2], r["backend"])
        for file, of in SERVED[name].items()
        for r in tables.load(file)["records"]
        if r["workload"] in of
    ]
    points = []
    for file, workload, tree, ms, backend in steps:
        if backend in ("pat", *gpu.baselines):
            batch = trees.of_cell(tree)
            points.append((file, workload, backend, len(batch.seq_lens), ms, attention_ms(batch, backend, gpu)))
    # What is neither attention nor a product with the weights: a constant of each backend, and a time per request.
    backends = ("pat", *gpu.baselines)
    bare = msgspec.structs.replace(gpu, rest_ms=dict.fromkeys(backends, 0.0), request_us=0)
    used = [
        (
            [*(backend == one for one in backends), size / 1e3],
            ms - attention - costs.rest_ms(size, WEIGHT_BYTES, bare)["pat"],
            ms,
        )
        for file, _, backend, size, ms, attention in points
        if not file or backend in SERVED_RESTS
    ]
    columns, rests, whole = (np.array(values, float) for values in zip(*used, strict=True))
    # Least squares of the error relative to the whole step.
    *constants, by_request = np.linalg.lstsq(columns / whole[:, None], rests / whole, rcond=None)[0].tolist()
    result |= {"rest_ms": dict(zip(backends, constants, strict=True)), "request_us": by_request}
    gpu = msgspec.structs.replace(gpu, rest_ms=result["rest_ms"], request_us=by_request)
    result["steps"] = [
        {
            "file": file or f"steps-{name}.json",
            "workload": workload,
            "backend": backend,
            "measured_ms": ms,
            "predicted_ms": round(attention + costs.rest_ms(size, WEIGHT_BYTES, gpu)[backend], 2),
        }
        for file, workload, backend, size, ms, attention in points
    ]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=tables.RESULTS, help="the folder (%(default)s)")
    options = parser.parse_args()
    for name in costs.GPUS:
        text = json.dumps(calibrate(name), indent=1)
        print(text)
        (options.output / f"estimate-{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
