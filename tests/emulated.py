"""The CUDA kernels without a GPU: csrc/cuda compiled for the host, on the machine in tests/emulator.

The kernels' own sources run, with `ptx.cuh` and `wgmma_ptx.cuh` replaced. Threads go on in a random order, copies and
products are done as late as they may or at once, and shared memory is NaN until then: a missing barrier or wait shows.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import tvm_ffi
from tvm_ffi import libinfo

from sglang_pat import jit
from sglang_pat.kernels import cuda
from sglang_pat.packing import AttentionSpec, TileTable

EMULATOR = Path(__file__).parent / "emulator"
WORKERS = 3
"""SMs: some bins get a worker of their own, some workers several."""

FLAGS = [
    # Compiling takes longest: -O2 takes 1.4 times as long in all.
    *("-std=c++17", "-O1", "-march=native", "-fPIC", "-shared", "-w"),
    # Shared memory is thread_local, and declared without its size.
    "-fno-extern-tls-init",
    # The CUDA runtime's functions are the emulator's, also where torch has brought CUDA's.
    "-Wl,-Bsymbolic-functions",
]

Change = tuple[str, str, str]
"""A file of csrc/cuda, a text in it, and what to put in its place."""

_modules: dict[tuple[cuda.Variant, Change | None], Any] = {}


def build(variants: Sequence[cuda.Variant], change: Change | None = None) -> None:
    """Compile what has not been compiled yet, all at the same time."""
    missing = [variant for variant in variants if (variant, change) not in _modules]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        sources = _overlay(Path(folder) / "csrc", change)
        for variant, module in zip(missing, pool.map(lambda one: _compile(one, sources), missing), strict=True):
            _modules[variant, change] = module


def _overlay(folder: Path, change: Change | None) -> Path:
    """csrc with the emulator's instructions, and a change."""
    (folder / "cuda").mkdir(parents=True)
    for path in [*jit.CSRC.iterdir(), *(jit.CSRC / "cuda").iterdir()]:
        if path.name == "cuda":
            continue
        own = EMULATOR / path.name
        (folder / path.relative_to(jit.CSRC)).symlink_to(own if own.exists() else path)
    if change is not None:
        name, text, replacement = change
        source = (jit.CSRC / "cuda" / name).read_text()
        assert source.count(text) == 1, f"{name} has {source.count(text)} times {text!r}"
        (folder / "cuda" / name).unlink()
        (folder / "cuda" / name).write_text(source.replace(text, replacement))
    return folder


def _compile(variant: cuda.Variant, sources: Path) -> Any:
    library = sources / f"{variant.name}.so"
    headers = [sources, EMULATOR, _cuda_headers(), libinfo.find_include_path(), libinfo.find_dlpack_include_path()]
    runtime = libinfo.find_libtvm_ffi()
    command = [os.environ.get("CXX", "c++"), *FLAGS, *variant.flags, *(f"-I{path}" for path in headers)]
    subprocess.run([*command, str(EMULATOR / "module.cpp"), "-o", str(library), runtime], check=True)
    return tvm_ffi.load_module(str(library))


def _cuda_headers() -> Path:
    """Of the wheels that torch brings, or of the CUDA toolkit."""
    packages = Path(torch.__file__).parent.parent
    found = sorted(packages.glob("nvidia/*/include/cuda_fp16.h"))
    return found[0].parent if found else Path(jit.find_nvcc()).resolve().parent.parent / "include"


class Decoder(cuda.Decoder):
    """`cuda.Decoder` for tensors in the host's memory."""

    def __init__(
        self,
        spec: AttentionSpec,
        tiles: TileTable,
        arch: str,
        change: Change | None = None,
        dtype: torch.dtype | None = None,
        limits: bool = False,
    ) -> None:
        variant = cuda.Variant.of(spec, arch, tiles.query_tiles, dtype, limits)
        build([variant], change)
        self._tile_rows, self._kv = tiles.query_tiles[-1], variant.kv
        self._window = spec.window if variant.limits else 0
        self._module = _modules[variant, change]
        self._no_sinks = torch.empty(0, dtype=torch.bfloat16)
        self._no_masks = torch.empty(0, 0, dtype=torch.int64)
        self._no_records = torch.empty(0, 0, 0, dtype=torch.uint8)
        self.workers = WORKERS
        self.seed(0)

    def seed(self, seed: int) -> None:
        """Another order of threads, and other chances, from the next kernel on."""
        self._module.set(self.workers, seed)
