"""What the observer does when SGLang does something that it does not know."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_pat.kernels.scheduler import NativeScheduler
from sglang_pat.packing import CPU_TILES, CostModel, PackConfig
from sglang_pat.radix_bridge import Observer, hooks
from sglang_pat.radix_bridge.events import ROOT, NodeInserted, RequestBound
from sglang_pat.radix_bridge.observer import apply


@pytest.fixture
def observer(monkeypatch: pytest.MonkeyPatch) -> Observer:
    observer = Observer(NativeScheduler(PackConfig(CostModel(8, 2, 64, 64, 2), CPU_TILES, 2), max_batch=8))
    monkeypatch.setattr(hooks, "_observer", observer)
    apply(observer.scheduler, NodeInserted(1, ROOT, 10, bytes(16)))
    apply(observer.scheduler, RequestBound("running", 3, 1, 12))
    return observer


def test_a_cache_that_cannot_be_read_leaves_serving_alone(observer: Observer, caplog: pytest.LogCaptureFixture) -> None:
    """For example a request of a streaming session, whose last node is none of the tree's."""
    req = SimpleNamespace(rid="odd", last_node=object(), finished=lambda: False)
    cache: Any = SimpleNamespace(disable=False, root_node=None)
    with caplog.at_level(logging.WARNING):
        hooks._on_cached(None, cache, req)
        hooks._on_cached(None, cache, req)
    assert observer.faults == 2
    assert len(caplog.records) == 1
    assert len(observer.scheduler) == 0, "what runs now is decoded unpacked"


def test_an_eviction_under_a_running_request_unbinds_it(observer: Observer) -> None:
    hooks._on_evict_id(None, None, 1)
    assert observer.faults == 1
    assert len(observer.scheduler) == 0


def test_subscribers_hear_what_the_mirror_hears(observer: Observer) -> None:
    heard: list[Any] = []
    observer.subscribers.append(heard.append)
    hooks._on_finishing([SimpleNamespace(rid="running")], None, None)
    assert observer.scheduler.batch == []
    observer.on_released(SimpleNamespace(rid="running"))
    observer.on_reset()
    assert [type(event).__name__ for event in heard] == ["RequestWithdrawn", "RequestReleased", "TreeReset"]
