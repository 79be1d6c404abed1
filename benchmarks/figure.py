"""Draws the paper's figure 10 from the kernels' results: `python benchmarks/figure.py [results/kernels-h200.json]`.

Needs matplotlib.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

COLOURS = {"pat": "#2563eb", "flashinfer": "#f59e0b", "cascade": "#a3a3a3", "triton": "#84cc16", "fa3": "#ef4444"}


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results" / "kernels-h200.json"
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
    figure.savefig(path.with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
