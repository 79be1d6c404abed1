"""What a terminal shows of text that others gave: names of files, arguments, messages."""

from __future__ import annotations

import contextlib
import re
import sys

UNSHOWABLE = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
"""Characters, for a set of a regular expression, that make a terminal show something else than the text: control characters, ends of lines and
changes of the direction of writing, and what Python makes of bytes that are not UTF-8."""

_UNSHOWABLE = re.compile(f"[{UNSHOWABLE}]")


def is_showable(name: str) -> bool:
    """Whether a terminal shows this name of a file as it is, and `/server_info` can say it."""
    return _UNSHOWABLE.search(name) is None


def printable(text: str) -> str:
    """The text with escapes in place of what a terminal would obey: names of files and arguments may come from others."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def say(text: str) -> None:
    """Write a line to stderr, if it can be written; where it was closed at the start, `print` would write to stdout."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)
