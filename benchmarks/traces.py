"""Reads Mooncake's traces. It imports neither torch nor SGLang, for those that only send requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_pat import jsonl
from sglang_pat.estimate.prompts import TRACE_BLOCK, BlockSize


def rows(trace: Path) -> list[dict[str, Any]]:
    """The requests of a trace of Mooncake's.

    Raises:
        SystemExit: Its hash ids do not stand for TRACE_BLOCK tokens. Such traces may also have seconds where Mooncake's have milliseconds.
        EstimateError: They stand for nothing that fits its lengths.
    """
    found = [jsonl.loads(line) for line in trace.read_bytes().splitlines() if line.strip()]
    size = BlockSize()
    for row in found:
        size.narrow(len(row["hash_ids"]), row["input_length"])
    if size.tokens != TRACE_BLOCK:
        raise SystemExit(
            f"{trace} has blocks of {size.tokens} tokens, and is none of Mooncake's, which have {TRACE_BLOCK}"
        )
    return found
