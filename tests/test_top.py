"""What `sglang-pat top` and the log say of counters."""

from __future__ import annotations

import io

import pytest

from sglang_pat import cli, top
from sglang_pat.backend import metrics


def counters(**changes: int) -> dict:
    numbers = dict.fromkeys([*metrics.COUNTERS, *metrics.GAUGES, "nodes"], 0)
    return {**numbers, **changes, "query_sizes": {"1": 8, "3": 2, "5": 4}}


def test_a_picture_shows_what_happened_in_between() -> None:
    old = counters(steps=100, kv_bytes=10**9, kv_bytes_unpacked=4 * 10**9, work_items=1000)
    new = counters(steps=150, kv_bytes=2 * 10**9, kv_bytes_unpacked=8 * 10**9, work_items=1500, bound=7)
    old["query_sizes"] = {"1": 8}
    text = "\n".join(top.render(new, old, 2.0))
    for piece in (
        "followed        7",
        "25 a second",
        "packs a step            10",
        "1.0 GB",
        "4.0 GB",
        "75%",
        "2-3",
        "4-7",
    ):
        assert piece in text, (piece, text)
    assert not any(line.split()[:1] == ["1"] for line in text.splitlines()), "these packs are older"


def test_processes_are_added_up() -> None:
    both = top.total([counters(steps=3), counters(steps=4)])
    assert both["steps"] == 7 and both["query_sizes"] == {"1": 16, "3": 4, "5": 8}


@pytest.mark.parametrize(("queries", "size"), [(1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (1023, 512)])
def test_size_classes(queries: int, size: int) -> None:
    assert metrics.size_class(queries) == size


def test_the_log_line_counts_from_the_last_one(caplog: pytest.LogCaptureFixture) -> None:
    published = metrics.Metrics()
    with caplog.at_level("INFO"):
        published.publish(counters(steps=10, plans=2, work_items=50, kv_bytes=100, kv_bytes_unpacked=250), None)
        published.publish(counters(steps=10, plans=2, work_items=50, kv_bytes=100, kv_bytes_unpacked=250), None)
        published.publish(
            counters(steps=14, plans=3, work_items=90, kv_bytes=200, kv_bytes_unpacked=650, fallbacks=1), None
        )
    assert [record.message for record in caplog.records] == [
        "PAT: 10 steps, 2 plans (0 ahead), 5 packs a step, KV read 0.00 GB, 2.50 times as much unpacked",
        "PAT: 4 steps, 1 plans (0 ahead), 10 packs a step, KV read 0.00 GB, 4.00 times as much unpacked, "
        "1 fallbacks, 0 faults",
    ]


def test_no_server_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "--once", "--url", "http://127.0.0.1:9"]) == 2
    assert "no SGLang server answers at http://127.0.0.1:9" in capsys.readouterr().err


def test_nothing_run_yet() -> None:
    out = io.StringIO()
    print("\n".join(top.render(counters(), None, 1.0)), file=out)
    assert "since the server started" in out.getvalue()
