"""Builds native modules on first use, and caches them in a folder under a hash of their inputs.

The folder is tvm-ffi's (`TVM_FFI_CACHE_DIR`, else `~/.cache/tvm-ffi`). A library appears in it complete, under a name that depends on its
sources, flags and the version of tvm-ffi, and ends with a digest of the rest. It is replaced as a whole, never written into, because it may be in use. So
a folder that was filled ahead may be read-only, and environments and ranks can share it; users can share one that only root or a user named in OWNER can
write.

A library's name is no secret, and its digest has no key: whoever can write where we load from runs code as us. So folder, library and lock are opened
once, never through a link, and used only if they belong to one of the `_trusted` and nobody else can write them. All but the folder are reached through
its descriptor, because somebody who can write a folder above may put another one under its name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import logging
import os
import platform
import pwd
import re
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

CSRC = Path(__file__).parents[1] / "csrc"

EXTRA_FLAGS = {
    "cpu": ["-fopenmp", "-ffp-contract=fast"],
    # Prices must round alike on every processor, and as in tests/oracle, or ties between packings break differently.
    "packing": ["-pthread", "-ffp-contract=off"],
}
"""Flags of each module besides the common ones."""

NVCC_FLAGS = ["-O3", "--expt-relaxed-constexpr"]

SANITIZE = "SGLANG_PAT_SANITIZE"
"""For tests: the sanitizers to build with, as in `-fsanitize`."""

CACHE = "TVM_FFI_CACHE_DIR"

OWNER = "SGLANG_PAT_CACHE_OWNER"
"""A user whose libraries are loaded too, besides root's and those of the process's own user."""

PREFIX = "sglang_pat_"
"""Of the names of all libraries; a dot before it for what is there only during a build."""

NOTICE_SECONDS = 10
"""A process that waits longer than this for another one's build says so in the log."""

LOCK_SECONDS = 900
"""A process that waits longer than this for another one's build builds too. All modules of `python -m sglang_pat.build --drafts` take minutes on few cores
(docs/install.md), and each has a lock of its own."""

LIBRARY_BYTES = 1 << 28
"""Nine times the largest library, the planner's with sanitizers (30 MB), and little enough to be read."""

SCRATCH_SECONDS = 86_400
"""What a build left behind is removed after a day: no build takes as long."""


class BuildError(RuntimeError):
    """A native module cannot be built here; the message says what to do."""


class _UnusedError(BuildError):
    """Others may have written the cache, or something in it."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"sglang-pat does not use {path}, because {reason}")


@functools.cache
def load(name: str, csrc: Path = CSRC) -> Any:
    """The module built from `<csrc>/<name>`.

    Raises:
        BuildError: It is not in the cache, and there is no C++ compiler, it failed, or the cache cannot be written.
    """
    folder = csrc / name
    return _load(
        f"{PREFIX}{name}", folder, compiler=find_cxx, sources=sorted(folder.glob("*.cpp")), **_host_inputs(name)
    )


def _host_inputs(name: str) -> dict[str, list[str]]:
    """What `load` builds a module for and with."""
    sanitizers = os.environ.get(SANITIZE, "")
    extra = EXTRA_FLAGS.get(name, EXTRA_FLAGS["packing"]) + ([f"-fsanitize={sanitizers}", "-g"] if sanitizers else [])
    return {
        "made_for": [_cpu_flags()],
        "extra_cflags": ["-O3", "-march=native", "-Wall", "-Wno-psabi", *extra],
        "extra_ldflags": extra,
    }


@functools.cache
def load_cuda(name: str, arch: str, flags: tuple[str, ...]) -> Any:
    """The module built from `csrc/cuda` for a GPU architecture such as `9.0a`, with the flags of NVCC_FLAGS and `flags`.

    Raises:
        BuildError: It is not in the cache, and there is no CUDA compiler, it failed, or the cache cannot be written.
    """
    # All modules of a process have the same architecture: tvm-ffi takes it from the environment only.
    os.environ["TVM_FFI_CUDA_ARCH_LIST"] = arch
    folder = CSRC / "cuda"
    sources = sorted(folder.glob("*.cu"))
    return _load(name, folder, compiler=find_nvcc, sources=sources, **_cuda_inputs(arch, flags))


def _cuda_inputs(arch: str, flags: Sequence[str]) -> dict[str, list[str]]:
    """What `load_cuda` builds a module for and with."""
    return {"extra_cuda_cflags": [*NVCC_FLAGS, *flags], "made_for": [arch, version("torch")]}


def is_ready(name: str) -> bool:
    """Whether `load` finds a module, whole, in the folder of `find_cache`, so that it needs no compiler."""
    return _is_ready(f"{PREFIX}{name}", CSRC / name, **_host_inputs(name))


def is_ready_for_cuda(name: str, arch: str, flags: Sequence[str]) -> bool:
    """Likewise for `load_cuda`."""
    return _is_ready(name, CSRC / "cuda", **_cuda_inputs(arch, flags))


def _is_ready(name: str, folder: Path, made_for: Sequence[str], **flags: Sequence[str]) -> bool:
    try:
        library = find_cache().folder / _library(name, folder, made_for, flags)
    except (BuildError, PackageNotFoundError):  # there is no folder, or no tvm-ffi, which builds
        return False
    try:
        at = os.open(library.parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        content = _read(library, at)
    except BuildError:
        return False
    finally:
        os.close(at)
    return content is not None and _is_sealed(library.name, content)


def _library(name: str, folder: Path, made_for: Sequence[str], flags: Mapping[str, Sequence[str]]) -> str:
    """The name of a module's file in the cache."""
    return f"{name}_{_key(folder, [*made_for, *(flag for group in flags.values() for flag in group)])}.so"


def find_nvcc() -> str:
    """The path of the CUDA compiler.

    Raises:
        BuildError: There is none.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc = shutil.which("nvcc", path=f"{home}/bin") or shutil.which("nvcc")
    if nvcc is None:
        raise BuildError(
            "sglang-pat compiles its CUDA kernels on first use and found no nvcc: install the CUDA toolkit, and set "
            f"CUDA_HOME where it is not {home}"
        )
    return nvcc


def cache_folder() -> Path:
    """The folder of built modules."""
    try:
        return Path(os.environ.get(CACHE) or "~/.cache/tvm-ffi").expanduser()
    except RuntimeError:
        raise BuildError(
            f"sglang-pat has no folder for what it builds, because this user has no home: set {CACHE}"
        ) from None


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
    if not os.path.lexists(folder):
        above = next((above for above in folder.parents if os.path.lexists(above)), folder)
        usable = above.is_dir() and os.access(above, os.W_OK | os.X_OK)
        return Cache(folder, "" if usable else f"it is not there and cannot be made in {above}", usable)
    try:
        os.close(_open_folder(folder))
    except _UnusedError as error:
        own = _own_folder()
        if own is None:
            return Cache(folder, f"{error}; servers build at every start", False)
        return Cache(own, f"{error}; {own} is used instead", True)
    except BuildError as error:
        return Cache(folder, str(error), False)
    usable = os.access(folder, os.W_OK | os.X_OK)
    return Cache(folder, "" if usable else "it cannot be written: only what is in it is loaded", usable)


def find_cxx() -> str:
    """The C++ compiler's command.

    Raises:
        BuildError: There is none.
    """
    compiler = os.environ.get("CXX") or "c++"
    if (
        shutil.which("".join(compiler.split()[:1])) is None
    ):  # it may have arguments, or be run by another, as ccache does
        raise BuildError(
            f"sglang-pat needs a C++ compiler and '{compiler}' is not there: install g++, or set CXX to yours"
        )
    return compiler


def check_cache() -> None:
    """For whoever fills the cache ahead.

    Raises:
        BuildError: Its folder is not used, because others may write it, or cannot be made.
    """
    os.close(_open_folder(cache_folder()))


def uid_of(user: str) -> int:
    """The number of a user, from a number or name in OWNER.

    Raises:
        BuildError: There is no such user, or the number is the one that unknown users share.
    """
    try:
        uid = int(user) if re.fullmatch("[0-9]{1,10}", user) else pwd.getpwnam(user).pw_uid
    except KeyError:
        raise BuildError(f"{OWNER}={user!a} must be the name or number of a user") from None
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


def _load(
    name: str,
    folder: Path,
    compiler: Callable[[], str],
    sources: list[Path],
    made_for: Sequence[str] = (),
    **flags: list[str],
) -> Any:
    file = _library(name, folder, made_for, flags)

    def load_from(cache: Path) -> Any:
        return _load_from(
            cache / file,
            compiler,
            lambda found, library, at: _build(found, name, library, at, [str(path) for path in sources], flags),
        )

    try:
        return load_from(cache_folder())
    except _UnusedError as error:
        own = _own_folder()
        if own is not None:
            _warn(f"{error}; what it builds is in {own} instead")
            return load_from(own)
        _warn(f"{error}; it builds at every start instead, because this user has no home to keep that in")
        with tempfile.TemporaryDirectory(prefix=f".{PREFIX}", dir=_temporary_folder()) as scratch:
            return load_from(Path(scratch))


def _load_from(library: Path, compiler: Callable[[], str], build: Callable[[str, Path, int], None]) -> Any:
    from tvm_ffi import load_module

    with contextlib.ExitStack() as opened:
        at = _open_folder(library.parent)
        opened.callback(os.close, at)
        content = _read(library, at)
        if content is None:
            found = compiler()
            with _only_builder(library, at):
                if _read(library, at) is None:
                    build(found, library, at)
            content = _read(library, at)
        if content is None or not _is_sealed(library.name, content):
            raise _unloadable(library, "it is damaged")
        # By the folder that was checked: nobody else can have put another file there meanwhile.
        name = f"/proc/self/fd/{at}/{library.name}"
        try:
            module = load_module(name)
        except (OSError, RuntimeError) as error:
            raise _unloadable(library, str(error).replace(name, str(library))) from None
        opened.pop_all()  # The descriptor is in the module's name, by which backtraces find the file. Another folder must not get that name either.
        return module


def _open_folder(path: Path) -> int:
    """Open the folder of a cache, which is made if it is not there; returns a descriptor.

    Raises:
        _UnusedError: Others may write it, or put another one in its place.
        BuildError: It cannot be made or opened.
    """
    try:
        _make_folder(path)
        folder = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP) and path.is_symlink():
            raise _UnusedError(path, "it is a link: name the folder itself") from None
        if error.errno in (errno.ENOTDIR, errno.ELOOP, errno.ENOENT, errno.EACCES):
            _check_obstacle(path)
        raise _unwritable(path, error) from error
    reason = _objection(os.fstat(folder))
    if reason:
        os.close(folder)
        raise _UnusedError(path, reason)
    return folder


def _check_obstacle(path: Path) -> None:
    """Whether the cache cannot be used because of something that another user put at its path or above: that must not keep a server from its start.

    Raises:
        _UnusedError: It is so.
    """
    for above in (path, *path.parents):
        with contextlib.suppress(OSError):
            status = os.lstat(above)
            if status.st_uid not in _trusted():
                raise _UnusedError(above, _objection(status))
            return


def _make_folder(path: Path) -> None:
    """Make a folder and those above it, for this user only: `Path.mkdir` gives those above the rights that the umask leaves."""
    if not path.is_dir():
        _make_folder(path.parent)
        with contextlib.suppress(FileExistsError):
            path.mkdir(0o700)


def _own_folder() -> Path | None:
    """The folder that is used where the cache is not: this user's only. None if there is no home, or it is somebody else's or cannot be written."""
    with contextlib.suppress(OSError, RuntimeError):
        home = Path.home()
        folder = home / ".cache" / "sglang-pat"
        if home.stat().st_uid == os.geteuid():
            os.close(_open_folder(folder))
            if os.access(folder, os.W_OK):
                return folder
    return None


def _temporary_folder() -> str:
    """Where compilers work: a folder in which others cannot replace what is ours, `$TMPDIR` if it is one.

    Raises:
        BuildError: There is none.
    """
    try:
        first = tempfile.gettempdir()
    except FileNotFoundError:
        raise BuildError("sglang-pat has no folder in which compilers can work: set TMPDIR to one") from None
    for find in (lambda: first, _own_folder, lambda: "/var/tmp", lambda: "/dev/shm"):
        folder = os.path.realpath(find() or first)  # A link's owner could put it elsewhere.
        with contextlib.suppress(OSError):
            status = os.stat(folder)
            kept = not _objection(status) or (status.st_uid in _trusted() and status.st_mode & stat.S_ISVTX)
            if kept and os.access(folder, os.W_OK | os.X_OK):
                return folder
    raise BuildError(
        f"sglang-pat does not build in {first}, because others may replace files there: set TMPDIR to a folder that only this user can write"
    )


def _trusted() -> set[int]:
    named = os.environ.get(OWNER)
    return {0, os.geteuid(), *([uid_of(named)] if named else [])}


def _objection(status: os.stat_result) -> str:
    """Why something is not used; empty if others neither made it nor can write it. The sticky bit of a folder is no help: it lets others add files."""
    if status.st_uid not in _trusted():
        return f"user {status.st_uid} owns it, who is not this user, root or {OWNER}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "not only its owner may write it (chmod go-w)"
    return ""


def _refusal(error: OSError) -> str:
    return "it is a link" if error.errno == errno.ELOOP else str(error.strerror)


@functools.cache
def _warn(message: str) -> None:
    """Once per process, not once per module."""
    logger.warning("%s", message)


def _read(library: Path, at: int) -> bytes | None:
    """What is in a library; None if it is not there.

    Args:
        library: Its path.
        at: The descriptor of its folder.

    Raises:
        _UnusedError: Others may have written it, or it is too large to be one.
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
            raise _unwritable(library.parent, error) from None
        raise _UnusedError(library, _objection(status) or _refusal(error)) from None
    try:
        status = os.fstat(file)
        reason = _objection(status)
        if reason:
            raise _UnusedError(library, reason)
        if not stat.S_ISREG(status.st_mode):
            raise _unloadable(library, "it is not a file")
        if status.st_size > LIBRARY_BYTES:
            raise _UnusedError(library, f"it has {status.st_size} bytes")
        with open(file, "rb", closefd=False) as content:
            return content.read(LIBRARY_BYTES)
    except OSError as error:
        raise _unloadable(library, str(error.strerror)) from None
    finally:
        os.close(file)


def _is_sealed(name: str, content: bytes) -> bool:
    """Whether a library is as it was built. Loading one that was cut off or has holes (a full disk, a power cut, a broken copy) ends the process by a
    signal."""
    size = len(content) - hashlib.sha256().digest_size
    return size > 0 and content[size:] == _seal(name, memoryview(content)[:size])


def _seal(name: str, content: bytes | memoryview) -> bytes:
    """The digest of a library's name and content, which is written behind it: loaders ignore what follows the sections."""
    digest = hashlib.sha256(name.encode())
    digest.update(content)
    return digest.digest()


def _build(compiler: str, name: str, library: Path, at: int, sources: list[str], flags: dict[str, Any]) -> None:
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
        _write(content + _seal(library.name, content), library, at)
    except BuildError:
        raise
    except OSError as error:
        raise _unwritable(library.parent, error) from error
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
        temporary = _temporary_folder()
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


def _write(content: bytes, library: Path, at: int) -> None:
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


@contextlib.contextmanager
def _only_builder(library: Path, at: int) -> Iterator[None]:
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
    """Open the file of a lock; None if others may have made it. Only its owner may open it, because whoever can open it can hold it.

    Raises:
        BuildError: The cache cannot be written.
    """
    path = library.with_suffix(".lock")
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK  # NFS wants a file that is locked to be open for writing
    try:
        return os.open(path.name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=at)
    except FileExistsError:
        pass
    except OSError as error:
        raise _unwritable(library.parent, error) from error
    try:
        lock = os.open(path.name, flags, dir_fd=at)
    except OSError as error:
        reason = _refusal(error)
    else:
        status = os.fstat(lock)
        reason = _objection(status)
        if not reason and status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            reason = "others may open it, and hold it for ever: remove it"
        if not reason and stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            return lock
        os.close(lock)
        reason = reason or "it is not a file of its own"
    _warn(f"sglang-pat does not use {path}, because {reason}; it builds without that lock")
    return None


def _locked(lock: int) -> bool:
    """Try to take the lock; returns whether this process has it. The lock ends with the process. On a filesystem without locks, returns True."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EINTR)
    return True


def _unloadable(library: Path, reason: str) -> BuildError:
    return BuildError(
        f"sglang-pat cannot load {library}, which it built earlier: remove it, or set {CACHE} to a folder from which libraries can be "
        f"loaded: {reason}"
    )


def _unwritable(folder: Path, error: OSError) -> BuildError:
    return BuildError(
        f"sglang-pat cannot keep what it builds in {folder} ({error.strerror}): let a user who may write there run "
        f"`python -m sglang_pat.build`, or set {CACHE} to another folder"
    )


def _key(folder: Path, flags: list[str]) -> str:
    """A hash of everything that a build depends on: sources, headers, flags, tvm-ffi's headers, the machine, and how this file builds.

    The flags of a CPU's module include its instruction sets, those of a CUDA module torch's version, which determines the CUDA that it is linked with.
    """
    digest = hashlib.sha256(repr((flags, version("apache-tvm-ffi"), platform.machine(), sys.platform)).encode())
    for path in sorted({Path(__file__), *CSRC.rglob("*.*"), *folder.iterdir()}):
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _cpu_flags() -> str:
    """The instruction sets of this machine; machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
