"""Files of JSON lines as people have them: with byte order marks, in UTF-16, with whole numbers that are written as floats."""

from __future__ import annotations

import codecs
import json
from typing import Any

UTF_16 = "is UTF-16, and requests are read as UTF-8: convert it with iconv -f UTF-16 -t UTF-8"


def is_utf_16(start: bytes) -> bool:
    """Whether a file that begins so is UTF-16: no UTF-8 has the bytes of its mark, and no text in UTF-8 begins with a zero byte among two."""
    return start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in start[:2]


def unmarked(line: bytes) -> bytes:
    """A line without UTF-8's mark in front: editors begin a file with it, and files may stand behind each other."""
    start = 0
    while line.startswith(codecs.BOM_UTF8, start):
        start += len(codecs.BOM_UTF8)
    return line[start:]  # copied once: a line may be nothing but marks


def joined(line: bytes) -> str:
    """What may be wrong with a line that is no JSON: a mark in its midst is where the last line of one file and the first one of the next became one."""
    return "; files without a last line end were joined here: a byte order mark follows" * (
        codecs.BOM_UTF8 in unmarked(line)
    )


def whole(number: Any) -> Any:
    """A whole float as the integer that servers take it for; all else as it is."""
    return int(number) if isinstance(number, float) and number.is_integer() else number


def loads(line: str | bytes) -> Any:
    """`json.loads`, with integers in place of whole floats."""
    return json.loads(line, parse_float=lambda text: whole(float(text)))
