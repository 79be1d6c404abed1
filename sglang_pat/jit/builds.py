"""Runs compilers, in a folder of this process that is removed however it ends."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_pat.jit.library import PREFIX, seal, write
from sglang_pat.jit.trust import BuildError, temporary_folder, unwritable

logger = logging.getLogger(__name__)

SCRATCH_SECONDS = 86_400
"""What a build left behind is removed after a day: no build takes as long."""


def build(compiler: str, name: str, library: Path, at: int, sources: list[str], flags: dict[str, Any]) -> None:
    from tvm_ffi import cpp

    # ninja is installed as a Python package, beside an interpreter that may not be on the PATH.
    beside = str(Path(sys.executable).parent)
    if beside not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = f"{beside}{os.pathsep}{os.environ.get('PATH', '')}"
    if not os.environ.get("CXX"):
        os.environ.pop("CXX", None)  # tvm-ffi takes an empty one for a compiler
    began = time.monotonic()
    try:
        _remove_leftovers(f"/proc/self/fd/{at}")
        # Not in the cache: tvm-ffi and ninja know folders by their paths only.
        with _workplace.entered() as place:
            scratch = tempfile.mkdtemp(prefix=f"{name}-", dir=place)
            built = cpp.build(name, sources=sources, build_directory=scratch, **flags)
            if not os.path.exists(built):
                raise RuntimeError("it made nothing")
            content = Path(built).read_bytes()
        write(content + seal(library.name, content), library, at)
    except BuildError:
        raise
    except OSError as error:
        raise unwritable(library.parent, error) from error
    except RuntimeError as error:
        for full in (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT)):
            if full in str(error):
                raise BuildError(
                    f"sglang-pat's '{name}' module has no room in {library.parent}, or what {compiler} makes meanwhile has none: {full}"
                ) from None
        raise BuildError(f"{compiler} could not build sglang-pat's '{name}' module: {error}") from error
    logger.info("sglang-pat's '%s' module was built in %.1f s", name, time.monotonic() - began)


class _Workplace:
    """Where the builds of this process work while there are any. Its threads share one environment, so the first to come sets what compilers need, and the
    last to go puts it back: each by itself, one would end with another's folder in use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._folder = ""
        self._watch: subprocess.Popen[bytes] | None = None
        self._before: dict[str, str | None] = {}  # what variables were

    @contextlib.contextmanager
    def entered(self) -> Iterator[str]:
        """Its folder.

        Raises:
            BuildError: There is none in which compilers can work.
        """
        with self._lock:
            if not self._inside:
                self._open()
            self._inside += 1
        try:
            yield self._folder
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self._close()

    def _open(self) -> None:
        temporary = temporary_folder()
        _remove_leftovers(temporary)
        # Not a TemporaryDirectory: a forked child's, too, removes its folder.
        self._folder = tempfile.mkdtemp(prefix=f".{PREFIX}", dir=temporary)
        self._watch = _start_watch(self._folder)
        # A library preloaded into this process, such as a sanitizer's, must not be loaded into compilers. Others must not replace their files either.
        self._before = {variable: os.environ.get(variable) for variable in ("LD_PRELOAD", "TMPDIR")}
        _set_variable("LD_PRELOAD", None)
        _set_variable("TMPDIR", self._folder)

    def _close(self) -> None:
        self._put_back()
        if self._watch is not None:
            self._watch.communicate(b"done")
        shutil.rmtree(self._folder, ignore_errors=True)

    def _put_back(self) -> None:
        for variable, value in self._before.items():
            _set_variable(variable, value)

    def leave_to_parent(self) -> None:
        """In a child that was forked meanwhile: these builds, their folder and their lock are the parent's."""
        if self._inside:
            self._put_back()
            if self._watch is not None and self._watch.stdin is not None:
                self._watch.stdin.close()
        self.__init__()  # type: ignore[misc]


_workplace = _Workplace()
os.register_at_fork(after_in_child=_workplace.leave_to_parent)


def _set_variable(name: str, value: str | None) -> None:
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value


def _remove_leftovers(folder: str) -> None:
    """Remove what builds of this user left in a folder long ago, because they were killed, and `watch.py` too."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith(f".{PREFIX}"):
                continue
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if status.st_uid != os.geteuid() or time.time() - status.st_mtime < SCRATCH_SECONDS:
                    continue
                if stat.S_ISDIR(status.st_mode):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)


def _start_watch(folder: str) -> subprocess.Popen[bytes] | None:
    """If this process is killed meanwhile, another one ends what works in a folder, and removes it: tvm-ffi starts ninja itself, so that cannot be told
    to end with us. It ends when it is told anything. None if it cannot be started."""
    command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("watch.py")), folder]
    # In a session of its own, because Ctrl-C is for all of ours.
    try:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
    except OSError as error:
        logger.warning("sglang-pat builds, but if it is killed meanwhile, compilers go on without it: %s", error)
        return None
