"""FP8 KV caches. Greedy answers are those of `torch_native`, which reads such a cache without scales, on the same weights; a checkpoint
with scales answers as its twin without."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gemma
import near_ties
import pytest
import scaled
import torch
from conftest import assert_sound, flush, generate_all
from forked import ForkedServer
from safetensors.torch import load_file, save_file

from sglang_pat import compat
from sglang_pat.backend.errors import UnsupportedError
from sglang_pat.backend.start import support
from sglang_pat.demo import workload
from sglang_pat.demo.server import Server
from sglang_pat.demo.tiny_model import SHAPE

COMMON = ["--max-running-requests", "48", "--max-total-tokens", "40000"]
FLOAT32, BFLOAT16 = ["--dtype", "float32"], ["--dtype", "bfloat16"]
E4M3, E5M2 = ["--kv-cache-dtype", "fp8_e4m3"], ["--kv-cache-dtype", "fp8_e5m2"]
PAGES = ["--page-size", "16", "--chunked-prefill-size", "64"]

SERVERS: dict[str, tuple[str, str, list[str]]] = {
    "e4m3, torch_native": ("qwen", "torch_native", [*FLOAT32, *E4M3]),
    "e4m3": ("qwen", "pat", [*FLOAT32, *E4M3]),
    "windows, e5m2, torch_native": ("gemma", "torch_native", [*FLOAT32, *E5M2]),
    "windows, e5m2": ("gemma", "pat", [*FLOAT32, *E5M2, *PAGES]),
    "scaled": ("scaled", "pat", BFLOAT16),
    "twin": ("twin", "pat", [*BFLOAT16, *E4M3]),
}
"""The model, the backend and flags of each; a cache of 16 or 32 bits has other answers. What a checkpoint says makes `scaled` e4m3."""


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    folder = tmp_path_factory.mktemp("fp8")
    with_scales, twin = scaled.write(folder, model)
    models = {"qwen": model, "gemma": gemma.write(folder / "gemma", model, 40), "scaled": with_scales, "twin": twin}
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(
                ForkedServer(
                    models[kind], backend, folder / f"{name}.log", [*COMMON, *flags], {"SGLANG_PAT_VERIFY": "1"}
                )
            )
            for name, (kind, backend, flags) in SERVERS.items()
        }
        for server in started.values():
            server.wait()
        yield started


@pytest.mark.server
@pytest.mark.parametrize(("name", "close"), [("e4m3", 0.02), ("windows, e5m2", 0.06)])
def test_packed_answers_are_those_of_a_stock_backend(name: str, close: float, servers: dict[str, Server]) -> None:
    prompts = workload.nested_prompts(2, 2, 6, unrelated=4)
    expected = near_ties.generate_all(servers[f"{name}, torch_native"], prompts)
    assert len({tuple(answer.ids) for answer in expected}) > len(prompts) / 2, "answers that depend on prompts"
    # The second time all of a prompt but its end is cached. What differs in the last bit may be another number of 8 bits.
    for _ in range(2):
        near_ties.assert_agree(near_ties.generate_all(servers[name], prompts), expected, close, least=0.1)
    counters = assert_sound(servers[name])
    assert 0 < counters["kv_bytes"] < counters["kv_bytes_unpacked"]


@pytest.mark.server
def test_bytes_that_are_counted_are_those_of_fp8(servers: dict[str, Server]) -> None:
    generate_all(servers["e4m3"], ["once"])
    counters = assert_sound(servers["e4m3"])
    token = 2 * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    assert counters["kv_bytes"] == token * counters["kv_tokens"] > 0


@pytest.mark.server
def test_scales_of_a_checkpoint(servers: dict[str, Server]) -> None:
    prompts = workload.nested_prompts(2, 2, 2, unrelated=2)
    # One after the other: in bfloat16 an answer may depend on what else is in its batch.
    expected = generate_all(servers["twin"], prompts, concurrency=1)
    assert len(set(map(tuple, expected))) > len(prompts) / 2, "answers that depend on prompts"
    assert generate_all(servers["scaled"], prompts, concurrency=1) == expected
    assert_sound(servers["scaled"])
    assert "KV Cache is allocated. dtype: torch.float8_e4m3fn" in servers["scaled"].log.read_text()


@pytest.mark.server
@pytest.mark.release
def test_scales_of_new_weights(servers: dict[str, Server], model: Path, tmp_path: Path) -> None:
    """The server starts with scales of 1, with which it keeps other values."""
    with_scales, _ = scaled.write(tmp_path, model)
    before = tmp_path / "before"
    shutil.copytree(with_scales, before)
    weights = load_file(before / "model.safetensors")
    weights |= {name: torch.ones_like(weight) for name, weight in weights.items() if name.endswith("_scale")}
    save_file(weights, before / "model.safetensors", metadata={"format": "pt"})
    prompts = workload.nested_prompts(2, 2, 2, unrelated=2)
    expected = generate_all(servers["scaled"], prompts, concurrency=1)
    with ForkedServer(before, "pat", tmp_path / "log", [*COMMON, *BFLOAT16], {"SGLANG_PAT_VERIFY": "1"}) as server:
        server.wait()
        assert generate_all(server, prompts, concurrency=1) != expected
        flush(server)
        assert server.post("/update_weights_from_disk", {"model_path": str(with_scales), "flush_cache": False})[
            "success"
        ]
        assert generate_all(server, prompts, concurrency=1) == expected
        assert_sound(server)


@pytest.mark.server
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_another_backend_that_ignores_scales_is_refused(phase: str, model: Path, tmp_path: Path) -> None:
    with_scales, _ = scaled.write(tmp_path, model)
    flags = [f"--{phase}-attention-backend", "torch_native", *COMMON, *BFLOAT16]
    with ForkedServer(with_scales, "pat", tmp_path / "log", flags) as server:
        log = server.wait_failed()
    assert (
        "pat does not support torch_native, which ignores the scales of an FP8 KV cache, as a second backend: let pat"
        in log
    )


def layer_of(k_scale: Any, v_scale: Any, on_host: bool = True) -> Any:
    """What matters here of SGLang's `RadixAttention`."""
    floats = (float(k_scale), float(v_scale)) if on_host else (None, None)
    return SimpleNamespace(
        layer_id=0, k_scale=k_scale, v_scale=v_scale, k_scale_float=floats[0], v_scale_float=floats[1]
    )


LAYERS = {
    "checkpoint": layer_of(torch.tensor(0.375), torch.tensor(24.0)),
    "--quantization-param-path": layer_of(0.375, 24.0, on_host=False),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("form", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16], ids=str)
def test_what_is_read_times_its_scales_is_what_was_written(form: torch.dtype, name: str) -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    layer, slots = LAYERS[name], torch.tensor([3, 5, 1])
    pool = MHATokenToKVPool(8, 1, form, 2, 16, 1, "cpu", enable_memory_saver=False)
    # Another dtype than any pool's: SGLang's divides by scales that it is given where K has not its own.
    k, v = torch.randn(2, 3, 2, 16).unbind()
    fp8 = compat.pool.is_fp8(form)
    k_scale, v_scale = compat.pool.kv_scales(layer)
    assert (k_scale, v_scale) == (0.375, 24.0)
    expected = ((k / k_scale).to(form), (v / v_scale).to(form)) if fp8 else (k.to(form), v.to(form))
    compat.pool.save_kv(pool, layer, slots, k.clone(), v.clone())
    for got, right in zip((pool.get_key_buffer(0), pool.get_value_buffer(0)), expected, strict=True):
        assert got.dtype == form
        assert torch.equal(got[slots].float(), right.float())


def test_a_layer_without_scales_has_ones() -> None:
    nothing = SimpleNamespace(k_scale=None, v_scale=None, k_scale_float=None, v_scale_float=None)
    assert compat.pool.kv_scales(nothing) == (1.0, 1.0)


AFTER_0_5_17 = "triton" if compat.release() == "0.5.17" else "flashinfer"


@pytest.mark.parametrize(
    ("capability", "form", "windows", "with_scales", "expected"),
    [
        (9, torch.bfloat16, True, False, "fa3"),
        (9, torch.float8_e4m3fn, True, True, "fa3"),
        (9, torch.float8_e5m2, False, False, "flashinfer"),
        (9, torch.float8_e5m2, False, True, AFTER_0_5_17),
        (9, torch.float8_e5m2, True, False, "triton"),
        (8, torch.bfloat16, False, False, "flashinfer"),
        (8, torch.bfloat16, True, False, "triton"),
        (8, torch.float8_e4m3fn, False, False, "flashinfer"),
        (12, torch.float8_e4m3fn, False, True, AFTER_0_5_17),
    ],
)
def test_prefill_runs_on_a_backend_that_reads_the_cache(
    capability: int, form: torch.dtype, windows: bool, with_scales: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (capability, 0))
    monkeypatch.setattr("sglang.srt.utils.is_flashinfer_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert compat.stock.prefill_backend(windows, form, with_scales) == expected


def test_a_backend_that_computes_no_sinks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for other, problem in (("flashinfer", "flashinfer, which computes no attention sinks"), ("triton", None)):
        arguments = SimpleNamespace(
            attention_backend="pat", prefill_attention_backend=other, decode_attention_backend=None
        )
        runner = SimpleNamespace(server_args=arguments, kv_cache_dtype=torch.bfloat16, token_to_kv_pool=None)
        assert support.partner_problem(runner, sinks=True) == problem
        assert support.partner_problem(runner) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr("sglang.srt.utils.is_flashinfer_available", lambda: True)
    for sinks, name in ((False, "flashinfer"), (True, "triton")):
        assert compat.stock.prefill_backend(False, torch.bfloat16, False, sinks) == name


def test_a_backend_that_takes_v_for_as_wide_as_k_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for other, problem in (("flashinfer", "flashinfer, which takes V to be as wide as K"), ("fa3", None)):
        arguments = SimpleNamespace(
            attention_backend="pat", prefill_attention_backend=other, decode_attention_backend=None
        )
        runner = SimpleNamespace(server_args=arguments, kv_cache_dtype=torch.bfloat16, token_to_kv_pool=None)
        assert support.partner_problem(runner, unequal=True) == problem
        assert support.partner_problem(runner) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr("sglang.srt.utils.is_flashinfer_available", lambda: True)
    for unequal, name in ((False, "flashinfer"), (True, "triton")):
        assert compat.stock.prefill_backend(False, torch.bfloat16, False, unequal=unequal) == name


def test_which_release_prefills_without_scales() -> None:
    assert compat.stock.ignores_scales("flashinfer", prefill=True) == (compat.release() == "0.5.17")
    assert compat.stock.ignores_scales("fa4", prefill=True)
    for backend in ("flashinfer", "fa4", None):
        assert not compat.stock.ignores_scales(backend, prefill=False)


@pytest.mark.parametrize(
    ("other", "form", "layer", "refused"),
    [
        ("torch_native", torch.float8_e4m3fn, "checkpoint", True),
        ("fa3", torch.float8_e5m2, None, True),
        ("torch_native", torch.float8_e4m3fn, None, False),
        ("torch_native", torch.bfloat16, "checkpoint", False),
        ("fa3", torch.float8_e4m3fn, "checkpoint", False),
        (None, torch.float8_e5m2, "checkpoint", False),
    ],
)
def test_a_backend_that_reads_something_else_is_refused(
    other: str | None, form: torch.dtype, layer: str | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    unscaled = SimpleNamespace(k_scale=None, v_scale=None, k_scale_float=None, v_scale_float=None)
    monkeypatch.setattr(
        compat.model, "attention_layers", lambda runner: [unscaled, LAYERS[layer] if layer else unscaled]
    )
    for phase in ("prefill", "decode"):
        chosen = {
            "prefill_attention_backend": None,
            "decode_attention_backend": None,
            f"{phase}_attention_backend": other,
        }
        arguments = SimpleNamespace(attention_backend="pat", **chosen)
        problem = support.partner_problem(
            SimpleNamespace(server_args=arguments, kv_cache_dtype=form, token_to_kv_pool=None)
        )
        assert (problem is not None) == refused
        assert problem is None or problem.startswith(other)


@pytest.mark.parametrize(
    ("device", "dtype", "form", "message"),
    [
        ("cpu", torch.bfloat16, torch.float8_e4m3fnuz, "a KV cache of torch.float8_e4m3fnuz yet"),
        ("cuda", torch.bfloat16, torch.uint8, "a KV cache of torch.uint8 yet"),
        ("cuda", torch.float32, torch.float8_e4m3fn, "torch.float32 with a KV cache of torch.float8_e4m3fn"),
        ("cuda", torch.float16, torch.bfloat16, "torch.float16 with a KV cache of torch.bfloat16"),
    ],
)
def test_other_formats_are_refused(device: str, dtype: torch.dtype, form: torch.dtype, message: str) -> None:
    config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=["Llama"]), is_multimodal=False, is_encoder_decoder=False
    )
    runner = SimpleNamespace(
        device=device, dtype=dtype, kv_cache_dtype=form, model_config=config, token_to_kv_pool=None,
        req_to_token_pool=None, use_mla_backend=False,
    )  # fmt: skip
    with pytest.raises(UnsupportedError, match=message):
        support.check_model(runner, fallback="triton")
