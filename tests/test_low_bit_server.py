"""Servers that keep KV in 4 and 2 bits: answers do not depend on what was cached, on chunks, or on who was retracted."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import near_ties
import pytest
import torch
from conftest import assert_sound, flush
from forked import ForkedServer
from near_ties import Answer
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig
from sglang.srt.server_args import ServerArgs

from sglang_pat import compat
from sglang_pat.backend.attention import PatAttnBackend
from sglang_pat.backend.errors import UnsupportedError
from sglang_pat.backend.kv.pages import Behind, LowBitKVPool, pool_class
from sglang_pat.backend.start import low_bit, support
from sglang_pat.demo import workload
from sglang_pat.demo.server import Server
from sglang_pat.demo.tiny_model import SHAPE
from sglang_pat.kernels import low_bit as kernels
from sglang_pat.packing import FORMATS

INT4 = {"SGLANG_PAT_KV": "int4"}
SERVERS: dict[str, tuple[list[str], dict[str, str]]] = {
    "16 bits": ([], {}),
    "4 bits": ([], {**INT4, "SGLANG_PAT_VERIFY": "1"}),
    "2 bits": ([], {"SGLANG_PAT_KV": "int2", "SGLANG_PAT_INT4_LAYERS": "1", "SGLANG_PAT_VERIFY": "1"}),
    "small pool": (
        ["--max-total-tokens", "3008", "--schedule-conservativeness", "0.1", "--chunked-prefill-size", "128"],
        {**INT4, "SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "40"},
    ),
}
COMMON = ["--dtype", "float32", "--max-running-requests", "32", "--max-total-tokens", "40000"]
CLOSE, LEAST = 0.02, 0.1
"""As in near_ties. What differs in the last bit may be another code."""


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    folder = tmp_path_factory.mktemp("low_bit")
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(
                ForkedServer(model, "pat", folder / f"{name}.log", [*COMMON, *flags], environment)
            )
            for name, (flags, environment) in SERVERS.items()
        }
        for server in started.values():
            server.wait()
        yield started


def test_arguments_of_a_gpu_s_server_are_decided_while_sglang_resolves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.23 lets nobody write to what the user gave."""
    monkeypatch.setenv("SGLANG_PAT_KV", "int4")
    given = ServerArgs(model_path="dummy", attention_backend="pat", device="cuda")
    given._input_frozen = True
    compat.arguments.decide(given, cuda_graph_config=CudaGraphConfig())
    low_bit.prepare(given)
    found = compat.arguments.resolved(given)
    assert (found.page_size, found.max_running_requests) == (64, low_bit.MOST_REQUESTS)
    assert found.cuda_graph_config.prefill.backend == "disabled" != found.cuda_graph_config.decode.backend


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return workload.nested_prompts(2, 2, 1, unrelated=2)


@pytest.fixture(scope="module")
def cold(servers: dict[str, Server], prompts: list[str]) -> list[Answer]:
    """Answers of which none found anything in the cache."""
    answers = []
    for prompt in prompts:
        flush(servers["4 bits"])
        answers.append(near_ties.generate(servers["4 bits"], prompt))
    return answers


@pytest.mark.server
def test_answers_do_not_depend_on_what_was_cached(
    servers: dict[str, Server], prompts: list[str], cold: list[Answer]
) -> None:
    server = servers["4 bits"]
    assert len({tuple(answer.ids) for answer in cold}) > len(prompts) / 2, "answers that depend on prompts"
    # Of these the last prompt is cached already, and soon the others are; then all of them.
    for _ in range(2):
        near_ties.assert_agree(near_ties.generate_all(server, prompts), cold, CLOSE, LEAST)
    counters = assert_sound(server)
    assert 0 < counters["kv_bytes"] < counters["kv_bytes_unpacked"]
    token = 2 * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * of_a_head("int4")
    assert counters["kv_bytes"] == token * counters["kv_tokens"]


@pytest.mark.server
def test_chunks_and_retraction_amid_pages(servers: dict[str, Server], prompts: list[str], cold: list[Answer]) -> None:
    server = servers["small pool"]
    near_ties.assert_agree(near_ties.generate_all(server, prompts * 4), cold * 4, CLOSE, LEAST)
    assert_sound(server)
    assert re.search(r"#retracted_reqs: [1-9]", server.log.read_text())


@pytest.mark.server
def test_answers_are_nearly_those_of_16_bits(
    servers: dict[str, Server], prompts: list[str], cold: list[Answer]
) -> None:
    right = near_ties.generate_all(servers["16 bits"], prompts)
    alike = sum(answer.ids[0] == exact.ids[0] for answer, exact in zip(cold, right, strict=True))
    assert alike > 0.5 * len(prompts)


@pytest.mark.server
def test_behind_full_pages_2_bits_are_16_bits_turned(servers: dict[str, Server]) -> None:
    """Requests shorter than a page have nothing in few bits: all that is left of 2 bits is the rotation, in extends and in steps."""
    prompts = [" ".join(f"{word}" for word in range(first, first + 4)) for first in range(10, 90, 10)]
    right = near_ties.generate_all(servers["16 bits"], prompts, tokens=12)
    near_ties.assert_agree(near_ties.generate_all(servers["2 bits"], prompts, tokens=12), right, 1e-3, 1e-3)


@pytest.mark.server
def test_answers_of_2_bits_do_not_depend_on_what_was_cached(servers: dict[str, Server], prompts: list[str]) -> None:
    server = servers["2 bits"]
    flush(server)
    first = [near_ties.generate(server, prompt) for prompt in prompts]
    near_ties.assert_agree(near_ties.generate_all(server, prompts), first, CLOSE, LEAST)
    counters = assert_sound(server)
    others = SHAPE["num_hidden_layers"] - 1
    token = 2 * SHAPE["num_key_value_heads"] * (of_a_head("int4") + others * of_a_head("int2"))
    assert counters["kv_bytes"] == token * counters["kv_tokens"]


STORES = {f"int{bits}": functools.partial(kernels.store, bits=bits) for bits in (4, 2)}
"""Those of a CPU."""


def of_a_head(form: str) -> float:
    """Bytes of a token's K or V."""
    return SHAPE["head_dim"] * FORMATS[form].bytes_with_scales(SHAPE["head_dim"], SHAPE["head_dim"])


def test_layers_of_two_formats_have_pages_of_two_sizes() -> None:
    """As on a rank that has layers from 4 on, of which 5 keeps 4 bits; each is written and read with its own bits."""
    pool = pool_class(FORMATS["int2"], (5, 7))(
        128, 64, torch.float32, 2, 32, 2, "cpu", enable_memory_saver=False, start_layer=4
    )
    pool.make_tails(2, torch.float32, STORES)
    k, v = torch.randn(2, 64, 2, 32)
    tokens = torch.arange(64)
    for layer, bits in ((4, 2), (5, 4)):
        pool.store(layer, k, v, torch.ones_like(tokens), tokens + 1, tokens + 64)
        found = pool.decoding(layer, torch.tensor([1]), torch.tensor([64])).pages
        assert found.bits == bits
        assert torch.equal(found.records[1], kernels.pack(k[None], v[None], bits)[0])
    assert pool.get_kv_size_bytes() == 3 * 2 * sum(kernels.record_bytes(bits, 32) for bits in (2, 4))


def test_a_layer_that_the_model_does_not_have_is_refused() -> None:
    pool = pool_class(FORMATS["int2"], (30,))(128, 64, torch.float32, 2, 32, 1, "cpu", enable_memory_saver=False)
    runner = SimpleNamespace(
        device="cpu", kv_cache_dtype=torch.bfloat16, token_to_kv_pool=pool, model=None, use_mla_backend=False, model_config=SimpleNamespace(num_attention_layers=30),
    )  # fmt: skip
    environment = {"SGLANG_PAT_KV": "int2", "SGLANG_PAT_INT4_LAYERS": "3,30"}
    with pytest.raises(UnsupportedError, match="names layer 30, but the model has layers 0 to 29: leave it out"):
        support.check_low_bit(runner, environment)
    support.check_low_bit(runner, {**environment, "SGLANG_PAT_INT4_LAYERS": "3,29"})


@pytest.mark.parametrize(("form", "rotates"), [("int2", True), ("int4", False)])
def test_what_is_kept_in_2_bits_is_rotated(form: str, rotates: bool) -> None:
    backend = object.__new__(PatAttnBackend)
    backend.token_to_kv_pool = pool_class(FORMATS[form])(
        128, 64, torch.float32, 2, 32, 1, "cpu", enable_memory_saver=False
    )
    backend.rotation = backend._make_rotation(SimpleNamespace(dtype=torch.float32, device="cpu"))
    q, k, v = torch.randn(3, 5, 64)
    seen = []

    def forward(*given: torch.Tensor) -> torch.Tensor:
        seen.extend(given)
        return given[2]

    # What is kept of V is turned back.
    assert torch.allclose(backend._rotated(forward, q, k, v), v, atol=1e-5)
    assert [torch.equal(x, y) for x, y in zip(seen, (q, k, v), strict=True)] == [not rotates] * 3
    products = [(x.view(5, 2, 32) * y.view(5, 2, 32)).sum(-1) for x, y in ((q, k), seen[:2])]
    assert torch.allclose(*products, atol=1e-4)


def make_pool(slots: int, rows: int) -> LowBitKVPool:
    pool = pool_class(FORMATS["int4"])(slots, 64, torch.float32, 2, 32, 1, "cpu", enable_memory_saver=False)
    pool.make_tails(rows, torch.float32, STORES)
    return pool


def test_extends_that_begin_and_end_amid_a_page() -> None:
    """A query of an extend finds what is in front of it in its own page, wherever that was written; what is kept is the same."""
    torch.manual_seed(0)
    lengths, table = {1: 260, 3: 130, 4: 64}, {1: [2, 9, 5, 3, 1], 3: [4, 6, 7], 4: [8]}
    k, v = ({row: torch.randn(length, 2, 32) for row, length in lengths.items()} for _ in range(2))
    slots = {row: (torch.tensor(pages)[:, None] * 64 + torch.arange(64)).flatten() for row, pages in table.items()}
    once, pool = make_pool(64 * 9, 5), make_pool(64 * 9, 5)
    for row, length in lengths.items():
        once.store(0, k[row], v[row], torch.full((length,), row), torch.arange(1, length + 1), slots[row][:length])
    done = dict.fromkeys(lengths, 0)
    for steps in ({1: 70, 3: 64}, {1: 1, 4: 10}, {1: 60, 3: 5, 4: 54}, {1: 129, 3: 61}):
        cached = [done[row] for row in steps]
        behind = Behind.of(list(steps), cached, list(steps.values()), 5)
        new = [(row, range(before, before + steps[row])) for row, before in zip(steps, cached, strict=True)]
        new_k, new_v = (torch.cat([x[row][list(tokens)] for row, tokens in new]) for x in (k, v))
        found = pool.extending(0, new_k.flatten(1), new_v, behind)
        query = 0
        for row, tokens in new:
            for position in tokens:
                own = torch.arange((position + 1) // 64 * 64, position + 1)
                for kept, x in ((found.k, k), (found.v, v)):
                    assert torch.equal(kept[own + found.pages.tails[query]], x[row][own])
                query += 1
        rows = torch.tensor([row for row, tokens in new for _ in tokens])
        seq_lens = torch.tensor([position + 1 for _, tokens in new for position in tokens])
        where = torch.cat([slots[row][list(tokens)] for row, tokens in new])
        pool.store(0, new_k, new_v, rows, seq_lens, where)
        for row, tokens in new:
            done[row] = tokens.stop
    assert done == lengths
    assert torch.equal(pool.records[0], once.records[0])
    for row, length in lengths.items():
        for kept, right in zip(pool.tails(0), once.tails(0), strict=True):
            assert torch.equal(kept[row, : length % 64], right[row, : length % 64])


@pytest.mark.parametrize(("device", "workspace"), [("cpu", 0), ("cuda", 2048 + 128 + 3)])
def test_sglang_counts_tokens_by_their_bits_and_leaves_room_for_tails(
    device: str, workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 15 requests on each of two ranks, and on a GPU for the pages of one layer that an extend reads: a context of 131,072 tokens, chunks of
    8,192."""
    from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator
    from sglang.srt.plugins.hook_registry import HookRegistry

    # As the plugin does with SGLANG_PAT_KV; without it they change nothing.
    compat.registry.hook(compat.pool.CELL_SIZE, low_bit.cell_size, around=True)
    compat.registry.hook(compat.pool.POOL_SIZES, low_bit.pool_sizes, around=True)
    HookRegistry.apply_hooks()
    monkeypatch.setattr(compat.pool, "kv_shape", lambda model_config: (8, 128))
    monkeypatch.setattr(compat.pool, "attention_replicas", lambda: 2)
    monkeypatch.setattr(compat.pool, "is_of_another_kind", lambda configurator: False)
    arguments = SimpleNamespace(
        attention_backend="pat", prefill_attention_backend=None, decode_attention_backend=None, device=device, max_running_requests=30,
        chunked_prefill_size=8192,
    )  # fmt: skip
    model_config = SimpleNamespace(context_len=131_072)
    kvc = SimpleNamespace(
        server_args=arguments, model_config=model_config, model_dtype=torch.bfloat16, layer_info=SimpleNamespace(start_layer=36),
    )  # fmt: skip
    # Layers 36 to 71 of a model: of those that are named two are here.
    for form, named, layers in (
        ("int4", "", 36 * 140),
        ("int2", "", 36 * 76),
        ("int2", "3,36,71,72", 34 * 76 + 2 * 140),
    ):
        monkeypatch.setenv("SGLANG_PAT_KV", form)
        monkeypatch.setenv("SGLANG_PAT_INT4_LAYERS", named)
        configurator = object.__new__(DefaultPoolConfigurator)
        configurator._fixed_overhead_bytes = 0  # 0.5.23
        configurator._cell_size = configurator._compute_cell_size(kvc, 36)
        assert configurator._cell_size == 8 * layers
        left = 2 * 10**9 - (16 * 36 + workspace) * 64 * 8 * 512
        found = configurator.calculate_pool_sizes(2 * 10**9, 64).max_total_num_tokens
        assert found == left // (8 * layers) // 64 * 64
    arguments.attention_backend = "triton"
    assert low_bit.chosen(arguments) is None


def test_a_pool_on_a_gpu_that_is_not_ours_is_refused() -> None:
    """As where another plugin replaces what makes pools, after sglang-pat hooked it."""
    of_sglang = MHATokenToKVPool(128, 64, torch.bfloat16, 2, 32, 1, "cpu", enable_memory_saver=False)
    runner = SimpleNamespace(
        device="cuda", kv_cache_dtype=torch.bfloat16, token_to_kv_pool=of_sglang, use_mla_backend=False
    )
    with pytest.raises(
        UnsupportedError,
        match="another plugin keeps KV in pools of another kind, as SGLang does for windows: unset it",
    ):
        support.check_low_bit(runner, {"SGLANG_PAT_KV": "int4"})
    support.check_low_bit(runner, {})
