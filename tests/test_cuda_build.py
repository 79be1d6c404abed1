"""The CUDA sources compile for every architecture, without spills; no GPU needed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import resources
import sass
import torch
from kernel_cases import spec_of

from sglang_pat import jit
from sglang_pat.cli import build
from sglang_pat.kernels import capabilities, cuda
from sglang_pat.packing import FORMATS, AttentionSpec
from sglang_pat.packing.spec import KVFormat

pytestmark = pytest.mark.once


@pytest.fixture
def nvcc() -> None:
    """Of tests that compile."""
    try:
        jit.find_nvcc()
    except jit.BuildError:
        pytest.skip("needs nvcc")


compiles = pytest.mark.usefixtures("nvcc")


def compiled_slowly(*values: Any) -> Any:
    """Parameters that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def used(variant: cuda.Variant) -> resources.Resources:
    """By its forward kernel."""
    return sass.compiled(variant).used


QUICK = {
    *(cuda.Variant.of(spec_of(dtype, dim, dim), "9.0a") for dtype in (torch.bfloat16, torch.float8_e4m3fn) for dim in (128, 256)),
    cuda.Variant.of(spec_of(torch.bfloat16, 128, 128), "8.0"),
    cuda.Variant.of(msgspec.structs.replace(spec_of(torch.bfloat16, 128, 128), heads=4, query_tokens=4), "9.0a"),
    cuda.Variant.of(spec_of(torch.bfloat16, 128, 128), "9.0a", batch_invariant=True),
    cuda.Variant.of(AttentionSpec(16, 1, *capabilities.LATENT_DIMS[0], FORMATS["bfloat16"], latent=True), "9.0a"),
    cuda.Variant.of(AttentionSpec(1, 1, 128, 128, FORMATS["int4"]), "9.0a"),
}  # fmt: skip
"""Of sass.SHIPPED those that most servers run. In other formats, dimensions and architectures kernels are compiled by `make test-all` alone."""
assert {*sass.SHIPPED} >= QUICK
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
UNEQUAL = [
    (arch, dims, dtype, sinks)
    for dims in capabilities.UNEQUAL_HEAD_DIMS
    for arch, dtype, sinks in (
        ("9.0a", torch.bfloat16, False),
        ("9.0a", torch.bfloat16, True),
        ("9.0a", torch.float8_e4m3fn, True),
        ("8.0", torch.bfloat16, False),
        ("8.0", torch.float8_e4m3fn, True),
        ("10.0", torch.bfloat16, True),
    )
]
"""V narrower than K."""
SHARED_LIMIT = {"8.0": 163 << 10, "8.9": 99 << 10, "9.0a": 227 << 10, "10.0": 227 << 10}


def variant_of(arch: str, dims: tuple[int, int], dtype: torch.dtype, sinks: bool) -> cuda.Variant:
    return cuda.Variant.of(msgspec.structs.replace(spec_of(dtype, *dims), sinks=sinks), arch)


FORWARD = [
    *((arch, (dim, dim), dtype, False) for arch, dim, dtype in VARIANTS),
    *((arch, (64, 64), torch.bfloat16, True) for arch in SHARED_LIMIT),
    *UNEQUAL,
]


@compiles
@pytest.mark.parametrize(
    ("arch", "dims", "dtype", "sinks"),
    [values if variant_of(*values) in QUICK else compiled_slowly(*values) for values in FORWARD],
)
def test_forward_compiles_without_spills(arch: str, dims: tuple[int, int], dtype: torch.dtype, sinks: bool) -> None:
    variant = variant_of(arch, dims, dtype, sinks)
    found = used(variant)
    print(variant.name, found)
    assert found.spill_bytes == 0
    assert 0 < found.shared_bytes <= SHARED_LIMIT[arch]
    assert not found.serialized


@compiles
@pytest.mark.parametrize(
    ("tokens", "dims", "limits"),
    [
        (1, (256, 256), False),
        *(compiled_slowly(1, dims, False) for dims in ((192, 192), (192, 128))),
        compiled_slowly(4, (256, 256), False),
        *(compiled_slowly(2, dims, False) for dims in ((256, 256), (192, 192), (192, 128))),
        *(compiled_slowly(4, dims, False) for dims in ((192, 192), (192, 128))),
        compiled_slowly(1, (256, 256), True),
    ],
)
def test_two_warpgroups_of_larger_dimensions_compile_without_spills(
    tokens: int, dims: tuple[int, int], limits: bool
) -> None:
    spec = msgspec.structs.replace(spec_of(torch.bfloat16, *dims), heads=4, query_tokens=tokens)
    variant = cuda.Variant.of(spec, "9.0a", limits=limits)
    found = used(variant)
    print(variant.name, found)
    assert variant.query_tiles[-1] == 128 and found.spill_bytes == 0 and not found.serialized
    # With fewer its 384 threads would have too few to trade, and would wait for them for ever (csrc/cuda/forward.cuh).
    assert found.registers == 168


@compiles
@pytest.mark.parametrize(
    ("heads", "tokens", "dims", "limits"),
    [
        (8, 1, (256, 256), False),
        *(compiled_slowly(heads, 4, (256, 256), False) for heads in (4, 8)),
        *(compiled_slowly(heads, tokens, dims, False) for heads, tokens in ((8, 1), (4, 4), (8, 4)) for dims in ((192, 192), (192, 128))),
        *(compiled_slowly(8, tokens, (256, 256), True) for tokens in (1, 4)),
    ],
)  # fmt: skip
def test_kv_of_8_bits_and_larger_dimensions_compiles_without_spills(
    heads: int, tokens: int, dims: tuple[int, int], limits: bool
) -> None:
    """Two warpgroups convert beside one that computes."""
    spec = msgspec.structs.replace(spec_of(torch.float8_e4m3fn, *dims), heads=heads, query_tokens=tokens)
    variant = cuda.Variant.of(spec, "9.0a", limits=limits)
    found = used(variant)
    print(variant.name, found)
    assert variant.query_tiles[-1] == 64 and found.spill_bytes == 0 and not found.serialized
    assert found.shared_bytes <= SHARED_LIMIT["9.0a"]
    assert found.registers == 168  # of 384 threads that trade, as above


@compiles
@pytest.mark.parametrize(
    ("dtype", "dim", "heads", "tokens", "limits"),
    [
        (torch.bfloat16, 128, 4, 1, False),
        compiled_slowly(torch.bfloat16, 128, 4, 1, True),
        compiled_slowly(torch.float8_e4m3fn, 128, 4, 1, True),
        compiled_slowly(torch.float8_e4m3fn, 256, 8, 1, True),
        compiled_slowly(torch.bfloat16, 256, 8, 4, False),
    ],
    ids=str,
)
def test_deterministic_modules_compile_without_spills(
    dtype: torch.dtype, dim: int, heads: int, tokens: int, limits: bool
) -> None:
    spec = msgspec.structs.replace(spec_of(dtype, dim, dim), heads=heads, query_tokens=tokens)
    variant = cuda.Variant.of(spec, "9.0a", limits=limits, batch_invariant=True)
    found = used(variant)
    print(variant.name, found)
    assert variant.query_tiles[0] == 64 and found.spill_bytes == 0 and not found.serialized


@compiles
def test_a_format_has_a_module_and_a_kv_format_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of another one with as many bits."""
    known, other = (
        cuda.Variant.of(AttentionSpec(1, 1, 128, 128, form), "9.0a")
        for form in (FORMATS["int4"], KVFormat("int4_rows", 4, "pages"))
    )
    assert known.name != other.name and known.flags != other.flags
    monkeypatch.setattr(jit, "NVCC_FLAGS", (*jit.NVCC_FLAGS, "-DkInt4_rows=KvName(99)"))
    with pytest.raises(jit.BuildError, match=r"incomplete .*KvFormat"):
        resources.compile_to(tmp_path, other)


def test_modules_that_cannot_be_deterministic_are_refused() -> None:
    for spec in (
        AttentionSpec(32, 8, 128, 128, FORMATS["int4"]),
        AttentionSpec(16, 1, 576, 512, FORMATS["bfloat16"], latent=True),
    ):
        with pytest.raises(
            ValueError, match="do not compute latents or KV of few bits with the same bits in any batch"
        ):
            cuda.Variant.of(spec, "9.0a", batch_invariant=True)


def test_kv_decides_which_tiles_larger_dimensions_have() -> None:
    def tiles(heads: int, tokens: int, dim: int, dtype: torch.dtype = torch.bfloat16, arch: str = "9.0a") -> Any:
        spec = msgspec.structs.replace(spec_of(dtype, dim, dim), heads=2 * heads, kv_heads=2, query_tokens=tokens)
        return cuda.Variant.of(spec, arch).query_tiles

    assert tiles(1, 1, 256) == tiles(8, 1, 256) == tiles(2, 4, 256) == tiles(6, 4, 256) == (8, 64, 128)
    assert tiles(1, 1, 192) == tiles(8, 1, 192) == (8, 16, 64, 128)
    assert tiles(1, 1, 256, torch.float8_e4m3fn) == tiles(16, 1, 256, torch.float8_e4m3fn) == (8, 64)
    assert tiles(4, 4, 256) == (64, 128) and tiles(4, 4, 256, torch.float8_e4m3fn) == (64,), "drafts of 16 rows"
    assert tiles(1, 1, 192, torch.float8_e4m3fn) == tiles(16, 1, 192, torch.float8_e4m3fn) == (8, 16, 64)
    assert tiles(16, 1, 256, arch="8.0") == tiles(16, 1, 256, torch.float8_e4m3fn, arch="8.0") == (8, 16, 64)


@compiles
@pytest.mark.parametrize(
    ("dim", "heads", "tokens", "spills"),
    [compiled_slowly(*case) for case in ((128, 4, 8, 0), (128, 64, 1, 0), (64, 8, 8, 0), (96, 4, 1, 0))]
    + [(128, 8, 8, 56)],
)
def test_kv_of_8_bits_with_drafts_and_tails_compiles(dim: int, heads: int, tokens: int, spills: int) -> None:
    """Where two warpgroups convert. With drafts and tails of 128 dimensions narrow items put masks aside."""
    spec = msgspec.structs.replace(spec_of(torch.float8_e4m3fn, dim, dim), heads=heads, query_tokens=tokens)
    variant = cuda.Variant.of(spec, "9.0a")
    found = used(variant)
    assert found.spill_bytes <= spills and not found.serialized
    assert variant.tails == (heads * tokens == 64) and found.shared_bytes <= SHARED_LIMIT["9.0a"]


@compiles
@pytest.mark.parametrize(
    ("tokens", "limits", "capped"),
    [
        (4, False, False),
        *(compiled_slowly(*case) for case in ((8, False, False), (1, True, False), (1, False, True), (4, False, True))),
    ],
    ids=["drafts", "long drafts", "extends", "caps", "drafts, caps"],
)
def test_rows_that_see_some_of_an_item_or_capped_scores_compile_without_spills(
    tokens: int, limits: bool, capped: bool
) -> None:
    spec = msgspec.structs.replace(spec_of(torch.bfloat16, 128, 128), heads=4, query_tokens=tokens, capped=capped)
    found = used(cuda.Variant.of(spec, "9.0a", limits=limits))
    assert found.spill_bytes == 0 and not found.serialized


PREFETCHED = 64 << 10
"""Bytes of a kernel that a GPU fetches when it starts (benchmarks/notes/code-placement.md, "Where code lies in memory")."""


def places_in_forward(spec: AttentionSpec, instructions: str) -> dict[str, list[int]]:
    """Where in Hopper's forward kernel instructions are that begin as a pattern says, in bytes."""
    forward = sass.compiled(cuda.Variant.of(spec, "9.0a")).forward
    places: dict[str, list[int]] = {}
    for place, instruction in re.findall(rf"/\*([0-9a-f]+)\*/ +(?:@!?U?P\d )?({instructions})", forward):
        places.setdefault(instruction, []).append(int(place, 16))
    return places


@compiles
@pytest.mark.parametrize(
    ("tokens", "first"),
    [
        # Of a tile: scores and output of one chunk and of two; of the first tile of a wide item, and of another.
        (1, {"HMMA": 48, "HGMMA": 24}),
        (4, {"HGMMA": 32}),
    ],
    ids=["decode", "drafts"],
)
def test_what_small_batches_run_lies_where_it_is_prefetched(tokens: int, first: dict[str, int]) -> None:
    """Items of 8 rows and most of wide ones, or with drafts wide ones; and in front of both the warps that load."""
    spec = msgspec.structs.replace(spec_of(torch.bfloat16, 128, 128), heads=4, query_tokens=tokens)
    places = places_in_forward(spec, r"\w+")
    for instruction, count in first.items():
        assert len(places[instruction]) >= count
        assert places[instruction][count - 1] < PREFETCHED, instruction
    # The first copies to shared memory are those of the warps that load.
    assert places["LDGSTS"][20] < min(places[instruction][0] for instruction in first)


@compiles
@pytest.mark.parametrize("tokens", [1, compiled_slowly(4)])
def test_what_small_batches_of_latents_run_lies_where_it_is_prefetched(tokens: int) -> None:
    """All of the warps that load, and behind them items of 8 and 16 rows."""
    spec = AttentionSpec(16, 1, *capabilities.LATENT_DIMS[0], FORMATS["bfloat16"], query_tokens=tokens, latent=True)
    places = places_in_forward(spec, r"LDGSTS|HGMMA\.64x\d+x16")
    assert set(places) == {"LDGSTS", *(f"HGMMA.64x{n}x16" for n in (8, 16, 32, 64))}
    assert places["LDGSTS"][-1] < places["HGMMA.64x8x16"][0]
    assert places["HGMMA.64x8x16"][-1] < places["HGMMA.64x16x16"][0] <= places["HGMMA.64x16x16"][-1] < PREFETCHED


@compiles
@pytest.mark.parametrize(
    ("form", "dim", "arch"),
    [
        ("int4", 128, "9.0a"),
        compiled_slowly("int2", 128, "9.0a"),
        compiled_slowly("int4", 64, "9.0a"),
        compiled_slowly("int2", 64, "8.0"),
        compiled_slowly("int4", 128, "8.0"),
    ],
)
def test_pages_of_few_bits_compile_without_spills(form: str, dim: int, arch: str) -> None:
    found = used(cuda.Variant.of(AttentionSpec(1, 1, dim, dim, FORMATS[form]), arch))
    print(found)
    assert found.spill_bytes == 0 and not found.serialized
    assert 0 < found.shared_bytes <= SHARED_LIMIT[arch]


@compiles
@pytest.mark.parametrize(
    ("arch", "dims", "dtype", "change"),
    [
        ("9.0a", 0, "bfloat16", {}),
        compiled_slowly("9.0a", 0, "float16", {"query_tokens": 4}),
        compiled_slowly("9.0a", 0, "float8_e4m3fn", {"query_tokens": 4}),
        compiled_slowly("9.0a", 1, "float8_e5m2", {"sinks": True, "capped": True}),
        compiled_slowly("9.0a", 0, "bfloat16", {"heads": 20, "query_tokens": 2}),
        compiled_slowly("10.0", 0, "float8_e4m3fn", {"heads": 48}),
        compiled_slowly("8.0", 0, "bfloat16", {"query_tokens": 4}),
        compiled_slowly("8.0", 0, "float8_e4m3fn", {}),
        compiled_slowly("8.9", 0, "float8_e4m3fn", {"query_tokens": 4}),
        compiled_slowly("10.0", 1, "bfloat16", {}),
    ],
)
def test_latents_compile_without_spills(arch: str, dims: int, dtype: str, change: dict[str, Any]) -> None:
    spec = AttentionSpec(16, 1, *capabilities.LATENT_DIMS[dims], FORMATS[dtype], latent=True)
    found = used(cuda.Variant.of(msgspec.structs.replace(spec, **change), arch))
    print(found)
    assert found.spill_bytes == 0 and not found.serialized
    assert 0 < found.shared_bytes <= SHARED_LIMIT[arch]
    if arch == "9.0a":
        # With fewer its 384 threads would have too few to trade, and would wait for them for ever (csrc/cuda/kv/latent.cuh).
        assert found.registers == 168


@compiles
@pytest.mark.parametrize(
    "variant",
    [pytest.param(one, id=one.name, marks=() if one in QUICK else pytest.mark.slow) for one in sass.SHIPPED],
)
def test_machine_code_is_as_recorded(variant: cuda.Variant) -> None:
    recorded = msgspec.json.decode(sass.GOLDEN.read_bytes())
    if recorded["nvcc"] != sass.compiler():
        pytest.skip(f"recorded with nvcc {recorded['nvcc']}")
    assert sass.compiled(variant).digests == recorded["variants"][variant.name], (
        "python tests/sass.py --write, if meant"
    )


def test_every_kernel_that_is_launched_is_measured() -> None:
    launched = re.findall(
        r"\blaunch\((?:PageKernels<Kv, true>::)?(k\w+),", (jit.CSRC / "cuda" / "module.cu").read_text()
    )
    assert len(launched) > 5
    assert set(launched) == set(re.findall(r"\)(?:Pages::)?(k\w+)[,}]", resources.KERNELS))


def test_modules_of_unequal_dimensions_say_both() -> None:
    equal, unequal = (cuda.Variant.of(spec_of(torch.bfloat16, 192, v_dim), "9.0a") for v_dim in (192, 128))
    assert equal.name == "sglang_pat_bfloat16_192_sm90a_m8_16_64_128"
    assert unequal.name == "sglang_pat_bfloat16_192_v128_sm90a_m8_16_64_128"
    assert set(unequal.flags) ^ set(equal.flags) == {"-DPAT_V_DIM=128", "-DPAT_V_DIM=192"}


def test_dimensions_that_cannot_be_built_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build.main(["--head-dim", "192", "64", "--v-head-dim", "128", "--arch", "9.0a"])
    assert "do not compute head dimensions of 64 (K) and 128 (V) on a GPU" in capsys.readouterr().err


@pytest.mark.parametrize("arch", ["banana", "", "7.5", "9", "9.0b"])
def test_what_is_no_compute_capability_is_refused(arch: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build.main(["--arch", arch])
    assert capsys.readouterr().err.count("\n") == 1


def test_hopper_is_compiled_for_with_its_own_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a server on one does."""
    built: list[cuda.Variant] = []
    monkeypatch.setattr(cuda, "build", built.extend)
    build.main(["--arch", "9.0"])
    assert {variant.arch for variant in built} == {"9.0a"}


def test_a_compiler_that_fails_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise jit.BuildError("no nvcc")

    monkeypatch.setattr(cuda, "build", fail)
    with pytest.raises(SystemExit, match="no nvcc"):
        build.main(["--arch", "9.0a"])


def test_what_is_built_ahead_is_what_servers_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """For steps and extends of each format and, if asked for, for drafts with windows and without."""
    built: list[cuda.Variant] = []
    monkeypatch.setattr(cuda, "build", built.extend)
    build.main(
        ["--arch", "9.0a", "--head-dim", "64", "128", "--kv-cache-dtype", "auto", "fp8_e4m3", "--drafts", "--windows"]
    )
    build.main(["--arch", "9.0a", "--kv-cache-dtype", "int4"])
    build.main(["--arch", "9.0a", "--logit-cap"])
    wanted = [
        variant
        for dim in (64, 128)
        for dtype in (torch.bfloat16, torch.float8_e4m3fn)
        for heads, tokens, window in (
            *((4, 1, 0), (4, 1, 128), (64, 1, 0)),
            *((1, 4, 0), (1, 4, 128), (4, 4, 0), (4, 4, 128), (8, 8, 0)),
        )
        for variant in cuda.variants(
            msgspec.structs.replace(spec_of(dtype, dim, dim), heads=heads, query_tokens=tokens, window=window),
            "9.0a",
            dtype=torch.bfloat16,
            extends=tokens == 1,
        )
    ]
    few_bits = cuda.variants(AttentionSpec(32, 8, 128, 128, FORMATS["int4"]), "9.0a", dtype=torch.bfloat16)
    capped = [
        msgspec.structs.replace(spec_of(torch.bfloat16, 128, 128), heads=heads, capped=True) for heads in (32, 64)
    ]
    caps = [variant for spec in capped for variant in cuda.variants(spec, "9.0a", extends=True)]
    assert set(built) == {*wanted, *few_bits, *caps}
    assert len(built) == len(set(built)) == 2 * (8 + 8) + 1 + 3, "with and without tails"
    built.clear()
    build.main(["--arch", "9.0a", "--head-dim", "256", "--drafts"])
    wanted = [
        variant
        for heads, tokens in ((4, 1), (8, 1), (2, 2), (4, 2), (4, 4), (8, 4))
        for variant in cuda.variants(
            msgspec.structs.replace(spec_of(torch.bfloat16, 256, 256), heads=heads, query_tokens=tokens),
            "9.0a",
            extends=tokens == 1,
        )
    ]
    assert set(built) == set(wanted) and len(built) == 4
    built.clear()
    build.main(["--arch", "9.0a", "--drafts", "--windows", "--deterministic"])
    wanted = [
        variant
        for tokens, window in ((1, 0), (1, 128), (4, 0), (4, 128))
        for variant in cuda.variants(
            msgspec.structs.replace(spec_of(torch.bfloat16, 128, 128), heads=16, query_tokens=tokens, window=window),
            "9.0a",
            extends=tokens == 1,
            batch_invariant=True,
        )
    ]
    assert set(built) == set(wanted) and len(built) == 4, "whatever the rows are"


@pytest.mark.parametrize(("heads", "tokens", "tiles"), [(4, 2, 5), (4, 3, 4), (4, 4, 4), (4, 5, 5), (16, 1, 5)])
def test_modules_leave_out_the_tile_that_drafts_never_use(heads: int, tokens: int, tiles: int) -> None:
    spec = msgspec.structs.replace(spec_of(torch.bfloat16, 128, 128), heads=heads, query_tokens=tokens)
    built = cuda.Variant.of(spec, "9.0a").query_tiles
    assert len(built) == tiles and built[-4:] == (16, 64, 128, 192)


def test_a_missing_compiler_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(jit.BuildError, match="found no nvcc: install the CUDA toolkit, and set CUDA_HOME"):
        jit.find_nvcc()
