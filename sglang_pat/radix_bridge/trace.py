"""Traces (`SGLANG_PAT_TRACE`): a file with a live server's radix-tree events and plans.

The file is `MAGIC`, then records: the length in four little-endian bytes, and one MessagePack object. The first record is the `Header`, the others
are events and `PlanMade`. There are no prompts in it: nodes are distinguished by a digest, whose key the server does not store.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
from msgspec import Meta

from sglang_pat.packing import PackConfig
from sglang_pat.packing.tree import InconsistentError
from sglang_pat.radix_bridge.events import Event, NodeEvicted, RequestsExpected, Tokens
from sglang_pat.text import is_showable, printable

logger = logging.getLogger(__name__)

MAGIC = b"sglang-pat trace\n"
FORMAT = 7

PENDING = 1 << 16
"""Bytes of events that wait in memory for the next plan, at most. A server that is killed loses them."""

LONGEST = 1 << 26
"""Bytes of a record: of 65,536 requests (`Header.max_batch`) with ids of LABEL characters of four bytes it has 54 MB."""

LABEL = 200
"""How many characters of a client's request id a trace keeps, and of what is in a trace an error shows."""


def is_trace(path: Path) -> bool:
    """Whether there is a file that begins as traces do."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


class TraceError(ValueError):
    """A file is not a trace, or not a whole one; the message is for the user."""


_UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not a record."""


class Header(msgspec.Struct, frozen=True, tag=True):
    """The first record.

    Attributes:
        format: `FORMAT` of the writer.
        config: Device, model and policy.
        max_batch: Requests of the largest batch.
        layers: How many of the model's layers the plans are for: those without a window, if there are any.
    """

    format: int
    config: PackConfig
    max_batch: Annotated[int, Meta(ge=1, le=1 << 16)]
    layers: Annotated[int, Meta(ge=1, le=1 << 16)]


class PlanMade(msgspec.Struct, frozen=True, tag=True):
    """A plan for a batch.

    Attributes:
        steps: How many steps the previous plan was used for.
        left: Positions in the previous batch of requests that left, descending; None if `joined` is the whole batch.
        joined: Requests after those that stayed; -1 for an unknown one.
        seq_lens: Tokens of each request.
        kv_tokens, parts: What the plan reads and merges in its first step.
        ahead: Whether it was made before its step, from predicted lengths.
        fallback: Whether this is not the whole plan: planning had failed, or it did not fit its memory.
        aside: Whether it is for one step only, after which the batch before goes on.
    """

    steps: Annotated[int, Meta(ge=0, le=1 << 30)]
    left: list[int] | None
    joined: list[Annotated[int, Meta(ge=-1, le=2**63 - 1)]]
    seq_lens: list[Tokens]
    kv_tokens: int
    parts: int
    ahead: bool
    fallback: bool
    aside: bool = False


Record = Header | PlanMade | Event


def _open(path: str, flags: int) -> int:
    """Open the file of a trace, or make it. Its requests' ids are their clients', so nobody else may have chosen where they go. Whoever lets others read
    them makes the file before."""
    # A pipe must not block, and is refused as whatever else is no file.
    try:
        file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise TraceError(f"SGLANG_PAT_TRACE: {path} is a link: name the file itself") from None
        raise
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        reason = "is not a file: name a file"
    elif status.st_uid not in (0, os.geteuid()):
        reason = f"belongs to user {status.st_uid}: remove it, or name another file"
    elif status.st_nlink != 1:
        reason = "has other names too (hard links): name another file"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        reason = "may be written by others: remove it, or name another file"
    else:
        return file
    os.close(file)
    raise TraceError(f"SGLANG_PAT_TRACE: {path} {reason}")


class TraceWriter:
    """Writes a trace until it has `limit` bytes, the disk is full, or somebody else removes, empties or shortens the file. No failure reaches the
    server."""

    def __init__(self, path: Path, header: Header, limit: int) -> None:
        """
        Raises:
            TraceError: The file cannot be written.
        """
        self._encode = msgspec.msgpack.Encoder().encode
        self._left = limit - len(MAGIC)
        self._batch: list[int] = []
        try:
            self._path = path.absolute()
            if not is_showable(str(self._path)):
                raise TraceError(
                    f"SGLANG_PAT_TRACE: {str(self._path)!a} has characters that cannot be shown: name another file"
                )
            self._file = open(path, "a+b", buffering=0, opener=_open)  # noqa: SIM115
            self._take(path)
            self._pending = bytearray(MAGIC)
            self._saved = 0  # bytes in the file
            self._record(header)
            self._save()
        except OSError as error:
            raise TraceError(f"SGLANG_PAT_TRACE: {path} cannot be written: {error.strerror}") from None

    def _take(self, path: Path) -> None:
        """Empty the file, unless another process records in it, or it is no trace."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                raise TraceError(f"SGLANG_PAT_TRACE: another server records in {path}: name another file") from None
            # A filesystem without locks.
        if not MAGIC.startswith(os.pread(self._file.fileno(), len(MAGIC), 0)):
            raise TraceError(
                f"SGLANG_PAT_TRACE: {path} has something else in it, which would be lost: name another file"
            )
        self._file.truncate(0)

    @property
    def is_open(self) -> bool:
        """Whether it still records."""
        return not self._file.closed

    @property
    def recording(self) -> str:
        """The absolute path of the file; empty once it ended."""
        return str(self._path) if self.is_open else ""

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
        # However the server ends, the file is whole up to its last plan.
        self._guarded(self._save)

    def _save(self) -> None:
        """Write what is pending, behind what was written before only: nobody could read records without their beginning, and they would keep the
        next server from this file."""
        status = os.fstat(self._file.fileno())
        if stat.S_ISREG(status.st_mode):
            if status.st_nlink == 0:
                raise OSError(errno.ENOENT, "it was removed")
            if status.st_size < self._saved:
                raise OSError(errno.EIO, "somebody else has emptied or shortened it")
        written = 0
        try:
            while written < len(self._pending):
                written += self._file.write(self._pending[written:])
        except OSError:
            # A disk that is full may have taken the beginning of a record.
            with contextlib.suppress(OSError):
                self._file.truncate(self._saved)
            raise
        self._saved += written
        self._pending.clear()

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
                pass  # it counts as closed

    def _record(self, record: Record) -> None:
        data = self._encode(record)
        self._left -= 4 + len(data)
        if self._left <= 0:
            self._save()
            logger.warning("SGLANG_PAT_TRACE: %s has reached its limit and ends here (SGLANG_PAT_TRACE_MB)", self._path)
            self._file.close()
            return
        self._pending += len(data).to_bytes(4, "little") + data
        if len(self._pending) > PENDING:
            self._save()


def read(path: Path, truncated: bool = False) -> Iterator[Record]:
    """The records of a trace; the header is the first one, and no other.

    Args:
        truncated: Accept a file that ends within a record, and return the records before that.

    Raises:
        TraceError: The file is missing, foreign, damaged or cut off.
    """
    try:
        # Opening a pipe would wait for a writer, and how long a record may be is known from a file's size.
        if path.is_fifo():
            raise TraceError(f"{path} is a pipe: name a file")
        with path.open("rb") as file:
            yield from _read(path, file, truncated)
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from None


def _read(path: Path, file: BinaryIO, truncated: bool) -> Iterator[Record]:
    decode = msgspec.msgpack.Decoder(Record).decode
    if (beginning := file.read(len(MAGIC))) != MAGIC:
        if not beginning and stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise TraceError(f"{path} is empty: somebody emptied it, or its server never started")
        raise TraceError(f"{path} is not a trace of sglang-pat: record one with SGLANG_PAT_TRACE=<file>")
    number, left = 0, os.fstat(file.fileno()).st_size - len(MAGIC)
    while size := file.read(4):
        left -= len(size)
        wanted = int.from_bytes(size, "little")
        if wanted > LONGEST:
            raise TraceError(f"{path} is damaged in record {number + 1}: it would be longer than {LONGEST >> 20} MiB")
        data = file.read(min(wanted, max(0, left)))
        left -= len(data)
        if len(size) < 4 or len(data) < wanted:
            if number == 0:
                raise TraceError(f"{path} is cut off within its first record: its server had hardly started")
            if truncated:
                return
            raise TraceError(f"{path} is cut off after {number} records: --truncated takes what is there")
        if number == 0:
            _check_format(path, data)
        try:
            record = decode(data)
        except _UNDECODABLE as error:
            raise TraceError(f"{path} is damaged in record {number + 1}: {printable(str(error))[:LABEL]}") from None
        if isinstance(record, Header) != (number == 0):
            raise TraceError(f"{path} is damaged: a header is in record {number + 1}, or missing in the first")
        if isinstance(record, Header) and record.config.piece:
            raise TraceError(f"{path} is damaged: it has plans in pieces, which no server records")
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
        raise TraceError(
            f"{path} has trace format {printable(str(found))[:LABEL]}, this version of sglang-pat reads format {FORMAT}"
        )


def _readable(rid: str) -> str:
    """A client's id as it is kept: it may be long, and may not be encodable."""
    return rid[:LABEL].encode(errors="replace").decode()


def _difference(before: list[int], after: list[int]) -> tuple[list[int] | None, list[int]]:
    """(positions that left `before`, what was appended) to get `after`; (None, after) if no request stayed."""
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
    """The batch of `plan`, given the batch of the previous plan.

    Raises:
        InconsistentError: The plan does not fit that batch.
    """
    if plan.left is None:
        batch = plan.joined
    else:
        batch, before = list(batch), len(batch)
        for position in plan.left:
            if not 0 <= position < before:
                raise InconsistentError(f"position {position} left a batch that does not have it")
            del batch[position]
            before = position
        batch += plan.joined
    if len(plan.seq_lens) != len(batch):
        raise InconsistentError(f"{len(plan.seq_lens)} lengths for {len(batch)} requests")
    return batch


def repeat(apply: Callable[[Event], None], event: Event) -> None:
    """Apply a recorded event. The eviction of a node in use is a fault that takes effect all the same, here as in the server that recorded it.

    Raises:
        InconsistentError: The event cannot be.
    """
    try:
        apply(event)
    except InconsistentError:
        if not isinstance(event, NodeEvicted):
            raise
