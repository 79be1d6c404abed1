"""The native modules: what each is built from and for, and under which name it is in the cache."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from sglang_pat.jit import trust
from sglang_pat.jit.builds import build
from sglang_pat.jit.library import PREFIX, is_sealed, read, unloadable
from sglang_pat.jit.locks import only_builder
from sglang_pat.jit.trust import BuildError

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


class _Module(NamedTuple):
    """How a module is built.

    Attributes:
        name: The module's.
        folder: Its sources and headers, besides those of CSRC.
        pattern: Which of these are compiled.
        compiler: Finds the compiler.
        made_for: What besides the flags makes it another module.
        flags: tvm-ffi's arguments.
    """

    name: str
    folder: Path
    pattern: str
    compiler: Callable[[], str]
    made_for: list[str]
    flags: dict[str, list[str]]

    @property
    def file(self) -> str:
        """The name of its library in the cache, with a hash of everything that a build depends on: sources, headers, flags, tvm-ffi's headers, the machine,
        and how this package builds.

        The flags of a CPU's module include its instruction sets, those of a CUDA module torch's version, which determines the CUDA that it is linked with.
        """
        flags = [*self.made_for, *(flag for group in self.flags.values() for flag in group)]
        digest = hashlib.sha256(repr((flags, version("apache-tvm-ffi"), platform.machine(), sys.platform)).encode())
        for path in sorted(
            {Path(__file__), Path(__file__).with_name("builds.py"), *CSRC.rglob("*.*"), *self.folder.iterdir()}
        ):
            if path.is_file():
                digest.update(path.read_bytes())
        return f"{self.name}_{digest.hexdigest()[:16]}.so"

    def build(self, compiler: str, library: Path, at: int) -> None:
        """Build it; `at` is the descriptor of the library's folder."""
        sources = [str(path) for path in sorted(self.folder.glob(self.pattern))]
        build(compiler, self.name, library, at, sources, self.flags)


def _host(name: str, csrc: Path = CSRC) -> _Module:
    sanitizers = os.environ.get(SANITIZE, "")
    # Sanitized for memory, the scheduler takes 27 s of a core to compile so, and 133 s with -O1 -g (g++ 12).
    optimized = ["-O0", "-g1", f"-fsanitize={sanitizers}"] if sanitizers else ["-O3"]
    extra = [*EXTRA_FLAGS.get(name, EXTRA_FLAGS["packing"]), *optimized]
    flags = {"extra_cflags": ["-march=native", "-Wall", "-Wno-psabi", *extra], "extra_ldflags": extra}
    return _Module(f"{PREFIX}{name}", csrc / name, "*.cpp", find_cxx, [_cpu_flags()], flags)


def _cuda(name: str, arch: str, flags: Sequence[str]) -> _Module:
    made_for = [arch, version("torch")]
    return _Module(name, CSRC / "cuda", "*.cu", find_nvcc, made_for, {"extra_cuda_cflags": [*NVCC_FLAGS, *flags]})


@functools.cache
def load(name: str, csrc: Path = CSRC) -> Any:
    """The module built from `<csrc>/<name>`.

    Raises:
        BuildError: It is not in the cache, and there is no C++ compiler, it failed, or the cache cannot be written.
    """
    return _load(_host(name, csrc))


@functools.cache
def load_cuda(name: str, arch: str, flags: tuple[str, ...]) -> Any:
    """The module built from `csrc/cuda` for a GPU architecture such as `9.0a`, with the flags of NVCC_FLAGS and `flags`.

    Raises:
        BuildError: It is not in the cache, and there is no CUDA compiler, it failed, or the cache cannot be written.
    """
    # All modules of a process have the same architecture: tvm-ffi takes it from the environment only.
    os.environ["TVM_FFI_CUDA_ARCH_LIST"] = arch
    return _load(_cuda(name, arch, flags))


def is_ready(name: str) -> bool:
    """Whether `load` finds a module, whole, in the folder of `find_cache`, so that it needs no compiler."""
    return _is_ready(_host(name))


def is_ready_for_cuda(name: str, arch: str, flags: Sequence[str]) -> bool:
    """Likewise for `load_cuda`."""
    return _is_ready(_cuda(name, arch, flags))


def _is_ready(module: _Module) -> bool:
    # Suppressed: there is no folder, or no tvm-ffi, which builds; or the library may not be used.
    with contextlib.suppress(BuildError, PackageNotFoundError, OSError), contextlib.ExitStack() as opened:
        library = trust.find_cache().folder / module.file
        at = os.open(library.parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        opened.callback(os.close, at)
        content = read(library, at)
        return content is not None and is_sealed(library.name, content)
    return False


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


def find_cxx() -> str:
    """The C++ compiler's command.

    Raises:
        BuildError: There is none.
    """
    compiler = os.environ.get("CXX") or "c++"
    # It may have arguments, or be run by another, as ccache does.
    if shutil.which("".join(compiler.split()[:1])) is None:
        raise BuildError(
            f"sglang-pat needs a C++ compiler and '{compiler}' is not there: install g++, or set CXX to yours"
        )
    return compiler


def _load(module: _Module) -> Any:
    try:
        return _load_from(trust.cache_folder(), module)
    except trust.UnusedError as error:
        own = trust.own_folder()
        if own is not None:
            trust.warn(f"{error}; what it builds is in {own} instead")
            return _load_from(own, module)
        trust.warn(f"{error}; it builds at every start instead, because this user has no home to keep that in")
        with tempfile.TemporaryDirectory(prefix=f".{PREFIX}", dir=trust.temporary_folder()) as scratch:
            return _load_from(Path(scratch), module)


def _load_from(cache: Path, module: _Module) -> Any:
    from tvm_ffi import load_module

    library = cache / module.file
    with contextlib.ExitStack() as opened:
        at = trust.open_folder(library.parent)
        opened.callback(os.close, at)
        content = read(library, at)
        if content is None:
            compiler = module.compiler()
            with only_builder(library, at):
                if read(library, at) is None:
                    module.build(compiler, library, at)
            content = read(library, at)
        if content is None or not is_sealed(library.name, content):
            raise unloadable(library, "it is damaged")
        # By the folder that was checked: nobody else can have put another file there meanwhile.
        name = f"/proc/self/fd/{at}/{library.name}"
        try:
            loaded = load_module(name)
        except (OSError, RuntimeError) as error:
            raise unloadable(library, str(error).replace(name, str(library))) from None
        opened.pop_all()  # The descriptor is in the module's name, by which backtraces find the file. Another folder must not get that name either.
        return loaded


def _cpu_flags() -> str:
    """The instruction sets of this machine; machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
