from __future__ import annotations

import pytest

from sglang_pat.packing.tree import InconsistentError
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
from sglang_pat.radix_bridge.mirror import Mirror


@pytest.fixture
def mirror() -> Mirror:
    """Requests a and b share node 1 of 100 tokens, of which b has 20 more in node 2; c is alone on node 3."""
    mirror = Mirror()
    for event in (
        NodeInserted(1, ROOT, 100, b"one"),
        RequestBound("a", 5, 1, 0),
        NodeInserted(2, 1, 20, b"two"),
        RequestBound("b", 6, 2, 0),
        NodeInserted(3, ROOT, 7, b"three"),
        RequestBound("c", 7, 3, 0),
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
    before = dict(mirror.bindings)
    mirror.apply(NodeSplit(node=1, upper=9, length=60, head=b"rest"))
    assert mirror.bindings == before
    assert spans(mirror, ["a", "b"]) == [(0, 60, [0, 1]), (60, 100, [0, 1]), (100, 120, [1])]
    assert mirror.root.children[b"one"].id == 9
    assert mirror.nodes[9].children[b"rest"].id == 1


def test_releasing_the_last_request_forgets_its_nodes(mirror: Mirror) -> None:
    mirror.apply(RequestReleased("b"))
    assert set(mirror.nodes) == {ROOT, 1, 3}
    mirror.apply(RequestReleased("a"))
    mirror.apply(RequestReleased("c"))
    assert set(mirror.nodes) == {ROOT} and not mirror.root.children


def test_advancing_moves_a_request_down(mirror: Mirror) -> None:
    mirror.apply(NodeInserted(4, 1, 30, b"four"))
    mirror.apply(RequestAdvanced("a", 5, 4, 0))
    node, row = mirror.bindings["a"]
    assert (node.id, node.end, row) == (4, 130, 5)


def test_reset_forgets_everything(mirror: Mirror) -> None:
    mirror.apply(TreeReset())
    assert not mirror.bindings and mirror.batch_tree(["a", "b"]) == []


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
        NodeInserted(1, ROOT, 5, b"again"),
        NodeInserted(8, 99, 5, b"no parent"),
        NodeInserted(8, ROOT, 5, b"one"),
        NodeInserted(8, ROOT, 0, b"empty"),
        NodeSplit(1, 8, 100, b"nothing left"),
        NodeSplit(99, 8, 1, b"unknown"),
        RequestBound("d", 1, 99, 0),
        RequestAdvanced("d", 5, 1, 0),
    ],
)
def test_events_that_cannot_be_are_refused(mirror: Mirror, event) -> None:
    with pytest.raises(InconsistentError):
        mirror.apply(event)
    assert spans(mirror, ["a", "b", "c"]) == [(0, 7, [2]), (0, 100, [0, 1]), (100, 120, [1])]
