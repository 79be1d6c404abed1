"""Layers by what their attention is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_pat import compat
from sglang_pat.backend import layers
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
