"""The CUDA sources compile for every architecture, without spills; no GPU needed."""

from __future__ import annotations

import shutil

import msgspec
import pytest
import torch
from kernel_cases import spec_of

from sglang_pat import jit
from sglang_pat.kernels import cuda, resources

pytestmark = pytest.mark.once

VARIANTS = [
    ("9.0a", 128, torch.bfloat16),
    ("9.0a", 128, torch.float8_e4m3fn),
    ("9.0a", 256, torch.float8_e4m3fn),
    ("9.0a", 64, torch.float8_e5m2),
    ("8.0", 128, torch.float8_e4m3fn),
    ("8.9", 128, torch.float8_e4m3fn),
    ("8.0", 128, torch.bfloat16),
    ("9.0a", 128, torch.float16),
    ("9.0a", 64, torch.bfloat16),
    ("9.0a", 256, torch.bfloat16),
    ("8.0", 64, torch.float16),
    ("8.9", 128, torch.bfloat16),
    ("10.0", 128, torch.bfloat16),
]
SHARED_LIMIT = {"8.0": 163 << 10, "8.9": 99 << 10, "9.0a": 227 << 10, "10.0": 227 << 10}


@pytest.mark.parametrize(
    ("arch", "dim", "dtype", "sinks"),
    [*((*one, False) for one in VARIANTS), *((arch, 64, torch.bfloat16, True) for arch in SHARED_LIMIT)],
)
def test_forward_compiles_without_spills(arch: str, dim: int, dtype: torch.dtype, sinks: bool) -> None:
    try:
        jit.find_nvcc()
    except jit.BuildError:
        pytest.skip("needs nvcc")
    variant = cuda.Variant.of(msgspec.structs.replace(spec_of(dtype, dim), sinks=sinks), arch)
    found = resources.measure(variant)
    print(variant.name, found)
    assert found.spill_bytes == 0
    assert 0 < found.shared_bytes <= SHARED_LIMIT[arch]
    assert not found.serialized


def test_a_missing_compiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(jit.BuildError, match="found no nvcc: install the CUDA toolkit, and set CUDA_HOME"):
        jit.find_nvcc()
