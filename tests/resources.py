"""Registers, spills and shared memory of a forward kernel, read from the compiler's output; needs no GPU.

`python tests/resources.py` takes the flags of `python -m sglang_pat.build`, and prints them.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from sglang_pat import jit
from sglang_pat.cli import build
from sglang_pat.kernels.cuda import Variant


class Resources(msgspec.Struct, frozen=True):
    """What the forward kernel of a module uses.

    Attributes:
        registers: Registers per thread at launch.
        spill_bytes: Bytes of spill stores and loads per thread.
        shared_bytes: Shared memory per CTA.
        serialized: Whether the compiler serialized asynchronous matrix products, or did not let warps give registers to others.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    serialized: bool


KERNELS = """#include "cuda/kernels.cuh"
using namespace pat::kernels;
using Pages = PageKernels<Kv, pat::kIsPages<Kv>>;
extern const void* const every_kernel[];
const void* const every_kernel[] = {(const void*)kForward, (const void*)kMergeByCta, (const void*)kMergeByWarp,
                           (const void*)kMergeSeveral, (const void*)Pages::kStore, (const void*)Pages::kUnpack};
"""
"""A source that uses every kernel of a module."""


def compile_to(folder: Path, variant: Variant) -> str:
    """Compile a module's device code to `module.cubin` in a folder, with the PTX beside it; returns what the compiler says.

    Raises:
        jit.BuildError: There is no CUDA compiler, or it failed.
    """
    source = folder / "module.cu"
    source.write_text(KERNELS)
    arch = variant.arch.replace(".", "")
    command = [
        jit.find_nvcc(), "-std=c++17", *jit.NVCC_FLAGS, f"-gencode=arch=compute_{arch},code=sm_{arch}", "-Xptxas=-v",
        f"-I{jit.CSRC}", *variant.flags, "--keep", f"--keep-dir={folder}", "-cubin", "-o", str(folder / "module.cubin"), str(source),
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise jit.BuildError(f"nvcc could not build {variant.name}: {result.stderr}")
    return result.stderr


def measure(variant: Variant, folder: Path | None = None) -> Resources:
    """Compile a module's device code; in a folder of the caller's, as `compile_to` does, if there is one.

    Raises:
        jit.BuildError: There is no CUDA compiler, or it failed.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as scratch:
            return measure(variant, Path(scratch))
    said = compile_to(folder, variant)
    ptx = next(folder.glob("*.ptx")).read_text()
    forward = re.split(r"Compiling entry function '_ZN3pat\d+forward", said, maxsplit=1)[1]
    registers = re.search(r"Used (\d+) registers", forward)
    shared = re.search(r"pat_shared_bytes = (\d+);", ptx)
    assert registers and shared
    # A kernel that calls functions has an entry for each.
    own = forward.split("Compiling entry function", 1)[0]
    spills = [int(number) for number in re.findall(r"(\d+) bytes spill (?:stores|loads)", own)]
    return Resources(
        int(registers[1]),
        sum(spills),
        int(shared[1]),
        any(word in said for word in ("serialized", "setmaxnreg")),
    )


if __name__ == "__main__":
    found = build.asked(None, "python tests/resources.py")
    with ThreadPoolExecutor() as pool:
        for variant, used in zip(found, pool.map(measure, found), strict=True):
            print(
                f"{variant.name}: {used.registers} registers, {used.spill_bytes} bytes of spills, {used.shared_bytes} bytes of shared memory"
            )
