"""The documentation builds, and its commands run, but for those that need a GPU, a server, a trace or a model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(
    r"^(<!-- needs (?:a GPU|a running server|running servers|a trace|a model) -->\n)?```sh\n(.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
"""Commands; those below a comment, which readers do not see, cannot run here."""
BLOCKS = [(page.name, *found) for page in PAGES for found in BLOCK.findall(page.read_text())]
COMMANDS = [(page, line) for page, needs, block in BLOCKS if not needs for line in block.splitlines()]


def run(command: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        command, shell=True, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
    )


def test_pages_build_without_a_warning(tmp_path: Path) -> None:
    result = run(f"mkdocs build --strict --site-dir {tmp_path}")
    assert result.returncode == 0, result.stderr
    settings = (tmp_path / "settings" / "index.html").read_text()
    assert "```" not in (tmp_path / "index.html").read_text()
    assert "SGLANG_PAT_POLICY" in settings and "sglang_pat:steps_total" in settings


def test_there_are_commands_of_both_kinds() -> None:
    assert COMMANDS and any(needs for _, needs, _ in BLOCKS)


def test_marks_for_tests_are_not_shown_to_readers() -> None:
    assert [page for page, _, block in BLOCKS if "# needs" in block] == []


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_commands_run(page: str, command: str) -> None:
    result = run(command)
    if "found no nvcc" in result.stderr:
        pytest.skip("needs nvcc")
    assert result.returncode == 0, f"{page}: {command}\n{result.stdout}{result.stderr}"


@pytest.mark.parametrize("script", ["benchmarks/report.py", "docs/hooks.py", "docs/picture.py"])
def test_readme_and_pages_have_what_is_generated(script: str) -> None:
    result = run(f"python {script} --check")
    assert result.returncode == 0, result.stderr
