"""Lists the benchmarks, or runs some, one after the other:

python benchmarks/run.py                     # what there is, what it needs, and whether it can run here
python benchmarks/run.py kernels ablations   # run these, then write the README's tables
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import msgspec

FOLDER = Path(__file__).parent


class Benchmark(msgspec.Struct):
    """
    Attributes:
        command: Script and arguments.
        what: One line about it.
        gpu: Whether it needs one.
        inputs: Arguments without defaults, which have to be given after `--`.
        results: What it writes, in `results`.
    """

    command: list[str]
    what: str
    gpu: bool = False
    inputs: str = ""
    results: str = ""


BENCHMARKS = {
    "cpu": Benchmark(["cpu_decode.py"], "CPU executor beside torch_native", results="cpu_decode.json"),
    "packing": Benchmark(["packing.py"], "what planning takes, 1 to 16,384 requests", results="packing.json"),
    "policies": Benchmark(["policies.py"], "bytes and balance of every policy", results="policies.json"),
    "kernels": Benchmark(
        ["kernels.py"], "decode attention beside FlashInfer, its cascade and Triton", True, results="kernels-h200.json"
    ),
    "ablations": Benchmark(
        ["kernels.py", "--ablations"], "without one part of the design", True, results="kernel-ablations-h200.json"
    ),
    "traffic": Benchmark(["traffic.py"], "bytes as ncu counts them", True, results="kernel-traffic-h200.json"),
    "serving": Benchmark(
        ["serving.py"], "whole servers, backend after backend", True, "--model FOLDER", "serving-h200.json"
    ),
    "figure": Benchmark(["figure.py"], "the paper's figure 10; needs matplotlib", results="kernels-h200.png"),
    "calibrate": Benchmark(["calibrate.py"], "fits `sglang-pat estimate` to the results", results="estimate-h200.json"),
}


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def show() -> None:
    available = has_gpu()
    for name, benchmark in BENCHMARKS.items():
        needs = ", ".join(filter(None, ["a GPU" if benchmark.gpu else "", benchmark.inputs]))
        state = "no GPU here" if benchmark.gpu and not available else "ready"
        print(f"{name:<10} {benchmark.what:<60} {needs or 'nothing':<24} {state:<12} {benchmark.results}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *BENCHMARKS], help="none: list them")
    names, rest = parser.parse_known_args()
    if not names.names:
        show()
        return
    for number, name in enumerate(names.names, 1):
        benchmark = BENCHMARKS[name]
        if benchmark.gpu and not has_gpu():
            raise SystemExit(f"{name} needs a GPU")
        print(f"[{number} of {len(names.names)}] {name}: {benchmark.what}", flush=True)
        script, *arguments = benchmark.command
        subprocess.run([sys.executable, str(FOLDER / script), *arguments, *[x for x in rest if x != "--"]], check=True)
    subprocess.run([sys.executable, str(FOLDER / "report.py")], check=True)


if __name__ == "__main__":
    main()
