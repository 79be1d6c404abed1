"""The table of SGLang's features (backend/start/features.py): it is whole, what it refuses is refused, and what no other file shows is shown
here."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs, prepare_server_args

from sglang_pat import compat, platform, plugin
from sglang_pat.backend.errors import UnsupportedError
from sglang_pat.backend.start import features

TESTS = Path(__file__).parent
ALL = [feature for group in features.FEATURES.values() for feature in group]

ASKED_BY: list[tuple[list[str], dict[str, str]]] = [
    (["--enable-pdmux"], {}),
    (["--enable-two-batch-overlap"], {}),
    (["--dcp-size", "2"], {}),
    (["--attn-cp-size", "2", "--tp-size", "2"], {}),
    (["--cuda-graph-backend-prefill", "full"], {}),
    (["--enable-torch-compile"], {}),
    ([], {"SGLANG_USE_HND_KVCACHE": "1"}),
    (["--kv-cache-dtype", "fp4_mx_block16"], {}),
    (["--kv-cache-dtype", "mxfp8"], {}),
    (["--enable-page-major-kv-layout"], {}),
    (["--enable-unified-memory"], {}),
    (["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4", "--enable-streaming-session"], {}),
    (["--speculative-algorithm", "FROZEN_KV_MTP"], {}),
    (["--speculative-algorithm", "NGRAM", "--speculative-adaptive"], {}),
    (["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "65"], {}),
    (["--speculative-algorithm", "NGRAM", "--prefill-attention-backend", "torch_native"], {}),
    (["--speculative-algorithm", "NGRAM", "--decode-attention-backend", "torch_native"], {}),
    (["--dllm-algorithm", "LowConfidence"], {}),
    (["--enable-deterministic-inference"], {}),
    (["--enable-deterministic-inference", "--prefill-attention-backend", "torch_native"], {}),
    (["--enable-deterministic-inference", "--speculative-algorithm", "EAGLE", "--speculative-eagle-topk", "2"], {}),
    (["--enable-deterministic-inference"], {"SGLANG_PAT_KV": "int4"}),
    (["--rl-on-policy-target", "fsdp"], {}),
    (["--enable-unified-cache-external-linker"], {}),
    (["--enable-pd-role-switch", "--disaggregation-mode", "decode"], {}),
    (["--kv-canary", "log"], {}),
    (["--page-size", "16"], {"SGLANG_PAT_KV": "int4"}),
    (["--kv-cache-dtype", "fp8_e4m3"], {"SGLANG_PAT_KV": "int4"}),
    (["--enable-hierarchical-cache"], {"SGLANG_PAT_KV": "int4"}),
    (["--enable-hierarchical-cache"], {}),
    (["--enable-memory-saver"], {}),
    (["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"], {}),
    (["--tp-size", "2", "--attn-dp-size", "2"], {}),
    (["--enable-lmcache"], {"SGLANG_PAT_KV": "int2"}),
    (["--disaggregation-mode", "decode"], {"SGLANG_PAT_KV": "int4"}),
    (["--prefill-attention-backend", "torch_native"], {"SGLANG_PAT_KV": "int4"}),
    (["--decode-attention-backend", "torch_native"], {"SGLANG_PAT_KV": "int4"}),
    (["--speculative-algorithm", "NGRAM"], {"SGLANG_PAT_KV": "int4"}),
    (["--chunked-prefill-size", "100"], {"SGLANG_PAT_KV": "int4"}),
    (["--enable-mixed-chunk"], {"SGLANG_PAT_KV": "int2"}),
    (["--enable-streaming-session"], {"SGLANG_PAT_KV": "int2"}),
    (["--enable-memory-saver"], {"SGLANG_PAT_KV": "int4"}),
    ([], {"SGLANG_PAT_KV": "int4", "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "1"}),
    (["--cuda-graph-backend-decode", "breakable"], {}),
    (["--cuda-graph-config", '{"decode": {"backend": "breakable"}}'], {}),
    (["--debug-cuda-graph"], {}),
    (["--enable-prefill-cp"], {}),
    (["--enable-nvidia-megakernel"], {}),
    (["--enable-amd-monokernel"], {}),
]
"""Flags and environment that ask for what is refused."""

WORDS = ("--", "SGLANG_")


def test_every_feature_that_works_is_shown_and_every_other_has_a_way_out() -> None:
    functions = {
        f"{path.name}::{name}"
        for path in TESTS.glob("test_*.py")
        for name in re.findall(r"^(?:def|class) (\w+)", path.read_text(), re.MULTILINE)
    }
    for feature in ALL:
        assert bool(feature.shown) == (feature.status != "refused"), feature.name
        assert bool(feature.instead) == (feature.status == "refused"), feature.name
        assert functions.issuperset(feature.shown), feature.name


def test_everything_that_flags_or_variables_ask_for_is_tried() -> None:
    tried = {word for flags, environment in ASKED_BY for word in [*flags, *environment] if word.startswith(WORDS)}
    for feature in features.REFUSED:
        if feature.asked is not None:
            asked_by = {word for word in re.findall(r"--[\w-]+|SGLANG_\w+", feature.how) if has(word)}
            assert asked_by <= tried, feature.name


def has(word: str) -> bool:
    """Whether this release has a flag; it has every variable."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return not word.startswith("--") or word in parser._option_string_actions


def resolve(flags: list[str]) -> None:
    """What the launcher does with its arguments."""
    server_args = prepare_server_args(flags)
    if hasattr(server_args, "resolve_once"):  # 0.5.23
        server_args.resolve_once()


@pytest.mark.parametrize(("flags", "environment"), ASKED_BY, ids=" ".join)
def test_what_is_asked_for_and_not_served_is_refused_before_anything_starts(
    flags: list[str], environment: dict[str, str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not all(map(has, [word for word in flags if word.startswith(WORDS)])):
        pytest.skip("not in this release")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for variable in (platform.AWAKE, "TRITON_INTERPRET"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    load_plugins()
    with pytest.raises(UnsupportedError) as refusal:
        resolve(["--model-path", str(model), "--device", "cpu", "--attention-backend", "pat", *flags])
    text = str(refusal.value)
    assert text.startswith("--attention-backend pat does not support ") and "\n" not in text
    assert any(word in text for word in [*flags, *environment] if word.startswith(WORDS))


def test_on_a_gpu_it_is_refused_before_weights_are_loaded(model: Path) -> None:
    """On a CPU, where the launcher says it, servers come no further."""
    flags = ["--model-path", str(model), "--device", "cpu", "--attention-backend", "torch_native"]
    server_args = prepare_server_args([*flags, "--enable-two-batch-overlap"])
    load_plugins()
    assert compat.registry.problem(compat.model.LOAD) == ""
    loaded: list[Any] = []
    plugin.load_model(loaded.append, SimpleNamespace(server_args=server_args))
    assert len(loaded) == 1, "servers with other backends are left alone"
    chosen: Any = SimpleNamespace(**(vars(server_args) | {"attention_backend": "pat"}))
    if hasattr(server_args, "resolve_once"):  # 0.5.23, where they are not resolved yet
        chosen = server_args
        chosen.attention_backend = "pat"
    with pytest.raises(UnsupportedError, match="does not support two-batch overlap"):
        plugin.load_model(loaded.append, SimpleNamespace(server_args=chosen))
    assert len(loaded) == 1


def test_a_cache_that_nobody_tested_is_not_followed() -> None:
    class CacheOfAnotherPlugin:
        root_node: Any = None

    req = SimpleNamespace(last_node=object(), session=None)
    assert compat.cache.path(CacheOfAnotherPlugin(), req) is None
    buffering: Any = RadixCache.create_simulated()
    req.last_node = buffering.root_node
    assert compat.cache.path(buffering, req) == []
    buffering.buffer_pipeline = object()
    assert compat.cache.path(buffering, req) is None
