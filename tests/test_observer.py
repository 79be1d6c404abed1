"""What the observer does when SGLang does something that it does not know. The requests are SGLang's own."""

from __future__ import annotations

import logging
import subprocess
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from natives import next_batch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_pat import compat
from sglang_pat.packing import CPU_TILES, CostModel, PackConfig
from sglang_pat.packing.native import NativeScheduler
from sglang_pat.radix_bridge import Observer, hooks
from sglang_pat.radix_bridge.events import ROOT, NodeInserted, RequestBound
from sglang_pat.radix_bridge.observer import apply
from sglang_pat.radix_bridge.siblings import Siblings

POOL = ReqToTokenPool(8, 64, "cpu", False)
CACHE: Any = SimpleNamespace(disable=False, req_to_token_pool=POOL)


@dataclass(eq=False)
class Follower:
    req_to_token_pool: ReqToTokenPool
    observer: Any


def request(rid: str) -> Req:
    req = Req(rid, "", array("q", range(12)), SamplingParams())
    POOL.alloc([req])
    return req


@pytest.fixture
def running() -> Iterator[list[Req]]:
    """Two that share a node; their clients chose the same id."""
    reqs = [request("same"), request("same")]
    yield reqs
    POOL.clear()


@pytest.fixture
def observer(running: list[Req], monkeypatch: pytest.MonkeyPatch) -> Iterator[Observer]:
    """Of two groups of layers, which know the same whatever happened."""
    config = PackConfig(CostModel(8, 2, 64, 64, 2), CPU_TILES, 2)
    other = NativeScheduler(msgspec.structs.replace(config, window=16), max_batch=8)
    observer = Observer(NativeScheduler(config, max_batch=8), other)
    follower = Follower(POOL, observer)
    stranger = Follower(ReqToTokenPool(8, 64, "cpu", False), Observer(NativeScheduler(config, max_batch=8)))
    monkeypatch.setattr(hooks, "followers", lambda: [stranger, follower])
    for scheduler in (observer.scheduler, other):
        apply(scheduler, NodeInserted(1, ROOT, 10, bytes(16)))
        for req in running:
            apply(scheduler, RequestBound(compat.requests.number(POOL, req), 1, 12))
    yield observer
    for number in range(1, 9):
        assert other.find(number) == observer.scheduler.find(number)
    for number in filter(None, numbers(running)):
        assert other.binding(number) == observer.scheduler.binding(number)
    assert next_batch(other) == next_batch(observer.scheduler)


def numbers(running: list[Req]) -> list[int]:
    return [compat.requests.number(POOL, req) for req in running]


def test_a_request_whose_path_cannot_be_read_is_decoded_unpacked_and_no_other(
    observer: Observer, running: list[Req], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = numbers(running)
    with caplog.at_level(logging.WARNING):
        hooks._on_cached(None, CACHE, running[0])
        hooks._on_cached(None, CACHE, request("never bound"))
    assert observer.faults == 2
    assert len(caplog.records) == 1
    assert (observer.scheduler.binding(first), observer.scheduler.binding(second)) == ((ROOT, 0), (1, 10))
    assert next_batch(observer.scheduler) == [first, second]


def test_requests_with_the_same_id_are_told_apart(observer: Observer, running: list[Req]) -> None:
    first, second = numbers(running)
    hooks._on_release(lambda req, cache: POOL.free(req), running[0], CACHE)
    assert next_batch(observer.scheduler) == [second] and len(observer.scheduler) == 1
    heir = request("same")
    (number,) = numbers([heir])
    assert number not in (first, second) and observer.scheduler.binding(number) is None


def test_a_request_whose_kv_was_offloaded_gives_its_row_back(observer: Observer, running: list[Req]) -> None:
    """A decode server's manager frees it, not `release_kv_cache`, and is asked again for some."""
    manager = SimpleNamespace(req_to_token_pool=POOL)
    _, second = numbers(running)
    for _ in range(2):
        hooks._on_offloaded(
            lambda manager, req, *_: compat.requests.row(req) is None or POOL.free(req), manager, running[0], 0
        )
    assert next_batch(observer.scheduler) == [second] and len(observer.scheduler) == 1


def test_an_eviction_under_running_requests_unbinds_them(observer: Observer, running: list[Req]) -> None:
    hooks._on_evict_id(None, CACHE, 1)
    assert observer.faults == 1
    assert [observer.scheduler.binding(number) for number in numbers(running)] == [(ROOT, 0)] * 2
    observer.on_prefill(numbers(running), [12, 12], ["same", "same"])
    assert next_batch(observer.scheduler) == numbers(running)


def test_subscribers_hear_what_the_mirror_hears(observer: Observer, running: list[Req]) -> None:
    heard: list[Any] = []
    observer.subscribers.append(heard.append)
    hooks._on_finishing(running, SimpleNamespace(req_to_token_pool=POOL))
    assert next_batch(observer.scheduler) == []
    observer.on_released(numbers(running)[0])
    observer.on_reset()
    assert [type(event).__name__ for event in heard] == [*["RequestWithdrawn"] * 2, "RequestReleased", "TreeReset"]


def test_a_chunk_of_a_request_that_was_retracted_does_not_decode_next(observer: Observer, running: list[Req]) -> None:
    """It has output from before. Plans made ahead are for requests that decode next."""
    heard: list[Any] = []
    observer.subscribers.append(heard.append)
    cache = RadixCache.create_simulated()
    cache.req_to_token_pool = POOL
    req = running[0]
    req.last_node = cache.root_node
    req.output_ids.extend([1, 2])
    of_release = compat.cache.caching_method() == "checkpoint"
    # 14 tokens are to be computed again; when that is done there is one more.
    req.full_untruncated_fill_ids = req.origin_input_ids + array("q", req.output_ids)
    chunks, whole = ([{"up_to": 9}, {"up_to": 13}], {"up_to": 14}) if of_release else ([{"chunked": True}] * 2, {})
    for options, length in ((chunks[0], 0), (chunks[1], 0), (whole, 15)):
        if length:
            req.output_ids.append(3)
        hooks._on_cached(None, cache, req, **options)
        bound = [event for event in heard if isinstance(event, RequestBound)]
        assert (bound[-1].request, bound[-1].length) == (numbers(running)[0], length)
    assert observer.faults == 0


@pytest.mark.skipif(compat.release() == "0.5.17", reason="says itself what a chunk is")
def test_a_request_that_comes_with_its_kv_decodes_next() -> None:
    """Its first token is known, but not computed."""
    from sglang.srt.runtime_context import get_context

    req = Req("r", "", array("q", range(12)), SamplingParams())
    req.full_untruncated_fill_ids = req.origin_input_ids + array("q", [1])
    for role, chunk in (("null", True), ("prefill", True), ("decode", False)):
        with get_context().override_server_args(disaggregation_mode=role):
            assert compat.requests.is_chunk(req, {"up_to": 12}) == chunk, role


def test_planners_are_told_once_of_what_a_result_brings(observer: Observer, running: list[Req]) -> None:
    told: list[list[int]] = []
    observer.planners.append(lambda: told.append(next_batch(observer.scheduler)))
    scheduler = SimpleNamespace(req_to_token_pool=POOL)
    first, second = numbers(running)
    observer.resume()  # of a follower that is younger than the result

    def process(owner: Any, batch: int, result: str) -> str:
        assert owner is scheduler and batch == 1
        for req in running:
            hooks._on_release(lambda req, cache: POOL.free(req), req, CACHE)
        assert told == []
        return result

    assert hooks._on_result(process, scheduler, 1, result="what SGLang returns") == "what SGLang returns"
    assert told == [[]]
    # Nothing happened: nothing is told. What happens elsewhere is told at once.
    assert hooks._on_result(lambda owner: None, scheduler) is None and len(told) == 1
    observer.on_prefill([first], [11], ["same"])
    observer.on_prefill([second], [11], ["same"])
    assert told[1:] == [[first], [first, second]]
    observer.on_finishing([first, second])
    assert told[3:] == [[]]


def test_planners_are_told_also_where_processing_a_result_fails(observer: Observer, running: list[Req]) -> None:
    told: list[list[int]] = []
    observer.planners.append(lambda: told.append(next_batch(observer.scheduler)))

    def process(scheduler: Any) -> None:
        hooks._on_release(lambda req, cache: POOL.free(req), running[0], CACHE)
        raise ValueError("SGLang's")

    with pytest.raises(ValueError, match="SGLang's"):
        hooks._on_result(process, SimpleNamespace(req_to_token_pool=POOL))
    assert told == [numbers(running[1:])]
    observer.on_released(numbers(running)[1])
    assert told[1:] == [[]]


def test_requests_that_are_extended_together_are_bound_like_each_alone(
    observer: Observer, running: list[Req], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two below one node, two that end there with fewer tokens of their own, one elsewhere, one that is bound already, one without a row."""
    for req in running:
        hooks._on_release(lambda req, cache: POOL.free(req), req, CACHE)
    cache = RadixCache.create_simulated()
    cache.req_to_token_pool = POOL
    tokens = array("q", range(100, 120))
    for upper in (10, 20):
        cache.insert(InsertParams(key=RadixKey(tokens[:upper], None), value=torch.arange(upper)))
    reqs = []
    for end, own in ((20, 20), (20, 20), (20, 15), (20, 15), (10, 10), (20, 20), (20, 20)):
        req = Req("", "", tokens + array("q", [1, 2]), SamplingParams())
        req.last_node = cache.match_prefix(MatchPrefixParams(key=RadixKey(tokens[:end], None))).last_device_node
        holder = req if hasattr(req, "cache_protected_len") else req.kv
        holder.cache_protected_len = own
        reqs.append(req)
    POOL.alloc(reqs[:6])
    bound, *_ = numbers(reqs[5:])
    for scheduler in (observer.scheduler, *observer._others):
        scheduler.bind(bound, ROOT)
    walked: list[Any] = []
    path = compat.cache.path
    monkeypatch.setattr(compat.cache, "path", lambda cache, req: walked.append(req) or path(cache, req))
    told: list[int] = []
    observer.planners.append(lambda: told.append(len(walked)))
    observer.on_extending(cache, reqs)
    found = [observer.scheduler.binding(number) for number in numbers(reqs[:6])]
    assert [end for _, end in found] == [20, 20, 0, 0, 10, 0]
    assert found[0] == found[1] and observer.faults == 2
    assert walked == [reqs[0], *reqs[2:5]] and told == [4]
    assert observer._reqs[numbers(reqs)[1] & 0xFFFFFFFF] is reqs[1]


def test_what_fails_in_a_hook_never_reaches_sglang(observer: Observer, running: list[Req]) -> None:
    """As on a release that renames something: everything is forgotten, and what SGLang does is done once."""
    first, second = numbers(running)
    released: list[Any] = []

    def release(*args: Any) -> str:
        released.append(args)
        return "what SGLang returns"

    def after_it(original: Any, *args: Any) -> None:
        original(*args)
        raise AttributeError("renamed")

    # A request without a row's number, a batch and a scheduler without any field.
    assert hooks.contained(hooks._on_release, around=True)(release, object(), CACHE) == "what SGLang returns"
    assert hooks.contained(after_it, around=True)(release, 1) == "what SGLang returns"
    assert [len(args) for args in released] == [2, 1] and observer.faults == 2
    for hook in (hooks._on_batch, hooks._on_finishing, hooks._on_cached):
        hooks.contained(hook)(None, object(), object(), up_to=1)
    assert observer.faults == 5
    assert [observer.scheduler.binding(number) for number in (first, second)] == [(ROOT, 0)] * 2
    observer._follows = True
    for _ in range(3):
        assert observer.unpacked_because == ""
        hooks.contained(hooks._on_batch)(None, object(), object())
    assert "object has no attribute" in observer.unpacked_because, "of a hook that always fails there is no use"


@pytest.mark.parametrize("hook", [hooks._on_release, hooks._on_result])
def test_what_sglang_raises_passes_and_is_no_fault(hook: Any, observer: Observer, running: list[Req]) -> None:
    calls: list[Any] = []

    def fails(*args: Any) -> None:
        calls.append(args)
        raise ValueError("SGLang's")

    owner = running[0] if hook is hooks._on_release else SimpleNamespace(req_to_token_pool=POOL)
    with pytest.raises(ValueError, match="SGLang's"):
        hooks.contained(hook, around=True)(fails, owner, CACHE)
    assert len(calls) == 1 and observer.faults == 0


@pytest.mark.parametrize("hook", [hooks._on_add, hooks._on_add_chunk])
def test_a_failure_of_sibling_waiting_costs_nothing_else(
    hook: Any, observer: Observer, running: list[Req], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where SGLang renames the list of the requests that a step runs."""
    monkeypatch.setattr(hooks, "_siblings", siblings := Siblings())
    monkeypatch.setattr(siblings, "defer", lambda adder, req: None)
    around = hook is hooks._on_add
    for _ in range(8):
        found = hooks.contained(hook, around)((lambda *_: "added") if around else None, object(), running[0])
        assert found == ("added" if around else None)
    assert hooks._siblings is None
    assert observer.faults == 0 and observer.unpacked_because == ""


def test_memory_that_other_ranks_need_not_lack_ends_the_server(observer: Observer) -> None:
    def lacks(*_: Any) -> None:
        raise MemoryError

    for around in (False, True):
        with pytest.raises(MemoryError):
            hooks.contained(lacks, around)(lambda: None)


class Paths:
    """A cache whose requests have the paths that a test says."""

    disable, page_size, req_to_token_pool = False, 1, POOL


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: dict[str, Any] = {}
    monkeypatch.setattr(compat.cache, "path", lambda cache, req: found[req.rid])
    monkeypatch.setattr(compat.requests, "protected_len", lambda req: 10)
    return found


def test_where_no_path_can_be_read_everything_is_unpacked_and_one_line_says_so(
    observer: Observer, running: list[Req], caplog: pytest.LogCaptureFixture
) -> None:
    for times in range(1, 20):
        assert bool(observer.unpacked_because) == (times > 8), times
        with caplog.at_level(logging.WARNING):
            hooks._on_cached(None, CACHE, running[0])
    assert observer.faults == 8
    assert [record.message for record in caplog.records if "serves unpacked" in record.message] == [
        f"sglang-pat serves unpacked: {observer.unpacked_because}"
    ]
    assert observer.unpacked_because.startswith("no path of a request could be followed: ")
    observer.on_prefill(numbers(running), [12, 12], ["same", "same"])
    hooks._on_finishing(running, SimpleNamespace(req_to_token_pool=POOL))
    for req in running:
        hooks._on_release(lambda req, cache: POOL.free(req), req, CACHE)
    assert len(observer.scheduler) == observer.scheduler.num_nodes == 0, "who runs is still released"


def test_once_a_path_was_followed_odd_requests_cost_themselves_only(
    observer: Observer, running: list[Req], paths: dict[str, Any]
) -> None:
    paths["same"] = [(1, 10)]
    hooks._on_cached(None, Paths(), running[0])
    paths["same"] = [(1, 11)]
    for _ in range(20):
        hooks._on_cached(None, Paths(), running[1])
    assert observer.faults == 20 and observer.unpacked_because == ""
    assert observer.scheduler.binding(numbers(running)[0]) == (1, 10)


def test_failures_with_followed_paths_between_them_do_not_add_up(
    observer: Observer, running: list[Req], paths: dict[str, Any]
) -> None:
    """In weeks, or by requests of one client, there may be many."""
    paths["same"] = [(1, 10)]
    for _ in range(20):
        hooks.contained(hooks._on_batch)(None, object(), object())
        hooks._on_cached(None, Paths(), running[0])
    assert observer.faults == 20 and observer.unpacked_because == ""
    for _ in range(8):
        hooks.contained(hooks._on_batch)(None, object(), object())
    assert observer.unpacked_because != ""


def test_who_gives_up_does_so_even_where_a_subscriber_fails(observer: Observer) -> None:
    def fails(event: Any) -> None:
        raise OSError("the disk is full")

    observer.subscribers.append(fails)
    hooks.tell(observer, lambda told: told.give_up("\x1b[2Jcleared" + "." * 600))
    assert observer.unpacked_because.startswith("\\x1b[2Jcleared.") and len(observer.unpacked_because) == 500


def test_the_first_requests_that_share_are_compared_in_sglangs_table(
    observer: Observer, running: list[Req], paths: dict[str, Any]
) -> None:
    """A release that gave a node's id to another one would make requests read each other's KV."""
    paths["same"] = [(1, 10)]
    (own, other), table = numbers(running), POOL.req_to_token
    table[own & 0xFFFFFFFF, :10] = table[other & 0xFFFFFFFF, :10] = torch.arange(10, dtype=table.dtype)
    table[own & 0xFFFFFFFF, 10] = 7
    hooks._on_cached(None, Paths(), running[0])
    hooks._on_cached(None, Paths(), running[1])
    assert observer.unpacked_because == "" and observer.scheduler.binding(own) == (1, 10)
    third = request("same")
    hooks._on_cached(None, Paths(), third)
    assert observer.unpacked_because == "two requests on one path of the prefix cache have different KV slots"
    assert observer.scheduler.binding(own) == (ROOT, 0) and observer.faults == 1
    observer.on_released(*numbers([third]))


FOLLOWER = """
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang_pat.radix_bridge import hooks

class Follower:
    req_to_token_pool = None
    packs_extends = False
    reason = ""

    @property
    def observer(self):
        return self

    def give_up(self, reason):
        self.reason = reason

follower = Follower()
"""
OTHER_PLUGIN = """
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

heard, faults = [], []
for target in (hooks._RELEASE, hooks._STATE, f"{hooks._UNIFIED}.reset", hooks._RESULT):
    HookRegistry.register(target.replace(":.", ".").replace(":", "."), lambda process, *args: heard.append(args), HookType.AROUND)
HookRegistry.apply_hooks()
hooks.install(follower)
hooks._count_fault = lambda: faults.append(1)
Scheduler.process_batch_result("scheduler", "batch", "result")
UnifiedRadixCache.reset("cache")
common.release_kv_cache("request", "cache")
print(heard, len(faults), repr(follower.reason))
"""
RENAMED = """
import sys
from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter
from sglang.srt.managers import schedule_policy
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

for owner, name in ((UnifiedRadixCache, "_evict_device_leaf"), (common, "release_kv_cache"), (SchedulerMetricsReporter, "report_decode_stats"),
                    (schedule_policy.PrefillAdder, "add_one_req")):
    setattr(owner, "renamed", getattr(owner, name))
    delattr(owner, name)
hooks.install(follower, defer=True)
print(follower.reason)
print(hooks._siblings, "sglang.srt.managers.scheduler:Scheduler.get_internal_state" in HookRegistry._patched)
"""


def said(script: str) -> list[str]:
    command = [sys.executable, "-c", FOLLOWER + script]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return [*ran.stdout.splitlines(), ran.stderr]


@pytest.mark.release
def test_what_another_plugin_hooks_is_hooked_too() -> None:
    """Its hooks are applied before ours, and both are called. It may have all that we hook."""
    *_, last, log = said(OTHER_PLUGIN)
    heard, faults, reason = last.rsplit(" ", 2)
    assert heard == "[('scheduler', 'batch', 'result'), ('cache',), ('request', 'cache')]"
    assert faults == "1", "of our hook, in which a text is no request"
    assert reason == "''" and "sglang-pat serves" not in log


@pytest.mark.release
def test_without_what_a_release_renames_it_serves_unpacked_and_says_what() -> None:
    *_, reason, rest, log = said(RENAMED)
    assert reason == (
        "this SGLang has no sglang.srt.mem_cache.common.release_kv_cache; "
        "this SGLang has no sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache._evict_device_leaf"
    )
    assert rest == "None True"
    (warning,) = [line for line in log.splitlines() if "sglang-pat serves with fewer" in line]
    assert "PrefillAdder.add_one_req" in warning and "SchedulerMetricsReporter.report_decode_stats" in warning
