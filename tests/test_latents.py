"""MLA on a CPU: latents are read once for K and V, by all heads, and greedy answers are those of transformers, which makes K and V of them."""

from __future__ import annotations

import json
import random
import unittest
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepseek
import msgspec
import pytest
import test_cpu_kernel
import test_verify
import torch
from conftest import TOKENS, UNPINNED, amid_aborts, assert_sound, drafts, flush, generate, generate_all, importing_kits
from forked import ForkedServer
from kernel_cases import TOLERANCE, of_latents, random_trees
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA
from sglang.srt.models.minicpm3 import MiniCPM3AttentionMLA
from sglang.srt.models.sarvam_moe import SarvamMoEMLAAttention
from sglang.srt.runtime_context import get_parallel
from trees import random_batch

from sglang_pat import compat, model_config, plugin
from sglang_pat.backend import create
from sglang_pat.backend.errors import UnsupportedError
from sglang_pat.backend.kv import NewTokens
from sglang_pat.backend.kv.choose import store_of
from sglang_pat.backend.kv.latent import LatentStore
from sglang_pat.backend.kv.plain import PlainStore
from sglang_pat.backend.start import layers, support
from sglang_pat.cli import build
from sglang_pat.demo import workload
from sglang_pat.demo.server import Server
from sglang_pat.kernels import capabilities, cuda
from sglang_pat.kernels.arguments import Tables
from sglang_pat.packing import CPU_TILES, FORMATS, AttentionSpec
from sglang_pat.radix_bridge import hooks
from sglang_pat.radix_bridge.events import ROOT, NodeInserted, RequestBound
from sglang_pat.radix_bridge.observer import apply

with importing_kits():
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.test.kits.attention_unittest.attention_methods import mla_attention as mla

plugin.register()

LATENTS = AttentionSpec(16, 1, 576, 512, FORMATS["bfloat16"], latent=True)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.once
def test_a_token_of_latents_has_the_bytes_of_k() -> None:
    assert LATENTS.cost().token_bytes == 1152
    assert msgspec.structs.replace(LATENTS, latent=False).cost().token_bytes == 2176
    assert "16/1 heads of 576 and 512, bfloat16 latents" in str(LATENTS)


@pytest.mark.once
def test_latents_of_other_dimensions_are_refused() -> None:
    assert capabilities.refusal(LATENTS, "cpu") is None
    assert "head dimension of 584" in str(capabilities.refusal(msgspec.structs.replace(LATENTS, head_dim=584), "cpu"))
    assert "head dimension of 576" in str(capabilities.refusal(msgspec.structs.replace(LATENTS, latent=False), "cpu"))
    assert capabilities.refusal(LATENTS, "cuda") is None
    for dims in ((512, 512), (584, 512), (80, 64)):  # the first without columns for positions
        other = msgspec.structs.replace(LATENTS, head_dim=dims[0], v_head_dim=dims[1])
        assert f"with {dims[0]} (K) and {dims[1]} (V) columns" in str(capabilities.refusal(other, "cuda"))
    assert capabilities.refusal(msgspec.structs.replace(LATENTS, kv=FORMATS["int4"]), "cuda")


@pytest.mark.once
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [4, 20])
def test_extends(dtype: torch.dtype, heads: int) -> None:
    generator = random.Random(heads)
    batch = random_batch(generator, depth=2, fanout=3, length=80)
    added = [generator.choice([0, 1, 1, 3, 6, 70, 200]) for _ in batch.seq_lens]
    added[:3] = [1, 3, 2]
    case = of_latents(test_cpu_kernel.Extended(batch, added, heads, 1, 80, 64, dtype))
    assert case.difference(case.decode(case.plan(CPU_TILES, 2))) < TOLERANCE[dtype]
    assert case.shared > 0 or heads == 20, "a part of many heads costs more than what is shared here"


@pytest.mark.once
@pytest.mark.parametrize("tokens", [1, 4, 64])
@pytest.mark.parametrize("heads", [4, 20])
def test_random_trees_of_drafts(tokens: int, heads: int) -> None:
    generator = random.Random(heads * tokens)
    batch = random_batch(generator, depth=2, fanout=3, length=80)
    case = of_latents(test_verify.verified(batch, random_trees(generator, batch, tokens), heads, 1))
    for policy in ("optimal", "naive"):
        assert case.error(case.plan(CPU_TILES, 8, policy)) < TOLERANCE[torch.float32]


@pytest.mark.once
@pytest.mark.parametrize("arch", ["9.0a", "8.9", "10.0"])
def test_the_modules_of_a_model_are_compiled_ahead_without_extends(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every number of heads, whose rows may straddle work items or not: it depends on --tp-size and on drafts."""
    (tmp_path / "config.json").write_text(json.dumps(deepseek.CONFIG | deepseek.OF_GPUS | {"torch_dtype": "bfloat16"}))
    built: list[cuda.Variant] = []
    monkeypatch.setattr(cuda, "build", built.extend)
    for flags, lengths in ([], (1,)), (["--drafts"], (1, 2, 3, 4)):
        built.clear()
        build.main(["--model", str(tmp_path), "--arch", arch, *flags])
        specs = [
            msgspec.structs.replace(LATENTS, heads=heads, query_tokens=tokens)
            for heads in (1, 4, 5, 8, 10, 16, 20, 32, 40, 64, 128)
            for tokens in lengths
        ]
        assert set(built) == {one for spec in specs for one in cuda.variants(spec, arch, dtype=torch.bfloat16)}
        assert {(one.masks, one.straddles) for one in built} == {
            (length > 1, straddles) for length in lengths for straddles in (False, True)
        }


# A model's layers and its pool.


def latent_pool(dtype: torch.dtype = torch.float32, rank: int = 64, rope: int = 16, **more: Any) -> MLATokenToKVPool:
    """Of two layers."""
    kind = compat.pool.latent_pool() if more else MLATokenToKVPool
    return kind(
        size=16, page_size=1, dtype=dtype, kv_lora_rank=rank, qk_rope_head_dim=rope, layer_num=2, device="cpu", enable_memory_saver=False, **more
    )  # fmt: skip


def model_of_latents(
    device: str = "cpu", architecture: str = "DeepseekV2ForCausalLM", rank: int = 64, rope: int = 16, kv: torch.dtype = torch.float32,
    module: type = torch.nn.Module, **config: Any,
) -> SimpleNamespace:  # fmt: skip
    """What matters here of a `ModelRunner` with two layers, each a `module`."""
    model = torch.nn.ModuleList([module() for _ in range(2)])
    for i, module in enumerate(model):
        module.attn_mqa = RadixAttention(4, rank + rope, 1.0, 1, layer_id=i, v_head_dim=rank)
        module.attn_mha = RadixAttention(4, 48, 1.0, 4, layer_id=i, v_head_dim=32)
    backends = dict.fromkeys(["attention_backend", "prefill_attention_backend", "decode_attention_backend"], "pat")
    return SimpleNamespace(
        model=model, device=device, dtype=kv if kv.itemsize > 1 else torch.bfloat16, kv_cache_dtype=kv, token_to_kv_pool=latent_pool(kv, rank, rope),
        req_to_token_pool=None, use_mla_backend=True, server_args=SimpleNamespace(**backends),
        model_config=SimpleNamespace(
            context_len=512, hf_config=SimpleNamespace(architectures=[architecture], **config), is_multimodal=False, is_encoder_decoder=False,
        ),
    )  # fmt: skip


class Dispatching(torch.nn.Module):
    """A module that asks SGLang's lists what to give a backend, as those with DeepSeek's code do."""

    dispatch_attn_forward_method = DeepseekV2AttentionMLA.dispatch_attn_forward_method


def runner_of(module: type, kv: torch.dtype) -> Any:
    """A `ModelRunner` whose model has such a module, which is not set up."""
    made: torch.nn.Module = module.__new__(module)
    torch.nn.Module.__init__(made)
    return SimpleNamespace(model=torch.nn.ModuleList([made]), kv_cache_dtype=kv)


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """Let there be a GPU of this compute capability, and all stock backends."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr("sglang.srt.utils.is_flashinfer_available", lambda: True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)


def test_the_layers_are_those_that_read_latents() -> None:
    """Not those for K and V that are made of them, which have the same ids."""
    found = support.check_model(model_of_latents(), "torch_native")
    spec = AttentionSpec(4, 1, 80, 64, FORMATS["float32"], latent=True)
    assert (
        found == {spec: 2} and layers.SpecReader(model_of_latents()).spec(model_of_latents().model[0].attn_mqa) == spec
    )


def test_layers_that_do_not_fit_the_pool_are_refused() -> None:
    runner = model_of_latents()
    runner.model[1].attn_mqa = RadixAttention(4, 96, 1.0, 1, layer_id=1, v_head_dim=64)
    with pytest.raises(UnsupportedError, match="in a KV pool of 80 and 64, which DeepseekV2ForCausalLM uses"):
        support.check_model(runner, "torch_native")


@pytest.mark.parametrize(
    ("architecture", "device", "config", "message"),
    [
        ("KimiLinearForCausalLM", "cuda", {"linear_attn_config": {"kda_layers": [1]}}, "MLA in hybrid models"),
        ("DeepseekV32ForCausalLM", "cpu", {"index_topk": 2048}, r"sparse attention \(DSA\)"),
        ("GlmMoeDsaForCausalLM", "cuda", {"index_topk": 2048}, r"sparse attention \(DSA\)"),
        ("DeepseekV4ForCausalLM", "cpu", {}, "the attention of DeepSeek V4"),
        (
            "DeepseekV3ForCausalLM",
            "cpu",
            {"kv_lora_rank": 64, "model_type": "deepseek_v3", "rope_scaling": None},
            "DeepSeek's attention without YaRN",
        ),
        ("Dots3NoteForCausalLM", "cpu", {"kv_lora_rank": 64, "swa_kv_lora_rank": 32}, "MLA with sliding windows"),
        ("Dots3NoteForCausalLM", "cuda", {"kv_lora_rank": 64, "swa_kv_lora_rank": 32}, "MLA with sliding windows"),
        ("MistralLarge3ForCausalLM", "cuda", {"llama_4_scaling": {"beta": 0.1}}, "MLA with scaling by position"),
    ],
)
def test_what_is_not_served_is_named(architecture: str, device: str, config: dict[str, Any], message: str) -> None:
    runner = model_of_latents(device, architecture, **config)
    with pytest.raises(
        UnsupportedError, match=f"does not support {message}.*, which {architecture} uses: leave it out"
    ):
        support.check_model(runner, "triton")


@pytest.mark.parametrize("kv", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_what_a_gpu_serves_is_refused_again_by_one_name(kv: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dimensions that its kernels have are asked of the loaded model."""
    found = support.check_model(model_of_latents("cuda", rank=512, rope=64, kv=kv), "triton")
    assert found == {AttentionSpec(4, 1, 576, 512, layers.kv_format(kv), latent=True): 2}
    for rank, rope in ((64, 16), (512, 0)):
        with pytest.raises(UnsupportedError, match=r"does not support latents of .*, which DeepseekV2ForCausal"):
            support.check_model(model_of_latents("cuda", rank=rank, rope=rope, kv=kv), "triton")
    monkeypatch.setattr(model_config, "LATENTS_ON_GPUS", False)
    with pytest.raises(UnsupportedError, match="MLA on a GPU, which DeepseekV2ForCausalLM uses: leave it out"):
        support.check_model(model_of_latents("cuda", rank=512, rope=64, kv=kv), "triton")


@pytest.mark.parametrize(
    ("capability", "kv", "module", "name"),
    [
        ((9, 0), torch.bfloat16, Dispatching, "fa3"),
        ((9, 0), torch.float8_e4m3fn, Dispatching, "fa3"),
        ((9, 0), torch.float8_e5m2, Dispatching, "triton"),
        ((9, 0), torch.bfloat16, MiniCPM3AttentionMLA, "triton"),
        ((9, 0), torch.bfloat16, SarvamMoEMLAAttention, "triton"),
        ((8, 0), torch.bfloat16, Dispatching, "triton"),
        ((10, 0), torch.bfloat16, Dispatching, "flashinfer"),
        ((10, 0), torch.bfloat16, MiniCPM3AttentionMLA, "triton"),
        ((12, 0), torch.bfloat16, Dispatching, "triton"),
    ],
)
def test_the_backend_that_prefills_is_the_one_that_sglang_chooses(
    capability: tuple[int, int], kv: torch.dtype, module: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where models have SGLang's lists to ask; others take Triton's to be any other."""
    on_gpu(monkeypatch, capability)
    spec = msgspec.structs.replace(LATENTS, kv=layers.kv_format(kv))
    assert create.stock_name(runner_of(module, kv), [spec]) == name


@pytest.mark.parametrize(
    ("device", "prefill", "decode", "problem"),
    [
        ("cuda", "fa3", "pat", None),
        ("cuda", "pat", "pat", None),
        ("cuda", "flashinfer", "pat", r"flashinfer for prefill of MLA models \(here fa3 is\)"),
        ("cuda", "torch_native", "pat", r"torch_native for prefill of MLA models \(here fa3 is\)"),
        ("cuda", "pat", "fa3", "fa3 for decode steps of MLA models"),
        ("cuda", "pat", "torch_native", "torch_native for decode steps of MLA models"),
        ("cpu", "torch_native", "pat", None),
        ("cpu", "pat", "torch_native", None),
        ("cpu", "fa3", "pat", "fa3, which was not tried with latents"),
    ],
)
def test_a_second_backend(
    device: str, prefill: str, decode: str, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU it may be the one that prefills beside PAT anyway, and only prefill."""
    on_gpu(monkeypatch, (9, 0))
    dims = {"rank": 512, "rope": 64, "kv": torch.bfloat16} if device == "cuda" else {}
    runner = model_of_latents(device, module=Dispatching, **dims)
    runner.server_args.prefill_attention_backend, runner.server_args.decode_attention_backend = prefill, decode
    if problem is None:
        assert support.check_model(runner, "triton")
        return
    with pytest.raises(UnsupportedError, match=f"does not support {problem}, as a second backend: let pat do"):
        support.check_model(runner, "triton")


def test_drafts_with_latents_on_another_backend_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, (9, 0))
    runner = model_of_latents("cuda", rank=512, rope=64, kv=torch.bfloat16, module=Dispatching)
    monkeypatch.setattr(compat.arguments, "of_this_process", lambda: runner.server_args)
    for named in (None, "pat", "fa3"):
        factory = SimpleNamespace(draft_attn_backend=named, draft_model_runner=runner)
        assert plugin.draft_backend(lambda factory: factory.draft_attn_backend, factory) == "fa3"
    factory = SimpleNamespace(draft_attn_backend="triton", draft_model_runner=runner)
    with pytest.raises(UnsupportedError, match=r"drafts of MLA models on triton .*, and they run on fa3"):
        plugin.draft_backend(lambda factory: factory.draft_attn_backend, factory)


def test_models_treat_pat_as_the_backend_that_prefills(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.model_executor.model_runner_components import misc_utils
    from sglang.srt.models.deepseek_common import attention_backend_handler, utils
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla

    registry = attention_backend_handler.AttentionBackendRegistry
    listed = utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
    assert forward_mla.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS is listed and "pat" not in listed
    monkeypatch.setattr(registry, "_handlers", dict(registry._handlers))
    monkeypatch.setattr(utils, "FORWARD_ABSORB_CORE_ATTENTION_BACKENDS", copied := list(listed))
    for stock in ("triton", "fa3", "fa3"):
        compat.model.treat_as("pat", stock)
        assert registry.get_handler("pat") is registry.get_handler(stock)
        assert copied.count("pat") == (stock == "fa3"), "Triton's backend takes Q whole"
    assert "pat" in misc_utils.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS


def test_sinks_that_sglang_would_drop_are_refused() -> None:
    runner = model_of_latents()
    runner.model[1].learnable_sink_param = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(UnsupportedError, match="MLA with attention sinks, which DeepseekV2ForCausalLM uses"):
        support.check_model(runner, "torch_native")


def test_latents_of_few_bits_are_refused() -> None:
    message = r"a KV cache of int4 \(SGLANG_PAT_KV\) for MLA models like DeepseekV2ForCausalLM: unset it"
    for device in ("cpu", "cuda"):
        with pytest.raises(UnsupportedError, match=message):
            support.check_low_bit(model_of_latents(device), {"SGLANG_PAT_KV": "int4"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *FP8], ids=str)
def test_latents_are_written_once_and_v_is_part_of_them(dtype: torch.dtype) -> None:
    # As 0.5.17 makes the pool on a plugin's platform.
    pool = latent_pool(dtype, index_head_dim=None)
    store, layer = (
        store_of(SimpleNamespace(token_to_kv_pool=pool), []),
        RadixAttention(4, 80, 1.0, 1, layer_id=1, v_head_dim=64),
    )
    assert isinstance(store, LatentStore)
    k, slots = torch.randn(3, 1, 80), torch.tensor([5, 1, 9])
    layer.k_scale = torch.tensor(2.0)
    with torch.no_grad(), get_parallel().override(dcp_enabled=False):
        store.write(layer, k, k[..., :64], NewTokens(slots, slots, slots, None))
    found = store.read(layer, Tables(slots, slots, slots))
    assert torch.equal(found.k[slots].float(), k.to(dtype).float()) and found.k_scale == found.v_scale == 1.0
    assert torch.equal(found.v[slots].float(), found.k[slots][..., :64].float())
    assert found.v.data_ptr() == found.k.data_ptr() and not pool.get_key_buffer(0).float().any()


def test_other_pools_are_written_as_ever() -> None:
    pool = MHATokenToKVPool(8, 1, torch.float32, 2, 16, 1, "cpu", enable_memory_saver=False)
    assert (
        type(store_of(SimpleNamespace(token_to_kv_pool=pool), [])) is PlainStore
        and compat.pool.latent_dims(pool) is None
    )
    sparse = latent_pool()
    sparse.use_dsa = True
    assert compat.pool.latent_dims(sparse) is None


# SGLang's own tests of attention backends.

CASES = {case.name: case for case in mla.make_mla_cases("pat")}
SHAPE: dict[str, Any] = {"device": "cpu", "kv_lora_rank": 64, "qk_rope_head_dim": 16, "dtype": torch.float32}
CLOSE: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}
SHARED = 300
"""Tokens of a prefix that requests of a batch share."""


@pytest.fixture
def _kit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its writes of latents by torch: SGLang's are a kernel of Triton."""

    def set_by_torch(pool: Any, layer: Any, slots: Any, nope: torch.Tensor, rope: torch.Tensor) -> None:
        pool.set_kv_buffer(layer, slots, torch.cat([nope, rope], -1), nope)

    monkeypatch.setattr(MLATokenToKVPool, "set_mla_kv_buffer", set_by_torch)
    with torch.no_grad():
        yield


def assert_right(fixture: Any) -> None:
    torch.testing.assert_close(mla.run_mla_fixture_eager(fixture), mla.expected_mla_fixture_output(fixture), **CLOSE)


def beside_torch_native(fixture: Any) -> Any:
    """The fixture with `--decode-attention-backend pat`."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    prefill = ATTENTION_BACKENDS["torch_native"](fixture.runner)
    fixture.backend = HybridAttnBackend(fixture.runner, decode_backend=fixture.backend, prefill_backend=prefill)
    return fixture


@pytest.mark.usefixtures("_kit")
@pytest.mark.parametrize("layout", ["contiguous", "shuffled_pages"])
@pytest.mark.parametrize("rope", [0, 16])
@pytest.mark.parametrize("name", CASES)
def test_kit(name: str, rope: int, layout: str) -> None:
    shape = SHAPE | {"qk_rope_head_dim": rope}
    mla.run_mla_attention_case(unittest.TestCase(), CASES[name], loc_layout=layout, **shape, **CLOSE)


@pytest.mark.usefixtures("_kit")
@pytest.mark.parametrize("name", CASES)
def test_kit_beside_a_prefill_backend(name: str) -> None:
    """`torch_native` prefills over latents too."""
    assert_right(beside_torch_native(mla.build_mla_attention_fixture(unittest.TestCase(), CASES[name], **SHAPE)))


def in_two_tensors(fixture: Any) -> Any:
    """The fixture, its model calling the backend as `forward_absorb_core` calls one of its list: Q and K in two tensors, K not yet written."""
    module = fixture.actual_module

    def forward(hidden: torch.Tensor, batch: Any) -> torch.Tensor:
        q, k, q_rope, k_rope = module.forward_absorb_prepare(hidden)
        out = module.attn_mqa(q, k, k, batch, q_rope=q_rope, k_rope=k_rope)
        values = torch.bmm(out.view(q.shape).transpose(0, 1), module.w_vc)
        return module.o_proj(values.transpose(0, 1).flatten(1, 2))

    module.forward = forward
    return fixture


@pytest.mark.usefixtures("_kit")
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.forward_mode.is_decode()])
@pytest.mark.parametrize("beside", [False, True])
def test_kit_in_two_tensors(name: str, beside: bool) -> None:
    """`beside`: with a backend for prefill that the user named, as `--prefill-attention-backend fa3` on a GPU."""
    fixture = in_two_tensors(mla.build_mla_attention_fixture(unittest.TestCase(), CASES[name], **SHAPE))
    assert_right(beside_torch_native(fixture) if beside else fixture)


def shared_batch(lengths: tuple[int, ...], added: tuple[int, ...] = (), members: tuple[int, int] = (0, 1)) -> Any:
    """A batch in which two requests, `members`, have one prefix in the cache, as in test_attention_kit.py. It decodes, or extends by `added` tokens."""
    mode = ForwardMode.MIXED if added else ForwardMode.DECODE
    case = replace(
        CASES["mla_decode_page_boundary"], page_size=1, prefix_lens=lengths, extend_lens=added, forward_mode=mode
    )
    fixture = mla.build_mla_attention_fixture(unittest.TestCase(), case, max_context_len=512, **SHAPE)
    table = fixture.runner.req_to_token_pool.req_to_token
    first, second = members
    fixture.prefix_hidden[second][:SHARED] = fixture.prefix_hidden[first][:SHARED]
    # Nobody may read what the second one's prefix had for itself.
    fixture.runner.token_to_kv_pool.kv_buffer[0][table[second, :SHARED].long()] = torch.nan
    table[second, :SHARED] = table[first, :SHARED]
    rows = torch.arange(len(lengths))
    fixture.forward_batch.rids = hooks.Rids([f"{row}" for row in rows], rows, mixed=mode.is_mixed())
    requests = compat.requests.numbers(fixture.runner.req_to_token_pool, rows).tolist()
    observer = fixture.backend.observer
    apply(observer.scheduler, NodeInserted(1, ROOT, SHARED, bytes(16)))
    for member in members:
        apply(observer.scheduler, RequestBound(requests[member], 1, 0 if added else case.seq_lens[member]))
    return fixture


@pytest.mark.usefixtures("_kit")
@pytest.mark.parametrize("tensors", [1, 2])
def test_shared_rows_are_packed(tensors: int) -> None:
    fixture = shared_batch((310, 347, 33))
    assert_right(fixture if tensors == 1 else in_two_tensors(fixture))
    counters = fixture.backend.reporter.counters()
    assert counters["kv_tokens_unpacked"] - counters["kv_tokens"] == SHARED
    assert counters["kv_bytes"] == counters["kv_tokens"] * 80 * 4
    assert (counters["fallbacks"], counters["faults"], counters["bound"]) == (0, 0, 2)


@pytest.mark.usefixtures("_kit")
def test_decoding_requests_of_a_mixed_step_are_packed() -> None:
    fixture = shared_batch((40, 0, 90, 310, 347, 33), (20, 33, 2, 1, 1, 1), members=(3, 4))
    assert_right(fixture)
    counters = fixture.backend.reporter.counters()
    assert counters["kv_tokens_unpacked"] - counters["kv_tokens"] == SHARED
    assert (counters["mixed_steps"], counters["extends"], counters["fallbacks"]) == (1, 1, 0)


@pytest.mark.usefixtures("_kit")
def test_a_backend_that_extends_nothing_leaves_mixed_steps_whole() -> None:
    """As on a GPU, where models give prefill K and V that are made of latents, for requests that decode too."""
    fixture = shared_batch((40, 0, 90, 310, 347, 33), (20, 33, 2, 1, 1, 1), members=(3, 4))
    backend = fixture.backend
    backend.groups.extends = False
    backend.prefill = backend._make_prefill(fixture.runner)
    assert_right(fixture)
    assert (backend.prefill.extend, backend.prefill.mixed_steps, backend.packs_extends) == (None, 0, False)


# Servers.

FLAGS = ["--dtype", "float32", "--max-running-requests", "24"]
CHECKED = {"SGLANG_PAT_VERIFY": "1"}
SMALL = [
    "--max-total-tokens", "3000", "--schedule-conservativeness", "0.1", "--chunked-prefill-size", "128", "--enable-mixed-chunk", "--page-size", "4",
]  # fmt: skip
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "40"}
PROMPTS = workload.nested_prompts(2, 2, 3, unrelated=2)


@pytest.fixture(scope="module")
def latent_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deepseek.write(tmp_path_factory.mktemp("models") / "deepseek", model)


@pytest.fixture(scope="module")
def expected(latent_model: Path) -> list[list[int]]:
    answers = deepseek.greedy(latent_model, PROMPTS, TOKENS)
    assert len(set(map(tuple, answers))) > len(PROMPTS) / 2, "answers that depend on prompts"
    return answers


@pytest.fixture(scope="module")
def server(latent_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Prompts come in chunks, which are mixed with decoding requests; some of these are retracted, and the cache does not hold all prompts."""
    log = tmp_path_factory.mktemp("latents") / "log"
    with ForkedServer(latent_model, "pat", log, [*FLAGS, *SMALL], CHECKED | RETRACTING) as started:
        yield started.wait()


@pytest.mark.server
def test_answers_are_those_of_transformers(server: Server, expected: list[list[int]]) -> None:
    for _ in range(2):
        assert generate_all(server, PROMPTS) == expected
    counters = assert_sound(server)
    assert 0 < counters["kv_bytes"] < 0.8 * counters["kv_bytes_unpacked"]
    assert max(map(int, counters["query_sizes"])) >= 3, "siblings are read together"
    assert counters["mixed_steps"] and counters["extends_shared"]
    assert "etract" in server.log.read_text()


@pytest.mark.server
def test_joins_aborts_and_a_flushed_cache(server: Server, expected: list[list[int]]) -> None:
    answers = amid_aborts(
        server,
        lambda i, rid: generate(server, PROMPTS[i % len(PROMPTS)] + "!", 200, rid=rid),
        lambda: generate_all(server, PROMPTS, concurrency=8),
    )
    assert answers == expected
    assert_sound(server)
    flush(server)
    assert generate_all(server, PROMPTS) == expected
    assert_sound(server)


@pytest.mark.server
@pytest.mark.slow
def test_drafts_and_experts(model: Path, tmp_path: Path) -> None:
    """Of a model of DeepSeek V3's shape that brings its draft (NEXTN), whose latents are its own; drafts have branches."""
    model = deepseek.write(tmp_path / "model", model, gain=0.4, **deepseek.V3)
    flags = ["--max-total-tokens", "20000", *drafts("NEXTN", 2, 2, 4)]
    with ForkedServer(model, "pat", tmp_path / "log", [*FLAGS, *flags], CHECKED | UNPINNED) as server:
        server.wait()
        assert generate_all(server, PROMPTS) == deepseek.greedy(model, PROMPTS, TOKENS)
        counters = assert_sound(server)
        assert 0 < counters["kv_bytes"] < 0.8 * counters["kv_bytes_unpacked"]
        sampling = {"temperature": 0, "max_new_tokens": 2 * TOKENS, "ignore_eos": True}
        found = server.post("/generate", {"text": PROMPTS, "sampling_params": sampling})
        steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in found)
        assert 0.5 < steps / (2 * TOKENS * len(PROMPTS)) < 0.9, "some drafts are accepted, some are not"
