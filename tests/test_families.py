"""Families of models whose attention is nothing new, but whose code is their own: greedy answers are those of `torch_native` on the same weights."""

from __future__ import annotations

from pathlib import Path

import glm
import pytest
from conftest import assert_sound, generate_all
from forked import ForkedServer

from sglang_pat.demo import workload

pytestmark = [pytest.mark.server, pytest.mark.slow]

FLAGS = ["--dtype", "float32", "--max-running-requests", "48", "--max-total-tokens", "20000"]
WRITERS = {"GLM-4.5": glm.write}


@pytest.mark.parametrize("family", WRITERS)
def test_answers_are_those_of_a_stock_backend(family: str, model: Path, tmp_path: Path) -> None:
    written = WRITERS[family](tmp_path / "model", model)
    prompts = workload.nested_prompts(2, 2, 3, unrelated=2)
    answers = {}
    for backend in ("torch_native", "pat"):
        with ForkedServer(written, backend, tmp_path / f"{backend}.log", FLAGS, {"SGLANG_PAT_VERIFY": "1"}) as server:
            server.wait()
            answers[backend] = generate_all(server, prompts)
            if backend == "pat":
                counters = assert_sound(server)
                assert 0 < counters["kv_bytes"] < counters["kv_bytes_unpacked"]
    assert len(set(map(tuple, answers["torch_native"]))) > len(prompts) / 2, "answers that depend on prompts"
    assert answers["pat"] == answers["torch_native"]
