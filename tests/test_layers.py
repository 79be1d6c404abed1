"""Layers by what their attention is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from sglang_pat import compat
from sglang_pat.backend import layers, support
from sglang_pat.packing import FORMATS, AttentionSpec


@pytest.mark.parametrize(
    ("radius", "seen"), [(None, 0), (-1, 0), (0, 1), (63, 64), (4094, 4095), (4095, 0), (2**40, 0)]
)
def test_a_window_that_holds_the_context_is_none(radius: int | None, seen: int) -> None:
    assert layers.window(radius, context=4096) == seen


def test_layers_that_torch_does_not_know_are_found() -> None:
    """SGLang's `models/transformers.py` keeps its attention in a dict."""
    model = torch.nn.Module()
    model.attention_instances = {
        i: RadixAttention(8, 64, 1.0, 2, layer_id=i, sliding_window_size=i * 99) for i in (0, 1)
    }
    runner = SimpleNamespace(model=model, kv_cache_dtype=torch.float32, model_config=SimpleNamespace(context_len=512))
    assert len(compat.attention_layers(runner)) == 2
    assert {spec.window: count for spec, count in layers.count(runner).items()} == {0: 1, 100: 1}


def test_only_some_layers_have_sinks() -> None:
    """As in MiMo V2 and Granite; the others of those have None in their place."""
    model = torch.nn.ModuleList([torch.nn.Module() for _ in range(3)])
    for i, (name, sinks) in enumerate([("sinks", True), ("attention_sink_bias", True), ("sinks", False)]):
        model[i].attn = RadixAttention(8, 64, 1.0, 2, layer_id=i)
        setattr(model[i], name, torch.nn.Parameter(torch.zeros(8)) if sinks else None)
    runner = SimpleNamespace(model=model, kv_cache_dtype=torch.float32, model_config=SimpleNamespace(context_len=512))
    assert layers.with_sinks(runner) == {0, 1}
    assert {spec.sinks: count for spec, count in layers.count(runner).items()} == {True: 2, False: 1}


def encoder(window: int = -1) -> SimpleNamespace:
    """What matters here of a `ModelRunner` whose model has an encoder's layer and one that decodes."""
    model = torch.nn.Module()
    model.encoder = RadixAttention(
        8, 64, 1.0, 8, layer_id=0, sliding_window_size=window, attn_type=AttentionType.ENCODER_ONLY
    )
    model.decoder = RadixAttention(8, 64, 1.0, 2, layer_id=1)
    config = SimpleNamespace(
        context_len=512, hf_config=SimpleNamespace(architectures=["Both"]), is_multimodal=False,
        is_encoder_decoder=False,
    )  # fmt: skip
    backends = dict.fromkeys(["attention_backend", "prefill_attention_backend", "decode_attention_backend"], "pat")
    return SimpleNamespace(
        model=model, model_config=config, device="cpu", dtype=torch.float32, kv_cache_dtype=torch.float32,
        token_to_kv_pool=None, req_to_token_pool=None, use_mla_backend=False, server_args=SimpleNamespace(**backends),
    )  # fmt: skip


def test_an_encoder_is_not_counted() -> None:
    assert [(spec.kv_heads, count) for spec, count in layers.count(encoder()).items()] == [(2, 1)]


def test_an_encoder_with_a_window_is_refused() -> None:
    with pytest.raises(support.UnsupportedError, match="encoder-only attention with a window, which Both uses"):
        support.check_model(encoder(window=63), fallback="triton")


def test_a_spec_can_be_read() -> None:
    spec = AttentionSpec(8, 2, 192, 128, FORMATS["bfloat16"], 64, sinks=True)
    assert str(spec) == "8/2 heads of 192 and 128, bfloat16, a window of 64, sinks"


def test_reports_of_groups_are_added_up() -> None:
    first = {
        "steps": 9,
        "work_items": 5,
        "plans": 1,
        "plans_ahead": 0,
        "planning_us": 7,
        "kv_bytes": 100,
        "kv_bytes_unpacked": 300,
        "fallbacks": 1,
    }
    second = first | {"work_items": 8, "plans": 2, "fallbacks": 2}
    total = layers.total([first, second])
    assert total == first | {"plans": 3, "planning_us": 14, "kv_bytes": 200, "kv_bytes_unpacked": 600, "fallbacks": 2}
