"""Single decode steps of SGLang's model runner with each attention backend in turn, without a server around them:

    python benchmarks/steps.py --model MODEL --dummy --backends pat fa3 flashinfer triton
    python benchmarks/steps.py --model MODEL --cells 8x512 8,256_2048,256
    python benchmarks/steps.py --model MODEL --dummy --backends pat --kv fp8_e4m3 int4 int2 --cells 8x32768 128x4096
    python benchmarks/steps.py --model MODEL --dummy --tokens 4     # verify steps, into results/steps-verify-<gpu>.json
    python benchmarks/steps.py --model MODEL --dummy --new 4 --cells 1,64_8192,4     # short extends, into steps-extend-<gpu>.json

A cell is BATCHxCONTEXT, where nothing is shared, or a tree of the kernels' benchmark. For each: what a step takes on the GPU;
what the host needs for the metadata of a step in a steady state, and for a new plan; and the kernels and copies of one step.
Prompts are not computed for that: their slots are filled with random numbers once, the same for all backends.

Then the same prompts are decoded greedily with each backend from a real prefill. Printed are how many tokens agree up to the
first that differs, for each two backends, and the greatest difference between their logits after the first step. Weights of
`--dummy` are random and the same for all. Verify steps and extends are only timed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import about
import serving
import torch
from model_runner import Runner

BENCHMARKS = {
    "steps": {
        "what": "single decode steps and their metadata, agreement",
        "minutes": 1.2,
        "gpu": True,
        "inputs": "--model FOLDER",
        "results": "steps-h200.json",
    },
}
"""For run.py, which reads it without importing this file."""

CELLS = (
    "1x512", "1x4096", "1x32768", "8x512", "8x4096", "8x32768", "32x512", "32x4096", "128x512", "128x4096", "256x512",
    "8,256_2048,256", "1,32_4096,256",
)  # fmt: skip


def child(options: argparse.Namespace) -> None:
    """One backend, in a process of its own."""
    began = time.monotonic()
    backend = options.backends[0]
    runner = Runner(options, backend)
    print(f"{backend}: up after {time.monotonic() - began:.0f} s", flush=True)
    records = []
    for cell in options.cells:
        record = runner.measure(cell)
        if record is not None:
            print(
                f"  {cell}: " + ", ".join(f"{k} {v:.3f}" for k, v in record.items() if isinstance(v, float)), flush=True
            )
            records.append({"backend": backend, "kv": options.kv[0], **record})
        options.child.with_suffix(".json").write_text(json.dumps(records))
    if options.tokens == 1 and not options.new:
        torch.save(runner.generate(), options.child)


def compare(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    rows = serving.compare({backend: result["tokens"].tolist() for backend, result in results.items()})
    for row in rows:
        a, b = (results[backend]["logits"] for backend in row["backends"])
        row |= {"max_logit_difference": (a - b).abs().max().item(), "logit_std": a.std().item()}
        print(row, flush=True)
    return rows


def main() -> None:
    parser = serving.make_parser(__doc__)
    parser.add_argument("--cells", nargs="*", default=list(CELLS))
    parser.add_argument("--tokens", type=int, default=1, help="of each request: more than one in a verify step")
    parser.add_argument(
        "--new", type=int, default=0, help="instead of a decode step, an extend of the last so many tokens"
    )
    serving.add_kv(parser)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
        return
    options.output = options.output or about.result_file(
        "steps-extend" if options.new else "steps-verify" if options.tokens > 1 else "steps"
    )
    device = about.gpu()
    result: dict[str, Any] = {
        "device": device, "model": options.model.name, "records": [], "agreement": [], "agreement_date": device["date"],
    }  # fmt: skip
    outcomes = {}
    with tempfile.TemporaryDirectory() as folder:
        for backend, kv in serving.settings(options):
            to = Path(folder) / f"{backend}-{kv}.pt"
            # The last of an option given twice counts.
            command = [sys.executable, __file__, *sys.argv[1:], "--backends", backend, "--child", str(to)]
            command += ["--kv", kv] if kv else []
            log = serving.log_of(options, backend, kv)
            with log.open("w") as errors:
                environment = {**os.environ, **serving.environment(kv)}
                code = subprocess.run(command, stderr=errors, env=environment, check=False).returncode
            if to.with_suffix(".json").exists():
                result["records"] += json.loads(to.with_suffix(".json").read_text())
            if code:
                print(f"{backend} failed; see {log}", flush=True)
            else:
                log.unlink()
                if to.exists():
                    outcomes[f"{backend} {kv}" if kv else backend] = torch.load(to)
            result["agreement"] = compare(outcomes)
            options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
