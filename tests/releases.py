"""Runs a few tests on every SGLang release that is supported, each in an environment of its own, which is removed afterwards (`make test-releases`).

    python tests/releases.py [RELEASE …]

What passed is written down in sglang_pat/compat/releases.py, by hand.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from sglang_pat.compat.releases import RUN

HERE = Path(__file__).parent
FOLDER = HERE.parent / ".venv-release"

TESTS = {
    "bridge": ["test_mirror.py", "test_observer.py", "test_releases.py", "test_run.py"],
    "scheduler": ["test_scheduler.py", "-k", "plain or drafts"],
    "server": ["test_families.py", "-k", "exaone"],
}
"""What packing needs of SGLang, by what runs it: its requests, trees and plugins, its scheduler and caches, with pairs of tokens as keys too, and a whole server
with a model for which SGLang has a list of backends. Answers are compared, and must be packed."""

STUBS = "cuda-tile; sys_platform == 'never'\n"
"""Some releases name a version of it that is a stub, which fetches another file from elsewhere when it is installed. No test on a CPU needs it."""


def install(release: str) -> Path:
    """An environment with this release and this checkout; its Python."""
    subprocess.run([sys.executable, "-m", "venv", FOLDER], check=True)
    python = FOLDER / "bin" / "python"
    overrides = FOLDER / "overrides.txt"
    overrides.write_text(STUBS)
    packages = [f"sglang=={release}", "-e", str(HERE.parent), "pytest", "hypothesis"]
    uv = ["uv", "pip", "install", "--quiet", "--python", python, "--overrides", overrides, *packages]
    subprocess.run([sys.executable, "-m", *uv], check=True)
    return python


def run(release: str) -> list[str]:
    """Install it, run the tests, remove it; what came of each part."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    try:
        python = install(release)
        found = []
        for files in TESTS.values():
            began = time.monotonic()
            status = subprocess.run([python, "-m", "pytest", "-q", *files], cwd=HERE, check=False).returncode
            found.append(f"{'FAILED' if status else 'passed'} ({time.monotonic() - began:.0f} s)")
        return found
    except subprocess.CalledProcessError:
        return ["not installed"] + [""] * (len(TESTS) - 1)
    finally:
        shutil.rmtree(FOLDER, ignore_errors=True)


def main() -> None:
    rows = []
    for release in sys.argv[1:] or RUN:
        rows.append([release, *run(release)])
        print("", *(" | ".join(row) for row in [["SGLang", *TESTS], *rows]), sep="\n", flush=True)
    if not all(cell.startswith("passed") for row in rows for cell in row[1:]):
        sys.exit(1)


if __name__ == "__main__":
    main()
