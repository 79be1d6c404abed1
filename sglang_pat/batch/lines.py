"""Files in OpenAI's batch format: requests that are read, and records that are written so that nothing is lost or done twice.

A line of the input is `{"custom_id": …, "method": "POST", "url": "/v1/chat/completions", "body": {…}}`. Its record has the line's number
as its `id`, so that a job that was interrupted goes on where it was.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import shutil
import stat
import tempfile
import zlib
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, overload

import msgspec

from sglang_pat import jsonl
from sglang_pat.text import printable, say

URLS = ("/v1/chat/completions", "/v1/completions")
"""What is answered."""

LONGEST = 1 << 27
"""Bytes of a line."""

LONGEST_REASON = 300
"""Characters that are shown of an error."""

LONGEST_RECORD = 2 * LONGEST
"""Bytes of a record: the name of a request and its answer may have LONGEST each."""

Json = dict[str, Any]

ID = "batch_req_"
"""With a line's number behind it, the `id` of its record."""


class BatchError(ValueError):
    """The job cannot be done, or not go on; the message says why."""


class Line(msgspec.Struct):
    """A line of the input, in OpenAI's format: `body` is what the client would post to `url`."""

    custom_id: str
    url: str
    body: Json
    method: Literal["POST"] = "POST"


class Request(msgspec.Struct):
    """A line that is to be answered, and where it stands: its number, from 1 on."""

    number: int
    custom_id: str
    url: str
    body: Json


class Failure(msgspec.Struct):
    """A line that is not to be answered, and why."""

    number: int
    custom_id: str | None
    code: str
    message: str


def parse(number: int, text: bytes) -> Request | Failure:
    """What a line of the input asks for."""
    if len(text) > LONGEST:
        return Failure(number, None, "invalid_line", f"line {number} is longer than {LONGEST >> 20} MiB")
    try:
        found = msgspec.json.decode(jsonl.unmarked(text))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Failure(number, None, "invalid_line", f"line {number} is no JSON: {error}{jsonl.joined(text)}")
    return check(number, found)


def check(number: int, found: object) -> Request | Failure:
    """The same of a line that has been decoded."""
    custom_id = found.get("custom_id") if isinstance(found, dict) else None
    name = custom_id if isinstance(custom_id, str) else None
    try:
        line = msgspec.convert(found, Line)
    except msgspec.ValidationError as error:
        code, why = "invalid_line", str(error)
    else:
        if line.url in URLS and not line.body.get("stream"):
            return Request(number, line.custom_id, line.url, line.body)
        code, why = "invalid_request", "a batch has nobody to stream to: leave out stream"
        if line.url not in URLS:
            code, why = "invalid_url", f"{line.url} is not served here: {' and '.join(URLS)} are"
    return Failure(number, name, code, f"line {number}: {why}")


class Source(Sequence[Request], contextlib.AbstractContextManager["Source"]):
    """The lines of a file, empty ones left out. Those that are to be asked are its items: only where they stand is kept, for a job may be
    larger than memory."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            BatchError: The file cannot be read.
        """
        self._path = path
        try:
            self._file: BinaryIO = path.open("rb")
            kind = os.fstat(self._file.fileno()).st_mode
            if stat.S_ISFIFO(kind):
                # What a pipe brings is there once.
                with self._file as pipe:
                    self._file = tempfile.TemporaryFile()  # noqa: SIM115
                    shutil.copyfileobj(pipe, self._file)
                self._file.seek(0)
            elif not stat.S_ISREG(kind):
                raise BatchError(f"{path} is no file of requests: name another one")
            first = self._file.readline(64)
            if jsonl.is_utf_16(first):
                raise BatchError(f"{path} {jsonl.UTF_16}")
            if first.endswith(b"\n") and jsonl.unmarked(first).strip() == b"[":
                raise BatchError(f"{path} is an array over several lines: write one request a line (JSONL)")
            self._file.seek(0)
        except OSError as error:
            raise BatchError(f"{path}: {error.strerror}") from None
        self._last = (0, 0, 0, 0)
        self._begins, self._sizes, self._numbers, self._sums = array("Q"), array("L"), array("Q"), array("L")

    def lines(self) -> Iterator[Request | Failure]:
        """All lines, once.

        Raises:
            BatchError: The file cannot be read.
        """
        try:
            begin = number = 0
            while text := self._file.readline(LONGEST + 2):
                number += 1
                size = len(text)
                if not text.endswith(b"\n"):
                    # The last line may lack its end; one that is too long goes on.
                    while rest := self._file.readline(LONGEST):
                        size += len(rest)
                        if rest.endswith(b"\n"):
                            break
                if jsonl.unmarked(text).strip():
                    self._last = begin, size, number, zlib.crc32(text)
                    yield parse(number, text)
                begin += size
        except OSError as error:
            raise BatchError(f"{self._path}: {error.strerror}") from None

    def keep(self) -> None:
        """The line that was given last is to be asked."""
        for figures, figure in zip((self._begins, self._sizes, self._numbers, self._sums), self._last, strict=True):
            figures.append(figure)

    def __len__(self) -> int:
        return len(self._begins)

    @overload
    def __getitem__(self, place: int) -> Request: ...
    @overload
    def __getitem__(self, place: slice) -> list[Request]: ...
    def __getitem__(self, place: int | slice) -> Request | list[Request]:
        """
        Raises:
            BatchError: The file cannot be read any more, or has changed.
        """
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        try:
            text = os.pread(self._file.fileno(), self._sizes[place], self._begins[place])
        except OSError as error:
            raise BatchError(f"{self._path}: {error.strerror}") from None
        found = parse(self._numbers[place], text) if zlib.crc32(text) == self._sums[place] else None
        if not isinstance(found, Request):
            raise BatchError(f"line {self._numbers[place]} of {self._path} has changed since the job began")
        return found

    def __exit__(self, *_: object) -> None:
        self._file.close()


def answer(request: Request, status: int, body: Json) -> Json:
    """The record of a request that was answered, perhaps by an error."""
    response = {"status_code": status, "request_id": str(body.get("id", "")), "body": body}
    return {"id": f"{ID}{request.number}", "custom_id": request.custom_id, "response": response, "error": None}


def refusal(failure: Failure) -> Json:
    """The record of a line that was not asked."""
    error = {"code": failure.code, "message": failure.message}
    return {"id": f"{ID}{failure.number}", "custom_id": failure.custom_id, "response": None, "error": error}


def number_of(record_id: str) -> int:
    """The line that a record answers.

    Raises:
        ValueError: It is no record's `id`.
    """
    if not record_id.startswith(ID):
        raise ValueError(record_id)
    return int(record_id.removeprefix(ID))


class _Response(msgspec.Struct):
    status_code: int


class _Reason(msgspec.Struct):
    """What is read of a record of an error, to show it."""

    id: str
    response: Json | None = None
    error: Json | None = None

    def said(self) -> str:
        """The message: of ours, or of a server, which has it in `error`, in `message`, or elsewhere."""
        status = self.response.get("status_code") if self.response else None
        part: Any = self.error or (self.response or {}).get("body") or {}
        if isinstance(part, dict) and isinstance(part.get("error"), dict):
            part = part["error"]
        message = part.get("message") if isinstance(part, dict) else None
        shown = " ".join(str(message or part or "no reason is given").split())[:LONGEST_REASON]
        return f"HTTP {status}: {shown}" if status else shown


class _Record(msgspec.Struct):
    """What is read again of a record."""

    id: str
    custom_id: str | None
    response: _Response | None


class Output(contextlib.AbstractContextManager["Output"]):
    """The records of a job, one a line; appended as they come, and kept when the job is started again.

    Attributes:
        done: The lines that have a record, by number, with their custom_id.
        failed: How many of the lines have errors only.
    """

    def __init__(self, path: Path) -> None:
        """Open it; what a process that was killed left of its last record goes to a file beside it.

        Raises:
            BatchError: It cannot be read and written, another process is writing it, or it is no output of a job.
        """
        self._path = path
        self._errors: set[int] = set()
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise BatchError(f"{path}: {error.strerror}") from None
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise BatchError(f"{path} is no regular file, from which a job could go on: name another one")
            self._lock()
            self.done: dict[int, str | None] = {}
            self._read()
        except BaseException:
            os.close(self._file)
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BatchError(f"{self._path} is being written by another process") from None

    def _read(self) -> None:
        decoder = msgspec.json.Decoder(_Record)
        begins = f'{{"id":"{ID}'.encode()
        self._end, whole = 0, True
        with os.fdopen(os.dup(self._file), "rb") as file:
            for number, text in enumerate(iter(lambda: file.readline(LONGEST_RECORD + 1), b""), 1):
                whole = text.endswith(b"\n")
                if len(text) > LONGEST_RECORD:
                    raise BatchError(f"line {number} of {self._path} is longer than {LONGEST_RECORD >> 20} MiB")
                try:
                    record = jsonl.unmarked(text)
                    if record.strip():
                        self._count(decoder.decode(record))
                except (ValueError, RecursionError) as error:
                    joined = "trailing characters" in str(error)  # a record and more
                    if not whole and not joined and begins.startswith(text[: len(begins)]):
                        self._keep(text)
                        whole = True  # without it
                        break
                    raise BatchError(
                        f"line {number} of {self._path} is no record of a job: name another file"
                    ) from None
                self._end += len(text)
        os.ftruncate(self._file, self._end)
        if not whole:
            self._append(b"\n")  # an editor may leave out the last one

    def _keep(self, text: bytes) -> None:
        """Write what is cut off to a new file: it may be somebody's after all."""
        # Made anew (O_EXCL), so that nothing is lost and no link is followed; and who may not read the output may not read this.
        mode = os.fstat(self._file).st_mode & 0o666
        for number in itertools.count(1):
            path = Path(f"{self._path}.cut{number if number > 1 else ''}")
            try:
                with open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                    file.write(text)
            except FileExistsError:
                continue
            except OSError as error:
                raise BatchError(f"{path}, for the record in {self._path} that was cut off: {error.strerror}") from None
            say(
                f"sglang-pat: {printable(str(self._path))}: its last record was cut off, and is in {printable(path.name)}"
            )
            return

    def _count(self, record: _Record) -> None:
        number = number_of(record.id)
        if record.response is not None and record.response.status_code == 200:
            self._errors.discard(number)
        elif number not in self.done:
            self._errors.add(number)
        self.done[number] = record.custom_id

    @property
    def failed(self) -> int:
        return len(self._errors)

    def first_error(self) -> str:
        """What the first record says whose line has errors only; empty if there is none. The cause of one is often that of all."""
        if not self._errors:
            return ""
        decoder = msgspec.json.Decoder(_Reason)
        with os.fdopen(os.dup(self._file), "rb") as file:
            file.seek(0)  # writes say where they go
            for text in iter(lambda: file.readline(LONGEST_RECORD + 1), b""):
                with contextlib.suppress(ValueError, RecursionError):
                    record = decoder.decode(jsonl.unmarked(text))
                    number = number_of(record.id)
                    if number in self._errors:
                        said = record.said()
                        return said if said.startswith("line ") else f"line {number}: {said}"
        return ""

    def write(self, record: Json) -> None:
        """Append a record: whole, or not at all.

        Raises:
            BatchError: The disk is full, or does not work; or the file is gone, and what is written to it with it.
        """
        if not os.fstat(self._file).st_nlink:
            raise BatchError(f"{self._path} was removed while the job ran: the same command begins anew")
        self._append(msgspec.json.encode(record) + b"\n")
        self._count(msgspec.convert(record, _Record))

    def _append(self, text: bytes) -> None:
        written = 0
        try:
            while written < len(text):
                written += os.pwrite(self._file, text[written:], self._end + written)
        except OSError as error:
            os.ftruncate(self._file, self._end)
            what = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
            raise BatchError(
                f"{self._path}: {what}; all {len(self.done)} answers so far are there, run the same command to go on from them"
            ) from None
        self._end += len(text)

    def __exit__(self, *_: object) -> None:
        os.close(self._file)
