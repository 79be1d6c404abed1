from __future__ import annotations

import pytest
from oracle.mirror import Mirror

from sglang_pat.packing.tree import InconsistentError
from sglang_pat.radix_bridge.events import (
    ROOT,
    NodeEvicted,
    NodeInserted,
    NodeSplit,
    RequestBound,
    RequestReleased,
    RequestsExpected,
    TreeReset,
)

A, B, C = 5, 6, 7


@pytest.fixture
def mirror() -> Mirror:
    """Requests A and B share node 1 of 100 tokens, of which B has 20 more in node 2; C is alone on node 3."""
    mirror = Mirror()
    for event in (
        NodeInserted(1, ROOT, 100, b"one"),
        RequestBound(A, 1, 0),
        NodeInserted(2, 1, 20, b"two"),
        RequestBound(B, 2, 0),
        NodeInserted(3, ROOT, 7, b"three"),
        RequestBound(C, 3, 0),
    ):
        mirror.apply(event)
    return mirror


def spans(mirror: Mirror, requests: list[int], tokens: int = 500) -> list[tuple[int, int, list[int]]]:
    from sglang_pat.packing import tree

    roots = mirror.batch(requests, [tokens] * len(requests)).roots
    return sorted((node.start, node.end, sorted(node.queries)) for node in tree.walk(roots))


def test_the_batch_tree_has_positions_in_batch_order(mirror: Mirror) -> None:
    assert spans(mirror, [C, B, A]) == [(0, 7, [0]), (0, 100, [1, 2]), (100, 120, [1])]


def test_the_batch_tree_leaves_out_who_is_not_in_the_batch(mirror: Mirror) -> None:
    assert spans(mirror, [A, 99]) == [(0, 100, [0])]


def test_a_split_leaves_requests_below_where_they_are(mirror: Mirror) -> None:
    before = dict(mirror.bindings)
    mirror.apply(NodeSplit(node=1, upper=9, length=60, head=b"rest"))
    assert mirror.bindings == before
    assert spans(mirror, [A, B]) == [(0, 60, [0, 1]), (60, 100, [0, 1]), (100, 120, [1])]
    assert mirror.root.children[b"one"].id == 9
    assert mirror.nodes[9].children[b"rest"].id == 1


def test_releasing_the_last_request_forgets_its_nodes(mirror: Mirror) -> None:
    mirror.apply(RequestReleased(B))
    assert set(mirror.nodes) == {ROOT, 1, 3}
    mirror.apply(RequestReleased(A))
    mirror.apply(RequestReleased(C))
    assert set(mirror.nodes) == {ROOT} and not mirror.root.children


def test_advancing_moves_a_request_down(mirror: Mirror) -> None:
    mirror.apply(NodeInserted(4, 1, 30, b"four"))
    mirror.apply(RequestBound(A, 4, 0))
    assert (mirror.bindings[A].id, mirror.bindings[A].end) == (4, 130)


def test_reset_forgets_everything(mirror: Mirror) -> None:
    mirror.apply(TreeReset())
    assert set(mirror.nodes) == {ROOT} and spans(mirror, [A, B]) == []


def test_an_eviction_elsewhere_changes_nothing(mirror: Mirror) -> None:
    mirror.apply(NodeEvicted(77))
    assert set(mirror.bindings) == {A, B, C}


def test_an_evicted_node_takes_its_requests_out_of_packing(mirror: Mirror) -> None:
    with pytest.raises(InconsistentError, match="evicted while requests"):
        mirror.apply(NodeEvicted(1))
    assert set(mirror.nodes) == {ROOT, 3} and spans(mirror, [A, B, C]) == [(0, 7, [2])]


def test_a_request_shares_nothing_twice_or_beyond_its_end(mirror: Mirror) -> None:
    assert spans(mirror, [A, A, B]) == [(0, 100, [0, 2]), (100, 120, [2])]
    assert spans(mirror, [A, B], tokens=110) == [(0, 100, [0])]


def test_a_row_is_the_last_requests_that_got_it(mirror: Mirror) -> None:
    mirror.apply(RequestsExpected([B + (1 << 32)], [120], ["heir"]))
    assert set(mirror.bindings) == {A, C, B + (1 << 32)} and spans(mirror, [A, B]) == [(0, 100, [0])]


@pytest.mark.parametrize(
    "event",
    [
        NodeInserted(1, ROOT, 5, b"again"),
        NodeInserted(8, 99, 5, b"no parent"),
        NodeInserted(8, ROOT, 5, b"one"),
        NodeInserted(8, ROOT, 0, b"empty"),
        NodeSplit(1, 8, 100, b"nothing left"),
        NodeSplit(99, 8, 1, b"unknown"),
        RequestBound(8, 99, 0),
    ],
)
def test_events_that_cannot_be_are_refused(mirror: Mirror, event) -> None:
    with pytest.raises(InconsistentError):
        mirror.apply(event)
    assert spans(mirror, [A, B, C]) == [(0, 7, [2]), (0, 100, [0, 1]), (100, 120, [1])]
