"""One process builds a library, the others wait for it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from sglang_pat.jit.trust import objection, refusal, unwritable, warn

logger = logging.getLogger(__name__)

NOTICE_SECONDS = 10
"""A process that waits longer than this for another one's build says so in the log."""

LOCK_SECONDS = 900
"""A process that waits longer than this for another one's build builds too. All modules of `python -m sglang_pat.build --drafts` take minutes on few cores
(docs/install.md), and each has a lock of its own."""


@contextlib.contextmanager
def only_builder(library: Path, at: int) -> Iterator[None]:
    """If several processes want the same library, one builds it and the others wait. Two that build it are no harm: the last one's stays.

    Raises:
        BuildError: The cache cannot be written.
    """
    lock = _open_lock(library, at)
    if lock is None:
        yield
        return
    try:
        began, told = time.monotonic(), False
        while not _locked(lock):
            waited = time.monotonic() - began
            if waited > LOCK_SECONDS:
                logger.warning(
                    "sglang-pat waited %.0f s for another process that builds %s, and builds it too",
                    waited,
                    library.name,
                )
                break
            if not told and waited > NOTICE_SECONDS:
                logger.info("sglang-pat waits for another process that builds %s", library.name)
                told = True
            time.sleep(0.1)
        yield
    finally:
        os.close(lock)


def _open_lock(library: Path, at: int) -> int | None:
    """Open the file of a lock; None if others may have made it. Only its owner may open it, because whoever can open it can hold it."""
    path = library.with_suffix(".lock")
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK  # NFS wants a file that is locked to be open for writing
    try:
        return os.open(path.name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=at)
    except FileExistsError:
        pass
    except OSError as error:
        raise unwritable(library.parent, error) from error
    try:
        lock = os.open(path.name, flags, dir_fd=at)
    except OSError as error:
        reason = refusal(error)
    else:
        status = os.fstat(lock)
        reason = objection(status)
        if not reason and status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            reason = "others may open it, and hold it for ever: remove it"
        if not reason and stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            return lock
        os.close(lock)
        reason = reason or "it is not a file of its own"
    warn(f"sglang-pat does not use {path}, because {reason}; it builds without that lock")
    return None


def _locked(lock: int) -> bool:
    """Try to take the lock; returns whether this process has it. The lock ends with the process. On a filesystem without locks, returns True."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EINTR)
    return True
