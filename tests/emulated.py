"""The CUDA kernels without a GPU: csrc/cuda compiled for the host, on the machine in tests/emulator.

The kernels' own sources run, with `ptx.cuh`, `wgmma_ptx.cuh` and `latent_wgmma_ptx.cuh` replaced. Threads go on in a random order, copies and
products are done as late as they may or at once, and shared memory is NaN until then: a missing barrier or wait shows.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import os
import re
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Sequence
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
    *("-std=c++17", "-march=native", "-fPIC", "-w"),
    # Shared memory is thread_local, and declared without its size.
    "-fno-extern-tls-init",
]
"""Of all that a module is made of. Modules are compiled with -O1, as that takes longest: -O2 takes 1.4 times as long in all. What all of them have is
compiled once, with -O3."""

Change = tuple[str, ...]
"""A file of csrc/cuda, a text that is there once, and what to put in its place; perhaps more such pairs. Either both are whole expressions, or statements, each with its `;`.
Statements that both begin or end with only say where the others are, and may be cut off."""

FOLDER = "PAT_EMULATED"
"""Environment variable: a folder in which processes share modules and what all modules have (conftest.py). Without it each process compiles its own."""


@functools.cache
def _module(variant: cuda.Variant, changes: tuple[Change, ...]) -> Any:
    def make(library: Path) -> None:
        with tempfile.TemporaryDirectory() as own:
            _compile(variant, _overlay(Path(own) / "csrc", changes), library)

    name = f"{variant.name}_{zlib.crc32(repr(changes).encode())}.so"
    return tvm_ffi.load_module(str(_made(name, make)))


@functools.cache
def _folder() -> Path:
    if FOLDER in os.environ:
        # Of these sources: a compiler does not look whether its precompiled header is old.
        sources = [
            *(jit.CSRC / "cuda").rglob("*.*"),
            *(jit.CSRC / "packing").glob("*.h"),
            *jit.CSRC.glob("*.h"),
            *EMULATOR.iterdir(),
        ]
        content = b"".join(path.read_bytes() for path in sorted(sources))
        folder = Path(os.environ[FOLDER]) / f"{zlib.crc32(content + repr(FLAGS).encode()):08x}"
        folder.mkdir(exist_ok=True)
        return folder
    own = tempfile.TemporaryDirectory()
    atexit.register(own.cleanup)
    return Path(own.name)


def _made(name: str, make: Callable[[Path], None]) -> Path:
    """A file of the folder. Whoever needs it first makes it; others wait."""
    path = _folder() / name
    with path.with_name(f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            # A compiler that is killed leaves no file, nor writes to another's.
            part = path.with_name(f"{name}.{os.getpid()}.part")
            make(part)
            part.rename(path)
    return path


def _overlay(folder: Path, changes: Sequence[Change]) -> Path:
    """csrc with the emulator's instructions, and changes."""
    # The folders of cuda are not linked: from a link `..` would lead to the instructions themselves.
    for path in [*jit.CSRC.glob("*.h"), jit.CSRC / "packing", *(jit.CSRC / "cuda").rglob("*.*")]:
        own, place = EMULATOR / path.name, folder / path.relative_to(jit.CSRC)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(own if own.exists() else path)
    for name in {name for name, *_ in changes}:
        (folder / "cuda" / name).unlink()
        (folder / "cuda" / name).write_text(with_changes(name, changes))
    return folder


def pairs(change: Change) -> list[tuple[str, str]]:
    """A change's texts, each with its replacement."""
    return list(zip(change[1::2], change[2::2], strict=True))


def with_changes(name: str, changes: Sequence[Change]) -> str:
    """A file of csrc/cuda with all of these changes that are in it. Each is made while its number is `planted` (tests/emulator/state.h)."""
    source = (jit.CSRC / "cuda" / name).read_text()
    switches: dict[tuple[int, int], str] = {}
    for number, text, replacement in (
        (number, *pair) for number, change in enumerate(changes) if change[0] == name for pair in pairs(change)
    ):
        assert source.count(text) == 1, f"{name} has {source.count(text)} times {text!r}"
        old, new = re.split("(?<=;)", text), re.split("(?<=;)", replacement)
        begin = source.index(text)
        while old and new and old[0] == new[0]:
            begin += len(old.pop(0))
            del new[0]
        while old and new and old[-1] == new[-1]:
            del old[-1], new[-1]
        place = begin, begin + len("".join(old))
        form = "if (%s) {\n%s\n} else {\n%s\n}" if (old or new)[-1].endswith(";") else "(%s ? (\n%s\n) : (\n%s\n))"
        switches[place] = form % (f"emulator::planted == {number}", "".join(new), switches.get(place, "".join(old)))
    rest = len(source)
    for (begin, end), switch in sorted(switches.items(), reverse=True):
        assert end <= rest, f"two changes of {name} overlap in {source[begin:end]!r}"
        source, rest = source[:begin] + switch + source[end:], begin
    return source


def _compile(variant: cuda.Variant, sources: Path, library: Path) -> None:
    # Of each header that is asked for, the compiler takes the precompiled one that is in the same folder.
    _made("prefix.h.gch", lambda to: _run(["-O1", "-x", "c++-header", EMULATOR / "prefix.h", "-o", to]))
    common = [
        _made(f"{name}.o", lambda to, name=name: _run(["-O3", "-c", EMULATOR / f"{name}.cpp", "-o", to]))
        for name in ("machine", "products")
    ]
    # The CUDA runtime's functions are the emulator's, also where torch has brought CUDA's.
    linked = ["-shared", "-Wl,-Bsymbolic-functions", *common, libinfo.find_libtvm_ffi()]
    _run(["-O1", *variant.flags, f"-I{_folder()}", f"-I{sources}", EMULATOR / "module.cpp", "-o", library, *linked])


def _run(arguments: Sequence[str | Path]) -> None:
    headers = [EMULATOR, _cuda_headers(), libinfo.find_include_path(), libinfo.find_dlpack_include_path()]
    command = [os.environ.get("CXX", "c++"), *FLAGS, *arguments, *(f"-I{path}" for path in headers)]
    subprocess.run(list(map(str, command)), check=True)


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
        dtype: torch.dtype | None = None,
        limits: bool = False,
        batch_invariant: bool = False,
        changes: tuple[Change, ...] = (),
        planted: Change | None = None,
    ) -> None:
        """All `changes` are compiled together, and none is made but the `planted` one."""
        variant = cuda.Variant.of(spec, arch, tiles.query_tiles, dtype, limits, batch_invariant)
        self._tile_rows, self._kv = tiles.query_tiles[-1], variant.kv
        self._window = spec.window if variant.limits else 0
        self._module = _module(variant, changes)
        self._module.plant(-1 if planted is None else changes.index(planted))
        self._no_sinks = torch.empty(0, dtype=torch.bfloat16)
        self._no_masks = torch.empty(0, 0, dtype=torch.int64)
        self._no_records = self._no_rope = torch.empty(0, 0, 0, dtype=torch.uint8)
        self.workers = WORKERS
        self.seed(0)

    def seed(self, seed: int) -> None:
        """Another order of threads, and other chances, from the next kernel on."""
        self._module.set(self.workers, seed)
