"""Writes the measured tables into the README, from the JSON that the benchmarks left: `python benchmarks/report.py`.

`--check` changes nothing and fails where the README has other numbers.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TIMES = "\N{MULTIPLICATION SIGN}"
SHOWN = "32/8"
"""Query and KV heads in the table of trees."""


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def mean(values: list[float]) -> float:
    """Geometric."""
    return math.exp(sum(map(math.log, values)) / len(values))


def advantage(record: dict[str, Any]) -> float:
    """Of PAT over the best of the others."""
    return min(record["rivals"].values()) / record["pat_us"]


def kernels() -> str:
    result = load("kernels-h200.json")
    records = result["records"]
    rows = []
    for record in records:
        if record["heads"] == SHOWN and record["page_size"] == 1:
            others = [
                f"{record['rivals'][name]:,.0f}" if name in record["rivals"] else "" for name in ("flashinfer", "cascade", "triton")
            ]  # fmt: skip
            rows.append(
                [
                    f"`{record['tree']}`", f"{record['floor_us']:,.1f}", f"**{record['pat_us']:,.1f}**", *others,
                    f"{advantage(record):.2f}{TIMES}",
                ]
            )  # fmt: skip
    ratios = [advantage(record) for record in records]
    shared = [advantage(record) for record in records if not record["tree"].startswith("256_")]
    device = result["device"]
    note = (
        f"{device['name']} ({device['read_tbps']} TB/s read), torch {device['torch']}, {device['date']}. All "
        f"{len(records)} cases (20 trees {TIMES} 32/32, 16/8, 32/8, 64/8 heads {TIMES} page sizes 1 and 32): faster than the best of the "
        f"others in {sum(ratio > 1 for ratio in ratios)}, by {min(ratios):.2f} to {max(ratios):.2f} times, "
        f"{mean(shared):.2f} times on average where anything is shared."
    )
    head = ["tree", "floor, us", "PAT", "FlashInfer", "its cascade", "SGLang's Triton", "best / PAT"]
    return f"{table(head, rows)}\n\n{note}"


def ablations() -> str:
    result = load("kernel-ablations-h200.json")
    names = list(result["records"][0]["us"])
    rows = [[f"`{row['tree']}`", *(f"{row['us'][name]:,.0f}" for name in names)] for row in result["records"]]
    return table(["tree, us", *names], rows)


def serving() -> str:
    result = load("serving-h200.json")
    records = result["records"]
    backends = list(dict.fromkeys(record["backend"] for record in records))
    rows = []
    for workload in dict.fromkeys((record["workload"], record["rate"]) for record in records):
        for backend in backends:
            for record in records:
                if (record["workload"], record["rate"], record["backend"]) == (*workload, backend):
                    steps = record.get("step_ms")
                    rate = f", {record['rate']:g} requests/s" if record["rate"] else ""
                    rows.append(
                        [
                            f"`{record['workload']}`{rate}", backend, f"{steps[0]:.1f} to {steps[-1]:.1f}" if steps else "",
                            f"{record['median_itl_ms']:.1f}", f"{record['mean_tpot_ms']:.1f}",
                            f"{record['mean_ttft_ms']:.0f}", f"{record['output_tps']:,.0f}",
                        ]
                    )  # fmt: skip
    head = [
        "workload",
        "backend",
        "decode step, ms",
        "median ITL, ms",
        "mean TPOT, ms",
        "mean TTFT, ms",
        "output tokens/s",
    ]
    device = result["device"]
    return f"{table(head, rows)}\n\n{device['name']}, {result['model']} shape, random weights, {device['date']}."


def steps() -> str:
    result = load("steps-h200.json")
    records = {(record["cell"], record["backend"]): record for record in result["records"]}
    backends = list(dict.fromkeys(backend for _, backend in records))
    others = [backend for backend in backends if backend != "pat"]
    rows = []
    for cell in dict.fromkeys(cell for cell, _ in records):
        ours = records[cell, "pat"]
        best = min(records[cell, backend]["step_ms"] for backend in others)
        rows.append(
            [
                f"`{cell}`", f"**{ours['step_ms']:.2f}**", *(f"{records[cell, backend]['step_ms']:.2f}" for backend in others),
                f"{best / ours['step_ms']:.3f}{TIMES}", f"{ours['metadata_us']:.0f}", f"{ours['metadata_changed_us']:.0f}",
                *(f"{records[cell, backend]['metadata_us']:.0f}" for backend in others),
            ]
        )  # fmt: skip
    head = [
        "batch x context", "PAT, ms", *(f"{backend}, ms" for backend in others), "best / PAT", "metadata, us", "new plan, us",
        *(f"{backend}'s, us" for backend in others),
    ]  # fmt: skip
    device = result["device"]
    return f"{table(head, rows)}\n\n{device['name']}, {result['model']} shape, random weights, torch {device['torch']}, {device['date']}."


def estimates() -> str:
    result = load("estimate-h200.json")
    rows = [
        [f"`{row['workload']}`", row["backend"], f"{row['measured_ms']:.1f}", f"{row['predicted_ms']:.1f}"]
        for row in result["steps"]
    ]
    pat, other = result["pat"]["error"], result["flashinfer"]["error"]
    return (
        f"On the 80 cases of the kernels' benchmark the estimate of PAT's attention is {pat['median']:.0%} off in the median and "
        f"{pat['most']:.0%} at most, FlashInfer's {other['median']:.0%} and {other['most']:.0%}. Decode steps of the serving "
        "benchmark, half way through the answers:\n\n"
        + table(["workload", "backend", "measured, ms", "estimated, ms"], rows)
    )


README_SECTIONS = ("kernels", "ablations", "serving", "steps")
SECTIONS: dict[str, Callable[[], str]] = {
    "kernels": kernels, "ablations": ablations, "serving": serving, "steps": steps, "estimates": estimates,
}  # fmt: skip


def main() -> None:
    text = old = (ROOT / "README.md").read_text()
    for name in README_SECTIONS:
        begin, end = f"<!-- {name} -->\n", f"<!-- end {name} -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise SystemExit(f"README.md has no section {name}")
        text = before + begin + SECTIONS[name]() + "\n" + end + after
    if "--check" in sys.argv[1:]:
        raise SystemExit(0 if text == old else "README.md: run python benchmarks/report.py")
    (ROOT / "README.md").write_text(text)


if __name__ == "__main__":
    main()
