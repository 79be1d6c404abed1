"""What a result was measured on: every benchmark writes it beside its numbers."""

from __future__ import annotations

import json
import os
import platform
import re
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "sglang", "flashinfer-python")


def about() -> dict[str, str]:
    """The machine, the versions of what runs there, and the date."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "machine": f"{processor()}, {os.cpu_count()} cores", "python": platform.python_version(), **versions,
        "date": date.today().isoformat(),
    }  # fmt: skip


def gpu() -> dict[str, str]:
    """The same, with the GPU's name."""
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {"name": name, **about(), "torch": torch.__version__}


def gpu_slug() -> str:
    """The GPU's model for file names: `h100` of `NVIDIA H100 80GB HBM3`, `a100` of `NVIDIA A100-SXM4-80GB`; `cpu` if there is none."""
    import torch

    return re.split(r"[ -]", torch.cuda.get_device_name())[1].lower() if torch.cuda.is_available() else "cpu"


def result_file(kind: str) -> Path:
    """Where a benchmark's result goes, unless it is told: each GPU has a file of its own."""
    return Path(__file__).parent / "results" / f"{kind}-{gpu_slug()}.json"


def kept(result: Path, append: bool) -> list[dict[str, Any]]:
    """The records that a result has already, if they are to stay."""
    return json.loads(result.read_text())["records"] if append and result.exists() else []


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
