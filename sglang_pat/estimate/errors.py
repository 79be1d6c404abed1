"""The error of `sglang-pat estimate`, and what is wrong with a value in JSON."""

from __future__ import annotations

import re

import msgspec

WORDS = {
    "int": "a whole number", "float": "a fraction", "str": "a text", "bool": "true or false", "array": "a list", "object": "an object",
    "null": "null",
}  # fmt: skip
"""Types as msgspec names them, in words."""


class EstimateError(Exception):
    """The file, the model or the GPU cannot be estimated; the message says why."""


def fault(error: msgspec.ValidationError, of: str, within: str = "") -> str:
    """What msgspec found, as a sentence.

    Args:
        error: Its error.
        of: How the whole is called.
        within: What stands in front of its keys.
    """
    what, _, path = str(error).partition(" - at ")
    key = path.strip("`").removeprefix("$").removeprefix(".")
    name = f"{within}{key}" if key else of
    if missing := re.fullmatch("Object missing required field `(.*)`", what):
        return f"{name} has no {missing[1]}"
    wanted = re.fullmatch(r"Expected `([^`]*)`(?: (of length )?([<>]=) (-?[0-9]+)(?:\.0)?)?(?:, got `(.*)`)?", what)
    if wanted is None:
        return f"{name}: {what}"
    kinds, length, bound, limit, given = wanted.groups()
    wants = WORDS | {"float": "a number"}
    words = " or ".join(wants.get(kind, kind) for kind in kinds.split(" | ") if kind != "null" or kinds == "null")
    bounds = f" of {'length ' * bool(length)}{int(limit):,} or {'more' if bound == '>=' else 'less'}" if bound else ""
    return f"{name} must be {words}{bounds}{f', not {WORDS.get(given, given)}' if given else ''}"
