"""What `python -m sglang_pat.tune` writes and refuses, and the tables that come with sglang-pat; no GPU needed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest
import torch
from derived_table import DERIVED, derived
from oracle import makespan, pricing

from sglang_pat.cli import tile_prices, tune
from sglang_pat.kernels import capabilities, low_bit
from sglang_pat.packing import FORMATS, AttentionSpec, CostModel, PackConfig, TileTable, devices
from sglang_pat.packing.native import NativeScheduler

pytestmark = pytest.mark.once

TILES = capabilities.tile_table("9.0a", 128)
H200 = devices.load(devices.TABLES / "h200.json")
FP8 = FORMATS["float8_e4m3fn"]


@pytest.mark.parametrize("name", DERIVED)
def test_a_table_is_derived_from_a_measured_one(name: str) -> None:
    path = devices.TABLES / name
    text = tune.written(derived(name))
    assert text == path.read_text()
    lines, table = text.splitlines(), devices.load(path)
    prices = sum(len(table.prices_of(FORMATS[name])) for name in tile_prices.PRICED)
    assert sum(line.startswith('  {"m": ') and line.rstrip(",").endswith("}") for line in lines) == prices > 0


@pytest.mark.parametrize(
    ("arch", "gpu", "known"),
    [
        ("9.0a", "NVIDIA H200", "NVIDIA H200"),
        ("9.0a", "NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"),
        ("8.0", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 SXM 80GB"),
        ("9.0a", "another Hopper", "NVIDIA H200"),
        ("9.0a", "NVIDIA GH200 480GB", "NVIDIA H200"),
        ("8.6", "NVIDIA RTX A1000", None),
        ("8.9", "NVIDIA L40S", None),
        ("10.0", "NVIDIA B200", None),
    ],
)
def test_a_gpu_finds_its_table(arch: str, gpu: str, known: str | None) -> None:
    table = devices.find(arch, gpu)
    assert (table and table.gpu) == known
    for dim in capabilities.HEAD_DIMS:
        tiles = capabilities.tile_table(arch, dim, gpu)
        assert tiles.query_tiles == capabilities.query_tiles(arch, dim)
        priced = known and (dim <= 128 or known in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"))
        assert len(tiles.item_ns) == (len(tiles.query_tiles) if priced else 0)


def test_an_h200s_bins_have_prices_of_their_own_and_an_h100s_have_not() -> None:
    tiles = {name: devices.load(devices.TABLES / f"{name}.json") for name in ("h200", "h100")}
    of_h200, of_h100 = (
        table.tiles(capabilities.query_tiles("9.0a", 128), 128, capabilities.NARROW_M, capabilities.WARP_TOKENS)
        for table in tiles.values()
    )
    known = capabilities.tile_table("9.0a", 128, "NVIDIA H200")
    assert msgspec.structs.replace(of_h200, tails_m=capabilities.WARPGROUP_ROWS) == known
    assert (of_h100.bins_item_ns, of_h100.bins_token_ns) == ((), ())
    assert capabilities.tile_table("9.0a", 64, "NVIDIA H200").bins_item_ns == (), "other dimensions were not fitted"
    prices = tiles["h200"].prices
    assert of_h200.bins_item_ns == tuple(price.item_ns * price.item_in_bins for price in prices)
    assert of_h200.bins_token_ns == tuple(price.token_ns * price.token_in_bins for price in prices)
    assert of_h200.for_bins().item_ns == of_h200.bins_item_ns != of_h200.item_ns
    assert of_h200.without_warps().for_bins().token_ns == of_h200.bins_token_ns[2:]
    # One that has a factor for one of both has the other's in plans.
    some = msgspec.structs.replace(prices[1], item_in_bins=None)
    assert some.in_bins() == (some.item_ns * some.item_in_plans, some.token_ns * some.token_in_bins)
    assert len(tiles["h200"].prices_8bit) == 4 and {price.item_in_bins for price in tiles["h200"].prices_8bit} == {None}


@pytest.mark.parametrize(
    "changes", [{"bins_token_ns": (1, 1, 1)}, {"bins_item_ns": (1, 1, 1)}, {"bins_item_ns": (1, 1)}]
)
def test_times_in_bins_are_those_of_all_tiles(changes: dict[str, tuple[int, ...]]) -> None:
    tiles = TileTable((8, 16, 64), (1, 1, 1), (1, 1, 1), bytes_per_ns=4)
    msgspec.structs.replace(tiles, bins_token_ns=(2, 2, 2), bins_item_ns=(0, 0, 0))
    with pytest.raises(ValueError, match="there must be"):
        msgspec.structs.replace(tiles, **changes)


@pytest.mark.parametrize("group", [1, 4, 8])
def test_only_short_packs_are_split_and_into_tiles_of_a_warp(group: int) -> None:
    config = PackConfig.of(AttentionSpec(8 * group, 8, 128, 128, FORMATS["bfloat16"]), TILES, workers=132)
    assert config.few_queries == capabilities.NARROW_M // group
    queries = 2 * config.few_queries
    assert pricing.items_of_pack(config, queries, 32) == 2 and pricing.items_of_pack(config, queries, 1000) == 1
    assert pricing.items_of_pack(config, config.few_queries, 32) == 1


@pytest.mark.parametrize("m", [8, 16, 64, 192])
def test_all_workers_of_a_synthetic_plan_have_the_same_to_do(m: int) -> None:
    plan = tile_prices.synthetic(m, 4, tokens=64, workers=6)
    tiles = capabilities.tile_table("9.0a", 128)
    config = PackConfig(CostModel(tile_prices.GROUP, 1, 128, 128, 2), tiles, workers=6).for_bins
    price = 4 * pricing.uncut_price(config, m // tile_prices.GROUP, 64)
    assert makespan(plan, [10**6] * len(plan.num_parts), config) == price
    covered = sorted((item.start, item.end) for item in plan.items)
    assert covered == [(i * 64, (i + 1) * 64) for i in range(24)], "every item has KV of its own"
    parts = sorted((query, part) for item in plan.items for query, part in zip(item.queries, item.parts, strict=True))
    assert parts == [(query, part) for query in range(len(plan.num_parts)) for part in range(2)]


def test_times_that_are_too_long_for_a_plan_are_the_tables_fault(tmp_path: Path) -> None:
    table = msgspec.structs.replace(devices.load(devices.TABLES / "h200.json"), turn_in_plans_ns=1e6, read_tbps=10)
    spec = AttentionSpec(64, 64, 128, 128, FORMATS["bfloat16"])
    config = PackConfig.of(spec, capabilities.tile_table("9.0a", 128, table=table), 132)
    with (
        pytest.raises(
            devices.TablesError, match=r"mine\.json is a table that no plan can be made with: turn_price must be"
        ),
        devices.used("mine.json"),
    ):
        NativeScheduler(config, 8)
    for name in ("slice_token_ns", "bin_ns", "wave_ns", "narrow_first_ns"):
        table = msgspec.structs.replace(devices.load(devices.TABLES / "h200.json"), **{name: 1e6}, read_tbps=1e3)
        with pytest.raises(devices.TablesError, match=f"{name} of 1e[+]06 ns is too long"), devices.used("mine.json"):
            capabilities.tile_table("9.0a", 128, table=table)
    with pytest.raises(ValueError, match=r"^other"), devices.used(""):
        raise ValueError("other")


def test_a_table_without_prices_for_a_model_is_not_used_silently(tmp_path: Path) -> None:
    """Such as one that was measured with another head dimension, or before there were prices with FP8 KV."""
    path = tmp_path / "mine.json"
    known = devices.load(devices.TABLES / "h200.json")
    for dim, kv, table in (
        (128, FORMATS["bfloat16"], msgspec.structs.replace(known, head_dim=64)),
        (128, FORMATS["bfloat16"], msgspec.structs.replace(known, prices=known.prices[1:])),
        (64, FP8, msgspec.structs.replace(known, prices_8bit=())),
    ):
        with (
            pytest.raises(
                devices.TablesError, match=f"mine.json .*no prices for head dimension {dim} with KV of {kv.bits} bits"
            ),
            devices.used(str(path)),
        ):
            capabilities.tile_table("9.0a", dim, "NVIDIA H200", table, kv)
        assert capabilities.tile_table("9.0a", 256, "NVIDIA H200", table).token_ns == (), "prices do not scale up"


def test_a_head_dimension_with_a_table_of_its_own_has_its_prices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = devices.load(devices.TABLES / "h200.json")
    prices = tuple(price for price in plain.prices if price.m in (8, 64, 128))
    own = msgspec.structs.replace(plain, head_dim=256, prices=prices, prices_8bit=plain.prices_8bit[:3])
    monkeypatch.setattr(devices, "TABLES", tmp_path)
    (tmp_path / "h200.json").write_text(tune.written(plain))
    (tmp_path / "h200-256.json").write_text(tune.written(own))
    for gpu in ("NVIDIA H200", "another Hopper"):
        tiles = {dim: capabilities.tile_table("9.0a", dim, gpu) for dim in capabilities.HEAD_DIMS}
        assert {dim: table.token_ns != () for dim, table in tiles.items()} == {
            64: True, 96: True, 128: True, 192: False, 256: True,
        }  # fmt: skip
        assert (
            tiles[256].token_ns[:2] == tiles[128].token_ns[::2][:2]
            and tiles[64].token_ns[0] == tiles[128].token_ns[0] / 2
        )
        assert (tiles[256].query_tiles, tiles[256].warp_m, tiles[256].tails_m) == ((8, 64, 128), 8, 0)
        assert own.slice_token_ns > 0 == tiles[256].slice_token_ns, (
            "kernels slice by 16 rows, and would leave out heads"
        )
    (tmp_path / "h200-256.json").write_text(tune.written(msgspec.structs.replace(own, prices=prices[:2])))
    assert capabilities.tile_table("9.0a", 256, "NVIDIA H200") == TileTable((8, 64, 128)), "one tile has no price"
    assert devices.find("", "another Hopper", 256) is None


def test_prices_of_other_dimensions_are_not_scaled_to_larger_ones_nor_those_of_latents_to_any() -> None:
    """Though such a table has a price for each tile."""
    wide, latents = (devices.load(devices.TABLES / f"h200-{dim}.json") for dim in (256, 576))
    wide = msgspec.structs.replace(wide, prices_8bit=latents.prices_8bit)
    for dim, table in ((192, wide), (192, latents), (256, latents)):
        assert capabilities.tile_table("9.0a", dim, "NVIDIA H200", table, FP8) == TileTable(
            capabilities.query_tiles("9.0a", dim, FP8)
        )
    assert capabilities.tile_table("9.0a", 256, "NVIDIA H200", wide, FP8).token_ns != ()
    with pytest.raises(ValueError, match="no prices for head dimension 128 with KV of 16 bits"):
        capabilities.tile_table("8.0", 128, "NVIDIA A100", latents)


def test_latents_have_the_prices_of_a_table_of_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = tile_prices.spec_of(576, "bfloat16")
    assert spec.latent and not tile_prices.spec_of(256, "bfloat16").latent
    plain = devices.load(devices.TABLES / "h200.json")
    own = msgspec.structs.replace(
        plain,
        head_dim=576,
        prices=tuple(devices.Price(m, 10.0 * m, 30, 1, 1) for m in (8, 16, 32, 64)),
        prices_8bit=(),
        slice_token_ns=0,
    )
    monkeypatch.setattr(devices, "TABLES", tmp_path)
    (tmp_path / "h200.json").write_text(tune.written(plain))
    assert capabilities.tile_table_of(spec, "9.0a", "NVIDIA H200").token_ns == (), (
        "those of K and V say nothing of them"
    )
    (tmp_path / "h200-576.json").write_text(tune.written(own))
    tiles = capabilities.tile_table_of(spec, "9.0a", "NVIDIA H200")
    assert tiles.item_ns == (80, 160, 320, 640) and tiles.warp_m == 0
    fp8 = tile_prices.spec_of(576, capabilities.FP8["fp8_e4m3"])
    for other in (fp8, msgspec.structs.replace(spec, head_dim=288, v_head_dim=256)):
        assert capabilities.tile_table_of(other, "9.0a", "NVIDIA H200").token_ns == ()
    # One that the user named must have prices of its dimension, and says nothing of others.
    with pytest.raises(ValueError, match="no prices for head dimension 576 with KV of 8 bits"):
        capabilities.tile_table_of(fp8, "9.0a", table=own)
    assert capabilities.tile_table_of(spec, "9.0a", table=own) == tiles
    assert capabilities.tile_table_of(fp8, "9.0a", table=plain).token_ns == ()


def test_bad_tables_and_missing_gpus_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "table.json").write_text("{}")
    with pytest.raises(
        devices.TablesError, match=r"is not a table of tiles, make one with `python -m sglang_pat.tune`"
    ):
        devices.load(tmp_path / "table.json")
    (tmp_path / "table.json").write_bytes(b'{"gpu": "\xff"}')
    with pytest.raises(devices.TablesError, match="is not a table of tiles"):
        devices.load(tmp_path / "table.json")
    good = json.loads(next(devices.TABLES.glob("*.json")).read_text())
    for wrong in (
        {"sms": 0},
        {"read_tbps": 0},
        {"read_tbps": 1e308},
        {"turn_in_plans_ns": -1},
        {"prices": [{"m": 8, "item_ns": 1e300, "token_ns": 1}]},
        {"prices": good["prices"] + good["prices"][-1:]},
        {"prices_8bit": good["prices"][::-1]},
        {"wide_queries": 4},
        {"wide_steps": {"query": 4}},
        {"gpu": "x" * devices.LARGEST},
        {"\x1b[31mevil\nline" + "y" * 3_000: 0},
    ):
        (tmp_path / "table.json").write_text(json.dumps(good | wrong))
        with pytest.raises(devices.TablesError, match="is not a table of tiles") as found:
            devices.load(tmp_path / "table.json")
        assert str(found.value).isprintable() and len(str(found.value)) < 1_000
    (tmp_path / "table.json").write_text('{"wide_steps": {"x": ' + "[" * 100_000)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "table.json", tmp_path / "pipe", Path("/dev/zero"), tmp_path, tmp_path / ("x" * 300)):
        with pytest.raises(devices.TablesError, match="is not a table of tiles"):
            devices.load(path)
    with pytest.raises(
        devices.TablesError,
        match=r"^SGLANG_PAT_TILES: .*nowhere is not a table of tiles, .*: No such file or directory$",
    ):
        devices.load(tmp_path / "nowhere", "SGLANG_PAT_TILES")
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            tune.main([])
        assert "there is no GPU here to measure" in capsys.readouterr().err


def test_a_table_that_cannot_be_written_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune, "measure", lambda *_: H200)
    with pytest.raises(SystemExit, match="cannot be written: No such file"):
        tune.main(["--output", str(tmp_path / "nowhere" / "x.json")])
    assert capsys.readouterr().out == tune.written(H200) + "\n"


def test_a_measured_table_has_the_factors_that_were_fitted_with_its_dimension() -> None:
    def factors(dim: int, kv: str = "bfloat16") -> tuple[float, float]:
        price = tile_prices.fitted(tile_prices.spec_of(dim, kv), 64)
        return price.item_in_plans, price.token_in_plans

    assert factors(128) == factors(96) == (3, 0.8) and factors(256) == factors(192) == (3, 0.87)
    assert factors(256, capabilities.FP8["fp8_e4m3"]) != factors(128, capabilities.FP8["fp8_e4m3"]) == (2, 1)
    assert factors(576) == (1, 1), "of latents none"


@pytest.mark.gpu
def test_a_table_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_prices, "TOKENS", (64, 256))
    tune.main(["--output", str(tmp_path / "table.json")])
    table = devices.load(tmp_path / "table.json")
    assert table.gpu == torch.cuda.get_device_name() and table.source.startswith("measured on")
    assert all(price.token_ns > 0 for price in table.prices)


@pytest.mark.parametrize(
    ("form", "dim"), [*((form, 128) for form in tile_prices.PRICED), *((form, 192) for form in tile_prices.PRICED[:2])]
)
def test_a_pool_to_measure_with_has_each_token_once(form: str, dim: int) -> None:
    """In pages of few bits it is whole pages, and no parameter of theirs is infinite. Beside K of 192 dimensions V has 128."""
    bench = object.__new__(tile_prices.Bench)
    bench.torch, bench.device, bench.dtype = torch, torch.device("cpu"), torch.bfloat16
    bench.spec = tile_prices.spec_of(dim, form)
    kv, slots = bench.pool(640)
    assert slots.shape == (1, 640) and sorted(slots[0].tolist()) == list(range(640))
    if kv.pages is None:
        assert (kv.k.shape, kv.v.shape) == ((640, 1, dim), (640, 1, 128))
    else:
        assert (slots[0].reshape(10, 64).diff() == 1).all() and len(kv.pages.records) == 10
        assert all(torch.isfinite(x).all() for x in low_bit.unpack(kv.pages.records, FORMATS[form].bits, 128))
