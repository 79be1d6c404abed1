"""How tables look, and where their numbers come from."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TIMES = "\N{MULTIPLICATION SIGN}"
RIVALS = {"flashinfer": "FlashInfer", "cascade": "FlashInfer's cascade", "triton": "SGLang's Triton", "fa3": "FA3"}
NAMES = {"pat": "PAT", **RIVALS}
SHOWN = "32/8"
"""Query and KV heads in the table of trees."""


def bold(values: dict[str, float | None], text: Callable[[float], str]) -> list[str]:
    """A row's cells, bold where they show its least number; empty where there is none."""
    least = text(min(value for value in values.values() if value is not None))
    cells = ["" if value is None else text(value) for value in values.values()]
    return [f"**{cell}**" if cell == least else cell for cell in cells]


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def folded(title: str, text: str) -> str:
    """What few readers ask for, closed until they click on its title; GitHub and MkDocs both understand it."""
    return f"<details markdown>\n<summary>{title}</summary>\n\n{text}\n\n</details>"


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text())


def mean(values: list[float]) -> float:
    """Geometric."""
    return math.exp(sum(map(math.log, values)) / len(values))
