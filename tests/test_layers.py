"""Layers by what their attention is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from transformers import PretrainedConfig

from sglang_pat import compat, plugin
from sglang_pat.backend import create, groups
from sglang_pat.backend.errors import UnsupportedError
from sglang_pat.backend.start import layers, support
from sglang_pat.kernels import capabilities
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
    runner = SimpleNamespace(
        token_to_kv_pool=None, model=model, kv_cache_dtype=torch.float32, model_config=SimpleNamespace(context_len=512)
    )
    assert len(compat.model.attention_layers(runner)) == 2
    assert {spec.window: count for spec, count in layers.count(runner).items()} == {0: 1, 100: 1}


def test_only_some_layers_have_sinks() -> None:
    """As in MiMo V2 and Granite; the others of those have None in their place."""
    model = torch.nn.ModuleList([torch.nn.Module() for _ in range(3)])
    for i, (name, sinks) in enumerate([("sinks", True), ("attention_sink_bias", True), ("sinks", False)]):
        model[i].attn = RadixAttention(8, 64, 1.0, 2, layer_id=i)
        setattr(model[i], name, torch.nn.Parameter(torch.zeros(8)) if sinks else None)
    runner = SimpleNamespace(
        token_to_kv_pool=None, model=model, kv_cache_dtype=torch.float32, model_config=SimpleNamespace(context_len=512)
    )
    assert layers.with_sinks(runner) == {0, 1}
    assert {spec.sinks: count for spec, count in layers.count(runner).items()} == {True: 2, False: 1}


def test_layers_that_cap_scores_are_told_from_others() -> None:
    """Some configurations say null for no cap, and 0 is none."""
    caps = (0.0, None, 50.0, 30)
    model = torch.nn.ModuleList(
        [RadixAttention(8, 64, 1.0, 2, layer_id=i, logit_cap=cap) for i, cap in enumerate(caps)]
    )
    runner = SimpleNamespace(
        token_to_kv_pool=None, model=model, kv_cache_dtype=torch.float32, model_config=SimpleNamespace(context_len=512)
    )
    assert {spec.capped: count for spec, count in layers.count(runner).items()} == {False: 2, True: 2}
    assert [compat.model.logit_cap(layer) for layer in model] == [0.0, 0.0, 50.0, 30.0]


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
    with pytest.raises(UnsupportedError, match="encoder-only attention with a window, which Both uses"):
        support.check_model(encoder(window=63), fallback="triton")


def test_chunks_are_refused_where_the_model_has_them() -> None:
    """`use_irope` alone says nothing: Muse Spark sets it for layers with RoPE."""
    runner = encoder()
    (runner.token_to_kv_pool,) = compat.pool.kv_pools(hybrid_runner().token_to_kv_pool)
    runner.model = torch.nn.ModuleList([RadixAttention(8, 64, 1.0, 2, layer_id=0, use_irope=True)])
    runner.model_config.hf_config = PretrainedConfig(architectures=["MuseSparkForConditionalGeneration"])
    support.check_model(runner, fallback="triton")
    runner.model_config.hf_config = PretrainedConfig(architectures=["Llama4ForConditionalGeneration"])
    with pytest.raises(
        UnsupportedError, match=r"attention in chunks \(Llama 4\), which Llama4ForConditionalGeneration uses"
    ):
        support.check_model(runner, fallback="triton")


def test_a_model_that_asks_for_log_sum_exps_is_refused_at_start() -> None:
    iquest_q1 = pytest.importorskip("sglang.srt.models.iquest_q1", reason="not in this release")
    attention = iquest_q1.IQuestQ1Attention.__new__(iquest_q1.IQuestQ1Attention)
    torch.nn.Module.__init__(attention)
    runner = encoder()
    (runner.token_to_kv_pool,) = compat.pool.kv_pools(hybrid_runner().token_to_kv_pool)
    runner.model = attention
    attention.attn, attention.enable_sink_attention = RadixAttention(8, 64, 1.0, 2, layer_id=0), False
    support.check_model(runner, fallback="triton")
    attention.enable_sink_attention = True
    with pytest.raises(UnsupportedError, match=r"log-sum-exps .* \(IQuest-Q1\), which Both uses"):
        support.check_model(runner, fallback="triton")


def test_laguna_is_warned_of_where_it_would_prefill_on_triton(caplog: pytest.LogCaptureFixture) -> None:
    runner = hybrid_runner("cuda")
    runner.model_config.hf_config = PretrainedConfig(architectures=["LagunaForCausalLM"])
    runner.model_config.is_draft_model = False
    support.check_prefill(runner, "fa3")
    assert "Laguna" not in caplog.text
    support.check_prefill(runner, "triton")
    assert "wrong answers of Laguna" in caplog.text


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_drafts_longer_than_a_window_are_refused(device: capabilities.Device) -> None:
    spec = AttentionSpec(8, 2, 64, 64, FORMATS["bfloat16"], 100)
    assert support._spec_problem(spec, device, 0) is support._spec_problem(spec, device, 100) is None
    assert "longer than a window" in str(support._spec_problem(spec, device, 101))


@pytest.mark.parametrize(("radius", "name"), [(-1, "flashinfer"), (2, "triton")])
def test_draft_models_on_gpus_run_on_a_stock_backend_whatever_their_layers_are(
    radius: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No kernel here has their head dimension, and a window of 3 is shorter than a draft."""
    arguments = dict.fromkeys(["attention_backend", "prefill_attention_backend", "decode_attention_backend"], "pat")
    runner = SimpleNamespace(
        model=torch.nn.ModuleList([RadixAttention(8, 80, 1.0, 2, layer_id=0, sliding_window_size=radius)]),
        model_config=SimpleNamespace(context_len=512, hf_config=PretrainedConfig()), device="cuda", dtype=torch.float16,
        kv_cache_dtype=torch.float16, token_to_kv_pool=None, req_to_token_pool=SimpleNamespace(req_generation=None), is_draft_worker=True,
        server_args=SimpleNamespace(**arguments, device="cuda", speculative_algorithm="EAGLE3", speculative_num_draft_tokens=8),
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr("sglang.srt.utils.is_flashinfer_available", lambda: True)
    for stock in ("flashinfer", "triton"):
        monkeypatch.setitem(ATTENTION_BACKENDS, stock, lambda runner, stock=stock: stock)
    assert create.create(runner) == name
    monkeypatch.setattr(compat.arguments, "of_this_process", lambda: runner.server_args)
    for named, wanted in ((None, name), ("pat", name), ("fa3", "fa3")):
        factory = SimpleNamespace(draft_attn_backend=named, draft_model_runner=runner)
        assert plugin.draft_backend(lambda factory: factory.draft_attn_backend, factory) == wanted


@pytest.mark.parametrize("named", [None, "fa3"])
def test_drafts_of_other_servers_are_left_alone(named: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang then takes the server's own backend; this plugin is loaded in every server."""
    arguments = dict.fromkeys(["attention_backend", "prefill_attention_backend", "decode_attention_backend"], "triton")
    monkeypatch.setattr(compat.arguments, "of_this_process", lambda: SimpleNamespace(**arguments))
    factory = SimpleNamespace(draft_attn_backend=named, draft_model_runner=None)
    assert plugin.draft_backend(lambda factory: factory.draft_attn_backend, factory) == named


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
        "kv_bytes_by_queries": {"1": 60, "16": 40},
        "fallbacks": 1,
        "too_large": 0,
        "unshared": 3,
        "unpaid": 0,
    }
    second = first | {"work_items": 8, "plans": 2, "kv_bytes_by_queries": {"2": 100}, "fallbacks": 2, "too_large": 3}
    second |= {"unshared": 2, "unpaid": 1}
    total = groups.total([first, second])
    by_queries = {"1": 60, "2": 100, "16": 40}
    summed = {
        "plans": 3,
        "planning_us": 14,
        "kv_bytes": 200,
        "kv_bytes_unpacked": 600,
        "kv_bytes_by_queries": by_queries,
    }
    assert total == first | summed | {"fallbacks": 2, "too_large": 3, "unshared": 2}
    assert list(total["kv_bytes_by_queries"]) == ["1", "2", "16"]


def pool_for_windows(windowed: list[int], full: list[int]) -> SWAKVPool:
    return SWAKVPool(
        size=8, size_swa=4, page_size=1, dtype=torch.float32, head_num=2, head_dim=64, device="cpu",
        swa_attention_layer_ids=windowed, full_attention_layer_ids=full,
    )  # fmt: skip


def test_in_a_pool_of_its_own_every_window_is_one() -> None:
    """Its slots have other numbers, however much it holds."""
    model = torch.nn.ModuleList(
        RadixAttention(8, 64, 1.0, 2, layer_id=i, sliding_window_size=9999 if i else -1) for i in (0, 1)
    )
    runner = SimpleNamespace(model=model, kv_cache_dtype=torch.float32, model_config=SimpleNamespace(context_len=512))
    runner.token_to_kv_pool = pool_for_windows([1], [0])
    assert {spec.window: count for spec, count in layers.count(runner).items()} == {0: 1, 10000: 1}


@pytest.mark.parametrize(
    ("radius", "message"),
    [
        (2**31 - 1, "a layer without a window whose KV is in the pool of those with one"),
        (-1, "a layer without a window whose KV is in the pool of those with one"),
        (63, "a layer with a window whose KV is in"),
    ],
)
def test_a_layer_in_the_wrong_pool_is_refused(radius: int, message: str) -> None:
    layer = RadixAttention(8, 64, 1.0, 2, layer_id=1, sliding_window_size=radius)
    windowed = radius == 63
    pool = pool_for_windows([0], [1]) if windowed else pool_for_windows([1], [0])
    assert message in (support.pool_problem(layer, pool) or "")
    right = pool_for_windows([1], [0]) if windowed else pool_for_windows([0], [1])
    assert support.pool_problem(layer, right) is None


def hybrid_runner(device: str = "cpu") -> SimpleNamespace:
    """What matters here of a `ModelRunner` whose layers 1 and 3 of 4 have KV; the others of one class and another do not."""
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool

    full = MHATokenToKVPool(
        size=16, page_size=1, dtype=torch.float32, head_num=2, head_dim=64, layer_num=2, device="cpu", enable_memory_saver=False
    )  # fmt: skip
    pool = HybridLinearKVPool(
        size=16, dtype=torch.float32, page_size=1, head_num=2, head_dim=64, full_attention_layer_ids=[1, 3], device="cpu",
        mamba_pool=None, full_kv_pool=full,
    )  # fmt: skip
    runner = encoder()
    runner.model = torch.nn.ModuleList([RadixAttention(8, 64, 1.0, 2, layer_id=i) for i in range(4)])
    runner.device, runner.token_to_kv_pool = device, pool
    runner.req_to_token_pool = SimpleNamespace(mamba_pool=None)
    return runner


def test_layers_without_kv_are_none() -> None:
    runner = hybrid_runner()
    assert [layer.layer_id for layer in compat.model.attention_layers(runner)] == [1, 3]
    assert list(layers.count(runner).values()) == [2]


def test_a_hybrid_pool_is_written_and_read_by_the_layers_own_ids() -> None:
    pool = hybrid_runner().token_to_kv_pool
    layer = RadixAttention(8, 64, 1.0, 2, layer_id=3)
    k, v = torch.randn(2, 1, 2, 64).unbind()
    with torch.no_grad():
        compat.pool.save_kv(pool, layer, torch.tensor([5]), k, v)
    assert torch.equal(pool.get_key_buffer(3)[5], k[0])
    assert torch.equal(pool.get_value_buffer(3)[5], v[0])
    assert not pool.get_key_buffer(1).any()
    assert compat.pool.kv_pools(pool)[0].get_key_buffer(1).any(), "of the second layer that has any"


def test_hybrid_models_are_refused_where_their_other_layers_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UnsupportedError, match=r"does not support hybrid models like Both on a CPU, .* serve it on a GPU"
    ):
        support.check_model(hybrid_runner(), "triton")
    monkeypatch.setattr(compat.stock, "lists_gdn_backends", lambda _: True)
    with pytest.raises(
        UnsupportedError, match=r"does not support Both on a Blackwell GPU, .* use --attention-backend triton"
    ):
        support.check_model(hybrid_runner("cuda"), "triton")


def test_a_pool_in_which_v_has_no_room_is_refused() -> None:
    """As 0.5.17 makes for MiMo V2 on a CPU."""
    layer = RadixAttention(8, 64, 1.0, 2, layer_id=1, v_head_dim=32)
    message = "K and V of 64 and 32 dimensions in a KV pool of 64 and 64"
    assert support.pool_problem(layer, pool_for_windows([0], [1])) == message
    assert support.pool_problem(layer, pool_for_windows([0], [1]).full_kv_pool) == message


@pytest.mark.parametrize("phase", ["prefill_attention_backend", "decode_attention_backend"])
def test_beside_a_pool_for_windows_torch_native_is_refused(phase: str) -> None:
    runner = encoder()
    setattr(runner.server_args, phase, "torch_native")
    assert support.partner_problem(runner) is None
    runner.token_to_kv_pool = pool_for_windows([1], [0])
    assert "torch_native, which reads a KV pool for windows by wrong slots" in (support.partner_problem(runner) or "")


def test_hybrid_models_with_a_pool_for_windows_are_refused() -> None:
    runner = hybrid_runner("cuda")
    runner.token_to_kv_pool = pool_for_windows([1], [0])
    with pytest.raises(UnsupportedError, match="hybrid models like Both with a KV pool for windows"):
        support.check_model(runner, "triton")


def test_a_stage_whose_layers_have_no_kv_decodes_nothing() -> None:
    """Of a hybrid model that is served by several (`--pp-size`)."""
    runner = hybrid_runner()
    runner.model = torch.nn.ModuleList([RadixAttention(8, 64, 1.0, 2, layer_id=0)])
    assert not layers.count(runner)


def test_sglang_lists_backends_beside_gated_delta_nets_on_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.configs import Qwen3NextConfig

    runner = hybrid_runner("cuda")
    runner.model_config.hf_config, runner.model_config.is_draft_model = Qwen3NextConfig(), False
    assert not compat.stock.lists_gdn_backends(runner)
    monkeypatch.setattr("sglang.srt.utils.is_blackwell", lambda: True)
    assert compat.stock.lists_gdn_backends(runner)


def test_hybrid_models_with_mla_are_refused_for_it() -> None:
    runner = hybrid_runner("cuda")
    runner.use_mla_backend = True
    with pytest.raises(UnsupportedError, match="does not support MLA in hybrid models like Both"):
        support.check_model(runner, "triton")


def test_hybrid_models_are_served_from_the_pool_of_their_attention_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that adds something to it, as 0.5.23 has one, belongs to a backend of SGLang's own."""
    runner = hybrid_runner("cuda")
    runner.dtype = runner.kv_cache_dtype = torch.bfloat16
    monkeypatch.setattr(compat.stock, "lists_gdn_backends", lambda _: False)
    support.check_model(runner, "triton")
    runner.token_to_kv_pool.__class__ = type("OtherPool", (type(runner.token_to_kv_pool),), {})
    with pytest.raises(UnsupportedError, match="does not support a KV pool of the kind OtherPool, which Both uses"):
        support.check_model(runner, "triton")


@pytest.mark.skipif(compat.release() != "0.5.17", reason="0.5.23's Triton asks a layer that has KV")
def test_a_backend_that_asks_the_first_layer_for_kv_does_not_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.configs import NemotronHConfig

    runner = hybrid_runner("cuda")
    runner.model_config.hf_config, runner.model_config.is_draft_model = NemotronHConfig(), False
    support.check_prefill(runner, "fa3")
    with pytest.raises(UnsupportedError, match=r"would prefill on triton, which SGLang 0.5.17 cannot make for a model"):
        support.check_prefill(runner, "triton")
