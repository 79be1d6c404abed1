"""What the observer does when SGLang does something that it does not know. The requests are SGLang's own."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_pat import compat
from sglang_pat.packing import CPU_TILES, CostModel, PackConfig
from sglang_pat.packing.native import NativeScheduler
from sglang_pat.radix_bridge import Observer, hooks
from sglang_pat.radix_bridge.events import ROOT, NodeInserted, RequestBound
from sglang_pat.radix_bridge.observer import apply

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
    follower, stranger = Follower(POOL, observer), Follower(ReqToTokenPool(8, 64, "cpu", False), None)
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
    assert other.batch == observer.scheduler.batch


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
    assert observer.scheduler.batch == [first, second]


def test_requests_with_the_same_id_are_told_apart(observer: Observer, running: list[Req]) -> None:
    first, second = numbers(running)
    hooks._on_release(lambda req, cache: POOL.free(req), running[0], CACHE)
    assert observer.scheduler.batch == [second] and len(observer.scheduler) == 1
    heir = request("same")
    (number,) = numbers([heir])
    assert number not in (first, second) and observer.scheduler.binding(number) is None


def test_an_eviction_under_running_requests_unbinds_them(observer: Observer, running: list[Req]) -> None:
    hooks._on_evict_id(None, CACHE, 1)
    assert observer.faults == 1
    assert [observer.scheduler.binding(number) for number in numbers(running)] == [(ROOT, 0)] * 2
    observer.on_prefill(numbers(running), [12, 12], ["same", "same"])
    assert observer.scheduler.batch == numbers(running)


def test_subscribers_hear_what_the_mirror_hears(observer: Observer, running: list[Req]) -> None:
    heard: list[Any] = []
    observer.subscribers.append(heard.append)
    hooks._on_finishing(running, SimpleNamespace(req_to_token_pool=POOL))
    assert observer.scheduler.batch == []
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
