"""Builds native modules on first use, and caches them in a folder under a hash of their inputs.

The folder is tvm-ffi's (`TVM_FFI_CACHE_DIR`, else `~/.cache/tvm-ffi`). A library appears in it complete, under a name that depends on its
sources, flags and the version of tvm-ffi, and ends with a digest of the rest. It is never overwritten, because it may be in use. So a folder that was
filled ahead may be read-only, and environments, users and ranks can share it.
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
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

CSRC = Path(__file__).parent / "csrc"

EXTRA_FLAGS = {
    "cpu": ["-fopenmp", "-ffp-contract=fast"],
    # Prices must round as in Python, or ties between packings break differently.
    "packing": ["-pthread", "-ffp-contract=off"],
}
"""Flags of each module besides the common ones."""

NVCC_FLAGS = ["-O3", "--expt-relaxed-constexpr"]

SANITIZE = "SGLANG_PAT_SANITIZE"
"""For tests: the sanitizers to build with, as in `-fsanitize`."""

CACHE = "TVM_FFI_CACHE_DIR"

NOTICE_SECONDS = 10
"""A process that waits longer than this for another one's build says so in the log."""


class BuildError(RuntimeError):
    """A native module cannot be built here; the message says what to do."""


@functools.cache
def load(name: str, csrc: Path = CSRC) -> Any:
    """The module built from `<csrc>/<name>`.

    Raises:
        BuildError: It is not in the cache, and there is no C++ compiler, it failed, or the cache cannot be written.
    """
    folder = csrc / name
    sanitizers = os.environ.get(SANITIZE, "")
    extra = EXTRA_FLAGS.get(name, EXTRA_FLAGS["packing"]) + ([f"-fsanitize={sanitizers}", "-g"] if sanitizers else [])
    return _load(
        f"sglang_pat_{name}",
        folder,
        compiler=_find_cxx,
        sources=sorted(folder.glob("*.cpp")),
        made_for=[_cpu_flags()],
        extra_cflags=["-O3", "-march=native", "-Wall", "-Wno-psabi", *extra],
        extra_ldflags=extra,
    )


@functools.cache
def load_cuda(name: str, arch: str, flags: tuple[str, ...]) -> Any:
    """The module built from `csrc/cuda` for a GPU architecture such as `9.0a`, with the flags of NVCC_FLAGS and `flags`.

    Raises:
        BuildError: It is not in the cache, and there is no CUDA compiler, it failed, or the cache cannot be written.
    """
    # All modules of a process have the same architecture: tvm-ffi takes it from the environment only.
    os.environ["TVM_FFI_CUDA_ARCH_LIST"] = arch
    folder = CSRC / "cuda"
    return _load(
        name,
        folder,
        compiler=find_nvcc,
        sources=sorted(folder.glob("*.cu")),
        extra_cuda_cflags=[*NVCC_FLAGS, *flags],
        made_for=[arch, version("torch")],
    )


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


def _find_cxx() -> str:
    compiler = os.environ.get("CXX") or "c++"
    if (
        shutil.which("".join(compiler.split()[:1])) is None
    ):  # it may have arguments, or be run by another, as ccache does
        raise BuildError(
            f"sglang-pat needs a C++ compiler and '{compiler}' is not there: install g++, or set CXX to yours"
        )
    return compiler


def _load(
    name: str,
    folder: Path,
    compiler: Callable[[], str],
    sources: list[Path],
    made_for: Sequence[str] = (),
    **flags: list[str],
) -> Any:
    from tvm_ffi import load_module

    key = _key(folder, [*made_for, *(flag for group in flags.values() for flag in group)])
    library = cache_folder() / f"{name}_{key}.so"
    try:
        is_there = library.exists()
    except OSError as error:
        raise _unwritable(library.parent, error) from None
    if not is_there:
        found = compiler()
        with _only_builder(library):
            if not library.exists():
                _build(found, name, library, [str(path) for path in sources], flags)
    try:
        if not library.is_file():
            raise OSError("it is not a file")
        if not _is_sealed(library):
            raise OSError("it is damaged")
        return load_module(str(library))
    except (OSError, RuntimeError) as error:
        raise BuildError(
            f"sglang-pat cannot load {library}, which it built earlier: remove it, or set {CACHE} to a folder from which libraries can be "
            f"loaded: {error}"
        ) from None


def _is_sealed(library: Path) -> bool:
    """Whether a library is as it was built. Loading one that was cut off or has holes (a full disk, a power cut, a broken copy) ends the process by a
    signal."""
    content = library.read_bytes()
    size = len(content) - hashlib.sha256().digest_size
    return size > 0 and content[size:] == _seal(library, memoryview(content)[:size])


def _seal(library: Path, content: bytes | memoryview) -> bytes:
    """The digest of a library's name and content, which is written behind it: loaders ignore what follows the sections."""
    digest = hashlib.sha256(library.name.encode())
    digest.update(content)
    return digest.digest()


def _build(compiler: str, name: str, library: Path, sources: list[str], flags: dict[str, Any]) -> None:
    from tvm_ffi import cpp

    # ninja is installed as a Python package, beside an interpreter that may not be on the PATH.
    beside = str(Path(sys.executable).parent)
    if beside not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = f"{beside}{os.pathsep}{os.environ.get('PATH', '')}"
    if not os.environ.get("CXX"):
        os.environ.pop("CXX", None)  # tvm-ffi takes an empty one for a compiler
    began = time.monotonic()
    # A library preloaded into this process, such as a sanitizer's, must not be loaded into the compiler.
    preloaded = os.environ.pop("LD_PRELOAD", None)
    try:
        with tempfile.TemporaryDirectory(dir=library.parent, prefix=f".{name}-") as scratch:
            built = cpp.build(name, sources=sources, build_directory=scratch, **flags)
            if not os.path.exists(built):
                raise RuntimeError("it made nothing")
            with open(built, "r+b") as file:
                file.write(_seal(library, file.read()))
            os.rename(built, library)
    except OSError as error:
        raise _unwritable(library.parent, error) from error
    except RuntimeError as error:
        for full in (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT)):
            if full in str(error):
                raise BuildError(
                    f"sglang-pat's '{name}' module has no room in {library.parent}, or what {compiler} makes meanwhile has none: {full}"
                ) from None
        raise BuildError(f"{compiler} could not build sglang-pat's '{name}' module: {error}") from error
    finally:
        if preloaded is not None:
            os.environ["LD_PRELOAD"] = preloaded
    logger.info("sglang-pat's '%s' module was built in %.1f s", name, time.monotonic() - began)


@contextlib.contextmanager
def _only_builder(library: Path) -> Iterator[None]:
    """If several processes want the same library, one builds it and the others wait.

    Raises:
        BuildError: The cache cannot be written.
    """
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        lock = _open_lock(library.with_suffix(".lock"))
    except OSError as error:
        raise _unwritable(library.parent, error) from error
    try:
        began, told = time.monotonic(), False
        while not _locked(lock):
            if not told and time.monotonic() - began > NOTICE_SECONDS:
                logger.info("sglang-pat waits for another process that builds %s", library.name)
                told = True
            time.sleep(0.1)
        yield
    finally:
        os.close(lock)


def _open_lock(path: Path) -> int:
    """Open the file of a lock, which another user may have made: whoever may read it can wait for it."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, os.O_RDONLY)
        raise
    with contextlib.suppress(OSError):  # another user's
        os.fchmod(lock, 0o666)  # whatever the umask is
    return lock


def _locked(lock: int) -> bool:
    """Try to take the lock; returns whether this process has it. The lock ends with the process. On a filesystem without locks, returns True."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EINTR)
    return True


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
