"""The machine code of the CUDA kernels (SASS), as digests: whether a change of the sources changed what runs. No GPU is needed.

`python tests/sass.py` compiles every variant of SHIPPED and says which differ from GOLDEN; with `--write` it records them. A change that moves code
keeps all of them. One that is meant to change code says in its commit what changed and what was measured. A record is of one compiler: nvcc of
another release makes other code. Of the host's code nothing is recorded.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec
import resources
import torch
import triton
from kernel_cases import spec_of

from sglang_pat import jit
from sglang_pat.kernels import capabilities, cuda
from sglang_pat.packing import FORMATS, AttentionSpec

GOLDEN = Path(__file__).parent / "sass.json"

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def _shipped() -> list[cuda.Variant]:
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    dense = [
        ("9.0a", 128, bf16), ("9.0a", 64, bf16), ("9.0a", 256, bf16), ("9.0a", 128, fp8), ("9.0a", 256, fp8),
        ("8.0", 128, bf16), ("8.0", 128, fp8), ("8.9", 128, bf16), ("10.0", 128, bf16),
    ]  # fmt: skip
    variants = [cuda.Variant.of(spec_of(dtype, dim, dim), arch) for arch, dim, dtype in dense]
    unequal = spec_of(fp8, *capabilities.UNEQUAL_HEAD_DIMS[0])
    variants += [cuda.Variant.of(spec_of(bf16, *capabilities.UNEQUAL_HEAD_DIMS[0]), "9.0a")]
    variants += [cuda.Variant.of(msgspec.structs.replace(unequal, sinks=True), "9.0a")]
    variants += [cuda.Variant.of(msgspec.structs.replace(spec_of(fp8, 256, 256), heads=8, query_tokens=4), "9.0a")]
    changes: list[tuple[torch.dtype, dict[str, int | bool], bool]] = [
        (bf16, {"sinks": True}, False), (bf16, {"heads": 4, "query_tokens": 4}, False), (bf16, {"heads": 4, "query_tokens": 8}, False),
        (bf16, {}, True), (bf16, {"heads": 4, "capped": True}, False), (fp8, {"heads": 4, "query_tokens": 8}, False),
        (fp8, {"heads": 64}, False),
    ]  # fmt: skip
    for dtype, change, limits in changes:
        variants.append(
            cuda.Variant.of(msgspec.structs.replace(spec_of(dtype, 128, 128), **change), "9.0a", limits=limits)
        )
    variants.append(cuda.Variant.of(spec_of(bf16, 128, 128), "9.0a", batch_invariant=True))
    variants += [
        cuda.Variant.of(AttentionSpec(heads, 1, *capabilities.LATENT_DIMS[0], FORMATS["bfloat16"], latent=True), "9.0a")
        for heads in (16, 40)
    ]
    variants += [
        cuda.Variant.of(AttentionSpec(16, 1, *capabilities.LATENT_DIMS[0], FORMATS[form], latent=True), arch)
        for form, arch in (("float8_e4m3fn", "9.0a"), ("bfloat16", "8.0"))
    ]
    pages = [("int4", 128, "9.0a"), ("int2", 128, "9.0a"), ("int4", 128, "8.0")]
    return variants + [cuda.Variant.of(AttentionSpec(1, 1, dim, dim, FORMATS[form]), arch) for form, dim, arch in pages]


SHIPPED = _shipped()
"""Every format, head dimension, feature and architecture at least once."""


class Compiled(NamedTuple):
    """What a compiler made of a variant.

    Attributes:
        used: What its forward kernel uses.
        digests: One for each kernel, sorted: of its instructions with their control words, without names of symbols and offsets of parameters.
        forward: The forward kernel's instructions, a line each, behind their places in bytes.
    """

    used: resources.Resources
    digests: list[str]
    forward: str


def _functions(cubin: Path) -> list[str]:
    """What cuobjdump says of each kernel.

    Raises:
        OSError, subprocess.CalledProcessError: There is no cuobjdump, or it failed.
    """
    said = subprocess.run([CUOBJDUMP, "-sass", cubin], capture_output=True, text=True, check=True).stdout
    return said.split("Function : ")[1:]


def _digest(function: str) -> str:
    # An instruction has two lines: its text with the lower half of its bits, in which the offsets are, and the other half.
    lines = re.findall(
        r"^\s+/\*[0-9a-f]+\*/ +(.*?) *;? +/\* 0x[0-9a-f]{16} \*/\n\s+/\* (0x[0-9a-f]{16}) \*/", function, re.MULTILINE
    )
    assert lines, "cuobjdump prints instructions otherwise than it did"
    text = "\n".join(f"{instruction} {control}" for instruction, control in lines)
    text = re.sub(r"c\[0x0\]\[[^]]*\]", "c[0x0]", re.sub(r"\(?[`$]\S*", "symbol", text))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def compiler() -> str:
    """The release of nvcc."""
    said = subprocess.run([jit.find_nvcc(), "--version"], capture_output=True, text=True, check=True).stdout
    return said.rsplit(" V", 1)[1].split()[0]


@functools.cache
def compiled(variant: cuda.Variant) -> Compiled:
    """Compile a variant, once in a process."""
    with tempfile.TemporaryDirectory() as folder:
        used = resources.measure(variant, Path(folder))
        # Without cuobjdump no record is the same; what else is measured is.
        functions = _functions(Path(folder) / "module.cubin") if CUOBJDUMP.exists() else []
    forward = next((function for function in functions if re.match(r"_ZN3pat\d+forward", function)), "")
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/ +[^;]*", forward)
    return Compiled(used, sorted(map(_digest, functions)), "\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record what the compiler makes now")
    write = parser.parse_args().write
    known = msgspec.json.decode(GOLDEN.read_bytes()) if GOLDEN.exists() else {"nvcc": compiler(), "variants": {}}
    if known["nvcc"] != compiler() and not write:
        raise SystemExit(f"recorded with nvcc {known['nvcc']}; this one is {compiler()}")
    recorded = known["variants"]
    found = {}
    for variant in SHIPPED:
        found[variant.name] = compiled(variant).digests
        print(
            "as recorded" if found[variant.name] == recorded.get(variant.name) else "differs", variant.name, flush=True
        )
    if write:
        GOLDEN.write_bytes(msgspec.json.format(msgspec.json.encode({"nvcc": compiler(), "variants": found})) + b"\n")
    elif found != recorded:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
