"""What a model's config.json says of it before it is loaded: the words of backend/start/features.py, and no traceback."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_pat import model_config
from sglang_pat.backend.start.features import FEATURES
from sglang_pat.cli import build, model
from sglang_pat.compat import TESTED, release
from sglang_pat.kernels import cuda

CONFIG = Path(__file__).parent.parent / "docs" / "examples" / "config.json"


def shape(dim: int = 128, **fields: Any) -> dict[str, Any]:
    """A config.json."""
    return {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 8 * dim, "head_dim": dim, **fields}


def called(*names: str, **fields: Any) -> dict[str, Any]:
    return shape(architectures=list(names), **fields)


GDN = shape(256, model_type="qwen3_next", full_attention_interval=4)
MIMO = shape(
    192, v_head_dim=128, swa_head_dim=192, swa_v_head_dim=128, add_swa_attention_sink_bias=True, sliding_window=128
)
MLA = {"num_attention_heads": 20, "hidden_size": 2048, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 256}

REFUSED = {
    "hybrid models on a CPU": [(GDN, "cpu", ""), (shape(layer_types=["mamba", "attention"]), "cpu", "")],
    "gated delta nets on a Blackwell GPU": [(GDN, "cuda", "10.0"), ({"text_config": GDN}, "cuda", "12.0")],
    "attention in both directions within an image": [(called("Gemma4ForConditionalGeneration"), "cuda", "")],
    "MLA in hybrid models (Kimi-Linear), with attention sinks, with windows, and on a GPU with scaling by position (Mistral Large 3) and of other dimensions; sparse attention over latents (DSA: DeepSeek V3.2, GLM-5; DeepSeek V4)": [
        ({"text_config": {**GDN, "kv_lora_rank": 512}}, "cpu", ""),
        ({"text_config": {**MLA, "linear_attn_config": {"kda_layers": [1]}}}, "cuda", ""),
        ({**MLA, "qk_rope_head_dim": None}, "cuda", "9.0a"),
        ({**MLA, "swa_kv_lora_rank": 256}, "cuda", "9.0a"),
        ({**MLA, "llama_4_scaling": {"beta": 0.1}}, "cuda", "9.0a"),
        ({**MLA, "index_topk": 2048}, "cpu", ""),
        (called("DeepseekV4ForCausalLM"), "cuda", ""),
    ],
    "windows that do not apply to prompts (UnlimitedOCR)": [(called("UnlimitedOCRForCausalLM"), "cuda", "")],
    "encoder-decoder models": [
        (called("WhisperForConditionalGeneration"), "cuda", ""),
        (called("MllamaForConditionalGeneration", is_encoder_decoder=False), "cpu", ""),
        (shape(is_encoder_decoder=True), "cuda", ""),
    ],
    "attention in both directions by a decoder (EmbeddingGemma, HRM)": [
        (shape(use_bidirectional_attention=True), "cuda", ""),
        (called("HrmTextForCausalLM"), "cuda", ""),
    ],
    "encoders with windows (EmbeddingGemma 2)": [(called("EmbeddingGemma2Model"), "cuda", "")],
    "other pairs of unequal dimensions on a GPU": [(shape(128, v_head_dim=64), "cuda", ""), ({**MIMO, "swa_v_head_dim": 64}, "cuda", "9.0a")],
    "other head dimensions than those above": [
        (shape(80), "cuda", ""),
        (shape(12), "cpu", ""),
        ({**MLA, "qk_rope_head_dim": 128}, "cpu", ""),
        (shape(128, global_head_dim=512), "cuda", ""),
        (shape(256), "cuda", "8.6"),
    ],
    "temperature that grows with the context (Grok)": [(called("Grok1ForCausalLM", attn_temperature_len=1024), "cuda", "")],
}  # fmt: skip
"""A config.json, or some, for each refused model of features.py that does not take a flag."""


@pytest.mark.once
def test_every_refused_model_has_an_example() -> None:
    rows = [row for row in FEATURES["Models"] if row.status == "refused" and not row.how.startswith("`--")]
    assert {row.name for row in rows} == set(REFUSED)


@pytest.mark.once
@pytest.mark.parametrize(
    ("config", "device", "arch"),
    [one for several in REFUSED.values() for one in several],
    ids=lambda one: str(one)[:40],
)
def test_what_a_server_would_refuse_is_refused(config: dict[str, Any], device: Any, arch: str) -> None:
    verdict, reason = model.judge(config, device, arch)
    assert verdict == "refused" and reason


@pytest.mark.once
@pytest.mark.parametrize(
    ("config", "device", "arch"),
    [
        (json.loads(CONFIG.read_text()), "cuda", "9.0a"),
        (shape(80), "cpu", ""),
        (MLA, "cpu", ""),
        (MLA, "cuda", ""),
        (MLA, "cuda", "8.9"),
        (GDN, "cuda", "9.0a"),
        (shape(layer_types=["mamba", "attention"]), "cuda", "10.0"),
        (MIMO, "cuda", ""),
        (shape(256), "cuda", "8.0"),
        (shape(attention_chunk_size=128, model_type="mimo_v2_flash"), "cuda", ""),
        (called("Grok1ForCausalLM", attn_temperature_len=-1), "cuda", ""),
        ({"text_config": shape(64), "architectures": ["Qwen2VLForConditionalGeneration"]}, "cuda", ""),
        ({"thinker_config": {"text_config": shape(64)}}, "cuda", ""),
        ({"model_type": "gemma2", "num_attention_heads": 8, "hidden_size": 2304}, "cuda", ""),
        ({"num_attention_heads": 32.0, "hidden_size": 4096}, "cuda", ""),
    ],
)
def test_what_a_server_would_take_is_supported(config: dict[str, Any], device: Any, arch: str) -> None:
    verdict, reason = model.judge(config, device, arch)
    assert verdict == "supported" and "are looked at when a server starts" in reason


@pytest.mark.once
@pytest.mark.parametrize(
    "config",
    [{}, {"num_attention_heads": 8}, {"num_attention_heads": 7, "hidden_size": 10}, shape(-1), shape("128"), shape(True), {"text_config": {}}],
)  # fmt: skip
def test_what_config_json_does_not_say_is_not_known(config: dict[str, Any]) -> None:
    verdict, reason = model.judge(config, "cuda")
    assert verdict == "unknown" and reason.startswith("it")


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = (
    "architectures", "model_type", "text_config", "num_attention_heads", "hidden_size", "head_dim", "v_head_dim", "swa_head_dim",
    "swa_v_head_dim", "global_head_dim", "layer_types", "layers_block_type", "attn_temperature_len", "attn_logit_softcapping",
    "sliding_window", "dtype", "torch_dtype", "kv_lora_rank", "full_attn_idxs", "is_encoder_decoder",
)  # fmt: skip


@pytest.mark.once
@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from(FIELDS), JSON | st.just("gemma2") | st.just(128)), st.sampled_from(["cuda", "cpu"])
)
def test_any_json_has_a_verdict(config: dict[str, Any], device: Any) -> None:
    verdict, reason = model.judge(config, device, "9.0a")
    assert verdict in ("supported", "refused", "unknown") and reason.isprintable()


def test_the_architectures_are_sglangs() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "srt" / "models"
    text = "\n".join(path.read_text() for path in folder.glob("*.py"))
    missing = {name for name in model.ARCHITECTURES if not re.search(rf"\b{name}\b", text)}
    # 0.5.17 lacks two that came later.
    assert missing <= ({"DiffusionGemmaForBlockDiffusion", "EmbeddingGemma2Model"} if release() == TESTED[0] else set())


@pytest.mark.once
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not JSON"),
        (b"{" * 10, "not JSON"),
        (b"[" * 200_000, "not JSON"),
        (b'{"a":' * 100_000, "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b"1" * 10_000, "not JSON"),
        (b"[1]", "not a JSON object"),
        (b" " * (model_config.LONGEST + 1), "is too long for a model's config.json: more than 16 MiB"),
    ],
    ids=range(8),
)
def test_what_is_no_config_json_is_a_sentence(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(text)
    for name in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(model_config.ModelError) as error:
            model_config.read(model_config.find(str(name)))
        assert message in str(error.value)


@pytest.mark.once
def test_what_is_no_file_is_a_sentence(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "config.json").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    for name, message in {
        f"{tmp_path}/pipe": "is not a file",
        f"{tmp_path}": "cannot be read: Is a directory",
        f"{tmp_path}/empty": "cannot be read: No such file or directory",
        f"{tmp_path}/gone": "cannot be read: No such file or directory",
        "/dev/zero": "is not a file",
        "a" * 5000: "cannot be read: File name too long",
        "nobody/has-this": "is neither a folder here nor in the cache of Hugging Face",
    }.items():
        with pytest.raises(model_config.ModelError) as error:
            model_config.read(model_config.find(name))
        assert message in str(error.value), name


@pytest.mark.once
def test_a_name_is_looked_up_in_the_cache_of_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--some--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    with pytest.raises(model_config.ModelError, match="nothing is downloaded"):
        model_config.read(model_config.find("some/model"))
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text('{"head_dim": 64}')
    assert model_config.read(model_config.find("some/model")) == {"head_dim": 64}


@pytest.mark.once
@pytest.mark.parametrize(
    ("config", "needs"),
    [
        (shape(dtype="bfloat16"), model.Needs(((128, 128),), (False,), False, False, "bfloat16")),
        (shape(64, torch_dtype="float32", model_type="gpt_oss", sliding_window=128), model.Needs(((64, 64),), (True,), False, True, "float16")),
        ({**MIMO, "torch_dtype": "bfloat16"}, model.Needs(((192, 128),), (False, True), False, True, "bfloat16")),
        (shape(256, model_type="gemma2", sliding_window=4096), model.Needs(((256, 256),), (False,), True, True, "bfloat16")),
        (shape(256, model_type="gemma2", attn_logit_softcapping=None), model.Needs(((256, 256),), (False,), False, False, "bfloat16")),
        (shape(sliding_window=4096, use_sliding_window=False, dtype="float16"), model.Needs(((128, 128),), (False,), False, False, "float16")),
        (shape(global_head_dim=256, dtype="bfloat16"), model.Needs(((128, 128), (256, 256)), (False,), False, False, "bfloat16")),
        (called("Grok1ForCausalLM", dtype="bfloat16"), model.Needs(((128, 128),), (False,), True, False, "bfloat16")),
    ],
)  # fmt: skip
def test_what_a_model_needs_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], needs: model.Needs
) -> None:
    assert model.needs(config) == needs
    (tmp_path / "config.json").write_text(json.dumps(config))
    built: list[cuda.Variant] = []
    monkeypatch.setattr(cuda, "build", built.extend)
    monkeypatch.setattr("sglang_pat.jit.load", lambda name: None)
    assert build.main(["--model", str(tmp_path), "--arch", "9.0"]) == 0
    assert {(one.head_dim, one.v_head_dim) for one in built} == set(needs.dims)
    assert {one.sinks for one in built} == set(needs.sinks) and {one.caps for one in built} == {needs.capped}
    assert {str(one.dtype) for one in built} == {f"torch.{needs.dtype}"}
    assert not any(one.masks for one in built)
    built.clear()
    build.main(["--model", str(tmp_path), "--arch", "9.0", "--drafts"])
    drafts = [one for one in built if one.masks]
    assert drafts and any(one.limits for one in drafts) == needs.windows


@pytest.mark.once
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "/nowhere"], "--model: /nowhere cannot be read: No such file or directory"),
        (["--model", str(CONFIG), "--head-dim", "64"], "--head-dim follows from the model"),
        (["--model", str(CONFIG), "--logit-cap"], "--logit-cap follows from the model"),
    ],
)
def test_a_model_that_cannot_be_built_for_is_a_sentence(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        build.main([*words, "--arch", "9.0"], "sglang-pat build")
    error = capsys.readouterr().err
    assert error.startswith("sglang-pat build: ") and message in error and error.count("\n") == 1
