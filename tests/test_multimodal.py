"""Models that see images: greedy answers are those of `torch_native` on the same weights, and questions on one image share it."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import qwen_vl
from conftest import assert_sound
from forked import ForkedServer
from PIL import Image

from sglang_pat.demo import workload
from sglang_pat.demo.server import Server

pytestmark = [pytest.mark.server, pytest.mark.release]

FLAGS = ["--dtype", "float32", "--max-running-requests", "16", "--max-total-tokens"]
SERVERS: dict[str, tuple[str, list[str], dict[str, str]]] = {
    "reference": ("torch_native", ["20000"], {}),
    "plain": ("pat", ["20000"], {"SGLANG_PAT_VERIFY": "1"}),
    "small pool, pages": (
        "pat",
        ["1500", "--page-size", "16", "--chunked-prefill-size", "64", "--schedule-conservativeness", "0.1"],
        {"SGLANG_PAT_VERIFY": "1", "SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "40"},
    ),
}
QUESTIONS = 4


def picture(seed: int) -> str:
    """Of random pixels, as a URL."""
    pixels = np.random.default_rng(seed).integers(0, 255, (84, 112, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def answers(server: Server) -> list[list[int]]:
    """To several questions on each of several pictures, all at the same time."""

    def ask(number: int) -> list[int]:
        image, question = divmod(number, QUESTIONS)
        body = {
            "text": f"{qwen_vl.IMAGE}{workload.prose('pictures', 150)} question {question}",
            "image_data": picture(image),
            "sampling_params": {"temperature": 0, "max_new_tokens": 24},
        }
        return server.post("/generate", body)["output_ids"]

    with ThreadPoolExecutor(3 * QUESTIONS) as pool:
        return list(pool.map(ask, range(3 * QUESTIONS)))


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    folder = tmp_path_factory.mktemp("multimodal")
    sighted = qwen_vl.write(folder / "model", model)
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(
                ForkedServer(sighted, backend, folder / f"{name}.log", [*FLAGS, *flags], environment)
            )
            for name, (backend, flags, environment) in SERVERS.items()
        }
        for server in started.values():
            server.wait()
        yield started


def test_answers_are_those_of_a_stock_backend(servers: dict[str, Server]) -> None:
    expected = answers(servers["reference"])
    assert len(set(map(tuple, expected))) == len(expected), "answers that depend on picture and question"
    for name in ("plain", "small pool, pages"):
        assert answers(servers[name]) == expected, name
        counters = assert_sound(servers[name])
        assert any(int(size) > 1 for size in counters["query_sizes"]), "questions on one picture share it"
