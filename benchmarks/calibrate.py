"""Fits `sglang-pat estimate`'s model of a GPU to what was measured on it, and says how far off it is:

    python benchmarks/calibrate.py

Reads results/kernels-h200.json, steps-h200.json and serving-h200.json; writes results/estimate-h200.json. The coefficients belong in
`sglang_pat/estimate.py` (tests/test_estimate.py compares).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import trees

from sglang_pat import estimate
from sglang_pat.kernels import gpu_tiles
from sglang_pat.packing import PackConfig, make_plan

RESULTS = Path(__file__).parent / "results"
LAYERS, WEIGHT_BYTES = 36, 2 * (36 * (2 * 4096 * 40 * 128 + 3 * 4096 * 12288) + 151936 * 4096)
"""Of the Qwen3-8B shape that benchmarks/serving.py served."""

TREES = {
    "gsp-8x32x2048": "8,256_3544,351", "gsp-32x8x1024": "32,256_1784,351", "gsp-4x64x8192": "4,256_14246,351",
    "gsp-1x128x16384": "1,128_28719,351", "random-128": "128_2040",
}  # fmt: skip
"""Of its workloads, half way through the answers of 256 tokens, and with as many tokens in the prompts as the model folder's own
tokenizer makes of them (benchmarks/NOTES.md, "What the workloads really are")."""


def predict(tree: str, heads: str, gpu: estimate.Gpu) -> dict[str, list[float]]:
    """What each backend's time for a tree is a sum of, with the coefficients to be found; in microseconds."""
    query_heads, kv_heads = map(int, heads.split("/"))
    cost = gpu_tiles.cost_model(query_heads, kv_heads, 128)
    config = PackConfig(cost, gpu_tiles.tile_table(gpu.arch, 128), workers=gpu.sms)
    batch = trees.build(*trees.parse(tree))
    return {
        "pat": [1, *estimate.features(make_plan(batch, config), batch, config, gpu)],
        "flashinfer": [1, *estimate.unpacked_features(batch, config, gpu)],
    }


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


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def tree_of(cell: str) -> str:
    """A cell of steps.py as a tree."""
    return cell.replace("x", "_")


def main() -> None:
    gpu = estimate.GPUS["h200"]
    kernels = load("kernels-h200.json")
    known = [
        (record, predict(record["tree"], record["heads"], gpu))
        for record in kernels["records"]
        if record["page_size"] == 1
    ]
    result: dict[str, Any] = {"device": kernels["device"]}
    for backend, names in COEFFICIENTS.items():
        times = [record["pat_us"] if backend == "pat" else record["rivals"].get(backend) for record, _ in known]
        measured = [(numbers[backend], us) for (_, numbers), us in zip(known, times, strict=True) if us]
        coefficients, error = fit(*map(list, zip(*measured, strict=True)))
        result[backend] = {**dict(zip(names, coefficients, strict=True)), "error": error}
        gpu = msgspec.structs.replace(gpu, **dict(zip(names, coefficients, strict=True)))

    def attention_ms(tree: str, backend: str) -> float:
        parts = zip(COEFFICIENTS[backend], predict(tree, "32/8", gpu)[backend], strict=True)
        return LAYERS * sum(getattr(gpu, name) * part for name, part in parts) / 1e3

    steps = [
        (tree_of(record["cell"]), record["backend"], record["step_ms"])
        for record in load("steps-h200.json")["records"]
        if record["backend"] in COEFFICIENTS
    ]
    served = [
        (
            record["workload"],
            TREES[record["workload"]],
            record["backend"],
            record["step_ms"][len(record["step_ms"]) // 2],
        )
        for record in load("serving-h200.json")["records"]
        if record["workload"] in TREES and record["backend"] in COEFFICIENTS
    ]
    # What is neither attention nor a product with the weights, by the number of requests.
    bare = msgspec.structs.replace(gpu, rest_ms=0, request_us=0)
    rests = []
    for tree, backend, ms in [*steps, *(row[1:] for row in served)]:
        batch = len(trees.build(*trees.parse(tree)).seq_lens)
        rests.append((batch, ms - attention_ms(tree, backend) - estimate.rest_ms(batch, WEIGHT_BYTES, bare)))
    columns = np.array([[1, batch / 1e3] for batch, _ in rests])
    fixed, by_request = np.linalg.lstsq(columns, np.array([ms for _, ms in rests]), rcond=None)[0].tolist()
    result |= {"rest_ms": fixed, "request_us": by_request, "steps": []}
    gpu = msgspec.structs.replace(gpu, rest_ms=fixed, request_us=by_request)
    for workload, tree, backend, ms in served:
        batch = len(trees.build(*trees.parse(tree)).seq_lens)
        predicted = attention_ms(tree, backend) + estimate.rest_ms(batch, WEIGHT_BYTES, gpu)
        result["steps"].append(
            {"workload": workload, "backend": backend, "measured_ms": ms, "predicted_ms": round(predicted, 2)}
        )
    print(json.dumps(result, indent=1))
    (RESULTS / "estimate-h200.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
