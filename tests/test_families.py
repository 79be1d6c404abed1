"""Families of models whose attention is nothing new, but whose code is their own: greedy answers are those of a stock backend on the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import families
import pytest
from conftest import assert_sound, generate_all
from forked import ForkedServer

from sglang_pat.demo import workload

pytestmark = pytest.mark.server

FLAGS = ["--dtype", "float32", "--trust-remote-code", "--max-running-requests", "48", "--max-total-tokens", "20000"]
NATIVE = ["--prefill-attention-backend", "torch_native", "--decode-attention-backend", "torch_native"]
STOCK: dict[Callable[[Path, Path], Path], tuple[str, list[str]]] = {
    families.glm: ("torch_native", []),
    families.hunyuan: ("torch_native", []),
    families.granite: ("torch_native", []),
    # It reads a pool for windows by wrong slots.
    families.step: ("torch_native", ["--disable-hybrid-swa-memory"]),
    # SGLang's list of backends for it has no `torch_native` either, but is about `--attention-backend` alone.
    families.exaone: ("fa3", NATIVE),
}
"""Families, and a stock backend that can serve them on a CPU, with its flags."""

QUICK = (families.exaone,)
"""One of them: others show little that is new about packing."""


@pytest.mark.parametrize(
    "write",
    [pytest.param(write, marks=[] if write in QUICK else pytest.mark.slow, id=write.__name__) for write in STOCK],
)
def test_answers_are_those_of_a_stock_backend(write: Callable[[Path, Path], Path], model: Path, tmp_path: Path) -> None:
    written = write(tmp_path / "model", model)
    prompts = workload.nested_prompts(2, 2, 3, unrelated=2)
    answers = {}
    stock, stock_flags = STOCK[write]
    for backend, flags in ((stock, stock_flags), ("pat", [])):
        log = tmp_path / f"{backend}.log"
        with ForkedServer(written, backend, log, [*FLAGS, *flags], {"SGLANG_PAT_VERIFY": "1"}) as server:
            server.wait()
            answers[backend] = generate_all(server, prompts)
            if backend == "pat":
                counters = assert_sound(server)
                assert 0 < counters["kv_bytes"] < counters["kv_bytes_unpacked"]
    assert len(set(map(tuple, answers[stock]))) > len(prompts) / 2, "answers that depend on prompts"
    assert answers["pat"] == answers[stock]
