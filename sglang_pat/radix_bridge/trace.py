"""What a live server did, in a file: radix-tree events and the plans made (`SGLANG_PAT_TRACE`).

The file is `MAGIC` and then records, each its length in four little-endian bytes and one MessagePack object: first the
`Header`, then events and `PlanMade`. Prompts are not in it: what tells nodes apart is a digest under a key that the server
forgets.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
from msgspec import Meta

from sglang_pat.packing import PackConfig
from sglang_pat.packing.tree import InconsistentError
from sglang_pat.radix_bridge.events import Event, RequestsExpected, Tokens

logger = logging.getLogger(__name__)

MAGIC = b"sglang-pat trace\n"
FORMAT = 4

LABEL = 200
"""Characters of a request's id that a trace keeps: clients choose them."""


class TraceError(ValueError):
    """A file that is no trace, or not a whole one; the message is for the user."""


_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises of bytes that are no record."""


class Header(msgspec.Struct, frozen=True, tag=True):
    """The first record.

    Attributes:
        format: `FORMAT` of the writer.
        config: Device, model and policy.
        max_batch: Requests of the largest batch.
        layers: How many of the model's layers the plans are for: those that see everything, if there are any.
    """

    format: int
    config: PackConfig
    max_batch: Annotated[int, Meta(ge=1, le=1 << 16)]
    layers: Annotated[int, Meta(ge=1, le=1 << 16)]


class PlanMade(msgspec.Struct, frozen=True, tag=True):
    """A plan for a batch.

    Attributes:
        steps: Steps run with the plan before.
        left: Positions in the batch before of requests that left it, descending; None if `joined` is the whole batch.
        joined: Requests after those that stayed; -1 is one of which SGLang says nothing.
        seq_lens: Tokens of each request.
        kv_tokens, parts: What the plan reads and merges in its first step.
        ahead: Made before its step, from the lengths expected then.
        fallback: Planning had failed, this is one query per work item.
    """

    steps: Annotated[int, Meta(ge=0, le=1 << 30)]
    left: list[int] | None
    joined: list[Annotated[int, Meta(ge=-1, le=2**63 - 1)]]
    seq_lens: list[Tokens]
    kv_tokens: int
    parts: int
    ahead: bool
    fallback: bool


Record = Header | PlanMade | Event


class TraceWriter:
    """Writes a trace until it has `limit` bytes, or the disk is full. Nothing that goes wrong reaches the server."""

    def __init__(self, path: Path, header: Header, limit: int) -> None:
        """
        Raises:
            TraceError: The file cannot be written.
        """
        self._path = path
        self._encode = msgspec.msgpack.Encoder().encode
        self._left = limit - len(MAGIC)
        self._batch: list[int] = []
        if path.is_fifo():
            # Opening it would wait for whoever reads it.
            raise TraceError(f"SGLANG_PAT_TRACE: {path} is a pipe: name a file")
        try:
            self._file = path.open("wb")
            self._file.write(MAGIC)
            self._record(header)
            self._file.flush()
        except OSError as error:
            raise TraceError(f"SGLANG_PAT_TRACE: {path} cannot be written: {error.strerror}") from None

    @property
    def is_open(self) -> bool:
        """Whether it still records."""
        return not self._file.closed

    @property
    def recording(self) -> str:
        """The file's whole path."""
        return str(self._path.resolve())

    def on_event(self, event: Event) -> None:
        """Record an event."""
        if isinstance(event, RequestsExpected):
            event = msgspec.structs.replace(event, rids=[_readable(rid) for rid in event.rids])
        self._write(event)

    def on_plan(self, requests: list[int], **record: Any) -> None:
        """Record a plan for `requests`; the other arguments are `PlanMade`'s."""
        left, joined = _difference(self._batch, requests)
        self._batch = requests
        self._write(PlanMade(left=left, joined=joined, **record))
        # Whatever ends the server, the file is whole up to its last plan.
        self._guarded(self._file.flush)

    def _write(self, record: Record) -> None:
        self._guarded(lambda: self._record(record))

    def _guarded(self, action: Callable[[], None]) -> None:
        if not self.is_open:
            return
        try:
            action()
        except OSError as error:
            logger.warning(
                "SGLANG_PAT_TRACE: %s cannot be written any more and ends here: %s", self._path, error.strerror
            )
            try:
                self._file.close()
            except OSError:
                pass  # of what was still to be written; the file counts as closed

    def _record(self, record: Record) -> None:
        data = self._encode(record)
        self._left -= 4 + len(data)
        if self._left <= 0:
            logger.warning("SGLANG_PAT_TRACE: %s has reached its limit and ends here (SGLANG_PAT_TRACE_MB)", self._path)
            self._file.close()
            return
        self._file.write(len(data).to_bytes(4, "little") + data)


def read(path: Path, truncated: bool = False) -> Iterator[Record]:
    """The records of a trace, the header first and only there.

    Args:
        path: The file.
        truncated: Accept a file that ends within a record, up to there.

    Raises:
        TraceError: The file is missing, foreign, damaged or cut off.
    """
    try:
        with path.open("rb") as file:
            yield from _read(path, file, truncated)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from None


def _read(path: Path, file: BinaryIO, truncated: bool) -> Iterator[Record]:
    decode = msgspec.msgpack.Decoder(Record).decode
    if file.read(len(MAGIC)) != MAGIC:
        raise TraceError(f"{path} is not a trace of sglang-pat: record one with SGLANG_PAT_TRACE=<file>")
    number, left = 0, os.fstat(file.fileno()).st_size - len(MAGIC)
    while size := file.read(4):
        left -= len(size)
        wanted = int.from_bytes(size, "little")
        data = file.read(min(wanted, max(0, left)))
        left -= len(data)
        if len(size) < 4 or len(data) < wanted:
            if truncated:
                return
            raise TraceError(f"{path} is cut off after {number} records: --truncated takes what is there")
        if number == 0:
            _check_format(path, data)
        try:
            record = decode(data)
        except _UNDECODABLE as error:
            raise TraceError(f"{path} is damaged in record {number + 1}: {error}") from None
        if isinstance(record, Header) != (number == 0):
            raise TraceError(f"{path} is damaged: a header is in record {number + 1}, or missing in the first")
        yield record
        number += 1
    if number == 0:
        raise TraceError(f"{path} is an empty trace: its server never started")


def _check_format(path: Path, data: bytes) -> None:
    try:
        found = msgspec.msgpack.decode(data)["format"]
    except (*_UNDECODABLE, KeyError, TypeError):
        raise TraceError(f"{path} is damaged: it does not begin with a header") from None
    if found != FORMAT:
        raise TraceError(f"{path} has trace format {found}, this version of sglang-pat reads format {FORMAT}")


def _readable(rid: str) -> str:
    """What is kept of a client's id: it may be long, and need not be text that can be encoded."""
    return rid[:LABEL].encode(errors="replace").decode()


def _difference(before: list[int], after: list[int]) -> tuple[list[int] | None, list[int]]:
    """Which positions left `before` and what was appended, so that the result is `after`; None if it is no such change."""
    left, kept = [], 0
    for position, request in enumerate(before):
        if kept < len(after) and after[kept] == request:
            kept += 1
        else:
            left.append(position)
    if kept == 0:
        return None, after
    return left[::-1], after[kept:]


def apply_difference(batch: list[int], plan: PlanMade) -> list[int]:
    """The batch of `plan`, `batch` being the one of the plan before.

    Raises:
        InconsistentError: The plan is for no such batch.
    """
    if plan.left is None:
        batch = plan.joined
    else:
        batch, before = list(batch), len(batch)
        for position in plan.left:
            if not 0 <= position < before:
                raise InconsistentError(f"position {position} left a batch that has it not")
            del batch[position]
            before = position
        batch += plan.joined
    if len(plan.seq_lens) != len(batch):
        raise InconsistentError(f"{len(plan.seq_lens)} lengths are told of {len(batch)} requests")
    return batch
