"""What our kernels read and write of a GPU's memory, as ncu counts it, beside what the plan says:

    python benchmarks/traffic.py                          # three of the paper's trees
    python benchmarks/traffic.py --trees 1,64_4096,128

The caches are empty at first. The plan's bytes are its KV tokens, once for each work item that reads them, and its parts.
Needs ncu, and a GPU whose counters may be read.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path

import torch
from about import gpu, result_file
from kernels import Pat, Problem

BENCHMARKS = {
    "traffic": {"what": "bytes as ncu counts them", "minutes": 0.3, "gpu": True, "results": "kernel-traffic-h200.json"},
}
"""For run.py, which reads it without importing this file."""

METRICS = {"read": "dram__bytes_read.sum", "written": "dram__bytes_write.sum", "l2_read": "lts__t_sectors_op_read.sum"}
TREES = ("1,1024_2048,32", "1,8,16,32,64,256,1024_256,128,64,32,32,32,32", "256_1024")


def run_once(tree: str) -> None:
    """One decode step, and its plan's bytes on the standard output."""
    problem = Problem(tree, 32, 8, 1, torch.bfloat16)
    pat = Pat(problem)
    cost = pat.config.cost
    print("plan", json.dumps({"plan_kv": cost.bytes(pat.kv_tokens, 0), "plan_parts": cost.bytes(0, pat.parts)}))
    pat.run()
    torch.cuda.synchronize()


def count(tree: str) -> dict[str, int | str]:
    command = [
        "ncu", "--csv", "--metrics", ",".join(METRICS.values()), "-k", "regex:forward|merge", sys.executable, __file__,
        "--once", tree,
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = result.stdout.splitlines()
    plan = next((line for line in lines if line.startswith("plan ")), None)
    if result.returncode or plan is None:
        raise SystemExit(f"ncu failed: {result.stdout[-500:]}{result.stderr[-500:]}")
    record: dict[str, int | str] = {"tree": tree, **json.loads(plan.removeprefix("plan "))}
    start = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    units = {"sector": 32, "byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
    for row in csv.DictReader(lines[start:]):
        kernel = "forward" if "forward" in row["Kernel Name"] else "merge"
        for name, metric in METRICS.items():
            if row["Metric Name"] == metric and row["Metric Value"] != "n/a":
                record[f"{kernel}_{name}"] = round(
                    float(row["Metric Value"].replace(",", "")) * units[row["Metric Unit"]]
                )
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", nargs="+", default=list(TREES))
    parser.add_argument("--once", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=result_file("kernel-traffic"))
    arguments = parser.parse_args()
    if arguments.once:
        run_once(arguments.once)
        return
    records = []
    for tree in arguments.trees:
        record = count(tree)
        records.append(record)
        print(record, flush=True)
    arguments.output.write_text(json.dumps({"device": gpu(), "records": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()
