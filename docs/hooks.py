"""Fills in what the code and the benchmarks' JSON know better than a page: all between `<!-- generated: name -->` and `<!-- end -->`.

python docs/hooks.py            # writes it into the pages, for whoever reads them in the repository
python docs/hooks.py --check    # only looks whether they are as they would be written
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import report
import tables

from sglang_pat.backend import metrics
from sglang_pat.backend.start import features
from sglang_pat.compat.releases import RUN
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
        shown = str(int(value)) if isinstance(value, bool) else str(value or "")
        rows.append([f"`{variable}`<br>{f'`{shown}`' if shown else 'none'}", " ".join(text.split())])
    return tables.table(["variable, default", "what it does"], rows)


def counters() -> str:
    rows = [[f"`{name}`<br>`sglang_pat:{name}_total`", text] for name, text in metrics.COUNTERS.items()]
    rows += [[f"`{name}`<br>`sglang_pat:{name}`", text] for name, text in metrics.GAUGES.items()]
    rows += [
        [f"`{name}`<br>`sglang_pat:{shown}_total{{queries=…}}`", text]
        for name, (shown, text) in metrics.BY_QUERIES.items()
    ]
    return tables.table(["in `/server_info`, in `/metrics`", "meaning"], rows)


def releases() -> str:
    """The releases of SGLang that tests ran with."""
    return tables.table(
        ["SGLang", "on a CPU", "on a GPU", "last on a CPU"],
        [[name, run.on_cpu, run.on_gpu, run.last] for name, run in RUN.items()],
    )


COLUMNS = {
    "Page size > 1": ("any page size",),
    "FP8 KV cache": ("FP8 KV caches, with or without scales",),
    "FP4 KV cache": ("FP4 and MXFP8 KV caches",),
    "Spec topk = 1": ("speculative decoding on a CPU", "speculative decoding on a GPU"),
    "Spec topk > 1": ("speculative decoding on a CPU", "speculative decoding on a GPU"),
    "Sliding window": ("sliding windows", "a KV pool of its own for windows (gpt-oss, Mellum, MiMo V2)"),
    "MultiModal": ("multimodal models",),
}
"""Of SGLang's page on attention backends, with the rows of `features.FEATURES` that say what to put there."""


def columns() -> str:
    """A row of SGLang's own page on attention backends: `yes` where all of a column's features work."""
    statuses = {feature.name: feature.status for group in features.FEATURES.values() for feature in group}
    served = ["yes" if {statuses[name] for name in names} == {"works"} else "no" for names in COLUMNS.values()]
    rows = [["`pat` (MHA, GQA, MQA)", *served]]
    return tables.table(["Backend", *COLUMNS], rows)


MARKS = {"works": "\N{WHITE HEAVY CHECK MARK}", "unpacked": "\N{HEAVY MINUS SIGN}", "refused": "\N{CROSS MARK}"}


def support() -> str:
    """The tables of `features.FEATURES`, each under its heading, for screens of any width."""
    parts = []
    for group, found in features.FEATURES.items():
        rows = []
        for feature in found:
            what = f"**{feature.name}**" + (f" ({feature.how})" if feature.how else "")
            more = "; ".join(filter(None, (feature.note, feature.instead)))
            on_gpu = any(test.startswith("test_gpu_") for test in feature.shown)
            rows.append(
                [MARKS[feature.status] + " GPU" * on_gpu, what + (f"<br>{more[0].upper()}{more[1:]}." if more else "")]
            )
        parts.append(f"### {group}\n\n" + tables.table(["", "feature"], rows))
    return "\n\n".join(parts)


def shown() -> str:
    """Which tests show each feature that works."""
    found = [feature for group in features.FEATURES.values() for feature in group if feature.shown]
    rows = [[feature.name, "<br>".join(f"`{test}`" for test in feature.shown)] for feature in found]
    return tables.folded("Tests of each feature", tables.table(["feature", "shown by, in `tests`"], rows))


GENERATED = {
    "columns": columns,
    "support": support,
    "shown": shown,
    "releases": releases,
    "settings": settings,
    "counters": counters,
    **report.SECTIONS,
}


def filled(markdown: str) -> str:
    """The page with what is generated in it."""

    def fill(match: re.Match[str]) -> str:
        return f"<!-- generated: {match[1]} -->\n\n{GENERATED[match[1]]()}\n\n<!-- end -->"

    return re.sub(r"<!-- generated: (\w+) -->\n.*?<!-- end -->", fill, markdown, flags=re.DOTALL)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """MkDocs calls this for every page."""
    return filled(markdown)


def main() -> None:
    for page in sorted(Path(__file__).parent.glob("*.md")):
        now = page.read_text()
        right = filled(now)
        if "--check" not in sys.argv:
            page.write_text(right)
        elif now != right:
            sys.exit(f"{page} is not what `python docs/hooks.py` writes")


if __name__ == "__main__":
    main()
