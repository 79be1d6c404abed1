"""Fits `sglang-pat estimate`'s model of a GPU to what was measured on it, and says how far off it is:

    python benchmarks/calibrate.py

Reads results/kernels-h200.json, steps-h200.json and serving-h200.json; writes results/estimate-h200.json. The coefficients belong in
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

from sglang_pat.estimate import costs
from sglang_pat.kernels import capabilities
from sglang_pat.packing import FORMATS, AttentionSpec, Batch, PackConfig
from sglang_pat.packing.native import make_plan

LAYERS, WEIGHT_BYTES = 36, 2 * (36 * (2 * 4096 * 40 * 128 + 3 * 4096 * 12288) + 151936 * 4096)
"""Of the Qwen3-8B shape that benchmarks/serving.py served."""

TREES = {
    "gsp-8x32x2048": "8,256_3544,351", "gsp-32x8x1024": "32,256_1784,351", "gsp-4x64x8192": "4,256_14246,351",
    "gsp-1x128x16384": "1,128_28719,351", "random-128": str(trees.RECORDED / "random-128"),
}  # fmt: skip
"""Of its workloads, half way through the answers of 256 tokens, and with as many tokens in the prompts as the model folder's own
tokenizer makes of them (benchmarks/NOTES.md, "What the workloads really are")."""


def pack_config(heads: str, gpu: costs.Gpu, kv: str = "bfloat16") -> PackConfig:
    query_heads, kv_heads = map(int, heads.split("/"))
    spec = AttentionSpec(query_heads, kv_heads, 128, 128, FORMATS[kv])
    return PackConfig.of(spec, capabilities.tile_table(gpu.arch, 128, kv_bits=spec.kv.bits), workers=gpu.sms)


def features(tree: str, heads: str, gpu: costs.Gpu, kv: str) -> dict[str, list[float]]:
    """What each backend's time for a tree is a sum of, with the coefficients to be found; in microseconds."""
    batch, config = trees.of_cell(tree), pack_config(heads, gpu, kv)
    return {
        "pat": [1, *costs.features(make_plan(batch, config), batch, config, gpu)],
        "flashinfer": [1, *costs.unpacked_features(batch, config, gpu)],
    }


def attention_ms(batch: Batch, backend: str, gpu: costs.Gpu) -> float:
    """All layers' attention in a step of the served model."""
    config = pack_config("32/8", gpu)
    if backend == "pat":
        return LAYERS * costs.attention_us(make_plan(batch, config), batch, config, gpu) / 1e3
    return LAYERS * costs.unpacked_us(batch, config, gpu) / 1e3


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


COEFFICIENTS = {
    "pat": ("base", "longest", "merge"),
    "flashinfer": ("other_base", "unique", "repeated", "other_item"),
}
"""Of `costs.Gpu`, in the order of `features`."""


def kernels(result: str, kv: str, gpu: costs.Gpu) -> dict[str, Any]:
    """The coefficients of each backend's kernels with KV of a format, and how far off they are."""
    known = [
        (record, features(record["tree"], record["heads"], gpu, kv))
        for record in tables.load(result)["records"]
        if record["page_size"] == 1
    ]
    found = {}
    for backend, names in COEFFICIENTS.items():
        times = [record["pat_us"] if backend == "pat" else record["rivals"].get(backend) for record, _ in known]
        measured = [(numbers[backend], us) for (_, numbers), us in zip(known, times, strict=True) if us]
        coefficients, error = fit(*map(list, zip(*measured, strict=True)))
        found[backend] = {**dict(zip(names, coefficients, strict=True)), "error": error}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=tables.RESULTS / "estimate-h200.json")
    options = parser.parse_args()
    gpu = costs.GPUS["h200"]
    result: dict[str, Any] = {"device": tables.load("kernels-h200.json")["device"]}
    result |= kernels("kernels-h200.json", "bfloat16", gpu)
    result["fp8"] = kernels("kernels-fp8-h200.json", "float8_e4m3fn", gpu)
    for backend, names in COEFFICIENTS.items():
        gpu = msgspec.structs.replace(gpu, **{name: result[backend][name] for name in names})

    # (workload if it was served, tree, milliseconds, backend)
    steps = [("", r["cell"], r["step_ms"], r["backend"]) for r in tables.load("steps-h200.json")["records"]]
    steps += [
        (r["workload"], TREES[r["workload"]], r["step_ms"][len(r["step_ms"]) // 2], r["backend"])
        for r in tables.load("serving-h200.json")["records"]
        if r["workload"] in TREES
    ]
    points = []
    for workload, tree, ms, backend in steps:
        if backend in COEFFICIENTS:
            batch = trees.of_cell(tree)
            points.append((workload, backend, len(batch.seq_lens), ms, attention_ms(batch, backend, gpu)))
    # What is neither attention nor a product with the weights, by the number of requests.
    bare = msgspec.structs.replace(gpu, rest_ms=0, request_us=0)
    columns = np.array([[1, size / 1e3] for _, _, size, _, _ in points])
    rests = np.array([ms - attention - costs.rest_ms(size, WEIGHT_BYTES, bare) for _, _, size, ms, attention in points])
    fixed, by_request = np.linalg.lstsq(columns, rests, rcond=None)[0].tolist()
    gpu = msgspec.structs.replace(gpu, rest_ms=fixed, request_us=by_request)
    result |= {"rest_ms": fixed, "request_us": by_request}
    result["steps"] = [
        {
            "workload": workload,
            "backend": backend,
            "measured_ms": ms,
            "predicted_ms": round(attention + costs.rest_ms(size, WEIGHT_BYTES, gpu), 2),
        }
        for workload, backend, size, ms, attention in points
        if workload
    ]
    print(json.dumps(result, indent=1))
    options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
