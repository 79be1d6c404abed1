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

NOTES = [ROOT / "benchmarks" / "NOTES.md", *sorted((ROOT / "benchmarks" / "notes").glob("*.md"))]
CITING = [
    path
    for path in [
        *ROOT.glob("*.md"),
        *(p for f in ("sglang_pat", "tests", "benchmarks", "docs") for p in (ROOT / f).rglob("*")),
    ]
    if path.suffix in {".py", ".h", ".cuh", ".cu", ".cpp", ".md", ".json"}
    and path != Path(__file__)
    and path.parent != ROOT / "benchmarks" / "results"
]
CITATION = re.compile(r"""benchmarks/notes/([\w.-]*\w)(`?)((?:(?:,| and) "[^"]+")*)""")
"""A file, and titles of its sections; in backquotes by itself, a file need not have any."""
LINK = re.compile(r"\]\(([^)#]*)(?:#([^)]*))?\)")


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


@pytest.mark.parametrize(
    ("page", "command"),
    # What compiles kernels is left to `make test-all`.
    [pytest.param(*one, marks=pytest.mark.slow if "resources.py" in one[1] else ()) for one in COMMANDS],
)
def test_commands_run(page: str, command: str) -> None:
    result = run(command)
    if "found no nvcc" in result.stderr:
        pytest.skip("needs nvcc")
    assert result.returncode == 0, f"{page}: {command}\n{result.stdout}{result.stderr}"


@pytest.mark.parametrize("script", ["benchmarks/report.py", "docs/hooks.py", "docs/picture.py"])
def test_readme_and_pages_have_what_is_generated(script: str) -> None:
    result = run(f"python {script} --check")
    assert result.returncode == 0, result.stderr


def sections(path: Path) -> list[str]:
    return re.findall(r"^##+ (.*)$", path.read_text(), re.MULTILINE)


def anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def wrong_citations(text: str) -> list[str]:
    """Citations of notes in `text` that say no section, or one that there is not."""
    flat = re.sub(r"\s*\n[ \t]*(?://|#)?[ \t]*", " ", text).replace('\\"', '"')
    wrong = re.findall(
        r"(?<!`benchmarks/)(?<!\.\./)\bNOTES\b.{0,20}|NOTES-.{0,20}|`benchmarks/NOTES\.md[^`].{0,20}", flat
    )
    for file, quoted, titles in CITATION.findall(flat):
        path = ROOT / "benchmarks" / "notes" / file
        cited = re.findall(r'"([^"]+)"', titles)
        if not path.is_file() or not (quoted or cited):
            wrong.append(file)
        else:
            wrong += [f"{file}: {title}" for title in cited if title not in sections(path)]
    return wrong


def test_citations_of_notes_are_of_sections_that_exist() -> None:
    cited = {path: text for path in CITING if "NOTES" in (text := path.read_text()) or "benchmarks/notes" in text}
    assert len(cited) > 30
    assert {
        str(path.relative_to(ROOT)): found for path, text in cited.items() if (found := wrong_citations(text))
    } == {}


@pytest.mark.parametrize(
    "text",
    [
        'benchmarks/notes/bins.md, "No such section"',
        'benchmarks/notes/bins.md, "How many bins" and "No such section"',
        'benchmarks/notes/no-such-file.md, "How many bins"',
        "benchmarks/notes/bins.md, 2026-11-23",
        "(benchmarks/notes/bins.md)",
        'benchmarks/NOTES.md, "How many bins" and more words',
        "see benchmarks/NOTES.md, 2026-11-23, and more words",
    ],
)
def test_a_wrong_citation_is_found(text: str) -> None:
    assert wrong_citations(text)


@pytest.mark.parametrize("page", NOTES, ids=lambda page: page.stem)
def test_links_of_notes_lead_somewhere(page: Path) -> None:
    assert len(set(sections(page))) == len(sections(page))
    for file, to in LINK.findall(page.read_text()):
        target = (page.parent / file).resolve() if file else page
        assert target.is_file(), file
        assert not to or to in map(anchor, sections(target)), f"{file}#{to}"
