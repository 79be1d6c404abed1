"""Embedding models: what a real server answers is what `torch_native` answers on the same weights, and nothing is decoded."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import bert
import pytest
from conftest import assert_sound
from forked import ForkedServer

from sglang_pat.demo import workload
from sglang_pat.demo.server import Server

pytestmark = pytest.mark.server

FLAGS = ["--is-embedding", "--dtype", "float32", "--max-running-requests", "16", "--max-total-tokens", "20000"]
WHOLE = ["--disable-radix-cache", "--chunked-prefill-size", "-1", "--mem-fraction-static", "0.5"]
"""0.5.23 knows by itself that tokens of an encoder see those behind them; 0.5.17 has to be told. Either then expects prefills of
16,384 tokens, for which it would keep 24 GB."""

SERVERS: dict[str, tuple[str, str, list[str]]] = {
    "qwen, torch_native": ("qwen", "torch_native", []),
    "decoder": ("qwen", "pat", []),
    "bert, torch_native": ("bert", "torch_native", WHOLE),
    "encoder": ("bert", "pat", WHOLE),
    "encoder, pat for decode": ("bert", "torch_native", [*WHOLE, "--decode-attention-backend", "pat"]),
}
"""The model, the backend and flags of each."""

TEXTS = [f"text: {workload.prose(f'text {number}', 15 + 30 * number)}" for number in range(12)]
"""They begin alike, so that an encoder's embeddings of them, its first token's output, differ by what that token sees."""


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    folder = tmp_path_factory.mktemp("embedding")
    models = {"qwen": model, "bert": bert.write(folder / "bert", model)}
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(ForkedServer(models[kind], backend, folder / f"{name}.log", [*FLAGS, *flags]))
            for name, (kind, backend, flags) in SERVERS.items()
        }
        for server in started.values():
            server.wait()
        yield started


def embeddings(server: Server, texts: list[str]) -> list[list[float]]:
    """Of texts that are in one request."""
    answers = server.post("/v1/embeddings", {"model": "tiny", "input": texts})["data"]
    return [answer["embedding"] for answer in answers]


@pytest.mark.parametrize("name", ["decoder", "encoder", "encoder, pat for decode"])
def test_embeddings_are_those_of_a_stock_backend(name: str, servers: dict[str, Server]) -> None:
    expected = embeddings(servers[f"{SERVERS[name][0]}, torch_native"], TEXTS)
    for other in expected[1:]:
        assert max(abs(a - b) for a, b in zip(expected[0], other, strict=True)) > 0.01, "they depend on the text"
    assert embeddings(servers[name], TEXTS) == [pytest.approx(right, abs=1e-5) for right in expected]
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        alone = list(pool.map(lambda text: embeddings(servers[name], [text])[0], TEXTS))
    assert alone == [pytest.approx(right, abs=1e-5) for right in expected]


def test_a_decoder_that_decodes_nothing_is_followed(servers: dict[str, Server]) -> None:
    counters = assert_sound(servers["decoder"])
    # A text of which all but a token is cached is a step, as if that token had been decoded. Each was sent twice.
    assert counters["nodes"] > 0 and counters["steps"] <= 2 * len(TEXTS)


def test_an_encoder_is_not_planned_for(servers: dict[str, Server]) -> None:
    for name in ("encoder", "encoder, pat for decode"):
        assert "sglang-pat: BertModel runs on a stock backend" in servers[name].log.read_text()
