"""Lists the benchmarks, or runs some, one after the other:

python benchmarks/run.py                     # what there is, what it needs, and whether it can run here
python benchmarks/run.py kernels ablations   # run these, then write the documentation's tables
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import msgspec

FOLDER = Path(__file__).parent


class Benchmark(msgspec.Struct):
    """
    Attributes:
        command: Script and arguments.
        what: One line about it.
        minutes: What it took where it was measured last: on the GPU host, or on two CPU cores; for serving and steps, a backend.
        gpu: Whether it needs one.
        inputs: Arguments without defaults, which have to be given after `--`.
        results: What it writes, in `results` where no folder is named.
    """

    command: list[str]
    what: str
    minutes: float
    gpu: bool = False
    inputs: str = ""
    results: str = ""


BENCHMARKS = {
    "cpu": Benchmark(["cpu_decode.py"], "CPU executor beside torch_native", 1.2, results="cpu_decode.json"),
    "packing": Benchmark(["packing.py"], "what planning takes, 1 to 16,384 requests", 0.7, results="packing.json"),
    "policies": Benchmark(["policies.py"], "bytes and balance of every policy", 0.2, results="policies.json"),
    "kernels": Benchmark(
        ["kernels.py"],
        "decode attention beside FlashInfer, its cascade, Triton and FA3",
        2.5,
        True,
        results="kernels-h200.json",
    ),
    "ablations": Benchmark(
        ["kernels.py", "--ablations"], "without one part of the design", 0.3, True, results="kernel-ablations-h200.json"
    ),
    "traffic": Benchmark(["traffic.py"], "bytes as ncu counts them", 0.3, True, results="kernel-traffic-h200.json"),
    "serving": Benchmark(
        ["serving.py"], "whole servers, backend after backend", 3.5, True, "--model FOLDER", "serving-h200.json"
    ),
    "steps": Benchmark(
        ["steps.py"],
        "single decode steps and their metadata, agreement",
        1.2,
        True,
        "--model FOLDER",
        "steps-h200.json",
    ),
    "soak": Benchmark(
        ["soak.py"], "half an hour's requests at full load", 3.5, True, "--model FOLDER --trace FILE", "soak-h200.json"
    ),
    "chaos": Benchmark(
        ["soak.py", "--chaos", "120", "--seed", "1"],
        "everything at once that the API allows",
        2.5,
        True,
        "--model FOLDER",
        "chaos-h200.json",
    ),
    "tune": Benchmark(["-m", "sglang_pat.tune"], "prices of this GPU's tiles", 0.3, True),
    "pictures": Benchmark(["../docs/picture.py"], "the documentation's pictures", 0.1, results="docs/*.svg"),
    "calibrate": Benchmark(
        ["calibrate.py"], "fits `sglang-pat estimate` to the results", 0.1, results="estimate-*.json"
    ),
}


def bar(done: float, total: float, width: int = 30) -> str:
    """How far the chosen benchmarks are, by the minutes that they are known to take."""
    full = round(width * done / total)
    return f"[{'#' * full}{'.' * (width - full)}]"


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def show() -> None:
    available = has_gpu()
    for name, benchmark in BENCHMARKS.items():
        needs = ", ".join(filter(None, ["a GPU" if benchmark.gpu else "", benchmark.inputs]))
        state = "no GPU here" if benchmark.gpu and not available else "ready"
        took = f"{benchmark.minutes:g} min"
        print(f"{name:<10} {benchmark.what:<64} {took:<8} {needs or 'nothing':<24} {state:<12} {benchmark.results}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *BENCHMARKS], help="none: list them")
    names, rest = parser.parse_known_args()
    if not names.names:
        show()
        return
    total = sum(BENCHMARKS[name].minutes for name in names.names)
    done = 0.0
    for number, name in enumerate(names.names, 1):
        benchmark = BENCHMARKS[name]
        if benchmark.gpu and not has_gpu():
            raise SystemExit(f"{name} needs a GPU")
        print(f"{bar(done, total)} {number} of {len(names.names)}: {name}, about {benchmark.minutes:g} min", flush=True)
        script, *arguments = benchmark.command
        command = [script, *arguments] if script == "-m" else [str(FOLDER / script), *arguments]
        began = time.monotonic()
        subprocess.run([sys.executable, *command, *[x for x in rest if x != "--"]], check=True)
        done += benchmark.minutes
        print(f"{bar(done, total)} {name} took {(time.monotonic() - began) / 60:.1f} min", flush=True)
    subprocess.run([sys.executable, str(FOLDER / "report.py")], check=True)


if __name__ == "__main__":
    main()
