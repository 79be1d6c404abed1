"""Builds a native module on first use; apache-tvm-ffi caches it by its sources and flags."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import shutil
import sys
import time
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

CSRC = Path(__file__).parent.parent / "csrc"

EXTRA_FLAGS = {
    "cpu": ["-fopenmp", "-ffp-contract=fast"],
    # Costs must round as they do in Python, or ties between packings fall differently.
    "packing": ["-pthread", "-ffp-contract=off"],
}
"""Flags of each module beside the common ones."""

NVCC_FLAGS = ["-O3", "--expt-relaxed-constexpr"]

SANITIZE = "SGLANG_PAT_SANITIZE"
"""For tests: sanitizers to build with, as in `-fsanitize`."""


class BuildError(RuntimeError):
    """A native module cannot be built here; the message says what to do."""


@functools.cache
def load(name: str, csrc: Path = CSRC) -> Any:
    """The module built from `<csrc>/<name>`.

    Raises:
        BuildError: There is no C++ compiler, or it failed.
    """
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise BuildError(
            f"sglang-pat needs a C++ compiler and '{compiler}' is not there: install g++, or set CXX to yours"
        )
    folder = csrc / name
    sanitizers = os.environ.get(SANITIZE, "")
    extra = EXTRA_FLAGS.get(name, EXTRA_FLAGS["packing"]) + ([f"-fsanitize={sanitizers}", "-g"] if sanitizers else [])
    return _build(
        compiler,
        f"sglang_pat_{name}",
        sources=sorted(folder.glob("*.cpp")),
        extra_cflags=["-O3", "-march=native", "-Wall", "-Wno-psabi", *extra, f"-DPAT_BUILD={_digest(folder)}"],
        extra_ldflags=extra,
    )


@functools.cache
def load_cuda(name: str, arch: str, flags: tuple[str, ...]) -> Any:
    """The module built from `csrc/cuda` for a GPU architecture such as `9.0a`, with the flags of NVCC_FLAGS and `flags`.

    Raises:
        BuildError: There is no CUDA compiler, or it failed.
    """
    find_nvcc()
    # All modules of a process are for one architecture: tvm-ffi takes it from the environment only.
    os.environ["TVM_FFI_CUDA_ARCH_LIST"] = arch
    return _build(
        "nvcc",
        name,
        sources=sorted((CSRC / "cuda").glob("*.cu")),
        extra_cuda_cflags=[*NVCC_FLAGS, *flags, f"-DPAT_BUILD={_digest(CSRC / 'cuda')}"],
    )


def find_nvcc() -> str:
    """Where the CUDA compiler is.

    Raises:
        BuildError: Nowhere.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc = shutil.which("nvcc", path=f"{home}/bin") or shutil.which("nvcc")
    if nvcc is None:
        raise BuildError(
            "sglang-pat compiles its CUDA kernels on first use and found no nvcc: install the CUDA toolkit, and set "
            f"CUDA_HOME where it is not {home}"
        )
    return nvcc


def _build(compiler: str, name: str, sources: list[Path], **flags: Any) -> Any:
    from tvm_ffi import cpp

    # ninja comes as a Python package, beside an interpreter that need not be on the PATH.
    folder = str(Path(sys.executable).parent)
    if folder not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"
    began = time.monotonic()
    # A library preloaded into this process, such as a sanitizer's, is not meant for the compiler.
    preloaded = os.environ.pop("LD_PRELOAD", None)
    try:
        module = cpp.load(name, sources=[str(path) for path in sources], **flags)
    except RuntimeError as error:
        raise BuildError(f"{compiler} could not build sglang-pat's '{name}' module: {error}") from error
    finally:
        if preloaded is not None:
            os.environ["LD_PRELOAD"] = preloaded
    logger.info("sglang-pat's '%s' module is ready after %.1f s", name, time.monotonic() - began)
    return module


def _digest(folder: Path) -> str:
    """Names a build by its headers and machine too: tvm-ffi's own key covers source paths and flags only."""
    digest = hashlib.sha256(f"{platform.machine()} {_cpu_flags()}".encode())
    for path in sorted({*CSRC.rglob("*.*"), *folder.iterdir()}):
        digest.update(path.read_bytes())
    return f"0x{digest.hexdigest()[:15]}"


def _cpu_flags() -> str:
    """The instruction sets of this machine: a cache folder may be shared by several."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
