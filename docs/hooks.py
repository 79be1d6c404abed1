"""Fills in what the code and the benchmarks' JSON know better than a page: `<!-- generated: name -->` becomes text."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import report

from sglang_pat.backend import features, metrics
from sglang_pat.config import PatConfig


def settings() -> str:
    """A table of `PatConfig`: its docstring says everything."""
    attributes = inspect.cleandoc(PatConfig.__doc__ or "").split("Attributes:")[1]
    found = re.findall(r"^ {4}(\w+): `(SGLANG_PAT_\w+)`: (.*?)(?=^ {4}\w|\Z)", attributes, re.DOTALL | re.MULTILINE)
    defaults = {field: getattr(PatConfig(), field) for field in PatConfig.__struct_fields__}
    if [name for name, _, _ in found] != list(defaults):
        raise ValueError("config.py: the docstring of PatConfig must describe every field")
    rows = []
    for name, variable, text in found:
        value = defaults[name]
        shown = str(int(value)) if isinstance(value, bool) else str(value) or "empty"
        rows.append([f"`{variable}`", f"`{shown}`", " ".join(text.split())])
    return report.table(["variable", "default", "what it does"], rows)


def counters() -> str:
    rows = [[f"`{name}`", f"`sglang_pat:{name}_total`", text] for name, text in metrics.COUNTERS.items()]
    rows += [[f"`{name}`", f"`sglang_pat:{name}`", text] for name, text in metrics.GAUGES.items()]
    rows.append(["`query_sizes`", "`sglang_pat:packs_total{queries=…}`", metrics.PACKS])
    return report.table(["in `/server_info`", "in `/metrics`", "meaning"], rows)


def support() -> str:
    """The tables of `features.FEATURES`, each under its heading."""
    parts = []
    for group, found in features.FEATURES.items():
        rows = []
        for feature in found:
            what = feature.name + (f" ({feature.how})" if feature.how else "")
            shown = ", ".join(f"`{test}`" for test in feature.shown)
            rows.append(
                [
                    what,
                    f"**{feature.status}**" if feature.status != "works" else "works",
                    feature.note,
                    shown or feature.instead,
                ]
            )
        parts.append(
            f"### {group}\n\n"
            + report.table(["feature", "", "note", "shown by `tests/`…, or what to do instead"], rows)
        )
    return "\n\n".join(parts)


GENERATED = {"support": support, "settings": settings, "counters": counters, **report.SECTIONS}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls this for every page."""
    return re.sub(r"<!-- generated: (\w+) -->", lambda match: GENERATED[match[1]](), markdown)
