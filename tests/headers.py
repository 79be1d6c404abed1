"""Writes the headers of csrc with the names and constants that both languages share: `python tests/headers.py`. A test checks that they are
up to date."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from sglang_pat.jit import CSRC
from sglang_pat.kernels import capabilities
from sglang_pat.packing import OPEN, POLICIES, constants, layout, spec

NOTICE = "// Written by `python tests/headers.py`: change it there.\n#pragma once\n\n#include <cstdint>\n\nnamespace pat {\n\n"


LINE = 124
"""Characters of a line (.clang-format), with its end."""


def headers() -> dict[Path, str]:
    """The text of each file."""
    return {
        CSRC / "packing" / "layout.h": _file(
            _constants("int32_t", {"kOpen": OPEN, "kDirect": layout.DIRECT, "kAllRows": layout.ALL_ROWS}),
            _named("int", layout, "FIRST_ROW_SHIFT PART_END_SHIFT"),
            _enum("Header", layout.HEADER, "kHeaderSize"),
            _enum("Column", layout.COLUMNS, "kItemSize"),
        ),
        CSRC / "packing" / "constants.h": _file(
            _enum("class Policy", POLICIES),
            _named(
                "int64_t",
                constants,
                "MAX_WAVES SLACK PASSES TOO_LONG SPLIT_GAIN UNEVEN LEAST_STEPS TAIL_GROWTH TAILS_SHARE TAILS_ITEMS LITTLE_PERCENT RAGGED",
            )
            + _named("int64_t", spec, "MAX_WINDOW"),
            _named("int", constants, "MAX_DEPTH MAX_SEGMENT"),
            _named("double", constants, "BUSY_WORKERS"),
            _constants("int32_t", {"kLevels[]": f"{{{', '.join(map(str, constants.LEVELS))}}}"}),
        ),
        CSRC / "cuda" / "tiles.h": _file(
            _constants("int", {"kTokens": constants.KV_TILE, "kStepTokens": capabilities.WARP_TOKENS})
            + _named("int", capabilities, "NARROW_M WARPGROUP_ROWS"),
        ),
    }


def _file(*parts: str) -> str:
    return NOTICE + "\n".join(parts) + "\n}  // namespace pat\n"


def _constants(kind: str, values: Mapping[str, float | str]) -> str:
    return "".join(f"constexpr {kind} {name} = {value};\n" for name, value in values.items())


def _named(kind: str, module: ModuleType, names: str) -> str:
    return _constants(kind, {_camel(name): getattr(module, name) for name in names.split()})


def _camel(name: str) -> str:
    return "k" + "".join(word.capitalize() for word in name.split("_"))


def _enum(name: str, members: Sequence[str], size: str = "") -> str:
    names = [*map(_camel, members), *([size] if size else [])]
    line = f"enum {name} {{ {', '.join(names)} }};\n"
    return line if len(line) <= LINE else f"enum {name} {{\n" + "".join(f"  {member},\n" for member in names) + "};\n"


def main() -> None:
    for path, text in headers().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
