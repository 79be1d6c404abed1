"""Offline jobs: records are those of a server, each line gets exactly one, and a job goes on where it was killed."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import errno
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from forked import ForkedProcess, ForkedServer
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

from sglang_pat import cli, compat, jsonl
from sglang_pat.batch import job as job_module
from sglang_pat.batch import lines
from sglang_pat.batch.command import Progress, spoken
from sglang_pat.batch.job import FOR_GOOD, LostError, StoppedError, _Client, answer_all, in_time, patiently, room_of
from sglang_pat.batch.lengths import Lengths, Usage
from sglang_pat.batch.lines import BatchError, Failure, Output, Request, Source
from sglang_pat.batch.order import QUEUED, Order, Room
from sglang_pat.batch.tree import Tree, beginning, limit_of
from sglang_pat.demo import workload

FLAGS = ["--dtype", "float32", "--grammar-backend", "none", "--max-total-tokens", "20000"]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def chat(text: str, **options: Any) -> dict[str, Any]:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 12,
        **options,
    }
    return {"custom_id": text[-12:], "method": "POST", "url": "/v1/chat/completions", "body": body}


def completion(prompt: Any, **options: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt, "temperature": 0, "max_tokens": 12, **options}
    return {"custom_id": f"c {prompt[-9:]}", "method": "POST", "url": "/v1/completions", "body": body}


def requests_of(prompts: list[str]) -> list[Request]:
    return [Request(i, str(i), "/v1/completions", {"prompt": prompt}) for i, prompt in enumerate(prompts, 1)]


@pytest.mark.once
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"garbage", "line 7 is no JSON"),
        (b"\xff\xfe", "line 7 is no JSON"),
        (b'{"custom_id": "\xff"}', "line 7 is no JSON"),
        (b'{"\xff": 1}', "line 7 is no JSON"),
        (b"[" * 100_000, "line 7 is no JSON"),
        (b'{"custom_id": "b"}\xef\xbb\xbf{}', "files without a last line end were joined here: a byte order mark follows"),
        (b"[]", "line 7: Expected `object`, got `array`"),
        (b"{}", "line 7: Object missing required field `custom_id`"),
        (b'{"custom_id": 3}', "line 7: Expected `str`, got `int` - at `$.custom_id`"),
        (b'{"custom_id": "a", "url": "/v1/embeddings", "body": {}}', "/v1/embeddings is not served here"),
        (b'{"custom_id": "a", "url": "/v1/completions", "body": []}', "line 7: Expected `object`, got `array` - at `$.body`"),
        (b'{"custom_id": "a", "url": "/v1/completions", "method": "GET", "body": {}}', "line 7: Invalid enum value 'GET'"),
        (b'{"custom_id": "a", "url": "/v1/completions", "body": {"stream": true}}', "nobody to stream to"),
    ],
)  # fmt: skip
def test_a_bad_line_is_an_error_of_its_own(text: bytes, message: str) -> None:
    found = lines.parse(7, text)
    assert isinstance(found, Failure)
    assert message in found.message
    record = lines.refusal(found)
    assert record["id"] == "batch_req_7" and record["response"] is None
    assert found.custom_id == ("a" if b'"a"' in text else None)


@pytest.mark.once
def test_a_line_of_nothing_but_marks_is_read_in_time_that_grows_with_its_length() -> None:
    begun = time.process_time()
    assert jsonl.unmarked(codecs.BOM_UTF8 * 700_000 + b"\xef\xbb{") == b"\xef\xbb{"
    assert time.process_time() - begun < 3, "a minute if each mark copies what follows"


@pytest.mark.once
def test_lines_keep_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LONGEST", 200)
    good = json.dumps(completion("x")).encode()
    (tmp_path / "in").write_bytes(codecs.BOM_UTF8 + good)
    assert isinstance(next(Source(tmp_path / "in").lines()), Request), "as some editors write it"
    (tmp_path / "in").write_bytes((codecs.BOM_UTF8 + good + b"\n") * 2 + codecs.BOM_UTF8 + b"\n")
    assert [type(one) for one in Source(tmp_path / "in").lines()] == [Request, Request], "files behind each other"
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        (tmp_path / "in").write_bytes(good.decode().encode(encoding))
        with pytest.raises(BatchError, match="in is UTF-16, and requests are read as UTF-8"):
            Source(tmp_path / "in")
    (tmp_path / "in").write_bytes(b"\n" + good + b"\n" + b"x" * 5000 + b"\n  \n" + good)
    source = Source(tmp_path / "in")
    found = list(source.lines())
    assert [one.number for one in found] == [2, 3, 5]
    assert [type(one) for one in found] == [Request, Failure, Request]
    source.keep()
    assert source[0] == found[-1]
    (tmp_path / "in").write_bytes((tmp_path / "in").read_bytes().replace(b"max_tokens", b"min_tokens"))
    with pytest.raises(BatchError, match=r"line 5 of .* has changed since the job began"):
        source[0]
    with pytest.raises(BatchError, match="No such file"):
        Source(tmp_path / "nothing")
    with pytest.raises(BatchError, match="is no file of requests"):
        Source(Path("/dev/zero"))
    (tmp_path / "array").write_text(json.dumps([completion("x")], indent=1))
    with pytest.raises(BatchError, match=r"array is an array over several lines: write one request a line \(JSONL\)"):
        Source(tmp_path / "array")
    (tmp_path / "array").write_bytes(codecs.BOM_UTF8 + b" [ \r\n{}]")
    with pytest.raises(BatchError, match="an array over several lines"):
        Source(tmp_path / "array")
    for line in (b"[1]", b"[" + b" " * 100 + b"1]"):
        (tmp_path / "array").write_bytes(line + b"\n")
        (bad,) = Source(tmp_path / "array").lines()
        assert isinstance(bad, Failure), "a bad line, which gets a record"


def record(number: int) -> dict[str, Any]:
    return lines.answer(Request(number, f"name {number}", "/v1/completions", {}), 200, {"text": "ä\n" * 3})


@pytest.mark.once
def test_what_a_kill_left_of_a_record_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with Output(path) as output:
        for number in (3, 1):
            output.write(record(number))
    whole = path.read_bytes()
    for cut in range(1, len(whole) // 2 - 1):
        path.write_bytes(whole + whole[:cut])
        with Output(path) as output:
            assert output.done == {3: "name 3", 1: "name 1"}
            output.write(record(2))
            assert output.failed == 0
        assert path.read_bytes() == whole + lines.msgspec.json.encode(record(2)) + b"\n"


@pytest.mark.once
def test_what_is_cut_off_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may be somebody's after all; and what is there already is not lost for it."""
    path, mine = tmp_path / "out", tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / "out.cut2").symlink_to(mine)
    for text, name in [('{"id":"batch_req_1', "out.cut"), ("{", "out.cut3")]:
        path.write_text(text)
        path.chmod(0o600)
        with Output(path):
            pass
        assert path.read_bytes() == b"" and (tmp_path / name).read_text() == text
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600, "read by those who may read the output"
        assert capsys.readouterr().err == f"sglang-pat: {path}: its last record was cut off, and is in {name}\n"
    assert (tmp_path / "out.cut").read_text() == '{"id":"batch_req_1' and mine.read_text() == "mine"
    # Where it cannot be kept it stays: a name that is too long, say.
    path = tmp_path / ("x" * 253)
    path.write_text("{")
    with pytest.raises(BatchError, match=r"x.cut, for the record in .* that was cut off: File name too long"):
        Output(path)
    assert path.read_text() == "{"


@pytest.mark.once
def test_a_line_of_an_output_is_not_read_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out"
    text = json.dumps(record(1)) + "\n" + json.dumps(record(2)) + "\n"
    path.write_text(text)
    monkeypatch.setattr(lines, "LONGEST_RECORD", len(text) // 2)
    with Output(path):
        pass
    for longer in (text.replace("name 2", "name 2 "), text + '{"id":"batch_req_' + "3" * len(text)):
        path.write_text(longer)
        with pytest.raises(BatchError, match=r"line [23] of .*out is longer than 0 MiB"):
            Output(path)
        assert path.read_text() == longer


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_an_output_that_was_edited_goes_on(tmp_path: Path, separators: tuple[str, str]) -> None:
    """Who deletes errors, to ask again, may leave blank lines, and no end of the last one."""
    path = tmp_path / "out"
    text = "\n\n".join(json.dumps(record(number), separators=separators) for number in (3, 1))
    for end in ("", "\n", "\n\n", "\n  "):
        path.write_text(text + end)
        for number in (2, 4):
            with Output(path) as output:
                assert {3: "name 3", 1: "name 1"}.items() <= output.done.items()
                output.write(record(number))
        with Output(path) as output:
            assert sorted(output.done) == [1, 2, 3, 4] and output.failed == 0
        assert [json.loads(line)["custom_id"][-1] for line in path.read_text().split("\n") if line.strip()] == [*"3124"]


@pytest.mark.once
def test_an_output_that_is_none_or_in_use_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("a line of something else\n")
    with pytest.raises(BatchError, match=r"line 1 of .* is no record of a job: name another file"):
        Output(path)
    assert path.read_text() == "a line of something else\n"
    # Nor is a file without an end of line a record that was cut off.
    deep = '{"id":"batch_req_1","custom_id":"1","response":null,"x":' + "[" * 100_000 + "\n"
    for text in (json.dumps(completion("x")), "x", '{"id": "batch_req_1"', deep):
        path.write_text(text)
        with pytest.raises(BatchError, match="is no record of a job"):
            Output(path)
        assert path.read_text() == text
    with Output(tmp_path / "other"), pytest.raises(BatchError, match="is being written by another process"):
        Output(tmp_path / "other")
    with pytest.raises(BatchError, match="Is a directory"):
        Output(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for endless in (tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(BatchError, match="is no regular file"):
            Output(endless)


@pytest.mark.once
def test_an_output_that_is_removed_ends_a_job(tmp_path: Path) -> None:
    with Output(tmp_path / "out") as output:
        output.write(record(1))
        (tmp_path / "out").rename(tmp_path / "other")
        output.write(record(2))
        (tmp_path / "other").unlink()
        with pytest.raises(BatchError, match="was removed while the job ran"):
            output.write(record(3))


@pytest.mark.once
def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "in")
    text = "".join(json.dumps(completion(f"p{i}")) + "\n" for i in range(3))
    writer = threading.Thread(target=(tmp_path / "in").write_text, args=(text,))
    writer.start()
    with Source(tmp_path / "in") as source:
        for _ in source.lines():
            source.keep()
        assert [one.body["prompt"] for one in source] == ["p0", "p1", "p2"]
    writer.join()


@pytest.mark.once
def test_a_full_disk_ends_a_job_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out"
    real = os.pwrite

    def full(file: int, text: bytes, at: int) -> int:
        if at >= len(before) + 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, text[:10], at)

    with Output(path) as output:
        output.write(record(1))
        before = path.read_bytes()
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(BatchError, match="the disk is full; all 1 answers so far are there, run the same command"):
            output.write(record(2))
    assert path.read_bytes() == before


def common(first: str, second: str) -> int:
    return next(
        (i for i, (one, other) in enumerate(zip(first, second, strict=False)) if one != other),
        min(len(first), len(second)),
    )


texts = st.lists(st.text("ab", max_size=6), min_size=1, max_size=24)


def ordered(prompts: list[str], shared: int, room: Room) -> tuple[Tree, Order]:
    tree = Tree(requests_of(prompts), shared)
    lengths = Lengths(tree)
    order = Order(tree, lengths, tree.arrange(lengths.answers(), lengths.scales()), room)
    order.add(range(len(prompts)))
    return tree, order


@pytest.mark.once
@given(texts, st.integers(1, 4), st.integers(1, 5), st.integers(10, 60), st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_a_prefix_is_computed_once(prompts: list[str], shared: int, in_flight: int, pool: int, random: Any) -> None:
    """Whoever starts finds its longest shared prefix in the cache, or brings it; each request runs once. Nodes of those that have begun, and
    what runs, fit in the pool, but for one that is alone and some of them that bring nothing new."""
    tree, order = ordered(prompts, shared, Room(pool, chunk=10**9))
    prompts = [prompts[place] for place in tree.origin]
    running: list[int] = []
    finished: list[int] = []
    while True:
        while len(running) < in_flight and (place := order.take()) is not None:
            cached = max((common(prompts[place], prompts[other]) for other in finished), default=0)
            for other in running:
                both = common(prompts[place], prompts[other])
                assert both < shared or cached >= both, "computed twice at the same time"
            running.append(place)
            brings = len(prompts[place]) > cached + 8
            assert order.used <= pool or len(running) == 1 or not brings or len(running) <= QUEUED
        if not running:
            break
        place = running.pop(random.randrange(len(running)))
        finished.append(place)
        order.finish(place)
    assert sorted(finished) == list(range(len(prompts)))
    assert abs(order.used) < 1e-6, "nothing is left"


@pytest.mark.once
@given(texts, st.integers(1, 3), st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_the_tree_has_what_requests_share(prompts: list[str], shared: int, random: Any) -> None:
    tree = Tree(requests_of(prompts), shared)
    found = [prompts[place] for place in tree.origin]
    assert sorted(found) == sorted(prompts)
    for rank, prompt in enumerate(found):
        others = [common(prompt, other) for i, other in enumerate(found) if i != rank]
        expected = {length for length in others if length >= shared}
        # Shorter ones are nodes only where somebody else has them with a third one.
        path = [int(tree.depth[node]) for node in tree.path(rank)]
        assert path == sorted(expected, reverse=True)
    # Places go from node to node: whoever is below one has places that follow each other.
    places = tree.arrange(Lengths(tree).answers(), Lengths(tree).scales())
    assert sorted(places) == list(range(len(prompts)))
    for node in range(len(tree.depth)):
        below = [int(places[rank]) for rank in range(len(found)) if node in tree.path(rank)]
        assert len(below) >= 2 and max(below) - min(below) == len(below) - 1


@pytest.mark.once
def test_those_that_decode_most_for_their_prefill_are_first() -> None:
    """Also when answers turn out to be shorter than their limits."""
    asked = [("a" * 2000, 100), ("b" * 8000 + "1", 200), ("b" * 8000 + "2", 200), ("c" * 2000, 400), ("d" * 2000, 1000)]
    requests = [
        Request(i, str(i), "/v1/completions", {"prompt": prompt, "max_tokens": limit})
        for i, (prompt, limit) in enumerate(asked)
    ]
    tree = Tree(requests)
    lengths = Lengths(tree)
    # 100 tokens for 500, 400 for 2,000 and two, 400 for 500, 1,000 for 500.
    assert tree.origin[np.argsort(tree.arrange(lengths.answers(), lengths.scales(0.25)))].tolist() == [4, 3, 0, 1, 2]
    ranks = tree.origin.tolist()
    for _ in range(100):
        lengths.learn(ranks.index(4), Usage(prompt_tokens=500, completion_tokens=20))
    assert lengths.of_a_byte == 0.25
    assert 29 < lengths.answer(ranks.index(4)) < 30 and lengths.answer(ranks.index(3)) == 400
    assert tree.origin[np.argsort(tree.arrange(lengths.answers(), lengths.scales()))].tolist() == [3, 0, 1, 2, 4]


@pytest.mark.once
def test_leaders_are_spaced_and_followers_come_before_other_prefixes() -> None:
    """A follower does not wait for its leader's answer once two steps of prefill are behind it."""
    prompts = [f"{group:02}{'x' * 4094}{member}" for group in range(12) for member in range(3)]
    _, order = ordered(prompts, 1024, Room(chunk=1500))
    # Each prefix is 2,048 tokens, as long as two bytes count as one; a leader is 3,000 in front of its followers.
    taken: list[int] = []
    while (rank := order.take()) is not None:
        taken.append(rank)
    assert taken[:9] == [0, 3, 6, 1, 2, 9, 4, 5, 12]
    assert order.waiting == {31, 32, 34, 35}, "behind the last leaders there is nothing else"
    order.finish(33)
    assert [order.take(), order.take(), order.take()] == [34, 35, None]


@pytest.mark.once
def test_followers_wait_in_a_server_that_lets_them_once_there_is_nothing_else_to_send() -> None:
    prompts = [f"{group}{'x' * 4095}{member}" for group in range(2) for member in range(3)]
    for defers, taken in ((False, [0, 3]), (True, [0, 3, 1, 2, 4, 5])):
        _, order = ordered(prompts, 1024, Room(defers=defers))
        assert [rank for rank in (order.take() for _ in prompts) if rank is not None] == taken


@pytest.mark.once
@pytest.mark.parametrize(
    ("info", "room"),
    [
        ({}, Room()),
        ([], Room()),
        ("x", Room()),
        ({"max_total_num_tokens": -1}, Room()),
        ({"max_total_num_tokens": 5, "chunked_prefill_size": -1}, Room(5)),
        (
            {
                "chunked_prefill_size": 64,
                "internal_states": [
                    {
                        "memory_usage": {"token_capacity": 7},
                        "effective_max_running_requests_per_dp": 3,
                        "pat": {"defers": True},
                    }
                ],
            },
            Room(7, 3, 64, True),
        ),
    ],
)
def test_what_a_server_says_of_its_room(info: Any, room: Room) -> None:
    assert room_of(info) == room


@pytest.mark.once
def test_no_more_prefixes_are_begun_than_the_pool_holds() -> None:
    prompts = [f"{group:02}{'x' * 4094}{member}" for group in range(12) for member in range(20)]
    _, order = ordered(prompts, 1024, Room(5_000))
    running: list[int] = []
    begun: list[int] = []
    while True:
        while (rank := order.take()) is not None:
            running.append(rank)
            if rank // 20 not in begun:
                begun.append(rank // 20)
        groups = {one // 20 for one in order.waiting if one // 20 in begun} | {one // 20 for one in running}
        assert len(groups) <= 2
        if not running:
            break
        order.finish(running.pop(0))
    assert len(begun) == 12 and not order.waiting


@pytest.mark.once
def test_a_full_pool_takes_what_brings_nothing_new_as_far_as_it_queues() -> None:
    """A replica that is asked for one more has it ready when there is room."""
    prompts = [f"0{'x' * 4095}{member:04}" for member in range(400)] + [f"1{'x' * 4095}", f"1{'x' * 4095}2"]
    _, order = ordered(prompts, 1024, Room(2_100))
    leader = order.take()
    assert leader is not None
    order.finish(leader)
    taken = 0
    while order.take() is not None:
        taken += 1
    before = len(order.running)
    assert order.full and order.used > 2_100 and QUEUED <= before < QUEUED + 20
    # One that ends makes room for one, not for more.
    order.finish(next(reversed(order.running)))
    assert order.take() is not None and order.take() is None


@pytest.mark.once
def test_a_job_without_stderr_writes_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.suppress(OSError), open("/dev/full", "w", buffering=1) as full:
        for number, stderr in enumerate((None, full), 1):
            monkeypatch.setattr(sys, "stderr", stderr)
            with Output(tmp_path / "out") as output, Progress(output, 2, 0) as progress:
                progress.warn("of which nobody hears")
                progress.keep(record(number))
            assert (tmp_path / "out").read_bytes().count(b"\n") == number


def failing(number: int, body: object, status: int = 400) -> dict:
    return {**record(number), "response": {"status_code": status, "request_id": "", "body": body}}


@pytest.mark.once
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (failing(2, {"object": "error", "message": "too\nlong"}), "line 2: HTTP 400: too long"),
        (failing(2, {"error": {"message": "busy", "code": 429}}, 429), "line 2: HTTP 429: busy"),
        (failing(2, {"detail": [1]}, 422), "line 2: HTTP 422: {'detail': [1]}"),
        (failing(2, {}), "line 2: HTTP 400: no reason is given"),
        (failing(2, {"message": "a" * 10_000}), "line 2: HTTP 400: " + "a" * 300),
        (failing(2, {"error": "shut"}, 500), "line 2: HTTP 500: {'error': 'shut'}"),
        ({**record(2), "response": None, "error": {"code": "x", "message": "line 2: no JSON"}}, "line 2: no JSON"),
        ({**record(2), "response": None, "error": {}}, "line 2: no reason is given"),
    ],
)
def test_the_first_error_is_told(tmp_path: Path, wrong: dict, said: str) -> None:
    healed = {**wrong, "id": "batch_req_1"}
    with Output(tmp_path / "out") as output:
        assert output.first_error() == ""
        for one in (healed, record(1), wrong, {**wrong, "id": "batch_req_3"}):
            output.write(one)
        assert output.first_error() == said
        output.write(record(4))
    with Output(tmp_path / "out") as output:
        assert (output.first_error(), output.failed, len(output.done)) == (said, 2, 4)


@pytest.mark.once
def test_times_are_spoken() -> None:
    found = [spoken(seconds) for seconds in (0.04, 119.9, 120, 3599, 7169, 7200, 100_000)]
    assert found == ["0.0 s", "119.9 s", "2 min", "60 min", "119 min", "2 h 0 min", "27 h 47 min"]


@pytest.mark.once
def test_a_line_that_was_asked_again_is_an_error_no_more(tmp_path: Path) -> None:
    path = tmp_path / "out"
    wrong = {**record(1), "response": None, "error": {"code": "x", "message": ""}}
    text = [json.dumps(one) + "\n" for one in (wrong, record(1), wrong, {**wrong, "id": "batch_req_2"})]
    path.write_text("\ufeff" + "".join(text))
    with Output(path) as output:
        assert (output.failed, sorted(output.done)) == (1, [1, 2])
    # Records that were joined are not cut off.
    path.write_text("".join(text).replace("\n", "\r"))
    with pytest.raises(BatchError, match="line 1 of"):
        Output(path)


@pytest.mark.once
def test_a_request_takes_its_prompt_and_half_of_its_answer() -> None:
    _, order = ordered(["x" * 400], 1024, Room())
    order.take()
    assert order.used == 400 * order._lengths.of_a_byte + order._lengths.answer(0) / 2


@pytest.mark.once
def test_no_more_requests_are_asked_than_run_and_queue() -> None:
    _, order = ordered([f"{number:03}" for number in range(300)], 1024, Room(requests=5))
    taken = sum(order.take() is not None for _ in range(300))
    assert taken == 5 + QUEUED and order.full


@pytest.mark.once
def test_chats_that_begin_alike_do_so_in_their_order() -> None:
    def request(**body: Any) -> Request:
        return Request(1, "", "/v1/chat/completions", body)

    system = {"role": "system", "content": "s" * 100}
    one, two = (request(messages=[system, {"role": "user", "content": f"q{i}"}], tools=[TOOL]) for i in range(2))
    assert common(beginning(one)[0], beginning(two)[0]) > 100
    assert common(beginning(one)[0], beginning(request(messages=[system]))[0]) < 10
    # SGLang takes tokens in place of messages.
    assert beginning(request(messages=[system], input_ids=[1, 2])) == beginning(request(input_ids=[1, 2]))
    # What no server would take is no reason to fail here.
    nested: Any = []
    for _ in range(5000):
        nested = [nested]
    for body in (
        {},
        {"messages": nested},
        {"messages": [{"content": nested}], "tools": {1: {2}}},
        {"messages": 3},
        {"messages": [3, None, {}]},
        {"messages": {"a": 1}, "tools": "x"},
    ):
        assert isinstance(beginning(request(**body))[0], bytes)
    for prompt in ([1, 2, 3], [-1], [2**40], ["a", "b"], [[1], [2]], {"a": 1}, "\ud800", None, []):
        found, is_tokens = beginning(Request(1, "", "/v1/completions", {"prompt": prompt}))
        assert isinstance(found, bytes) and is_tokens == (prompt == [1, 2, 3])


@pytest.mark.once
def test_whole_floats_are_integers_as_for_servers() -> None:
    def request(**body: Any) -> Request:
        return Request(1, "", "/v1/completions", body)

    for name in ("max_tokens", "max_completion_tokens"):
        assert limit_of(request(**{name: 50.0})) == limit_of(request(**{name: 50})) == 50
        assert limit_of(request(**{name: 50.5})) == limit_of(request())
    assert limit_of(request(n=3.0, max_tokens=7)) == 21
    assert beginning(request(prompt=[5.0, 1e3])) == beginning(request(prompt=[5, 1000]))
    assert not beginning(request(prompt=[5.5]))[1]


@pytest.mark.once
def test_an_engine_that_refuses_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "PAUSES", (0.001,) * 5)
    full, fine = (503, {"message": "The request queue is full."}), (200, {"choices": [{"finish_reason": "stop"}]})
    abort = (200, {"choices": [{"finish_reason": "stop"}, {"finish_reason": "abort"}]})
    asked: list[Any] = []

    def answers(*found: Any, alone: bool = False, stopping: bool = False) -> Any:
        replies = iter(found)
        asked.clear()

        async def ask() -> Any:
            asked.append(next(replies))
            return asked[-1]

        return asyncio.run(patiently(ask, lambda: alone, lambda: stopping))

    assert answers(*[full] * 30, (429, {}), (503, {"message": "aborted by a higher priority request"}), fine) == fine
    assert answers(abort, full, abort, fine) == fine
    assert answers(*[full] * 3, fine, alone=True) == fine
    assert answers(*[full] * 9, alone=True) == full and len(asked) == 6, "what no queue has room for"
    with pytest.raises(RuntimeError, match="its answer was aborted 6 times"):
        answers(*[abort] * 9)
    with pytest.raises(StoppedError):
        answers(full, fine, stopping=True)
    for message in FOR_GOOD:
        assert answers((503, {"message": f"{message} x"})) == (503, {"message": f"{message} x"})
    assert answers((500, {})) == (500, {}) and answers((400, {"message": "x"})) == (400, {"message": "x"})


@pytest.mark.once
def test_one_that_fails_costs_only_itself() -> None:
    async def ask(request: Request) -> tuple[int, dict[str, Any]]:
        if request.number % 3 == 0:
            raise RuntimeError("boom")
        return 200, {"id": f"r{request.number}"}

    records: list[dict[str, Any]] = []
    prompts = [f"{'same ' * 300}{i}" for i in range(10)]
    asyncio.run(answer_all(requests_of(prompts), [ask], records.append, in_flight=4))
    assert sorted(one["id"] for one in records) == sorted(f"batch_req_{i}" for i in range(1, 11))
    for one in records:
        number = int(one["id"].removeprefix("batch_req_"))
        assert (one["error"] is not None) == (number % 3 == 0)
        assert number % 3 or one["error"]["message"] == f"line {number}: RuntimeError: boom"


@pytest.mark.once
@pytest.mark.parametrize("seconds", [60, 0.01], ids=["asked", "probed"])
def test_a_replica_that_is_lost_while_its_requests_are_withdrawn_is_not_printed(seconds: float) -> None:
    """One request has found it lost, and the others are cancelled while they find out."""
    printed, asked_for = [], []

    async def ask(request: Request) -> tuple[int, Any]:
        asked_for.append(request)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if seconds < 1 and len(asked_for) == 1:
                raise
            raise LostError("it is lost") from None
        return 200, {}

    async def withdraw() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: printed.append(context))
        asked = asyncio.ensure_future(in_time(ask, seconds, "it")(requests_of(["a"])[0]))
        while len(asked_for) < (1 if seconds > 1 else 2):
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        del asked
        gc.collect()

    asyncio.run(withdraw())
    assert printed == []


@pytest.mark.once
def test_an_engine_sees_when_nobody_waits_for_an_answer() -> None:
    """SGLang asks its view of the client, and aborts what is no longer wanted."""

    async def look() -> list[bool]:
        client = _Client()
        request = client.request()
        assert not request.headers
        before = await request.is_disconnected()
        client.gone = True
        return [before, await request.is_disconnected()]

    assert asyncio.run(look()) == [False, True]


@pytest.mark.once
def test_a_job_that_is_told_to_end_finishes_what_runs() -> None:
    records: list[dict[str, Any]] = []

    async def ask(request: Request) -> tuple[int, dict[str, Any]]:
        await asyncio.sleep(0)
        if request.number == 9:
            raise asyncio.CancelledError
        return 200, {}

    prompts = [str(i) for i in range(20)]
    with pytest.raises(
        BatchError, match=r"told to end, 1[0-4] requests before it was done: run the same command to go on"
    ):
        asyncio.run(answer_all(requests_of(prompts), [ask], records.append, 4, lambda: len(records) >= 6))
    assert 6 <= len(records) <= 10
    records.clear()
    asyncio.run(answer_all(requests_of(prompts), [ask], records.append, 4))
    assert len(records) == 20 and [one["id"] for one in records if one["error"]] == ["batch_req_9"]


@pytest.mark.once
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["nowhere", "out"],
            "nowhere is not there, and no file of requests; the two files come before all other flags",
        ),
        ([".", "out"], ". is a folder, and no file of requests; the two files come before all other flags"),
        (["in", "in"], "in is the input: name another file"),
        (["in", "out", "--in-flight", "0"], "'0' is not a whole number"),
        (
            ["in", "other"],
            "other has answers to another input than in: name another file, or delete the records of lines that you have corrected",
        ),
        (["in", "longer"], "longer has answers to another input than in: name another file"),
    ],
)
def test_careless_commands_end_with_a_sentence(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in").write_text(json.dumps(completion("x")) + "\n")
    with Output(Path("other")) as output:
        output.write(record(1))
    with Output(Path("longer")) as output:
        output.write(record(1) | {"custom_id": completion("x")["custom_id"]})
        output.write(record(2))
    try:
        status = cli.main(["batch", *arguments, "--model-path", "nowhere"])
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert message in capsys.readouterr().err
    assert not Path("out").exists(), "a mistake leaves nothing behind"


@pytest.mark.once
def test_a_job_that_nothing_answers_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["batch", str(tmp_path / "in"), str(tmp_path / "out")]) == 2
    assert "give --model-path, or --url" in capsys.readouterr().err
    assert cli.main(["batch", str(tmp_path / "in"), str(tmp_path / "out"), "--url", "http://localhost:1"]) == 2
    assert "in: No such file" in capsys.readouterr().err, "no other flags have taken its place"


@pytest.mark.once
def test_errors_show_in_the_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = ["--model-path", str(tmp_path / "nowhere")]
    (tmp_path / "in").write_text("one\ntwo\n")
    for _ in range(2):
        assert cli.main(["batch", str(tmp_path / "in"), str(tmp_path / "out"), *model]) == 1
        said = capsys.readouterr().err
        assert "out: all 2 records are there, 2 of them errors; the first error: line 1 is no JSON: " in said
        assert "loading the model" not in said and said.count("\n") == 1
    assert (tmp_path / "out").read_bytes().count(b"\n") == 2
    (tmp_path / "in").write_text("\n")
    assert cli.main(["batch", str(tmp_path / "in"), str(tmp_path / "none"), *model]) == 0


def job(model: Path, folder: Path, *flags: str, **variables: str) -> ForkedProcess:
    command = [sys.executable, "-m", "sglang_pat.cli", "batch", str(folder / "in"), str(folder / "out")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
    return ForkedProcess([*command, "--model-path", str(model), *FLAGS, *flags], environment, folder / "log")


def free(path: Path) -> bool:
    try:
        with Output(path):
            pass
    except BatchError:
        return False
    return True


def until(condition: Callable[[], bool], process: ForkedProcess | None, log: Path) -> None:
    for _ in range(1200):
        if condition():
            return
        assert process is None or process.poll() is None, log.read_text()[-3000:]
        time.sleep(0.1)
    raise AssertionError(log.read_text()[-3000:])


@pytest.mark.server
@pytest.mark.release
def test_records_are_a_servers_answers(model: Path, tmp_path: Path) -> None:
    """Also of a job that was killed in the middle of a line."""
    document = workload.prose("a document", 1500)
    asked = [chat(f"{document} question {i}") for i in range(16)]
    asked += [
        chat("tools", tools=[TOOL], tool_choice="none"),
        chat("several", n=3),
        chat("hot", logprobs=True, top_logprobs=2),
    ]
    asked += [
        completion("abc"),
        completion(list(range(40, 60))),
        completion("echo", echo=True),
        completion("stop", stop=["!"]),
    ]
    asked += [chat("wrong", max_tokens="many"), chat("too long", max_tokens=10**9), completion("", max_tokens=4)]
    text = [json.dumps(one) for one in asked]
    text.insert(5, "garbage")
    # Of these a server would die.
    unknown = [
        (f"token {10**8} is none of the model's", completion([5, 10**8])),
        ("token -1 is none of the model's", completion([[7, 8], [-1]])),
        (f"token {10**8} is none of the model's", completion([5, 1e8])),
        ("token -7 is none of the model's", chat("tokens", input_ids=[5, -7])),
        (f"tokens, not {10**6}", completion("abc", logprobs=10**6)),
        (f"tokens, not {10**6}", chat("abc", logprobs=True, top_logprobs=10**6)),
        ("one of the prompts is empty", completion(["abc", ""])),
        ("one of the prompts is empty", completion([[5], []])),
        (f"stop_token_ids: token {10**9} is none of", completion("abc", stop_token_ids=[10**9], min_tokens=2)),
    ]
    text += [json.dumps(one) for _, one in unknown]
    (tmp_path / "in").write_text("\n".join(text) + "\n")
    out = tmp_path / "out"
    process = job(model, tmp_path, "--in-flight", "3")
    until(lambda: out.exists() and out.read_bytes().count(b"\n") >= 6, process, tmp_path / "log")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    # SGLang's processes, forked here, have the file open too until they notice.
    until(lambda: free(out), None, tmp_path / "log")
    with out.open("ab") as file:
        file.write(b'{"id":"batch_req_1","custom_id":"')
    # Its queue is full all the time.
    process = job(model, tmp_path, "--max-running-requests", "4", "--max-queued-requests", "4")
    assert process.wait(600) == 1, (tmp_path / "log").read_text()[-3000:]
    records = {one["id"]: one for one in map(json.loads, out.read_text().splitlines())}
    assert out.read_text().count("\n") == len(records) == len(text), "each line once"
    said = (tmp_path / "log").read_text()
    assert "sglang-pat: loading the model\n" in said
    ending = r"of them errors; [\d.]+ s, \d+ tokens/s, \d+% of prefill saved; the first error: line 6 is no JSON: "
    assert re.search(ending, said.splitlines()[-1]), said[-3000:]

    with (
        ForkedServer(model, "pat", tmp_path / "server.log", [*FLAGS, "--enable-cache-report"]) as server,
        ThreadPoolExecutor(8) as pool,
    ):
        server.wait()
        expected = list(pool.map(lambda one: post(server, one["url"], one["body"]), asked))
    assert len({str(choice(body)) for _, body in expected}) > len(asked) / 2, "answers that depend on questions"
    numbers = [i for i, line in enumerate(text, 1) if line != "garbage"]
    for number, (why, _) in zip(numbers[len(asked) :], unknown, strict=True):
        response = records[f"batch_req_{number}"]["response"]
        assert response["status_code"] == 400 and why in str(response["body"])
    for number, one, (status, body) in zip(numbers[: len(asked)], asked, expected, strict=True):
        found = records[f"batch_req_{number}"]
        assert found["custom_id"] == one["custom_id"] and found["error"] is None
        assert found["response"]["status_code"] == status, found
        assert choice(found["response"]["body"]) == choice(body)
    assert records["batch_req_6"]["error"]["code"] == "invalid_line"


@pytest.mark.parametrize(
    ("flags", "config", "message"),
    [
        (["--chunked-prefil-size", "64"], "", "sglang-pat batch: unrecognized arguments: --chunked-prefil-size"),
        (["--config", "{}"], "nope: 1", "sglang-pat batch: unrecognized arguments: --nope"),
        (["--config={}"], "nope: 1", "sglang-pat batch: unrecognized arguments: --nope"),
        (["--config", "{}"], "a: [\33", "sglang-pat: the engine does not start: "),
        (["--config=/no/config"], "", "sglang-pat: the engine does not start: "),
    ],
)
def test_flags_that_there_are_not_are_one_sentence(flags: list[str], config: str, message: str, tmp_path: Path) -> None:
    """SGLang would print all that there are, too."""
    (tmp_path / "in").write_text(json.dumps(completion("abc")) + "\n")
    (tmp_path / "flags.yaml").write_text(config)
    assert job(tmp_path, tmp_path, *(flag.format(tmp_path / "flags.yaml") for flag in flags)).wait(600) == 2
    said = (tmp_path / "log").read_text().splitlines()
    assert said[-1].startswith(message), said
    assert not any("usage:" in line or "Traceback" in line for line in said)


@pytest.mark.parametrize(
    "flags",
    [
        ["--node-rank", "1", "--nnodes", "2", "--dist-init-addr", "127.0.0.1:9"], ["--tokenizer-worker-num", "2"],
        ["--skip-tokenizer-init"], ["--disaggregation-mode", "prefill"], ["--encoder-only"], ["--is-embedding"], ["--use-ray"],
    ],
    ids=lambda flags: flags[0],
)  # fmt: skip
def test_an_engine_that_would_answer_nothing_is_refused_before_it_starts(flags: list[str], model: Path) -> None:
    load_plugins()
    words = ["--model-path", str(model), "--attention-backend", "pat", *FLAGS]
    job_module.check_answers(prepare_server_args([*words, "--detokenizer-worker-num", "2"]))
    if flags[0] == "--tokenizer-worker-num" and compat.release() != "0.5.17":
        job_module.check_answers(prepare_server_args([*words, *flags]))
        return
    # SGLang itself may refuse a model with a flag.
    with pytest.raises(ValueError, match=f"no engine answers a job with {flags[0]}|for encoder disaggregation"):
        job_module.check_answers(prepare_server_args([*words, *flags]))


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.once
def test_an_engine_that_ends_is_one_sentence(model: Path, tmp_path: Path) -> None:
    """SGLang would kill this process too."""
    lines = [completion("abc", max_tokens=1), completion("abd", max_tokens=6000, ignore_eos=True)]
    (tmp_path / "in").write_text("".join(json.dumps(one) + "\n" for one in lines))
    process, out, log = job(model, tmp_path), tmp_path / "out", tmp_path / "log"
    until(lambda: out.exists() and out.stat().st_size > 0, process, log)
    psutil.Process(process.pid).children()[0].kill()
    assert process.wait(600) == 2, log.read_text()[-3000:]
    assert log.read_text().splitlines()[-1] == "sglang-pat: the engine has ended, and said why above"
    assert out.read_bytes().count(b"\n") == 1


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.once
def test_a_job_that_is_told_to_end_before_its_engine_has_started_is_one_sentence(model: Path, tmp_path: Path) -> None:
    (tmp_path / "in").write_text(json.dumps(completion("abc")) + "\n")
    process, log = job(model, tmp_path), tmp_path / "log"
    until(lambda: len(psutil.Process(process.pid).children(recursive=True)) > 0, process, log)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(600) == 2, log.read_text()[-3000:]
    assert log.read_text().splitlines()[-1] == "sglang-pat: the job was told to end before its engine had started"


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "variables", "why"),
    [
        ([], {"SGLANG_PAT_TILES": "/no/table"}, "SGLANG_PAT_TILES: /no/table is not a table"),
        (["--chat-template", "no-such"], {}, "Chat template no-such is not"),
        (
            ["--page-size", "64", "--chunked-prefill-size", "100"],
            {},
            "start: chunked_prefill_size must be divisible by",
        ),
    ],
)
def test_an_engine_that_does_not_start_is_one_sentence(
    flags: list[str], variables: dict[str, str], why: str, model: Path, tmp_path: Path
) -> None:
    """What a process of its own finds wrong, which then has SGLang's handler kill this one; and this one, which has sockets by then."""
    (tmp_path / "in").write_text(json.dumps(completion("abc")) + "\n")
    process = job(model, tmp_path, *flags, **variables)
    log = tmp_path / "log"
    assert process.wait(600) == 2, log.read_text()[-3000:]
    text = log.read_text()
    assert text.splitlines()[-1].startswith("sglang-pat: the engine does not start")
    assert why in text and "SIGQUIT" not in text


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.once
def test_a_job_ends_in_silence(model: Path, tmp_path: Path) -> None:
    """Not forked, as the other jobs here: what libraries do at exit counts."""
    (tmp_path / "in").write_text(json.dumps(completion("abc")) + "\n")
    command = [
        sys.executable,
        "-m",
        "sglang_pat.cli",
        "batch",
        tmp_path / "in",
        tmp_path / "out",
        "--model-path",
        model,
        *FLAGS,
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=600)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr[-3000:]
    assert json.loads((tmp_path / "out").read_text())["response"]["status_code"] == 200


def post(server: ForkedServer, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    import urllib.error

    try:
        return 200, server.post(path, body)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def choice(body: dict[str, Any]) -> Any:
    """What depends on the request alone."""
    return [{**one, "logprobs": None, "hidden_states": None} for one in body["choices"]] if "choices" in body else None
