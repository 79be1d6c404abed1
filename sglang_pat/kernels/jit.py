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
    from tvm_ffi import cpp

    # ninja comes as a Python package, beside an interpreter that need not be on the PATH.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    folder = csrc / name
    sanitizers = os.environ.get(SANITIZE, "")
    extra = EXTRA_FLAGS.get(name, EXTRA_FLAGS["packing"]) + ([f"-fsanitize={sanitizers}", "-g"] if sanitizers else [])
    flags = ["-O3", "-march=native", "-Wall", "-Wno-psabi", *extra, f"-DPAT_BUILD={_digest(folder)}"]
    began = time.monotonic()
    # A library preloaded into this process, such as a sanitizer's, is not meant for the compiler.
    preloaded = os.environ.pop("LD_PRELOAD", None)
    try:
        module = cpp.load(
            f"sglang_pat_{name}",
            sources=[str(path) for path in sorted(folder.glob("*.cpp"))],
            extra_cflags=flags,
            extra_ldflags=extra,
        )
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
