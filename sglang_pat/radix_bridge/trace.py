"""What a live server did, in a file: radix-tree events and the plans made (`SGLANG_PAT_TRACE`).

The file is `MAGIC` and then records, each its length in four little-endian bytes and one MessagePack object: first the
`Header`, then events and `PlanMade`. Prompts are not in it: what tells nodes apart is a digest under a key that the server
forgets.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from sglang_pat.packing import PackConfig
from sglang_pat.radix_bridge.events import Event

logger = logging.getLogger(__name__)

MAGIC = b"sglang-pat trace\n"
FORMAT = 2


class TraceError(ValueError):
    """A file that is no trace, or not a whole one; the message is for the user."""


class Header(msgspec.Struct, frozen=True, tag=True):
    """The first record.

    Attributes:
        format: `FORMAT` of the writer.
        config: Device, model and policy.
        max_batch: Requests of the largest batch.
        layers: Attention layers of the model.
    """

    format: int
    config: PackConfig
    max_batch: int
    layers: int


class PlanMade(msgspec.Struct, frozen=True, tag=True):
    """A plan for a batch.

    Attributes:
        steps: Steps run with the plan before.
        left: Positions in the batch before of requests that left it, descending; None if `joined` is the whole batch.
        joined: Request ids after those that stayed.
        seq_lens: Tokens of each request.
        kv_tokens, parts: What the plan reads and merges in its first step.
        ahead: Made before its step, from the lengths expected then.
        fallback: Planning had failed, this is one query per work item.
    """

    steps: int
    left: list[int] | None
    joined: list[str]
    seq_lens: list[int]
    kv_tokens: int
    parts: int
    ahead: bool
    fallback: bool


Record = Header | PlanMade | Event


class TraceWriter:
    """Writes a trace until it has `limit` bytes."""

    def __init__(self, path: Path, header: Header, limit: int) -> None:
        """
        Raises:
            TraceError: The file cannot be written.
        """
        try:
            self._file = path.open("wb")
        except OSError as error:
            raise TraceError(f"SGLANG_PAT_TRACE: {path} cannot be written: {error.strerror}") from None
        self._path = path
        self._encode = msgspec.msgpack.Encoder().encode
        self._left = limit - len(MAGIC)
        self._batch: list[str] = []
        self._file.write(MAGIC)
        self._write(header)
        self._file.flush()

    def on_event(self, event: Event) -> None:
        """Record an event."""
        self._write(event)

    def on_plan(self, rids: list[str], **record: Any) -> None:
        """Record a plan for `rids`; the other arguments are `PlanMade`'s."""
        left, joined = _difference(self._batch, rids)
        self._batch = rids
        self._write(PlanMade(left=left, joined=joined, **record))
        if self._left > 0:
            # Whatever ends the server, the file is whole up to its last plan.
            self._file.flush()

    def _write(self, record: Record) -> None:
        if self._left <= 0:
            return
        data = self._encode(record)
        self._left -= 4 + len(data)
        if self._left <= 0:
            self._file.close()
            logger.warning("SGLANG_PAT_TRACE: %s has reached its limit and ends here (SGLANG_PAT_TRACE_MB)", self._path)
            return
        self._file.write(len(data).to_bytes(4, "little") + data)


def read(path: Path, truncated: bool = False) -> Iterator[Record]:
    """The records of a trace, the header first.

    Args:
        path: The file.
        truncated: Accept a file that ends within a record, up to there.

    Raises:
        TraceError: The file is missing, foreign, damaged or cut off.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from None
    decode = msgspec.msgpack.Decoder(Record).decode
    with file:
        if file.read(len(MAGIC)) != MAGIC:
            raise TraceError(f"{path} is not a trace of sglang-pat: record one with SGLANG_PAT_TRACE=<file>")
        number = 0
        while size := file.read(4):
            data = file.read(int.from_bytes(size, "little"))
            if len(size) < 4 or len(data) < int.from_bytes(size, "little"):
                if truncated:
                    return
                raise TraceError(f"{path} is cut off after {number} records: --truncated takes what is there")
            if number == 0:
                _check_format(path, data)
            try:
                record = decode(data)
            except msgspec.MsgspecError as error:
                raise TraceError(f"{path} is damaged in record {number + 1}: {error}") from None
            yield record
            number += 1
    if number == 0:
        raise TraceError(f"{path} is an empty trace: its server never started")


def _check_format(path: Path, data: bytes) -> None:
    try:
        found = msgspec.msgpack.decode(data)["format"]
    except (msgspec.MsgspecError, KeyError, TypeError):
        raise TraceError(f"{path} is damaged: it does not begin with a header") from None
    if found != FORMAT:
        raise TraceError(f"{path} has trace format {found}, this version of sglang-pat reads format {FORMAT}")


def _difference(before: list[str], after: list[str]) -> tuple[list[int] | None, list[str]]:
    """Which positions left `before` and what was appended, so that the result is `after`; None if it is no such change."""
    left, kept = [], 0
    for position, rid in enumerate(before):
        if kept < len(after) and after[kept] == rid:
            kept += 1
        else:
            left.append(position)
    if kept == 0:
        return None, after
    return left[::-1], after[kept:]


def apply_difference(batch: list[str], plan: PlanMade) -> list[str]:
    """The batch of `plan`, `batch` being the one of the plan before."""
    if plan.left is None:
        return plan.joined
    batch = list(batch)
    for position in plan.left:
        del batch[position]
    return batch + plan.joined
