"""A module's file in the cache: it appears complete, ends with a digest of the rest, and is never written into."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from pathlib import Path

from sglang_pat.jit.trust import CACHE, BuildError, UnusedError, objection, refusal, unwritable

PREFIX = "sglang_pat_"
"""Of the names of all libraries; a dot before it for what is there only during a build."""

LIBRARY_BYTES = 1 << 28
"""Nine times the largest library, the planner's with sanitizers (30 MB), and little enough to be read."""


def read(library: Path, at: int) -> bytes | None:
    """What is in a library; None if it is not there.

    Args:
        library: Its path.
        at: The descriptor of its folder.

    Raises:
        UnusedError: Others may have written it, or it is too large to be one.
        BuildError: It, or its folder, cannot be read.
    """
    try:
        file = os.open(library.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
    except FileNotFoundError:
        return None
    except OSError as error:
        try:
            status = os.stat(library.name, dir_fd=at, follow_symlinks=False)
        except OSError:
            raise unwritable(library.parent, error) from None
        raise UnusedError(library, objection(status) or refusal(error)) from None
    try:
        status = os.fstat(file)
        reason = objection(status)
        if reason:
            raise UnusedError(library, reason)
        if not stat.S_ISREG(status.st_mode):
            raise unloadable(library, "it is not a file")
        if status.st_size > LIBRARY_BYTES:
            raise UnusedError(library, f"it has {status.st_size} bytes")
        with open(file, "rb", closefd=False) as content:
            return content.read(LIBRARY_BYTES)
    except OSError as error:
        raise unloadable(library, str(error.strerror)) from None
    finally:
        os.close(file)


def is_sealed(name: str, content: bytes) -> bool:
    """Whether a library is as it was built. Loading one that was cut off or has holes (a full disk, a power cut, a broken copy) ends the process by a
    signal."""
    size = len(content) - hashlib.sha256().digest_size
    return size > 0 and content[size:] == seal(name, memoryview(content)[:size])


def seal(name: str, content: bytes | memoryview) -> bytes:
    """The digest of a library's name and content, which is written behind it: loaders ignore what follows the sections."""
    digest = hashlib.sha256(name.encode())
    digest.update(content)
    return digest.digest()


def write(content: bytes, library: Path, at: int) -> None:
    """Write a library. It appears complete, or not at all."""
    partial = f".{library.name}-{secrets.token_hex(8)}"
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644, dir_fd=at)
    try:
        with open(file, "wb") as to:
            to.write(content)
        os.rename(partial, library.name, src_dir_fd=at, dst_dir_fd=at)
    except BaseException:
        os.unlink(partial, dir_fd=at)
        raise


def unloadable(library: Path, reason: str) -> BuildError:
    return BuildError(
        f"sglang-pat cannot load {library}, which it built earlier: remove it, or set {CACHE} to a folder from which libraries can be "
        f"loaded: {reason}"
    )
