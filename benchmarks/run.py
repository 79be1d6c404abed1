"""Lists the benchmarks, or runs some, one after the other:

python benchmarks/run.py                     # what there is, what it needs, and whether it can run here
python benchmarks/run.py kernels ablations   # run these, then write the documentation's tables
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import time
from pathlib import Path

import msgspec

FOLDER = Path(__file__).parent


class Benchmark(msgspec.Struct):
    """
    Attributes:
        what: One line about it.
        script: In this folder; or `-m` with a module in front of `arguments`.
        arguments: What it is always given.
        minutes: What it took where it was measured last: on the GPU host, or on two CPU cores; for serving and steps, a backend. None if nobody noted it.
        gpu: Whether it needs one.
        inputs: Arguments without defaults, which have to be given after `--`.
        results: What it writes, in `results` where no folder is named.
    """

    what: str
    script: str = ""
    arguments: list[str] = []
    minutes: float | None = None
    gpu: bool = False
    inputs: str = ""
    results: str = ""

    @property
    def weight(self) -> float:
        """Its part of the bar."""
        return self.minutes or 1


def declared() -> dict[str, Benchmark]:
    """What the scripts of this folder declare in `BENCHMARKS`. They are read and not run, as most import torch."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "BENCHMARKS" and path.name != "run.py":
                for name, fields in ast.literal_eval(node.value).items():
                    found[name] = msgspec.convert({"script": path.name, **fields}, Benchmark)
    return found


BENCHMARKS = declared() | {
    "tune": Benchmark("prices of this GPU's tiles", "-m", ["sglang_pat.tune"], 0.3, True),
    "pictures": Benchmark("the documentation's pictures", "../docs/picture.py", minutes=0.1, results="docs/*.svg"),
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
        took = f"{benchmark.minutes:g} min" if benchmark.minutes else "?"
        print(f"{name:<18} {benchmark.what:<64} {took:<8} {needs or 'nothing':<36} {state:<12} {benchmark.results}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *BENCHMARKS], help="none: list them")
    names, rest = parser.parse_known_args()
    if not names.names:
        show()
        return
    total = sum(BENCHMARKS[name].weight for name in names.names)
    done = 0.0
    for number, name in enumerate(names.names, 1):
        benchmark = BENCHMARKS[name]
        if benchmark.gpu and not has_gpu():
            raise SystemExit(f"{name} needs a GPU")
        print(f"{bar(done, total)} {number} of {len(names.names)}: {name}", flush=True)
        script = benchmark.script if benchmark.script == "-m" else str(FOLDER / benchmark.script)
        command = [script, *benchmark.arguments]
        began = time.monotonic()
        subprocess.run([sys.executable, *command, *[x for x in rest if x != "--"]], check=True)
        done += benchmark.weight
        print(f"{bar(done, total)} {name} took {(time.monotonic() - began) / 60:.1f} min", flush=True)
    subprocess.run([sys.executable, str(FOLDER / "report.py")], check=True)


if __name__ == "__main__":
    main()
