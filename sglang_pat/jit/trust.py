"""Whose files are used: a module that others may have written would run as us.

A library's name is no secret, and its digest has no key: whoever can write where we load from runs code as us. So folder, library and lock are opened
once, never through a link, and used only if they belong to one of the `trusted` and nobody else can write them. All but the folder are reached through
its descriptor, because somebody who can write a folder above may put another one under its name.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import pwd
import re
import stat
import tempfile
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger(__name__)

CACHE = "TVM_FFI_CACHE_DIR"

OWNER = "SGLANG_PAT_CACHE_OWNER"
"""A user whose libraries are loaded too, besides root's and those of the process's own user."""


NOBODYS = 2**32 - 1
"""`(uid_t)-1`, which no user has; no number of one is larger."""


class BuildError(RuntimeError):
    """A native module cannot be built here; the message says what to do."""


class UnusedError(BuildError):
    """Others may have written the cache, or something in it."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"sglang-pat does not use {path}, because {reason}")


class Cache(NamedTuple):
    """Where modules are loaded from, and kept.

    Attributes:
        folder: Its path.
        problem: Why not every module can be kept there, or why it is not the folder that was named; empty if all is well.
        usable: Whether modules can be loaded and kept there.
    """

    folder: Path
    problem: str
    usable: bool


def find_cache() -> Cache:
    """The folder that `load` would use. Only the one in place of another that others may write is made.

    Raises:
        BuildError: There is none, as this user has no home.
    """
    folder = cache_folder()
    try:
        os.lstat(folder)
    except (FileNotFoundError, NotADirectoryError):
        above = next((above for above in folder.parents if os.path.lexists(above)), folder)
        usable = above.is_dir() and os.access(above, os.W_OK | os.X_OK)
        return Cache(folder, "" if usable else f"it is not there and cannot be made in {above}", usable)
    except OSError as error:
        return Cache(folder, f"it cannot be looked at ({error.strerror})", False)
    try:
        os.close(open_folder(folder))
    except UnusedError as error:
        own = own_folder()
        if own is None:
            return Cache(folder, f"{error}; servers build at every start", False)
        return Cache(own, f"{error}; {own} is used instead", True)
    except BuildError as error:
        return Cache(folder, str(error), False)
    usable = os.access(folder, os.W_OK | os.X_OK)
    return Cache(folder, "" if usable else "it cannot be written: only what is in it is loaded", usable)


def check_cache() -> None:
    """For whoever fills the cache ahead.

    Raises:
        BuildError: Its folder is not used, because others may write it, or cannot be made.
    """
    os.close(open_folder(cache_folder()))


def cache_folder() -> Path:
    """The folder of built modules."""
    try:
        return Path(os.environ.get(CACHE) or "~/.cache/tvm-ffi").expanduser()
    except RuntimeError:
        raise BuildError(
            f"sglang-pat has no folder for what it builds, because this user has no home: set {CACHE}"
        ) from None


def open_folder(path: Path) -> int:
    """Open the folder of a cache, which is made if it is not there; returns a descriptor.

    Raises:
        UnusedError: Others may write it, or put another one in its place.
        BuildError: It cannot be made or opened.
    """
    try:
        _make_folder(path)
        folder = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP) and path.is_symlink():
            raise UnusedError(path, "it is a link: name the folder itself") from None
        if error.errno in (errno.ENOTDIR, errno.ELOOP, errno.ENOENT, errno.EACCES):
            _check_obstacle(path)
        raise unwritable(path, error) from error
    reason = objection(os.fstat(folder))
    if reason:
        os.close(folder)
        raise UnusedError(path, reason)
    return folder


def _check_obstacle(path: Path) -> None:
    """Raise UnusedError if another user put something at the cache's path or above: that must not keep a server from its start."""
    for above in (path, *path.parents):
        with contextlib.suppress(OSError):
            status = os.lstat(above)
            if status.st_uid not in trusted():
                raise UnusedError(above, objection(status))
            return


def _make_folder(path: Path) -> None:
    """Make a folder and those above it, for this user only: `Path.mkdir` gives those above the rights that the umask leaves."""
    for folder in (*reversed(path.parents), path):
        if not folder.is_dir():
            with contextlib.suppress(FileExistsError):
                folder.mkdir(0o700)


def own_folder() -> Path | None:
    """The folder that is used where the cache is not: this user's only. None if there is no home, or it is somebody else's or cannot be written."""
    with contextlib.suppress(OSError, RuntimeError):
        home = Path.home()
        folder = home / ".cache" / "sglang-pat"
        if home.stat().st_uid == os.geteuid():
            os.close(open_folder(folder))
            if os.access(folder, os.W_OK):
                return folder
    return None


def temporary_folder() -> str:
    """Where compilers work: a folder in which others cannot replace what is ours, `$TMPDIR` if it is one.

    Raises:
        BuildError: There is none.
    """
    try:
        first = tempfile.gettempdir()
    except FileNotFoundError:
        raise BuildError("sglang-pat has no folder in which compilers can work: set TMPDIR to one") from None
    for find in (lambda: first, own_folder, lambda: "/var/tmp", lambda: "/dev/shm"):
        folder = os.path.realpath(find() or first)  # A link's owner could put it elsewhere.
        with contextlib.suppress(OSError):
            status = os.stat(folder)
            kept = not objection(status) or (status.st_uid in trusted() and status.st_mode & stat.S_ISVTX)
            if kept and os.access(folder, os.W_OK | os.X_OK):
                return folder
    raise BuildError(
        f"sglang-pat does not build in {first}, because others may replace files there: set TMPDIR to a folder that only this user can write"
    )


def trusted() -> set[int]:
    named = os.environ.get(OWNER)
    return {0, os.geteuid(), *([uid_of(named)] if named else [])}


def uid_of(user: str) -> int:
    """The number of a user, from a number or name in OWNER.

    Raises:
        BuildError: There is no such user, or the number is the one that unknown users share.
    """
    try:
        uid = int(user) if re.fullmatch("[0-9]{1,10}", user) else pwd.getpwnam(user).pw_uid
    except KeyError:
        uid = NOBODYS
    if uid >= NOBODYS:
        raise BuildError(f"{OWNER}={user[:100]!a} must be the name or number of a user")
    if uid == _overflow_uid():
        raise BuildError(
            f"{OWNER}={user!a} must be another user: files of all users that a container or NFS does not know seem to belong to number {uid}"
        )
    return uid


def _overflow_uid() -> int:
    """What the kernel shows as the owner of files whose owner has no number here."""
    try:
        return int(Path("/proc/sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 65534


def objection(status: os.stat_result) -> str:
    """Why something is not used; empty if others neither made it nor can write it. The sticky bit of a folder is no help: it lets others add files."""
    if status.st_uid not in trusted():
        return f"user {status.st_uid} owns it, who is not this user, root or {OWNER}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "not only its owner may write it (chmod go-w)"
    return ""


def refusal(error: OSError) -> str:
    return "it is a link" if error.errno == errno.ELOOP else str(error.strerror)


@functools.cache
def warn(message: str) -> None:
    """Once per process, not once per module."""
    logger.warning("%s", message)


def unwritable(folder: Path, error: OSError) -> BuildError:
    return BuildError(
        f"sglang-pat cannot keep what it builds in {folder} ({error.strerror}): let a user who may write there run "
        f"`python -m sglang_pat.build`, or set {CACHE} to another folder"
    )
