"""What a forward kernel takes of a GPU, read from the compiler: no GPU needed."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import msgspec

from sglang_pat import jit
from sglang_pat.kernels.cuda import Variant


class Resources(msgspec.Struct, frozen=True):
    """Of the forward kernel of a module.

    Attributes:
        registers: Of a thread when the kernel starts.
        spill_bytes: Stores and loads of a thread that are there only because registers did not suffice.
        shared_bytes: Of a CTA.
        serialized: Whether the compiler made asynchronous matrix products wait for each other.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    serialized: bool


def measure(variant: Variant) -> Resources:
    """Compile a module's device code.

    Raises:
        jit.BuildError: There is no CUDA compiler, or it failed.
    """
    import tvm_ffi.libinfo

    arch = variant.arch.replace(".", "")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            jit.find_nvcc(), "-std=c++17", *jit.NVCC_FLAGS, f"-gencode=arch=compute_{arch},code=sm_{arch}", "-Xptxas=-v",
            *(f"-I{path}" for path in tvm_ffi.libinfo.include_paths()), *variant.flags, "--keep", f"--keep-dir={folder}",
            "-cubin", "-o", f"{folder}/module.cubin", str(jit.CSRC / "cuda" / "module.cu"),
        ]  # fmt: skip
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise jit.BuildError(f"nvcc could not build {variant.name}: {result.stderr}")
        ptx = next(Path(folder).glob("*.ptx")).read_text()
    forward = result.stderr.split("Compiling entry function '_ZN3pat7forward", 1)[1]
    registers = re.search(r"Used (\d+) registers", forward)
    shared = re.search(r"pat_shared_bytes = (\d+);", ptx)
    assert registers and shared
    # A kernel that calls functions has an entry for each.
    own = forward.split("Compiling entry function", 1)[0]
    spills = [int(number) for number in re.findall(r"(\d+) bytes spill (?:stores|loads)", own)]
    return Resources(int(registers[1]), sum(spills), int(shared[1]), "serialized" in result.stderr)
