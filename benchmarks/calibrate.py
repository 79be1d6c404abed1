"""Fits `sglang-pat estimate`'s model of a GPU to what was measured on it, and says how far off it is:

    python benchmarks/calibrate.py

Reads results/kernels-h200.json and serving-h200.json; writes results/estimate-h200.json. The coefficients belong in
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

TREES = {"gsp-8x32x2048": "8,256_2048,256", "random-128": "128_1152"}
"""Of its workloads, half way through the answers of 256 tokens."""


def predict(tree: str, heads: str, gpu: estimate.Gpu) -> tuple[float, float, float, float]:
    """(longest SM, merge, KV once, KV read again) of a tree, in microseconds."""
    query_heads, kv_heads = map(int, heads.split("/"))
    cost = gpu_tiles.cost_model(query_heads, kv_heads, 128)
    config = PackConfig(cost, gpu_tiles.tile_table(gpu.arch, 128), workers=gpu.sms)
    batch = trees.build(*trees.parse(tree))
    longest, merge = estimate.features(make_plan(batch, config), batch, config, gpu)
    per_us, again = gpu.tbps * 1e6 / cost.token_bytes, estimate.repeated(batch.roots)
    return longest, merge, (sum(batch.seq_lens) - again) / per_us, again / per_us


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


def main() -> None:
    gpu = estimate.GPUS["h200"]
    records = [r for r in json.loads((RESULTS / "kernels-h200.json").read_text())["records"] if r["page_size"] == 1]
    known = [(record, predict(record["tree"], record["heads"], gpu)) for record in records]
    ours, errors = fit([[1, *numbers[:2]] for _, numbers in known], [r["pat_us"] for r in records])
    both = [(record, numbers) for record, numbers in known if "flashinfer" in record["rivals"]]
    other, other_errors = fit([[1, *numbers[2:]] for _, numbers in both], [r["rivals"]["flashinfer"] for r, _ in both])
    result: dict[str, Any] = {
        "device": json.loads((RESULTS / "kernels-h200.json").read_text())["device"],
        "pat": {"base": ours[0], "longest": ours[1], "merge": ours[2], "error": errors},
        "flashinfer": {"base": other[0], "unique": other[1], "repeated": other[2], "error": other_errors},
        "steps": [],
    }
    gpu = msgspec.structs.replace(
        gpu, base=ours[0], longest=ours[1], merge=ours[2], other_base=other[0], unique=other[1], repeated=other[2]
    )  # fmt: skip
    rests = []
    for record in json.loads((RESULTS / "serving-h200.json").read_text())["records"]:
        if record["workload"] not in TREES or not record["step_ms"] or record["backend"] not in ("pat", "flashinfer"):
            continue
        tree = TREES[record["workload"]]
        longest, merge, unique, again = predict(tree, "32/8", gpu)
        pat = gpu.base + gpu.longest * longest + gpu.merge * merge
        other_us = gpu.other_base + gpu.unique * unique + gpu.repeated * again
        attention = pat if record["backend"] == "pat" else other_us
        step = record["step_ms"][len(record["step_ms"]) // 2]
        rests.append(step - LAYERS * attention / 1e3 - WEIGHT_BYTES / gpu.tbps * 1e-9)
        result["steps"].append({"workload": record["workload"], "backend": record["backend"], "measured_ms": step})
    result["rest_ms"] = float(np.median(rests))
    for row, rest in zip(result["steps"], rests, strict=True):
        row["predicted_ms"] = round(row["measured_ms"] - rest + result["rest_ms"], 2)
    print(json.dumps(result, indent=1))
    (RESULTS / "estimate-h200.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
