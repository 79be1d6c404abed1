"""SGLang's own test kits, as they ship in its wheel, against `--attention-backend pat`.

| kit, mixin | left out | why |
|---|---|---|
| `abort_timeout_kit`: `AbortAllMixin`, `WaitingTimeoutMixin`, `RunningTimeoutTwoWaveMixin` | nothing | |
| `pause_generation_kit`: `PauseResumeInPlaceMixin` | nothing | |
| `streaming_session_kit`: `StreamingSessionKitMixin`, `AbortLeakReproKitMixin` | nothing | |
| `radix_cache_server_kit`: `run_radix_attention_test` | nothing | with fewer nodes than its 400, for time |
| `unified_radix_cache_kit`: `UnifiedRadixTreeTestMixin` | `test_gsm8k`, `test_mmlu` | need a trained model and its data |
| the same | `test_l3_prefetch_full_prefix_hit_after_flush` | needs a HiCache storage, which `flush_cache` does not empty |
| `basic_scheduler_stress_kit`: `BasicSchedulerStressMixin` | `test_streaming_response`, `test_concurrent_requests` | ask a trained model for capitals |
| `prefix_cache_branching_kit`: `PrefixCacheBranchingMixin` | `test_prefix_cache_branching` | expects what only hybrid models do: no hit before a branch was seen twice |

The kits ask for token ids up to 31,999 and for 100,000 tokens, so that the tiny model has a larger vocabulary and a longer
context here.
"""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from chaos import our_tracebacks
from conftest import assert_sound, importing_kits
from forked import ForkedServer

from sglang_pat.demo import tiny_model
from sglang_pat.demo.server import Server

with importing_kits():
    from sglang.test.kits import radix_cache_server_kit
    from sglang.test.kits.abort_timeout_kit import AbortAllMixin, RunningTimeoutTwoWaveMixin, WaitingTimeoutMixin
    from sglang.test.kits.basic_scheduler_stress_kit import BasicSchedulerStressMixin
    from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin
    from sglang.test.kits.streaming_session_kit import AbortLeakReproKitMixin, StreamingSessionKitMixin
    from sglang.test.kits.unified_radix_cache_kit import UnifiedRadixTreeTestMixin
    from sglang.test.server_fixtures import streaming_session_fixture

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.once]

VOCABULARY = 32_000
CHECKED = {
    "SGLANG_PAT_VERIFY": "1",
    "OMP_NUM_THREADS": "1",
    "SGLANG_ENABLE_UNIFIED_RADIX_TREE": "1",  # which 0.5.23 has anyway
    # As `StreamingSessionServerBase` does.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
LIMITS = {"SGLANG_REQ_WAITING_TIMEOUT": "1.5", "SGLANG_REQ_RUNNING_TIMEOUT": "30"}
COMMON = ["--dtype", "float32", "--enable-streaming-session"]
LONG = ["--json-model-override-args", '{"max_position_embeddings": 131072}']

SERVERS: dict[str, tuple[list[str], dict[str, str]]] = {
    "all": (
        [*COMMON, *LONG, "--max-total-tokens", "40000", "--max-running-requests", "32", "--chunked-prefill-size", "512"],
        CHECKED,
    ),
    "limits": ([*COMMON, "--max-total-tokens", "80000", "--max-running-requests", "16"], CHECKED | LIMITS),
    "pages": (
        [*COMMON, "--max-total-tokens", "16384", "--max-running-requests", "16",
         "--context-length", str(streaming_session_fixture.ABORT_REPRO_CONTEXT_LEN),
         "--page-size", str(streaming_session_fixture.ABORT_REPRO_PAGE_SIZE),
         "--chunked-prefill-size", str(streaming_session_fixture.ABORT_REPRO_CHUNKED_PREFILL_SIZE)],
        # With `RadixCache` in 0.5.17.
        {name: value for name, value in CHECKED.items() if "UNIFIED" not in name},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with as many tokens as the kits choose from."""
    with mock.patch.object(tiny_model, "VOCAB", VOCABULARY):
        return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny-wide")


@pytest.fixture(scope="module")
def kit_servers(wide_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    logs = tmp_path_factory.mktemp("logs")
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(ForkedServer(wide_model, "pat", logs / f"{name}.log", flags, environment))
            for name, (flags, environment) in SERVERS.items()
        }
        for server in started.values():
            server.wait()
        yield started


class Kit(unittest.TestCase):
    """What the mixins expect, and a look at the server after each of them."""

    server_name = "all"
    base_url: str
    model: str
    process: Any
    tokenizer: Any

    @pytest.fixture(autouse=True)
    def _served(self, kit_servers: dict[str, Server], wide_model: Path) -> Iterator[None]:
        from transformers import AutoTokenizer

        server = kit_servers[self.server_name]
        cls = type(self)
        cls.base_url, cls.model, cls.process = server.url, str(wide_model), server._process
        cls.tokenizer = AutoTokenizer.from_pretrained(wide_model)
        before = server.counters()["steps"]
        yield
        assert assert_sound(server)["steps"] > before
        assert not our_tracebacks(server.log.read_text())


class TestAbortAll(AbortAllMixin, Kit):
    """More requests than run at once, none of which would end by itself."""


class TestPauseResumeInPlace(PauseResumeInPlaceMixin, Kit):
    pause_max_new_tokens = 200
    pause_duration = 3


class TestStreamingSessions(StreamingSessionKitMixin, Kit):
    pass


class TestBasicSchedulerStress(BasicSchedulerStressMixin, Kit):
    test_streaming_response = test_concurrent_requests = None

    def _stress_generate(self, prompt: str, max_new_tokens: int) -> str:
        # A character is a token here, and 36,000 of them take a CPU minutes.
        return super()._stress_generate(prompt[-6000:], max_new_tokens)


class TestUnifiedRadixTree(UnifiedRadixTreeTestMixin, Kit):
    test_gsm8k = test_mmlu = None
    max_new_tokens = 64
    input_ids = [[(7 * group + position * (group + 3)) % 30_000 + 1 for position in range(700)] for group in range(6)]  # noqa: RUF012


class TestRadixAttention(Kit):
    def test_radix_attention(self) -> None:
        nodes = radix_cache_server_kit.gen_radix_tree(num_nodes=80, chunk_len=96)
        with mock.patch.object(radix_cache_server_kit, "gen_radix_tree", return_value=nodes):
            radix_cache_server_kit.run_radix_attention_test(self.base_url)


class TestTimeouts(WaitingTimeoutMixin, RunningTimeoutTwoWaveMixin, Kit):
    """One more than run at once has to wait for longer than it may; nobody may run for as long as they ask for."""

    server_name = "limits"
    # Whoever waits has to wait for longer than 1.5 s, and nobody else may run for 30: 5 to 100 ms a step.
    waiting_timeout_num_requests = 17
    waiting_timeout_max_new_tokens = 300
    running_timeout_max_new_tokens = 4000


class TestAbortsOfChunkedPrefill(AbortLeakReproKitMixin, Kit):
    server_name = "pages"
