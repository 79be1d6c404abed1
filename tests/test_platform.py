from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang  # noqa: F401 - as in life: SGLang imports the platform, not the other way round
import torch
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig

from sglang_pat import platform

DORMANT = "sglang_pat.platform.cpu.DormantPlatform"
AWAKE = "sglang_pat.platform.cpu.CpuPlatform"

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without an accelerator")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for variable in (platform.AWAKE, "SGLANG_PLATFORM", "SGLANG_USE_CPU_ENGINE", "TRITON_INTERPRET"):
        # Set first, so that what a test adds to the environment is taken back.
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    return monkeypatch


def arguments(**chosen: Any) -> SimpleNamespace:
    fields = (
        "attention_backend",
        "prefill_attention_backend",
        "decode_attention_backend",
        "speculative_algorithm",
        "grammar_backend",
        "tokenizer_path",
        "revision",
    )
    others = {"enable_two_batch_overlap": False, "enable_dp_attention": False, "pp_size": 1}
    others |= {
        "model_path": "/no/model",
        "tokenizer_mode": "auto",
        "device": "cpu",
        "cuda_graph_config": CudaGraphConfig(),
    }
    return SimpleNamespace(**(dict.fromkeys(fields) | others | chosen))


def test_dormant_until_something_chooses_it(environment: pytest.MonkeyPatch) -> None:
    assert platform.activate() == DORMANT
    environment.setenv("SGLANG_PLATFORM", platform.NAME)
    assert platform.activate() == AWAKE


def test_subprocesses_of_a_server_with_pat_are_awake(environment: pytest.MonkeyPatch) -> None:
    environment.setenv(platform.AWAKE, "1")
    assert platform.activate() == AWAKE


def test_sglangs_own_cpu_engine_is_left_alone(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert platform.activate() is None


def test_another_platform_plugin_is_left_alone(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "vendor-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[sglang.srt.platforms]\nvendor = vendor:activate\n")
    environment.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert platform.activate() is None


@pytest.mark.parametrize("field", ["attention_backend", "prefill_attention_backend", "decode_attention_backend"])
def test_choosing_pat_wakes_it(field: str) -> None:
    from sglang_pat.platform.cpu import DormantPlatform

    dormant = DormantPlatform()
    dormant.apply_server_args_defaults(arguments(attention_backend="torch_native"))
    assert not dormant.is_out_of_tree()
    given = arguments(**{field: "pat"})
    dormant.apply_server_args_defaults(given)
    assert dormant.is_out_of_tree()
    assert given.cuda_graph_config.decode.backend == given.cuda_graph_config.prefill.backend == "disabled"
    assert dormant.get_device() == "cpu"


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        ({}, "llguidance"),
        ({"grammar_backend": "outlines"}, "outlines"),
        ({"tokenizer_mode": "slow"}, "none"),
        ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 6}, "none"),
        ({"tokenizer_path": "/no/tokenizer"}, "none"),
    ],
)
def test_grammars_are_computed_by_what_needs_no_gpu(chosen: dict[str, str], found: str, model: Path) -> None:
    """And what cannot be computed is refused when it is asked for, not when the server starts."""
    from sglang_pat.platform.cpu import DormantPlatform

    given = arguments(attention_backend="pat", model_path=str(model), **chosen)
    DormantPlatform().apply_server_args_defaults(given)
    assert given.grammar_backend == found


@pytest.mark.parametrize("changed", [{"eos_token_id": None}, {"vocab_size": 100}, {"eos_token_id": 10**6}])
def test_grammars_that_a_server_could_not_start_with_are_refused(
    changed: dict[str, int | None], model: Path, tmp_path: Path
) -> None:
    """As for encoders, whose answers have no end."""
    from sglang_pat.compat.arguments import choose_grammar_backend

    (tmp_path / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(json.loads((model / "config.json").read_text()) | changed))
    given = arguments(model_path=str(tmp_path))
    choose_grammar_backend(given)
    assert given.grammar_backend == "none"


def test_a_missing_device_is_still_an_error_with_another_backend() -> None:
    from sglang_pat.platform.cpu import DormantPlatform

    dormant = DormantPlatform()
    assert dormant.get_device() == "cpu"
    with pytest.raises(RuntimeError, match="add --attention-backend pat, or set SGLANG_PLATFORM=pat_cpu"):
        dormant.apply_server_args_defaults(arguments(attention_backend="torch_native"))
