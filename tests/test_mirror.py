from __future__ import annotations

import pytest

from sglang_pat.radix_bridge import Mirror
from sglang_pat.radix_bridge.events import (
    ROOT,
    NodeEvicted,
    NodeInserted,
    NodeSplit,
    RequestAdvanced,
    RequestBound,
    RequestReleased,
    TreeReset,
)
from sglang_pat.radix_bridge.mirror import InconsistentError


@pytest.fixture
def mirror() -> Mirror:
    """Requests a and b share node 1 of 100 tokens, of which b has 20 more in node 2; c is alone on node 3."""
    mirror = Mirror()
    for event in (
        NodeInserted(1, ROOT, 100, "one"),
        RequestBound("a", 5, 1),
        NodeInserted(2, 1, 20, "two"),
        RequestBound("b", 6, 2),
        NodeInserted(3, ROOT, 7, "three"),
        RequestBound("c", 7, 3),
    ):
        mirror.apply(event)
    return mirror


def spans(mirror: Mirror, rids: list[str]) -> list[tuple[int, int, list[int]]]:
    from sglang_pat.packing import tree

    return sorted((node.start, node.end, sorted(node.queries)) for node in tree.walk(mirror.batch_tree(rids)))


def test_the_batch_tree_has_positions_in_batch_order(mirror: Mirror) -> None:
    assert spans(mirror, ["c", "b", "a"]) == [(0, 7, [0]), (0, 100, [1, 2]), (100, 120, [1])]


def test_the_batch_tree_leaves_out_who_is_not_in_the_batch(mirror: Mirror) -> None:
    assert spans(mirror, ["a", "unknown"]) == [(0, 100, [0])]


def test_a_split_leaves_requests_below_where_they_are(mirror: Mirror) -> None:
    before = mirror.paths(["a", "b"])
    epoch = mirror.epoch
    mirror.apply(NodeSplit(node=1, upper=9, length=60, head="rest"))
    assert mirror.paths(["a", "b"]) == before and mirror.epoch == epoch
    assert spans(mirror, ["a", "b"]) == [(0, 60, [0, 1]), (60, 100, [0, 1]), (100, 120, [1])]
    assert mirror.child(ROOT, "one").id == 9
    assert mirror.child(9, "rest").id == 1


def test_releasing_the_last_request_forgets_its_nodes(mirror: Mirror) -> None:
    mirror.apply(RequestReleased("b"))
    assert set(mirror.nodes) == {ROOT, 1, 3}
    mirror.apply(RequestReleased("a"))
    mirror.apply(RequestReleased("c"))
    assert set(mirror.nodes) == {ROOT} and not mirror.root.children


def test_advancing_moves_a_request_down(mirror: Mirror) -> None:
    mirror.apply(NodeInserted(4, 1, 30, "four"))
    mirror.apply(RequestAdvanced("a", 4))
    assert mirror.paths(["a"]) == [(4, 130)]
    assert mirror.bindings["a"][1] == 5


def test_every_change_of_a_binding_changes_the_epoch(mirror: Mirror) -> None:
    epochs = [mirror.epoch]
    for event in (
        RequestAdvanced("b", 1),
        RequestReleased("a"),
        RequestReleased("never bound"),
        RequestBound("a", 1, 1),
    ):
        mirror.apply(event)
        epochs.append(mirror.epoch)
    assert len(set(epochs)) == len(epochs)


def test_reset_forgets_everything(mirror: Mirror) -> None:
    mirror.apply(TreeReset())
    assert mirror.paths(["a"]) == [(ROOT, 0)] and mirror.batch_tree(["a", "b"]) == []


def test_an_eviction_elsewhere_changes_nothing(mirror: Mirror) -> None:
    mirror.apply(NodeEvicted(77))
    assert set(mirror.bindings) == {"a", "b", "c"}


def test_an_evicted_node_takes_its_requests_out_of_packing(mirror: Mirror) -> None:
    with pytest.raises(InconsistentError, match="evicted while requests"):
        mirror.apply(NodeEvicted(1))
    assert set(mirror.bindings) == {"c"} and set(mirror.nodes) == {ROOT, 3}


@pytest.mark.parametrize(
    "event",
    [
        NodeInserted(1, ROOT, 5, "again"),
        NodeInserted(8, 99, 5, "no parent"),
        NodeInserted(8, ROOT, 5, "one"),
        NodeInserted(8, ROOT, 0, "empty"),
        NodeSplit(1, 8, 100, "nothing left"),
        NodeSplit(99, 8, 1, "unknown"),
        RequestBound("d", 1, 99),
        RequestAdvanced("d", 1),
    ],
)
def test_events_that_cannot_be_are_refused(mirror: Mirror, event) -> None:
    with pytest.raises(InconsistentError):
        mirror.apply(event)
    assert spans(mirror, ["a", "b", "c"]) == [(0, 7, [2]), (0, 100, [0, 1]), (100, 120, [1])]
