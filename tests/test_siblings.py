"""Requests wait for a prefix that another one is computing: real schedulers (tests/scheduler_siblings.py) and servers."""

from __future__ import annotations

import json
import os
import random
import sys
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from conftest import amid_aborts, assert_sound
from forked import ForkedProcess, ForkedServer
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_pat.demo.server import Server
from sglang_pat.radix_bridge import hooks
from sglang_pat.radix_bridge.siblings import BLOCK, LEADER, STEPS, Siblings

SCRIPT = Path(__file__).parent / "scheduler_siblings.py"
CHUNK = 64

FLAGS = {
    "overlap": [],
    "no overlap, by weight": ["--disable-overlap-schedule", "--schedule-policy", "dfs-weight"],
    "chunks, longest match": ["--chunked-prefill-size", str(CHUNK), "--schedule-policy", "lpm"],
}

Steps = list[dict[str, int]]


@pytest.fixture(scope="module", params=FLAGS)
def scenes(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Steps]:
    """Of each scene, for each step, how many tokens each request computed."""
    log = tmp_path_factory.mktemp("logs") / "log"
    command = [sys.executable, str(SCRIPT), str(model), "--max-total-tokens", "3000", *FLAGS[request.param]]
    status = ForkedProcess(command, {**os.environ, "OMP_NUM_THREADS": "1"}, log).wait()
    output = log.read_text()
    assert status == 0, output[-3000:]
    report = json.loads(next(line for line in reversed(output.splitlines()) if line.startswith("{")))
    assert report["leaders"] == 0, "nobody is left"
    return report["scenes"]


def of(name: str, steps: Steps) -> int:
    return sum(step.get(name, 0) for step in steps)


def began(name: str, steps: Steps) -> int:
    return next(i for i, step in enumerate(steps) if name in step)


def ended(name: str, steps: Steps) -> int:
    return max(i for i, step in enumerate(steps) if name in step)


@pytest.mark.parametrize(("scene", "leader", "others"), [("together", "t0", 4), ("after each other", "a0", 3)])
def test_a_prefix_is_computed_once(scene: str, leader: str, others: int, scenes: dict[str, Steps]) -> None:
    steps = scenes[scene]
    assert of(leader, steps) == 108
    for i in range(1, others + 1):
        assert of(f"{leader[0]}{i}", steps) == 8
        assert began(f"{leader[0]}{i}", steps) <= ended(leader, steps) + max(2, i + 1), "at once when it is there"


def test_prefixes_of_two_levels_are_each_computed_once(scenes: dict[str, Steps]) -> None:
    found = {name: of(name, scenes["nested"]) for name in ("n00", "n01", "n10", "n11")}
    assert found == {"n00": 158, "n01": 8, "n10": 58, "n11": 8}


def test_who_waits_for_one_that_is_aborted_goes_on(scenes: dict[str, Steps]) -> None:
    steps = scenes["aborted"]
    assert of("x2", steps) == 8
    # What a chunked leader had computed when it was aborted need not be in the tree.
    assert of("x1", steps) in (8, 108 - CHUNK, 108)
    assert began("x1", steps) <= ended("x0", steps) + 2


def test_nobody_waits_for_the_rest_of_a_long_prompt(scenes: dict[str, Steps]) -> None:
    """But for the part that both begin with."""
    steps = scenes["a long leader"]
    assert (of("l0", steps), of("l1", steps), of("l2", steps)) == (300, 8, 8)
    if len([step for step in steps if "l0" in step]) > 1:
        assert began("l1", steps) == began("l2", steps) == ended("l0", steps), "in the step of its last chunk"


def test_who_can_have_nothing_of_another_does_not_wait(scenes: dict[str, Steps]) -> None:
    steps = scenes["another namespace"]
    assert (of("o0", steps), of("o1", steps), of("o2", steps)) == (108, 108, 8)
    assert began("o1", steps) <= ended("o0", steps)
    steps = scenes["log-probabilities"]
    assert (of("p0", steps), of("p1", steps)) == (108, 108)
    assert began("p1", steps) <= ended("p0", steps)


def test_a_leader_that_is_lost_stops_nobody_for_long(scenes: dict[str, Steps]) -> None:
    steps = scenes["a lost leader"]
    assert of("s1", steps) == 108
    assert STEPS <= began("s1", steps) - ended("s0", steps) <= STEPS + 12


RANK = """
import sys
from sglang.srt.distributed import init_distributed_environment
from sglang_pat import compat

rank, where = int(sys.argv[1]), sys.argv[2]
init_distributed_environment(2, rank, where, rank, backend="gloo")
print("all want it:", [compat.model.wanted_by_all(wanted) for wanted in (rank == 0, rank == 1, False, True)])
"""


def test_requests_wait_where_every_rank_wants_it(tmp_path: Path) -> None:
    """Ranks that let different requests wait would form different batches."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    ranks = [
        ForkedProcess(
            [sys.executable, str(script), str(rank), f"file://{tmp_path}/store"], dict(os.environ), tmp_path / str(rank)
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(ranks):
        assert process.wait(60) == 0, (tmp_path / str(rank)).read_text()[-2000:]
        assert "all want it: [False, False, False, True]" in (tmp_path / str(rank)).read_text()


@pytest.mark.once
def test_only_what_every_rank_fails_at_is_put_up_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that alone stopped to let requests wait would form other batches than the others: it ends."""
    siblings = Siblings()
    monkeypatch.setattr(hooks, "_siblings", siblings)
    with pytest.raises(MemoryError):
        hooks._tell_siblings(lambda siblings: b"x" * (1 << 62))
    assert hooks._siblings is siblings
    assert hooks._tell_siblings(lambda siblings: siblings.computes(None, None)) is None
    assert hooks._siblings is None, "nobody waits from then on"


PREFIX, OWN, SIBLINGS = 700, 50, 16


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    logs = tmp_path_factory.mktemp("servers")
    flags = ["--dtype", "float32", "--max-total-tokens", "20000", "--chunked-prefill-size", "2048"]
    with ExitStack() as stack:
        started = {
            defer: stack.enter_context(
                ForkedServer(model, "pat", logs / defer, flags, {"SGLANG_PAT_DEFER": defer, "OMP_NUM_THREADS": "1"})
            )
            for defer in "01"
        }
        for server in started.values():
            server.wait()
        yield started


def ask(server: Server, prompts: list[list[int]], **options: Any) -> Any:
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    return server.post("/generate", {"input_ids": prompts, "sampling_params": sampling, **options})


def prompts(key: str) -> list[list[int]]:
    numbers = random.Random(key)
    prefix = numbers.choices(range(40, 120), k=PREFIX)
    return [prefix + numbers.choices(range(40, 120), k=OWN) for _ in range(SIBLINGS)]


@pytest.mark.server
def test_siblings_that_arrive_together_compute_their_prefix_once(servers: dict[str, Server]) -> None:
    asked = prompts("together")
    answers, computed = {}, {}
    for defer, server in servers.items():
        found = ask(server, asked)
        answers[defer] = [one["output_ids"] for one in found]
        computed[defer] = sum(one["meta_info"]["prompt_tokens"] - one["meta_info"]["cached_tokens"] for one in found)
    assert answers["0"] == answers["1"]
    once = PREFIX + SIBLINGS * OWN
    # Their own tokens may begin alike, by chance.
    assert once - 2 * SIBLINGS <= computed["1"] <= once
    assert computed["0"] >= once + PREFIX, "it is worth something"
    counters = {defer: assert_sound(server) for defer, server in servers.items()}
    assert counters["1"]["deferred"] >= SIBLINGS - 1 and counters["0"]["deferred"] == 0
    assert counters["1"]["defers"] and not counters["0"]["defers"], "what a job asks before it sends siblings together"


@pytest.mark.server
def test_aborts_of_leaders_keep_nobody_waiting(servers: dict[str, Server]) -> None:
    asked = prompts("aborts")
    expected = [one["output_ids"] for one in ask(servers["0"], asked)]

    def disturb(number: int, rid: str) -> None:
        ask(servers["1"], [asked[number % SIBLINGS] + [40 + number] * 600], rid=[rid])

    def answer() -> list[Any]:
        with ThreadPoolExecutor(SIBLINGS) as pool:
            return list(pool.map(lambda prompt: ask(servers["1"], [prompt])[0]["output_ids"], asked * 4))

    assert amid_aborts(servers["1"], disturb, answer) == expected * 4
    assert_sound(servers["1"])


class Adder:
    """As much of SGLang's `PrefillAdder` as is looked at."""

    preempt_list: tuple[Any, ...] = ()
    page_size = 1

    def __init__(self) -> None:
        self.tree_cache = RadixCache.create_simulated()

    def budget_state(self) -> str:
        return "more"


def request(tokens: list[int], cached: int, node: int | None, on_host: int = 0) -> Req:
    """One that was just matched with the tree."""
    found = array("q", tokens)
    req = Req("", "", found, SamplingParams())
    req.full_untruncated_fill_ids = found
    req.prefix_indices, req.prefix_len, req.last_node = found[:cached], cached, node
    req.host_hit_length = on_host
    return req


@pytest.mark.once
def test_nobody_waits_where_matches_are_empty() -> None:
    """What a leader computes would not be found."""
    for miss in (False, True):
        adder, siblings = Adder(), Siblings()
        with envs.SGLANG_RADIX_FORCE_MISS.override(miss):
            assert siblings.defer(adder, request([7] * 200, 0, None)) is None
            siblings.computes(adder, request([7] * 200, 0, None))
            assert siblings.defer(adder, request([7] * 200, 0, None)) == (None if miss else "more")


@pytest.mark.once
def test_a_step_compares_so_many_tokens_and_then_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that differ late, and of which the last blocks are equal, could be compared with each other for a second."""
    length, leaders = 1000, 5
    prompts = [[7] * (length - 1) + [number] + [8] * (BLOCK + 1) for number in range(leaders)]
    # The last leader is the right one.
    monkeypatch.setattr("sglang_pat.radix_bridge.siblings.COMPARED", leaders * (length + BLOCK + LEADER))
    siblings, adder = Siblings(), Adder()
    assert siblings.defer(adder, request(prompts[0], length, None)) is None
    for prompt in prompts[:leaders]:
        siblings.computes(adder, request(prompt, length, None))
    waits = request(prompts[leaders - 1], length, None)
    assert siblings.defer(adder, waits) == "more"
    assert siblings.defer(adder, waits) is None, "it has compared enough"
    assert siblings.defer(Adder(), waits) == "more", "another step"
    assert siblings.deferred == 2


def test_who_ends_at_the_same_node_waits_and_who_has_other_tokens_behind_it_does_not() -> None:
    """What is cached is not compared if the node says that it is equal: by its id, where the tree has ids, which are other objects each time."""
    numbers = random.Random(0)
    document, other = (numbers.choices(range(1000), k=2000) for _ in range(2))
    turn, another = (numbers.choices(range(1000), k=600) for _ in range(2))
    document[:BLOCK] = other[:BLOCK]
    adder, siblings = Adder(), Siblings()
    assert siblings.defer(adder, request(document + turn, 2000, int("1000"))) is None
    siblings.computes(adder, request(document + turn, 2000, int("1000")))
    assert siblings.defer(adder, request(document + turn, 2000, int("1000"))) == "more"
    assert siblings.defer(adder, request(document + turn, 2000, int("1001"))) == "more", "compared"
    assert siblings.defer(adder, request(document + another, 2000, int("1000"))) is None
    assert siblings.defer(adder, request(other + turn, 2000, int("1001"))) is None
    # Part of it is on the host, behind the node: another branch may be as long.
    assert siblings.defer(adder, request(other + turn, 1000, int("1000"), on_host=1000)) is None
    # Once that is loaded, it is on the device too.
    loaded = request(other + another, 2000, int("1002"), on_host=1000)
    siblings.computes(adder, loaded)
    assert siblings.defer(adder, request(other + another, 2000, int("1003"))) == "more"
