"""Draws the paper's figures 10 and 11 for the documentation, from the results of kernels.py and serving.py:
`python benchmarks/figure.py`.

Needs matplotlib.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.pyplot as plt

DOCS = Path(__file__).parent.parent / "docs"

COLOURS = {"pat": "#2563eb", "flashinfer": "#f59e0b", "cascade": "#a3a3a3", "triton": "#84cc16", "fa3": "#ef4444"}


def draw_kernels(path: Path) -> None:
    result = json.loads(path.read_text())
    records = [record for record in result["records"] if record["page_size"] == 1]
    configurations = list(dict.fromkeys(record["heads"] for record in records))
    figure, panels = plt.subplots(len(configurations), 1, figsize=(14, 2.6 * len(configurations) + 1.6), sharex=True)
    for panel, heads in zip(panels, configurations, strict=True):
        rows = [record for record in records if record["heads"] == heads]
        names = ["pat", *dict.fromkeys(name for row in rows for name in row["rivals"])]
        for i, name in enumerate(names):
            offset = (i - (len(names) - 1) / 2) * 0.8 / len(names)
            times = [row["pat_us"] if name == "pat" else row["rivals"].get(name, 0) for row in rows]
            panel.bar([x + offset for x in range(len(rows))], times, 0.8 / len(names), label=name, color=COLOURS[name])
        panel.plot(range(len(rows)), [row["floor_us"] for row in rows], "k_", markersize=16, label="floor")
        panel.set_yscale("log")
        panel.set_ylabel(f"{heads} heads\nmicroseconds")
        panel.set_xticks(range(len(rows)), [row["tree"].replace("_", "\n") for row in rows], rotation=60, fontsize=6)
    panels[0].legend(ncols=6, fontsize=8)
    panels[0].set_title(
        f"Decode attention, page size 1, bfloat16, {result['device']['name']}, {result['device']['date']}"
    )
    figure.tight_layout()
    figure.savefig(DOCS / f"{path.stem}.png", dpi=110)


MEASURES = {
    "median_itl_ms": "median ITL, ms", "mean_tpot_ms": "mean TPOT, ms", "p99_tpot_ms": "P99 TPOT, ms",
    "mean_ttft_ms": "mean TTFT, ms", "output_tps": "output tokens/s",
}  # fmt: skip


def draw_serving(path: Path) -> None:
    """Workloads of a number of requests as bars above, the trace over its rates below."""
    result = json.loads(path.read_text())
    batches = [record for record in result["records"] if record["rate"] is None]
    replays = [record for record in result["records"] if record["rate"] is not None]
    replays.sort(key=lambda record: record["rate"])
    rates = list(dict.fromkeys(record["rate"] for record in replays))
    workloads = list(dict.fromkeys(record["workload"] for record in batches))
    backends = list(dict.fromkeys(record["backend"] for record in result["records"]))
    figure, rows = plt.subplots(2, len(MEASURES), figsize=(3.4 * len(MEASURES), 6.2))
    for (field, title), bars, lines in zip(MEASURES.items(), *rows, strict=True):
        for i, backend in enumerate(backends):
            own = [record for record in batches if record["backend"] == backend]
            offset = (i - (len(backends) - 1) / 2) * 0.8 / len(backends)
            places = [workloads.index(record["workload"]) + offset for record in own]
            bars.bar(
                places, [record[field] for record in own], 0.8 / len(backends), label=backend, color=COLOURS[backend]
            )
            own = [record for record in replays if record["backend"] == backend]
            places = [record["rate"] for record in own]
            lines.plot(places, [record[field] for record in own], "o-", label=backend, color=COLOURS[backend])
        bars.set_xticks(range(len(workloads)), workloads, rotation=30, ha="right", fontsize=7)
        bars.set_title(title, fontsize=9)
        bars.set_ylim(0)
        lines.set_xlabel("trace, requests/s", fontsize=8)
        lines.set_xscale("log", base=2)
        lines.set_xticks(rates, [f"{rate:g}" for rate in rates])
        lines.set_ylim(0)
    rows[0][0].legend(fontsize=8)
    figure.suptitle(f"{result['model']} shape, {result['device']['name']}, {result['device']['date']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(DOCS / f"{path.stem}.png", dpi=110)


def main() -> None:
    results = Path(__file__).parent / "results"
    draw_kernels(results / "kernels-h200.json")
    draw_serving(results / "serving-nominal-h200.json")


if __name__ == "__main__":
    main()
