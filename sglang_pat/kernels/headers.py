"""Writes the headers of csrc with the names and constants that both languages share: `python -m sglang_pat.kernels.headers`. A test checks that they are
up to date."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sglang_pat.jit import CSRC
from sglang_pat.kernels import capabilities
from sglang_pat.packing import OPEN, POLICIES, constants, layout, spec

NOTICE = "// Written by `python -m sglang_pat.kernels.headers`: change it there.\n#pragma once\n\n#include <cstdint>\n\nnamespace pat {\n\n"


def headers() -> dict[Path, str]:
    """The text of each file."""
    return {
        CSRC / "packing" / "layout.h": _file(
            _constants("int32_t", {"kOpen": OPEN, "kDirect": layout.DIRECT}),
            _enum("Header", layout.HEADER, "kHeaderSize"),
            _enum("Column", layout.COLUMNS, "kItemSize"),
        ),
        CSRC / "packing" / "constants.h": _file(
            _enum("class Policy", POLICIES),
            _constants(
                "int64_t",
                {
                    "kKvTile": constants.KV_TILE,
                    "kMaxWaves": constants.MAX_WAVES,
                    "kSlack": constants.SLACK,
                    "kPasses": constants.PASSES,
                    "kTooLong": constants.TOO_LONG,
                    "kSplitGain": constants.SPLIT_GAIN,
                    "kUneven": constants.UNEVEN,
                    "kLeastSteps": constants.LEAST_STEPS,
                    "kTailGrowth": constants.TAIL_GROWTH,
                    "kTailsShare": constants.TAILS_SHARE,
                    "kTailsItems": constants.TAILS_ITEMS,
                    "kMaxWindow": spec.MAX_WINDOW,
                    "kLittlePercent": constants.LITTLE_PERCENT,
                    "kRagged": constants.RAGGED,
                },
            ),
            _constants("int", {"kMaxDepth": constants.MAX_DEPTH, "kMaxSegment": constants.MAX_SEGMENT}),
            _constants("double", {"kBusyWorkers": constants.BUSY_WORKERS}),
            _constants("int32_t", {"kLevels[]": f"{{{', '.join(map(str, constants.LEVELS))}}}"}),
        ),
        CSRC / "cuda" / "tiles.h": _file(
            _constants(
                "int",
                {
                    "kTokens": constants.KV_TILE,
                    "kNarrowM": capabilities.NARROW_M,
                    "kStepTokens": capabilities.WARP_TOKENS,
                    "kWarpgroupRows": capabilities.WARPGROUP_ROWS,
                },
            )
        ),
    }


def _file(*parts: str) -> str:
    return NOTICE + "\n".join(parts) + "\n}  // namespace pat\n"


def _constants(kind: str, values: Mapping[str, float | str]) -> str:
    return "".join(f"constexpr {kind} {name} = {value};\n" for name, value in values.items())


def _enum(name: str, members: Sequence[str], size: str = "") -> str:
    names = ["k" + "".join(word.capitalize() for word in member.split("_")) for member in members]
    return f"enum {name} {{\n" + "".join(f"  {member},\n" for member in [*names, *([size] if size else [])]) + "};\n"


def main() -> None:
    for path, text in headers().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
