"""benchmarks/accuracy.py with trained weights: decode finds a text as likely as prefill does, and a fault in decode does not go unnoticed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from conftest import assert_sound
from forked import ForkedServer
from transformers import AutoTokenizer

from sglang_pat.demo import trained_model
from sglang_pat.demo.server import Server

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))
import accuracy

SHARED, REQUESTS, STEPS = 128, 8, 32
FLAGS = [
    "--dtype",
    "float32",
    "--max-running-requests",
    "8",
    "--max-total-tokens",
    "4096",
    "--enable-custom-logit-processor",
]
LAUNCH = (sys.executable, "-m", "sglang.launch_server")
SERVERS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "right": (LAUNCH, {}),
    "2 bits": (LAUNCH, {"SGLANG_PAT_KV": "int2"}),
    "faulty": ((sys.executable, str(Path(__file__).with_name("faulty_decode.py"))), {}),
}

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.once]


@pytest.fixture(scope="module")
def trained() -> Path:
    """SmolLM2-135M, kept from run to run."""
    try:
        return trained_model.write(trained_model.CACHE / "tests" / "smollm2-135m")
    except trained_model.DownloadError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def servers(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    folder = tmp_path_factory.mktemp("accuracy")
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(
                ForkedServer(trained, "pat", folder / f"{name}.log", FLAGS, environment, command=command)
            )
            for name, (command, environment) in SERVERS.items()
        }
        for server in started.values():
            server.wait()
        yield started


@pytest.fixture(scope="module")
def perplexities(servers: dict[str, Server], trained: Path) -> dict[str, tuple[float, float]]:
    """Of prefill and of decode, by server."""
    words = (ROOT / "docs" / "how-it-works.md").read_text()
    text = AutoTokenizer.from_pretrained(trained)(words).input_ids
    parts = accuracy.parts_of(text, SHARED, REQUESTS, STEPS)
    found = {}
    for name, server in servers.items():
        by_prefill = accuracy.prefilled(server, text, SHARED, REQUESTS, STEPS)
        by_decode = accuracy.decoded(server, parts)
        assert len(by_prefill) == len(by_decode) == REQUESTS * STEPS
        found[name] = accuracy.perplexity(by_prefill), accuracy.perplexity(by_decode)
    return found


def test_decode_finds_a_text_as_likely_as_prefill(
    servers: dict[str, Server], perplexities: dict[str, tuple[float, float]]
) -> None:
    by_prefill, by_decode = perplexities["right"]
    assert 5 < by_prefill < 100, "weights that are trained"
    assert by_decode == pytest.approx(by_prefill, rel=1e-3)
    counters = assert_sound(servers["right"])
    assert counters["kv_bytes"] < 0.5 * counters["kv_bytes_unpacked"]


def test_a_fault_in_decode_changes_what_it_finds(perplexities: dict[str, tuple[float, float]]) -> None:
    by_prefill, by_decode = perplexities["faulty"]
    assert by_prefill == pytest.approx(perplexities["right"][0], rel=1e-3)
    assert by_decode > 1.02 * by_prefill


def test_the_lead_where_answers_part_is_of_the_token_that_was_expected() -> None:
    steps = [{1: -0.1, 2: -3.0}, {3: -0.5, 4: -0.75, 5: -4.0}]
    right = accuracy.Answer([1, 3], steps)
    close, unlikely = accuracy.Answer([1, 4], []), accuracy.Answer([1, 9], [])
    assert accuracy.leads([right, close, unlikely], [right] * 3) == [0.25, 3.5]
    assert accuracy.parting([right, close], [right] * 2)["answers_equal"] == 1


def test_2_bits_cost_accuracy_and_the_server_says_so(
    servers: dict[str, Server], perplexities: dict[str, tuple[float, float]]
) -> None:
    by_prefill, by_decode = perplexities["2 bits"]
    assert by_decode == pytest.approx(by_prefill, rel=0.02), "prefill sees what decode sees"
    assert by_decode > 1.02 * perplexities["right"][1]
    assert servers["2 bits"].log.read_text().count("SGLANG_PAT_KV=int2 loses accuracy") == 1
