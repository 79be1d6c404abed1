"""Real servers on a GPU: windows, sinks, unequal dimensions, hybrids, KV of 8 bits and less.

Beside SGLang's other backends on the same weights, as in test_gpu_server.py.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import deepseek
import families
import gemma
import gpt_oss
import hybrid
import mellum
import mimo
import pytest
import scaled
import torch
from conftest import assert_sound, flush
from gpu_servers import CHECKED, COMMON, POOL, WITHOUT_PREFILL_GRAPHS, cached, serving
from near_ties import Answer, assert_agree, fill_cache, generate, generate_all, parted

from sglang_pat.demo import workload
from sglang_pat.demo.server import Server

pytestmark = [pytest.mark.gpu, pytest.mark.server]


def test_windows(gpu_model: Path, tmp_path: Path) -> None:
    """Shorter than most prefixes, and longer than some requests.

    FlashInfer decodes as far back as we do, Triton a token less. Prefill is Triton's on both sides.
    """
    prompts = workload.nested_prompts(2, 3, 8, unrelated=8) + [
        workload.prose(f"short {i}", 340 + 3 * i) for i in range(12)
    ]
    flags = [*WITHOUT_PREFILL_GRAPHS, POOL, "60000", "--prefill-attention-backend", "triton"]
    with ExitStack() as stack:
        servers = {}
        for window in (40, 400):
            model = gemma.write(tmp_path / f"model {window}", gpu_model, window, head_dim=64)
            for backend, environment in (("flashinfer", {}), ("pat", CHECKED)):
                log = tmp_path / f"{backend} {window}.log"
                server = Server(model, backend, log, flags, environment, on_cpu=False)
                servers[window, backend] = stack.enter_context(server)
        for server in servers.values():
            server.wait()
        for window in (40, 400):
            expected, answers = (generate_all(servers[window, backend], prompts) for backend in ("flashinfer", "pat"))
            assert_agree(answers, expected)
            counters = assert_sound(servers[window, "pat"])
            assert 0 < counters["kv_bytes"] < counters["kv_bytes_unpacked"]


def test_fp8_kv(gpu_model: Path, tmp_path: Path) -> None:
    """Both formats beside FlashInfer, which leaves Q and weights of V in 16 bits as we do (Triton and FA3 round them to 8 bits); a
    checkpoint's scales beside the twin that needs none, where Triton prefills both."""
    prompts = workload.nested_prompts(2, 3, 8, unrelated=8)
    models = dict(zip(("scaled", "twin"), scaled.write(tmp_path, gpu_model), strict=True)) | {"plain": gpu_model}
    flashinfer = ["--prefill-attention-backend", "flashinfer"]
    triton, bfloat16 = ["--prefill-attention-backend", "triton"], ["--dtype", "bfloat16"]
    pairs = {
        "e4m3": [("plain", backend, ["--kv-cache-dtype", "fp8_e4m3", *flashinfer]) for backend in ("flashinfer", "pat")],
        "e5m2": [("plain", backend, ["--kv-cache-dtype", "fp8_e5m2", *flashinfer]) for backend in ("flashinfer", "pat")],
        "scales": [("twin", "pat", [*bfloat16, *triton, "--kv-cache-dtype", "fp8_e4m3"]), ("scaled", "pat", [*bfloat16, *triton])],
    }  # fmt: skip
    common = [*COMMON, "--mem-fraction-static", "0.1", "--disable-prefill-cuda-graph", POOL, "60000"]
    with ExitStack() as stack:
        servers = {}
        for name, pair in pairs.items():
            for number, (model, backend, flags) in enumerate(pair):
                environment = CHECKED if backend == "pat" else {}
                server = Server(
                    models[model],
                    backend,
                    tmp_path / f"{name} {number}.log",
                    [*common, *flags],
                    environment,
                    on_cpu=False,
                )
                servers[name, number] = stack.enter_context(server)
        for server in servers.values():
            server.wait()
            fill_cache(server, prompts)
        for name in pairs:
            expected, answers = (generate_all(servers[name, number], prompts) for number in range(2))
            # What rounds to the other neighbour of FP8 in one layer is 6 % away for the next: 0.151 was found on an H200, on 2026-11-26.
            assert_agree(answers, expected, close=0.25, least=0.04)
            counters = assert_sound(servers[name, 1])
            assert 0 < counters["kv_bytes"] < 0.8 * counters["kv_bytes_unpacked"]


def test_kv_of_few_bits(gpu_model: Path, tmp_path: Path) -> None:
    """Answers to many at once, with prefixes from the cache, are those of each alone with an empty cache; in graphs, in small chunks, and through evictions
    and retractions."""
    alone = workload.nested_prompts(2, 2, 1, unrelated=2)
    many = workload.nested_prompts(2, 2, 6, unrelated=12)
    flags = [*COMMON, "--mem-fraction-static", "0.1"]
    small = [POOL, "4032", "--schedule-conservativeness", "0.1", "--chunked-prefill-size", "128"]
    retracting = {**CHECKED, "SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "40"}
    cases: dict[str, tuple[str, list[str], dict[str, str]]] = {
        "int4": ("int4", [POOL, "60032"], CHECKED),
        "int4 small": ("int4", small, retracting),
        "int2": ("int2", [POOL, "60032"], CHECKED),
    }
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                Server(gpu_model, "pat", tmp_path / f"{name}.log", [*flags, *extra], {**environment, "SGLANG_PAT_KV": form}, on_cpu=False)
            )
            for name, (form, extra, environment) in cases.items()
        }  # fmt: skip
        for server in servers.values():
            server.wait()
        cold: dict[str, list[Answer]] = {}
        for name in ("int4", "int2"):
            cold[name] = []
            for prompt in alone:
                flush(servers[name])
                cold[name].append(generate(servers[name], prompt))
        assert len({tuple(answer.ids) for answer in cold["int4"]}) > 2, "answers that depend on prompts"
        for name, server in servers.items():
            # Chunks of another size round differently. A number at the border between two codes, a step apart, then gets the other: rounding by r
            # looks like noise of sqrt(r * step). With chunks of 128 log-probabilities moved by up to 0.21, with KV of 16 bits by 0.006
            # (H200, 2026-11-25).
            for _ in range(2):
                generate_all(server, many)
                warm, right = generate_all(server, alone), cold[cases[name][0]]
                if name == "int2":
                    # There rounding decides what follows: on a CPU, float16 and float32 part where two tokens are up to 0.97 apart.
                    assert parted(warm, right, close=0.3, beyond=True) <= len(alone) / 2
                else:
                    assert_agree(warm, right, close=0.3, beyond=True)
            counters = assert_sound(server)
            assert 0 < counters["kv_bytes"] < 0.8 * counters["kv_bytes_unpacked"], name


def test_a_pool_for_windows(gpu_model: Path, tmp_path: Path) -> None:
    """FA3 decodes as far back as we do, and knows the pool; prefill is FA3's on both sides."""
    prompts = workload.nested_prompts(2, 3, 8, unrelated=8) + [
        workload.prose(f"short {i}", 340 + 3 * i) for i in range(12)
    ]
    retracting = ["3000", "--schedule-conservativeness", "0.1", "--page-size", "16"]
    kinds = {
        (40, "fa3"): (["60000"], {}),
        (40, "pat"): (["60000"], CHECKED),
        (40, "pat, small pool"): (
            retracting,
            {**CHECKED, "SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "40"},
        ),
        (400, "fa3"): (["60000"], {}),
        (400, "pat"): (["60000"], CHECKED),
    }
    with ExitStack() as stack:
        servers = {}
        models = {
            window: mellum.write(tmp_path / f"model {window}", gpu_model, window, head_dim=64) for window in (40, 400)
        }
        for (window, name), (pool, environment) in kinds.items():
            flags = [*WITHOUT_PREFILL_GRAPHS, "--prefill-attention-backend", "fa3", POOL, *pool]
            server = Server(
                models[window], name.split(",")[0], tmp_path / f"{name} {window}.log", flags, environment, on_cpu=False
            )
            servers[window, name] = stack.enter_context(server)
        for server in servers.values():
            server.wait()
        expected = {window: generate_all(servers[window, "fa3"], prompts) for window in models}
        for (window, name), server in servers.items():
            assert "SWAKVPool" in server.log.read_text()
            if name != "fa3":
                for _ in range(2):
                    assert_agree(generate_all(server, prompts), expected[window])
                counters = assert_sound(server)
                assert 0 < counters["kv_bytes"] < counters["kv_bytes_unpacked"]


def test_a_tier_on_the_host_behind_a_pool_for_windows(gpu_model: Path, tmp_path: Path) -> None:
    """Evicted KV of both pools comes back while others decode."""
    prompts = workload.nested_prompts(2, 3, 8, unrelated=8)
    model = mellum.write(tmp_path / "model", gpu_model, 128, head_dim=64)
    flags = [*WITHOUT_PREFILL_GRAPHS, "--prefill-attention-backend", "fa3", POOL]
    tier = ["3072", "--page-size", "64", "--enable-hierarchical-cache", "--hicache-ratio", "4"]
    with ExitStack() as stack:
        servers = {}
        for name, pool, environment in (("fa3", ["60032", "--page-size", "64"], {}), ("pat", tier, CHECKED)):
            server = Server(model, name, tmp_path / f"{name}.log", [*flags, *pool], environment, on_cpu=False)
            servers[name] = stack.enter_context(server)
        for server in servers.values():
            server.wait()
        expected = generate_all(servers["fa3"], prompts)
        for _ in range(2):
            assert_agree(generate_all(servers["pat"], prompts, 16), expected)
        assert cached(servers["pat"], prompts)["host"] > 0
        counters = assert_sound(servers["pat"])
        assert 0 < counters["kv_bytes"] < counters["kv_bytes_unpacked"]


def assert_answers_are_those_of_fa3(model: Path, more: list[str], folder: Path) -> list[Answer]:
    """In bfloat16: its steps are eight times those of float16, and few tokens lie that far apart. Returns FA3's answers."""
    prompts = workload.nested_prompts(2, 3, 8, unrelated=8)
    flags = [*WITHOUT_PREFILL_GRAPHS, "--dtype", "bfloat16", *more, POOL, "60000"]
    with ExitStack() as stack:
        servers = {}
        for backend, environment in (("fa3", {}), ("pat", CHECKED)):
            server = Server(model, backend, folder / f"{backend}.log", flags, environment, on_cpu=False)
            servers[backend] = stack.enter_context(server)
        for server in servers.values():
            server.wait()
        expected, answers = (generate_all(servers[backend], prompts) for backend in ("fa3", "pat"))
        assert_agree(answers, expected, close=0.25, least=0.04)
        counters = assert_sound(servers["pat"])
        assert 0 < counters["kv_bytes"] < 0.8 * counters["kv_bytes_unpacked"]
    return expected


def test_sinks(gpu_model: Path, tmp_path: Path) -> None:
    """A gpt-oss-shaped model, with windows of gpt-oss's length in a pool of their own."""
    model = gpt_oss.write(tmp_path / "model", gpu_model, 128)
    assert_answers_are_those_of_fa3(model, ["--moe-runner-backend", "triton"], tmp_path)


def test_unequal_dimensions(gpu_model: Path, tmp_path: Path) -> None:
    """A MiMo-V2-shaped model: V narrower than K, and for windows sinks, other KV heads and a pool of their own."""
    model = mimo.write(tmp_path / "model", gpu_model, 128)
    expected = assert_answers_are_those_of_fa3(model, ["--trust-remote-code"], tmp_path)
    assert len({tuple(answer.ids) for answer in expected}) > len(expected) / 2, "answers that depend on prompts"


def test_norms_of_all_heads(gpu_model: Path, tmp_path: Path) -> None:
    """A model of MiniMax M2's shape."""
    model = families.minimax(tmp_path / "model", gpu_model)
    expected = assert_answers_are_those_of_fa3(model, ["--moe-runner-backend", "triton"], tmp_path)
    assert len({tuple(answer.ids) for answer in expected}) > len(expected) / 2, "answers that depend on prompts"


@pytest.mark.parametrize("kv", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("heads", [16, 20, 64])
def test_latents(heads: int, kv: str, gpu_model: Path, tmp_path: Path) -> None:
    """Of DeepSeek V2's shape (MLA). 16 and 20 heads are packed, 64 are not, and with 16 bits they are FA3's whole."""
    prompts = workload.nested_prompts(2, 3, 8, unrelated=8)
    counts = {"num_attention_heads": heads, "num_key_value_heads": heads}
    model = deepseek.write(tmp_path / "model", gpu_model, **deepseek.OF_GPUS | counts)
    flags = [*WITHOUT_PREFILL_GRAPHS, "--dtype", "bfloat16", "--kv-cache-dtype", kv, POOL, "60000"]
    mixing = ["--enable-mixed-chunk", "--chunked-prefill-size", "512"]
    cases = {"fa3": ("fa3", mixing, {}), "pat": ("pat", mixing, CHECKED)}
    fp8 = kv != "auto"
    with serving(model, cases, flags, tmp_path) as servers:
        if fp8:
            fill_cache(servers["fa3"], prompts)
        expected = generate_all(servers["fa3"], prompts)
        assert len({tuple(answer.ids) for answer in expected}) > len(prompts) / 2, "answers that depend on prompts"
        # SGLang mixes requests without log-probabilities only.
        for logprobs in (True, False):
            if fp8:  # then there is nothing left to chunk or to mix
                fill_cache(servers["pat"], prompts)
            answers = generate_all(servers["pat"], prompts, logprobs=logprobs)
            if fp8:
                # An H200, 2026-12-01: of 56 answers none or one differed where a token led by more than 0.25, none by 0.5; in other runs at leads of up to
                # 0.47, first tokens too, which are FA3's in both servers. Perhaps as what is rounded to 8 bits differs by the batch.
                assert parted(answers, expected, close=0.25, beyond=True) <= 2
                assert not parted(answers, expected, close=0.5, beyond=True)
            else:
                assert_agree(answers, expected, close=0.25, least=0.04)
            flush(servers["pat"])
        log = servers["pat"].log.read_text()
        if heads == 64 and not fp8:
            assert "nothing is packed: decode steps run there too" in log
            return
        counters = assert_sound(servers["pat"])
        assert 0 < counters["kv_bytes"] < (0.8 if heads % 64 else 1.01) * counters["kv_bytes_unpacked"]
        assert f"{heads}/1 heads of 576 and 512" in log


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("kv", ["auto", "fp8_e4m3"])
def test_latents_behind_a_long_prefix(kv: str, graphs: bool, gpu_model: Path, tmp_path: Path) -> None:
    """Of 10,000 tokens, cached: from 8,192 on SGLang makes K and V of it (SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD), and in chunks where a batch has more than
    131,072 tokens (`get_max_chunk_capacity`), unless prefill runs in graphs. `pat` alone, and beside FA3 that was named for prefill."""
    prefix = workload.prose("a document", 10_000)
    prompts = [prefix + workload.prose(f"question {i}", 20 + 5 * i) for i in range(24)]
    scaling = deepseek.CONFIG["rope_scaling"] | {"original_max_position_embeddings": 8192}
    longer = {"max_position_embeddings": 16384, "rope_scaling": scaling}
    model = deepseek.write(tmp_path / "model", gpu_model, **deepseek.OF_GPUS | longer)
    common = COMMON if graphs else WITHOUT_PREFILL_GRAPHS
    flags = [*common, "--dtype", "bfloat16", "--kv-cache-dtype", kv, POOL, "120000"]
    cases = {
        "fa3": ("fa3", [], {}), "pat": ("pat", [], CHECKED), "named": ("fa3", ["--decode-attention-backend", "pat"], CHECKED),
    }  # fmt: skip
    with serving(model, cases, flags, tmp_path) as servers:
        for server in servers.values():
            generate(server, prefix, tokens=1)
            again = server.post("/generate", {"text": prefix, "sampling_params": {"max_new_tokens": 1}})
            assert again["meta_info"]["cached_tokens"] > 8_192
        expected = generate_all(servers.pop("fa3"), prompts)
        assert len({tuple(answer.ids) for answer in expected}) > 2, "answers that depend on prompts"
        for server in servers.values():
            assert_agree(generate_all(server, prompts), expected, close=0.25, least=0.04)
            counters = assert_sound(server)
            assert 0 < counters["kv_bytes"] < 0.5 * counters["kv_bytes_unpacked"]


@pytest.mark.parametrize("name", hybrid.WRITERS)
def test_hybrid_models(name: str, gpu_model: Path, tmp_path: Path) -> None:
    """Beside SGLang's default backend: alone, with graphs for prefill where SGLang has them, and as the half that decodes, in a small pool."""
    prompts = workload.nested_prompts(2, 3, 8, unrelated=8)
    model = hybrid.WRITERS[name](tmp_path / "model", gpu_model)
    flags = ["--dtype", "bfloat16", "--mem-fraction-static", "0.15", "--max-running-requests", "48"]
    flags += ["--moe-runner-backend", "triton", "--disable-shared-experts-fusion"]
    default = "fa3" if torch.cuda.get_device_capability()[0] == 9 else "flashinfer"
    states, eagerly = "--max-mamba-cache-size", "--disable-prefill-cuda-graph"
    cases: dict[str, tuple[str, list[str], dict[str, str]]] = {
        "reference": (default, [POOL, "60000", states, "400", eagerly], {}),
        "pat": ("pat", [POOL, "60000", states, "400"], CHECKED),
        "small": (
            default,
            ["--decode-attention-backend", "pat", POOL, "6000", states, "160", eagerly, "--chunked-prefill-size", "256"],
            CHECKED,
        ),
    }  # fmt: skip
    with serving(model, cases, flags, tmp_path) as servers:
        expected = generate_all(servers["reference"], prompts)
        assert len({tuple(answer.ids) for answer in expected}) > len(prompts) / 2, "answers that depend on prompts"
        for case in ("pat", "small"):
            # The second time prefixes come from the cache, with states as they were at a checkpoint.
            for _ in range(2):
                answers = generate_all(servers[case], prompts)
                if name == "Nemotron-H":
                    # FA3 gives a fifth of these answers otherwise when it is asked again: 11 of 56 on one H200, 2026-11-23.
                    assert parted(answers, expected, close=0.25) < len(prompts) / 3
                else:
                    assert_agree(answers, expected, close=0.25, least=0.04)
            counters = assert_sound(servers[case])
            assert 0 < counters["kv_bytes"] < (0.9 if case == "pat" else 1) * counters["kv_bytes_unpacked"], case
        log = servers["pat"].log.read_text()
        assert f", {hybrid.ATTENTION_LAYERS} layers of " in log, "layers without KV do not count"
        assert "impl=UnifiedRadixCache" in log
