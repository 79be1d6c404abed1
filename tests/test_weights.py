"""Weights that change between rollouts: answers are those of a server that started with them, and nothing of the old ones is left in plans or mirror.

Two tiny models of other weights, A and B, on a CPU. Rollouts are several samples to nested prompts, greedy, so that all are known.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import near_ties
import pytest
from conftest import TOKENS, assert_sound, flush, generate_all
from forked import ForkedProcess, ForkedServer
from gpu_servers import CHECKED, POOL, WITHOUT_PREFILL_GRAPHS
from near_ties import Answer, assert_agree
from near_ties import generate_all as likely_answers

from sglang_pat import compat
from sglang_pat.demo import tiny_model, workload
from sglang_pat.demo.server import Server

pytestmark = pytest.mark.server

FLAGS = [
    "--dtype", "float32", "--max-running-requests", "48", POOL, "40000", "--chunked-prefill-size", "32768", "--max-prefill-tokens", "32768",
    "--mem-fraction-static", "0.5",
]  # fmt: skip
ENVIRONMENT = {**CHECKED, "SGLANG_PAT_DEFER": "0"}
"""With the flags: all of a rollout begins in one step, and ends in one. So the last batch of one weights' is as large as the first of the next, which a plan
that outlived them would be taken for."""
SAMPLES = 2
LONG = 200
"""Tokens of an answer that an update finds running."""

Rollouts = list[list[list[int]]]
"""Ids of each prompt's samples."""


@pytest.fixture(scope="module")
def models(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"A": model, "B": tiny_model.write(tmp_path_factory.mktemp("models") / "tiny-qwen3-B", seed=1)}


@pytest.fixture(scope="module")
def servers(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """Of PAT one whose weights change; of a stock backend its twin, and one that has B from the start."""
    logs = tmp_path_factory.mktemp("logs")
    started = {"pat": ("pat", "A"), "twin": ("torch_native", "A"), "B": ("torch_native", "B")}
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(ForkedServer(models[of], backend, logs / f"{name}.log", FLAGS, ENVIRONMENT))
            for name, (backend, of) in started.items()
        }
        for server in running.values():
            server.wait()
        yield running


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return workload.nested_prompts(2, 2, 3, unrelated=4)


@pytest.fixture(scope="module")
def expected(servers: dict[str, Server], prompts: list[str]) -> dict[str, Rollouts]:
    """By weights: rollouts of a server that started with them."""
    return {weights: rollouts(servers[name], prompts) for weights, name in (("A", "twin"), ("B", "B"))}


def rollouts(server: Server, prompts: list[str]) -> Rollouts:
    """In one call, so that batches have the same sizes and rows, and on 0.5.17 behind a flush the same numbers, whatever the prompts are."""
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    answers = server.post("/generate", {"text": prompts * SAMPLES, "sampling_params": sampling})
    ids = [answer["output_ids"] for answer in answers]
    return [ids[number :: len(prompts)] for number in range(len(prompts))]


def update(server: Server, model: Path, **body: Any) -> None:
    body = {"model_path": str(model), "flush_cache": False, **body}
    assert server.post("/update_weights_from_disk", body)["success"]


def running(pool: ThreadPoolExecutor, server: Server, prompts: list[str]) -> list[Future[dict[str, Any]]]:
    """Long answers, which are all being decoded when this returns."""
    sampling = {"temperature": 0, "max_new_tokens": LONG, "ignore_eos": True}
    sent = [pool.submit(server.post, "/generate", {"text": prompt, "sampling_params": sampling}) for prompt in prompts]
    deadline = time.monotonic() + 60
    while server.counters()["bound"] < len(prompts) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(one.done() for one in sent), "none of them runs any more"
    return sent


def wait_for_rest(server: Server) -> None:
    """0.5.17 ends if an update cannot flush, and the last step of a batch outlasts its answers."""
    assert_sound(server)
    time.sleep(0.5)


def test_weights_matter(expected: dict[str, Rollouts]) -> None:
    """Or else the comparisons below would prove nothing."""
    assert all(a[0] != b[0] for a, b in zip(expected["A"], expected["B"], strict=True))


def test_updates_while_nothing_runs(
    servers: dict[str, Server], models: dict[str, Path], prompts: list[str], expected: dict[str, Rollouts]
) -> None:
    """The update flushes, or the trainer does."""
    server = servers["pat"]
    assert rollouts(server, prompts) == expected["A"]
    for step, weights in enumerate("BABA"):
        wait_for_rest(server)
        update(server, models[weights], flush_cache=step % 2 == 0)
        if step % 2:
            flush(server)
        turned = prompts[step + 1 :] + prompts[: step + 1]
        right = expected[weights][step + 1 :] + expected[weights][: step + 1]
        assert rollouts(server, turned) == right, step
    counters = assert_sound(server)
    assert counters["kv_bytes"] < 0.7 * counters["kv_bytes_unpacked"]


@pytest.mark.parametrize("abort", [False, True], ids=["waits", "aborts"])
def test_updates_while_requests_run(
    servers: dict[str, Server], models: dict[str, Path], prompts: list[str], expected: dict[str, Rollouts], abort: bool
) -> None:
    """SGLang answers them first, by the old weights, or aborts them."""
    server = servers["pat"]
    wait_for_rest(server)
    update(server, models["A"], flush_cache=True)
    with ThreadPoolExecutor(len(prompts)) as pool:
        sent = running(pool, server, prompts)
        update(server, models["B"], abort_all_requests=abort)
        for one, right in zip(sent, expected["A"], strict=True):
            answer = one.result()
            assert (answer["meta_info"]["finish_reason"]["type"] == "abort") == abort
            assert answer["output_ids"][:TOKENS] == right[0][: len(answer["output_ids"])]
    flush(server)
    assert rollouts(server, prompts) == expected["B"]
    assert_sound(server)


@pytest.mark.release
def test_a_cache_that_is_not_flushed(
    servers: dict[str, Server], models: dict[str, Path], prompts: list[str], expected: dict[str, Rollouts]
) -> None:
    """KV of the old weights stays, and is shared as before: answers are those of a stock backend that did the same. What is not cached is all new."""
    for name in ("pat", "twin"):
        server = servers[name]
        flush(server)
        update(server, models["A"])
        assert rollouts(server, prompts) == expected["A"]
        update(server, models["B"])
    # The same prompts would leave it to chance whether a first step reads their last token's KV of B or, once the tree has taken it, of A.
    continued, others = [f"{prompt} and more" for prompt in prompts], [f"Another {prompt}" for prompt in prompts]
    stale = rollouts(servers["pat"], continued)
    assert stale == rollouts(servers["twin"], continued)
    assert stale != rollouts(servers["B"], continued), "nothing was cached"
    assert generate_all(servers["pat"], others) == generate_all(servers["B"], others)
    assert_sound(servers["pat"])


@pytest.mark.skipif(compat.release() == "0.5.17", reason="ends at such an update (docs/crashes.md)")
@pytest.mark.parametrize("mode", ["retract", pytest.param("in_place", marks=pytest.mark.release)])
def test_updates_amid_answers(
    servers: dict[str, Server], models: dict[str, Path], prompts: list[str], expected: dict[str, Rollouts], mode: str
) -> None:
    """Partial rollouts: paused requests go on with the new weights. Retracted ones are computed anew behind a flush: from there on an answer is what the
    new weights say of all of it. Those that stay keep their KV."""
    server = servers["pat"]
    wait_for_rest(server)
    update(server, models["A"], flush_cache=True)
    with ThreadPoolExecutor(len(prompts)) as pool:
        sent = running(pool, server, prompts)
        time.sleep(0.5)
        server.post("/pause_generation", {"mode": mode})
        update(server, models["B"], flush_cache=mode == "retract")
        server.post("/continue_generation")
        answers = [one.result()["output_ids"] for one in sent]
    assert all(len(answer) == LONG for answer in answers)
    if mode == "retract":
        flush(servers["twin"])
        update(servers["twin"], models["A"], flush_cache=True)
        begun = [of_old_weights(servers, prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        assert all(0 < count < LONG for count in begun), begun
    assert_sound(server)
    flush(server)
    assert rollouts(server, prompts) == expected["B"]
    assert_sound(server)


def of_old_weights(servers: dict[str, Server], prompt: str, answer: list[int]) -> int:
    """How many tokens of an answer are not what B says; they must be what A says, and in front of all others."""
    prompt_ids = servers["B"].post("/tokenize", {"prompt": prompt})["tokens"]
    old, new = (said_by(servers[name], prompt_ids, answer) for name in ("twin", "B"))
    other = [step for step, (token, right) in enumerate(zip(answer, new, strict=True)) if token != right]
    count = max(other, default=-1) + 1
    assert answer[:count] == old[:count]
    return count


def said_by(server: Server, prompt: list[int], answer: list[int]) -> list[int]:
    """The likeliest token at each place of an answer, given what is in front of it."""
    body = {
        "input_ids": prompt + answer, "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True, "logprob_start_len": len(prompt) - 1, "top_logprobs_num": 1,
    }  # fmt: skip
    steps = server.post("/generate", body)["meta_info"]["input_top_logprobs"]
    return [step[0][1] for step in steps[1:]]


MEMORY = {
    "memory": (["kv_cache", "weights"], {}, False),
    "memory of graphs too": (["cuda_graph", "kv_cache", "weights"], {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"}, False),
    "graphs captured anew": ([], {}, True),
}  # fmt: skip
"""What is released between rollouts, the environment for it, and whether an update captures graphs again."""


@pytest.fixture(scope="module")
def on_gpu(
    gpu_model: Path, tmp_path_factory: pytest.TempPathFactory, prompts: list[str]
) -> dict[str, tuple[Path, list[Answer]]]:
    """By weights: the model, and the answers of Triton's backend that started with it."""
    folder = tmp_path_factory.mktemp("gpu")
    found = {}
    for name, model in (("A", gpu_model), ("B", tiny_model.write(folder / "B", seed=1, head_dim=64))):
        with Server(
            model, "triton", folder / f"{name}.log", [*WITHOUT_PREFILL_GRAPHS, POOL, "60000"], on_cpu=False
        ) as server:
            found[name] = model, likely_answers(server.wait(), prompts)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("case", MEMORY)
def test_memory_is_released_between_rollouts(
    case: str, on_gpu: dict[str, tuple[Path, list[Answer]]], prompts: list[str], tmp_path: Path
) -> None:
    """As trainers do it: all is released, weights come back and are updated, then the cache comes back; graphs have the addresses of before."""
    tags, environment, recaptures = MEMORY[case]
    flags = [*WITHOUT_PREFILL_GRAPHS, POOL, "60000", *(["--enable-memory-saver"] if tags else [])]
    with Server(on_gpu["A"][0], "pat", tmp_path / "log", flags, CHECKED | environment, on_cpu=False) as server:
        server.wait()
        assert_agree(likely_answers(server, prompts), on_gpu["A"][1])
        for weights in "BAB":
            model, expected = on_gpu[weights]
            wait_for_rest(server)
            if tags:
                server.post("/release_memory_occupation", {"tags": tags})
                server.post("/resume_memory_occupation", {"tags": [tag for tag in tags if tag != "kv_cache"]})
            update(server, model, recapture_cuda_graph=recaptures)
            if tags:
                server.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
            flush(server)
            assert_agree(likely_answers(server, prompts), expected)
        counters = assert_sound(server)
    assert counters["kv_bytes"] < 0.8 * counters["kv_bytes_unpacked"]


def test_an_engine_takes_tensors_and_broadcasts(
    models: dict[str, Path], prompts: list[str], expected: dict[str, Rollouts], tmp_path: Path
) -> None:
    """From the trainer's process, and from a process group of both."""
    command, log = engine(models["A"], models["B"], prompts, TOKENS, tmp_path, "cpu"), tmp_path / "log"
    assert ForkedProcess(command, {**os.environ, **CHECKED}, log).wait(600) == 0, log.read_text()
    right = {weights: [samples[0] for samples in expected[weights]] for weights in "AB"}
    assert answers_of(tmp_path) == [right[weights] for weights in "ABABA"]


@pytest.mark.gpu
def test_an_engine_on_a_gpu_takes_tensors_and_broadcasts(
    on_gpu: dict[str, tuple[Path, list[Answer]]], prompts: list[str], tmp_path: Path
) -> None:
    """In CUDA graphs, which read weights where they were when they were captured."""
    command = engine(on_gpu["A"][0], on_gpu["B"][0], prompts, near_ties.TOKENS, tmp_path, "cuda")
    subprocess.run(command, env={**os.environ, **CHECKED}, timeout=600, check=True)
    for weights, ids in zip("ABABA", answers_of(tmp_path), strict=True):
        assert_agree([Answer(one, []) for one in ids], on_gpu[weights][1])


def engine(model: Path, other: Path, prompts: list[str], tokens: int, folder: Path, device: str) -> list[str]:
    """The command of ENGINE, which writes `out` to the folder."""
    script = folder / "engine.py"
    script.write_text(ENGINE)
    return [
        sys.executable, str(script), str(model), str(other), json.dumps(prompts), str(tokens), str(folder / "out"), device,
        "float32" if device == "cpu" else "float16",
    ]  # fmt: skip


def answers_of(folder: Path) -> Rollouts:
    """What ENGINE's engine answered, with one weights after the other; it packed, and no plan failed."""
    answers, counters = json.loads((folder / "out").read_text())
    assert (counters["fallbacks"], counters["faults"], counters["bound"]) == (0, 0, 0)
    assert counters["kv_bytes"] < 0.9 * counters["kv_bytes_unpacked"]
    return answers


ENGINE = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import sglang
import torch
from safetensors.torch import load_file
from sglang.srt.utils import init_custom_process_group
from sglang_pat.demo.server import free_port

def updated(engine, update):
    # From 0.5.23 on updates are in sessions.
    for step in ("begin_weight_update", None, "end_weight_update"):
        if step is None:
            done = update()
        elif hasattr(engine, step):
            done = getattr(engine, step)()
        else:
            continue
        assert done[0], done

def broadcast(weights, group):
    for weight in weights.values():
        torch.distributed.broadcast(weight, src=0, group=group)

if __name__ == "__main__":
    prompts, tokens, out, device, dtype = json.loads(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]), *sys.argv[6:]
    weights = [{name: weight.to(device, getattr(torch, dtype)) for name, weight in load_file(Path(folder) / "model.safetensors").items()}
               for folder in sys.argv[1:3]]
    flags = {"mem_fraction_static": 0.5} if device == "cpu" else {"mem_fraction_static": 0.15, "disable_prefill_cuda_graph": True}
    engine = sglang.Engine(model_path=sys.argv[1], attention_backend="pat", dtype=dtype, grammar_backend="none", max_total_tokens=20000,
                           nccl_port=free_port(), **flags)
    answers = []
    def ask():
        outputs = engine.generate(prompts, {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True})
        answers.append([output["output_ids"] for output in outputs])
    ask()
    for new in (weights[1], weights[0]):
        updated(engine, lambda: engine.update_weights_from_tensor(list(new.items()), flush_cache=False))
        assert engine.flush_cache().success
        ask()
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        group = pool.submit(init_custom_process_group, backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=0,
                            group_name="trainer")
        done = engine.init_weights_update_group("127.0.0.1", port, 1, 2, "trainer", "gloo")
        assert done[0], done
        for new in (weights[1], weights[0]):
            sent = pool.submit(broadcast, new, group.result())
            shapes = [list(weight.shape) for weight in new.values()]
            updated(engine, lambda: engine.update_weights_from_distributed(list(new), [dtype] * len(new), shapes, "trainer", flush_cache=False))
            sent.result()
            assert engine.flush_cache().success
            ask()
    counters = engine.get_server_info()["internal_states"][0]["pat"]
    engine.shutdown()
    out.write_text(json.dumps([answers, counters]))
"""
