"""Speculative decoding on a CPU: greedy answers with drafts are those of `torch_native` without them."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import eagle
import eagle3
import gemma
import mellum
import mtp
import pytest
from conftest import NGRAMS, TOKENS, assert_sound, drafts, generate_all
from forked import ForkedServer

from sglang_pat import compat
from sglang_pat.demo import workload

pytestmark = pytest.mark.server

FLAGS = ["--dtype", "float32", "--max-running-requests", "24"]
ROOMY, SMALL = ["--max-total-tokens", "20000"], ["--max-total-tokens", "3000", "--schedule-conservativeness", "0.1"]
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "10"}
PROMPTS = workload.nested_prompts(2, 2, 2, unrelated=2)


# The longest prompts end with their context, behind which slots are reserved for drafts. SGLang keeps two tokens for itself.
ENDING = ["--context-length", str(max(map(len, PROMPTS)) + TOKENS + 2)]

CASES: dict[str, tuple[list[str], dict[str, str]]] = {
    # Drafts of the model itself, which SGLang does not show the first token: many are accepted.
    "right": ([*ROOMY, *drafts("STANDALONE", 3, 1, 4)], {}),
    # Of random weights: hardly any is. Keys of the prefix cache are pairs of tokens.
    "wrong": ([*ROOMY, "--page-size", "16", *drafts("EAGLE", 2, 1, 3)], {}),
    "branches": ([*ROOMY, *drafts("EAGLE", 3, 4, 8)], {}),
    "right, branches in pages": ([*ROOMY, "--page-size", "16", *drafts("STANDALONE", 3, 2, 5)], {}),
    # Prompts in chunks, in which the draft is a token ahead of the model.
    "EAGLE3": ([*ROOMY, "--page-size", "16", "--chunked-prefill-size", "128", *drafts("EAGLE3", 2, 1, 3)], {}),
    "branches of EAGLE3": ([*ROOMY, *drafts("EAGLE3", 3, 4, 8)], {}),
    "n-grams": ([*ROOMY, *NGRAMS, *ENDING], {}),
    "small pool, pages": ([*SMALL, "--page-size", "8", *NGRAMS, "--chunked-prefill-size", "128"], RETRACTING),
}


COMPILER = {"CXX": str(Path(__file__).parent / "cxx" / "c++")}
"""SGLang compiles its n-grams with this: a header of theirs lacks an include that some compilers want. Where it lies does not change, or else they would be
compiled in every run."""


@pytest.fixture(scope="module")
def draft_models(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By algorithm; n-grams need none."""
    folder = tmp_path_factory.mktemp("drafts")
    return {
        "STANDALONE": model, "EAGLE": eagle.write(folder / "eagle", model), "EAGLE3": eagle3.write(folder / "eagle3", model),
    }  # fmt: skip


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    folder = tmp_path_factory.mktemp("reference")
    with ForkedServer(model, "torch_native", folder / "log", [*FLAGS, *ROOMY]) as server:
        server.wait()
        return generate_all(server, PROMPTS)


MARKS = dict.fromkeys(["right", "branches", "branches of EAGLE3"], pytest.mark.slow)
MARKS |= dict.fromkeys(["wrong", "right, branches in pages"], pytest.mark.release)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=MARKS.get(case, ())) for case in CASES],
)
def test_answers_are_those_without_it(
    case: str, model: Path, draft_models: dict[str, Path], expected: list[list[int]], tmp_path: Path
) -> None:  # fmt: skip
    flags, environment = CASES[case]
    path = draft_models.get(flags[flags.index("--speculative-algorithm") + 1])
    flags = [*FLAGS, *flags, *(["--speculative-draft-model-path", str(path)] if path else [])]
    with ForkedServer(
        model, "pat", tmp_path / "log", flags, {"SGLANG_PAT_VERIFY": "1", **COMPILER, **environment}
    ) as server:
        server.wait()
        assert generate_all(server, PROMPTS) == expected
        counters = assert_sound(server)
        assert 0 < counters["kv_bytes"] < 0.8 * counters["kv_bytes_unpacked"]
        if not environment:
            assert counters["plans"] < 0.7 * counters["steps"], "plans that last"
        if case.startswith("right"):
            sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
            answer = server.post("/generate", {"text": PROMPTS[0], "sampling_params": sampling})
            assert answer["meta_info"]["spec_verify_ct"] < 0.7 * TOKENS, "steps that accept several tokens"


@pytest.mark.release
def test_a_model_that_brings_its_draft(model: Path, tmp_path: Path) -> None:
    """`--speculative-algorithm NEXTN` without a draft model; its drafts have branches."""
    model = mtp.write(tmp_path / "model", model)
    answers = {}
    for backend, more in (("torch_native", []), ("pat", drafts("NEXTN", 2, 2, 4))):
        log = tmp_path / backend
        with ForkedServer(model, backend, log, [*FLAGS, *ROOMY, *more], {"SGLANG_PAT_VERIFY": "1"}) as server:
            server.wait()
            answers[backend] = generate_all(server, PROMPTS)
            if backend == "pat":
                counters = assert_sound(server)
                assert 0 < counters["kv_bytes"] < 0.8 * counters["kv_bytes_unpacked"]
                assert counters["plans"] < 0.7 * counters["steps"], "plans that last"
                sampling = {"temperature": 0, "max_new_tokens": 2 * TOKENS, "ignore_eos": True}
                found = server.post("/generate", {"text": PROMPTS, "sampling_params": sampling})
                steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in found)
                assert 0.5 < steps / (2 * TOKENS * len(PROMPTS)) < 0.9, "some drafts are accepted, some are not"
    assert answers["pat"] == answers["torch_native"]
    assert len(set(map(tuple, answers["pat"]))) > len(PROMPTS) / 2, "answers that depend on prompts"


@pytest.mark.parametrize(
    ("family", "window"),
    [
        ("gemma", 40),
        pytest.param("gemma", 400, marks=pytest.mark.slow),
        pytest.param("mellum", 40, marks=pytest.mark.release),
    ],
)
def test_windows(family: str, window: int, model: Path, tmp_path: Path) -> None:
    """By turns with full layers, in one pool and, on 0.5.23, in two."""
    windowed = {"gemma": gemma, "mellum": mellum}[family].write(tmp_path / "model", model, window)
    flags = [*FLAGS, "--max-total-tokens", "4000"]
    answers = {}
    for backend, more in (("torch_native", ["--disable-hybrid-swa-memory"]), ("pat", NGRAMS)):
        environment = {"SGLANG_PAT_VERIFY": "1", **COMPILER}
        with ForkedServer(windowed, backend, tmp_path / backend, [*flags, *more], environment) as server:
            server.wait()
            answers[backend] = generate_all(server, PROMPTS)
            if backend == "pat":
                assert assert_sound(server)["plans"] > 0
    assert answers["pat"] == answers["torch_native"]
    assert len(set(map(tuple, answers["pat"]))) > len(PROMPTS) / 2, "answers that depend on prompts"


@pytest.mark.slow
@pytest.mark.skipif(compat.release() == "0.5.17", reason="it mixes no steps beside drafts")
def test_windows_hold_where_mixed_steps_are_among_verify_steps(
    model: Path, draft_models: dict[str, Path], tmp_path: Path
) -> None:
    """Each has plans of its own, and requests gain tokens in both. A prompt that is aborted within its chunks leaves a plan of mixed steps behind, which
    still is of the right requests when the next prompt comes."""
    numbers = random.Random(5)
    shared, *rest = (numbers.choices(range(40, 500), k=length) for length in (80, 4, 4, 6_000, 3_000))
    asked, (aborted, later) = [shared + own for own in rest[:2]], rest[2:]
    windowed = mellum.write(tmp_path / "model", model, 130)
    flags = [*FLAGS, "--max-total-tokens", "30000"]

    def answers(server: ForkedServer) -> list[list[int]]:
        sampling = {"temperature": 0, "max_new_tokens": 260, "ignore_eos": True}
        found = server.post("/generate", {"input_ids": asked, "sampling_params": sampling})
        return [one["output_ids"] for one in found]

    with ForkedServer(windowed, "torch_native", tmp_path / "log", [*flags, "--disable-hybrid-swa-memory"]) as server:
        server.wait()
        expected = answers(server)
    flags += ["--enable-mixed-chunk", "--chunked-prefill-size", "64", *drafts("EAGLE", 2, 1, 3)]
    flags += ["--speculative-draft-model-path", str(draft_models["EAGLE"])]
    with (
        ForkedServer(windowed, "pat", tmp_path / "log", flags, {"SGLANG_PAT_VERIFY": "1"}) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        server.wait()
        found = pool.submit(answers, server)
        while server.counters()["steps"] < 10:
            time.sleep(0.05)
        one = {"temperature": 0, "max_new_tokens": 1}
        sent = pool.submit(server.post, "/generate", {"input_ids": aborted, "sampling_params": one, "rid": "aborted"})
        while server.counters()["mixed_steps"] < 2:
            time.sleep(0.01)
        server.post("/abort_request", {"rid": "aborted"})
        sent.result()
        before = server.counters()
        while server.counters()["steps"] < before["steps"] + 60:
            time.sleep(0.05)
        server.post("/generate", {"input_ids": later, "sampling_params": one})
        assert found.result() == expected
        assert assert_sound(server)["mixed_steps"] > before["mixed_steps"]
