"""What `sglang-pat top` and the log say of counters."""

from __future__ import annotations

import itertools
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_pat import cli
from sglang_pat.backend import metrics
from sglang_pat.backend.planner import Counters
from sglang_pat.cli import top


def counters(**changes: int) -> dict:
    numbers = dict.fromkeys([*metrics.COUNTERS, *metrics.GAUGES, "nodes"], 0)
    return {**numbers, **changes, "kv_bytes_by_queries": {"1": 8, "3": 2, "5": 4}}


def info(**changes: object) -> dict:
    """What `/server_info` answers, as far as it matters."""
    pat = {**counters(steps=10, kv_bytes=1, kv_bytes_unpacked=2), "trace": "", "unpacked_because": ""}
    return {"version": "0.5.17", "internal_states": [{"memory": {}, "pat": {**pat, **changes}}]}


def http(body: object, status: str = "200 OK", headers: str = "") -> bytes:
    """An answer; JSON of what is no bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\n{headers}\r\n".encode() + data


class Port:
    """Where something answers that need not be a server.

    Attributes:
        url: Its address.
        requests: What came in.
    """

    def __init__(self, answer: Callable[[socket.socket], None]) -> None:
        self.requests: list[bytes] = []
        self._answer = answer
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                with connection, suppress(OSError):
                    self.requests.append(connection.recv(1 << 16))
                    self._answer(connection)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@contextmanager
def port(answer: bytes | Callable[[socket.socket], None]) -> Iterator[Port]:
    """A port that gives every client the same answer, or calls it."""
    opened = Port(answer if callable(answer) else lambda connection: connection.sendall(answer))
    try:
        yield opened
    finally:
        opened.close()


def sentence(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command says that refuses something."""
    try:
        status = cli.main(list(arguments))
    except SystemExit as end:
        status = end.code
    output = capsys.readouterr()
    assert (status, output.out) == (2, "") and output.err.count("\n") == 1 and output.err.startswith("sglang-pat")
    assert output.err.strip().isprintable()
    return output.err


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def lines(new: dict, old: dict | None, seconds: float = 2.0, verbose: bool = False) -> list[str]:
    return list(top.picture(new, old, seconds).lines(verbose))


def test_a_picture_shows_what_happened_in_between() -> None:
    """How much is shared is told by bytes, not by work items: one that reads for many requests stands for much."""
    old = counters(steps=100, kv_bytes=10**9, kv_bytes_unpacked=4 * 10**9, work_items=1000)
    new = counters(steps=150, kv_bytes=2 * 10**9, kv_bytes_unpacked=14 * 10**9, work_items=1500, bound=7)
    old["kv_bytes_by_queries"] = {1: 8, 3: 2}
    new["kv_bytes_by_queries"] = {1: 11, 3: 2, 9: 3, 15: 4}
    new["tokens_per_s"] = 1234.4
    assert lines(new, old) == [
        "10.0 \N{MULTIPLICATION SIGN} less KV read: 1.0 GB, without packing 10.0 GB",
        "7 requests now, 1,234 tokens a second; 50 decode steps, 25 a second",
        "",
        "KV read, by how many requests share it",
        f"        1   30% {'█' * 12}",
        f"     8-15   70% {'█' * 28}",
        "",
        "fallbacks 0, faults 0 since the start; both should be 0",
    ]
    assert "10 work items and 0 merged parts a step; 0 nodes in the tree" in lines(new, old, verbose=True)
    assert "; 150 decode steps" in lines(new, None)[1] and "no KV was read" in lines(old, old)


def test_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which `sglang-pat batch --url` does not ask either; it would see the key."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with port(http(info())) as opened:
        assert top.total(top.fetch(opened.url, ""))["steps"] == 10


def test_processes_are_added_up() -> None:
    both = top.total([counters(steps=3), counters(steps=4)])
    assert both["steps"] == 7 and both["kv_bytes_by_queries"] == {"1": 16, "3": 4, "5": 8}
    assert not any(line.startswith("unpacked: ") for line in lines(both, None))
    one = top.total([{**counters(), "unpacked_because": reason} for reason in ("", "this SGLang has no tree")])
    assert "unpacked: this SGLang has no tree" in lines(one, None)


@pytest.mark.parametrize(("queries", "size"), [(1, 1), (2, 2), (3, 2), (4, 4), (7, 4), (1023, 512)])
def test_size_classes(queries: int, size: int) -> None:
    assert metrics.new_by_size({str(queries): 1}, {}) == {size: 1}


def test_the_log_line_counts_from_the_last_one(caplog: pytest.LogCaptureFixture) -> None:
    published = metrics.Metrics()
    with caplog.at_level("INFO"):
        published.log(counters(steps=10, plans=2, work_items=50, kv_bytes=100, kv_bytes_unpacked=250))
        published.log(counters(steps=10, plans=2, work_items=50, kv_bytes=100, kv_bytes_unpacked=250))
        published.log(counters(steps=14, plans=3, work_items=90, kv_bytes=200, kv_bytes_unpacked=650, fallbacks=1))
    assert [record.message for record in caplog.records] == [
        "PAT: 10 steps, 2 plans (0 ahead), 5 work items a step, KV read 0.00 GB, 2.50 times as much unpacked",
        "PAT: 4 steps, 1 plans (0 ahead), 10 work items a step, KV read 0.00 GB, 4.00 times as much unpacked, "
        "1 fallbacks, 0 faults",
    ]


def test_no_server_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    found = sentence(capsys, "top", "--once", "--url", "http://127.0.0.1:9")
    assert "no SGLang server answers at http://127.0.0.1:9 (Connection refused): is it running there?\n" in found


@pytest.mark.parametrize(
    "url",
    [
        "", "http://", "http://:30000", "localhost", "localhost:99999", "user:secret@localhost:1", "//localhost", "file:///etc/passwd",
        "ftp://localhost", "data:,x", "http://localhost:99999", "http://localhost:x", "http://localhost:-1", "http://[::1",
        "http://localhost:0", "http://a..b", f"http://{'a' * 64}", "http://local host", "http://localhost\n", "http://h?x=1",
        "http://h#x", "http://b\u00fccher.example:30000", "http://user:secret@localhost:99999", "http://user:secret@127.0.0.1:9", "\x1b[2J",
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["top", "explain"])
def test_what_is_no_address_is_refused_and_not_shown(
    capsys: pytest.CaptureFixture[str], command: str, url: str
) -> None:
    found = sentence(capsys, command, "--url", url)
    assert "--url must be like http://127.0.0.1:30000, in ASCII, without user, query or fragment" in found
    assert "secret" not in found


def test_an_address_is_asked_for_where_none_was_given(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_pat.cli.commands.URL", "http://127.0.0.1:9")
    assert "is it running there? Or give its address with --url\n" in sentence(capsys, "top", "--once")


def test_a_port_without_tls_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with port(http(info())) as server:
        found = sentence(capsys, "top", "--url", server.url.replace("http", "https"))
    assert "no SGLang server answers at https://127.0.0.1:" in found and "SSL" in found


def test_an_address_may_be_written_in_several_ways(capsys: pytest.CaptureFixture[str]) -> None:
    with port(http(info())) as server:
        number = server.url.rpartition(":")[2]
        for url in (
            server.url, f"{server.url}/", f"HTTP://localhost:{number}", f"localhost:{number}", f"{server.url}/replica/1",
        ):  # fmt: skip
            assert cli.main(["top", "--once", "--url", url]) == 0
            assert "; 10 decode steps" in capsys.readouterr().out
        paths = [request.split()[1] for request in server.requests]
    assert paths == [b"/server_info"] * 4 + [b"/replica/1/server_info"]


NO_HTTP = ", but it is no SGLang server (it does not speak HTTP)"
NO_SGLANG = "is not an SGLang server that this sglang-pat knows: "
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", NO_HTTP),
        (b"SSH-2.0-OpenSSH_9.2\r\n", NO_HTTP),
        (b"\xff\x00\x1b[2J" * 99, NO_HTTP),
        (b"x" * 10**6, NO_HTTP),
        (b"HTTP/1.1 OK\r\n\r\n", NO_HTTP),
        (b"HTTP/1.1 200 OK\r\nA: " + b"x" * 10**5, NO_HTTP),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 1000, NO_HTTP),
        (b"HTTP/1.1 200 OK\r\n", NO_SGLANG + "Input data was truncated"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}", NO_SGLANG),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -7\r\n\r\n{}", NO_SGLANG),
        (CHUNKED + b"zz\r\n{}", NO_HTTP),
        (CHUNKED + b"-1\r\n{}", ""),
        (CHUNKED + b"ffffffffffffffffffff\r\n{}", ""),
        (http(b"", "404 \x1b[2JNot here"), ", but it is no SGLang server (404 at /server_info)\n"),
        (http(b"", "500 x"), "(500 Internal Server Error): is it running there?"),
        (http(b"", "299 x"), NO_SGLANG),
        (http(b"", "777 x"), "(777): is it running there?"),
        (http(b"", "401 x"), "answers 401 Unauthorized: give its key with --api-key"),
        (http(b"", "403 x"), "answers 403 Forbidden: give its key with --api-key"),
        (http(b"\xff\xfe{"), NO_SGLANG + "JSON is malformed"),
        (http(b'{"internal_states": "\xff"}'), NO_SGLANG),
        (http(b"<html>"), NO_SGLANG + "JSON is malformed"),
        (http(b"[" * 10**6), NO_SGLANG),
        (http(b'{"a": ' + b"[" * 10**5 + b"]" * 10**5 + b"}"), NO_SGLANG + "maximum recursion depth"),
        (http([]), NO_SGLANG + "Expected `object`, got `array`"),
        (http(None), NO_SGLANG + "Expected `object`, got `null`"),
        (http(1e300), NO_SGLANG),
        (http({}), NO_SGLANG + "Object missing required field `internal_states`"),
        (http({"internal_states": {"pat": {}}}), NO_SGLANG + "Expected `array`, got `object` - at `$.internal_states`"),
        (http({"internal_states": [None]}), NO_SGLANG),
        (http({"internal_states": [{"pat": [1]}]}), NO_SGLANG + "Expected `object | null`, got `array`"),
        (http({"internal_states": [{"pat": {}}]}), NO_SGLANG + "Object missing required field"),
        (http(info(steps="7")), NO_SGLANG + "Expected `int`, got `str`"),
        (http(info(steps=-7)), NO_SGLANG + "Expected `int` >= 0"),
        (http(info(steps=10**30)), NO_SGLANG + "Expected `int` <= 9223372036854775807"),
        (http(info(steps=True)), NO_SGLANG),
        (http(info(steps=1.5)), NO_SGLANG),
        (http(info(kv_bytes_by_queries=[1])), NO_SGLANG),
        (http(info(kv_bytes_by_queries={"x": 1})), NO_SGLANG),
        (http(info(kv_bytes_by_queries={"0": 1})), NO_SGLANG),
        (http(info(kv_bytes_by_queries={"1": None})), NO_SGLANG),
        (http(info(trace="a\x1b[2J")), NO_SGLANG),
        (http(info(unpacked_because="a\x1b[2J")), NO_SGLANG),
        (http({"internal_states": []}), "decodes with another backend: start it with --attention-backend pat"),
        (http({"internal_states": [{}, {"pat": None}]}), "decodes with another backend"),
    ],
)
def test_whatever_answers_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, answer: bytes, message: str
) -> None:
    monkeypatch.setattr(top, "PATIENCE", 5)
    with port(answer) as server:
        for command in (["top"], ["top", "--once"], ["explain"]):
            found = sentence(capsys, *command, "--url", server.url)
            assert message in found and server.url in found


def slowly(data: bytes) -> Callable[[socket.socket], None]:
    """A byte now and then, over and over."""

    def answer(connection: socket.socket) -> None:
        for place in range(40):
            connection.sendall(data[place % len(data) :][:1])
            time.sleep(0.05)

    return answer


def endlessly(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b" " * 10**6)


@pytest.mark.parametrize(
    "answer",
    [
        lambda connection: time.sleep(2),
        slowly(b"H"),
        slowly(b"HTTP/1.1 100 Continue\r\n\r\n"),
        slowly(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n"),
        slowly(CHUNKED + b"1\r\n \r\n"),
    ],
)
def test_who_is_slow_is_not_waited_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, answer: Callable[[socket.socket], None]
) -> None:
    monkeypatch.setattr(top, "PATIENCE", 0.5)
    began = time.monotonic()
    with port(answer) as server:
        found = sentence(capsys, "top", "--url", server.url)
    assert "(not within 0.5 s): is it running there?" in found and time.monotonic() - began < 1.8


@pytest.mark.parametrize("answer", [endlessly, http(b" " * (17 << 20))])
def test_more_than_a_server_says_is_not_read(capsys: pytest.CaptureFixture[str], answer) -> None:
    with port(answer) as server:
        assert ", but it is no SGLang server (it sends more than 16 MiB)" in sentence(
            capsys, "top", "--url", server.url
        )


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize(
    "place", ["file:///etc/passwd", "ftp://127.0.0.1/x", "http://[", "{url}/server_info?x=sk-secret", "\x1b[2J"]
)
def test_no_redirection_is_followed(capsys: pytest.CaptureFixture[str], status: int, place: str) -> None:
    with port(http(info())) as other:
        place = place.format(url=other.url)
        with port(http(b"", f"{status} x", f"Location: {place}\r\n")) as server:
            found = sentence(capsys, "top", "--url", server.url, "--api-key", "sk-secret")
        assert other.requests == [] and "sk-secret" not in found
    assert f"answers {status} " in found and "give that address with --url" in found
    if place.startswith("http://1"):
        assert f" to '{other.url}':" in found


def test_the_key_is_sent_and_never_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def header(request: bytes) -> list[bytes]:
        return [line for line in request.split(b"\r\n") if line.lower().startswith(b"authorization")]

    def protected(connection: socket.socket) -> None:
        request = server.requests[-1]
        allowed = header(request) == [b"Authorization: Bearer sk-secret"]
        # Whoever sends the request back must not get it shown either.
        connection.sendall(http(info(trace=str(tmp_path / "none"))) if allowed else http(request, "401 sk-secret"))

    with port(protected) as server:
        url = ["--url", server.url]
        assert cli.main(["top", "--once", *url, "--api-key", "sk-secret"]) == 0
        assert "sk-secret" not in "".join(capsys.readouterr())
        for given in ([], ["--api-key", ""], ["--api-key", "sk-secret-too"]):
            for command in (["top"], ["explain"]):
                found = sentence(capsys, *command, *url, *given)
                assert "answers 401 Unauthorized: give its key with --api-key" in found and "sk-" not in found
        monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
        assert cli.main(["top", "--once", *url]) == 0
        capsys.readouterr()
        assert "which is not a file on this machine" in sentence(capsys, "explain", *url)
        found = sentence(capsys, "top", *url, "--api-key", "wrong")
        assert "give its key" in found and "wrong" not in found, "the option counts"


@pytest.mark.parametrize(
    "key", ["sk\nsecret", "sk\r\nHost: secret", "sk-secret\u20ac", "sk-secret\x00", "sk-secret\x7f"]
)
def test_a_key_that_cannot_be_sent_is_not_shown(capsys: pytest.CaptureFixture[str], key: str) -> None:
    with port(http(info())) as server:
        found = sentence(capsys, "top", "--once", "--url", server.url, "--api-key", key)
        assert server.requests == []
    assert "an API key has printable ASCII characters only: give another one with --api-key" in found
    assert "secret" not in found


def test_the_key_of_the_environment_is_not_in_the_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    for command in ("top", "explain"):
        with pytest.raises(SystemExit, match="0"):
            cli.main([command, "--help"])
        shown = capsys.readouterr().out
        assert "--api-key" in shown and "OPENAI_API_KEY" in shown and "sk-secret" not in shown


def test_explain_says_why_there_is_no_recording(capsys: pytest.CaptureFixture[str]) -> None:
    for trace, message in [
        ("", "does not record: start it with SGLANG_PAT_TRACE=<file>"),
        ("/no/such/trace", "records /no/such/trace, which is not a file on this machine"),
        ("/dev/zero", "records /dev/zero, which is not a file on this machine"),
    ]:
        with port(http(info(trace=trace))) as server:
            assert message in sentence(capsys, "explain", "--url", server.url)


def test_replicas_may_answer_in_any_order(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for order in itertools.permutations(("", str(tmp_path / "trace"), str(tmp_path / "trace.dp1"))):
        states = [
            {"pat": {**counters(steps=1 + len(trace)), "trace": trace, "unpacked_because": ""}} for trace in order
        ]
        with port(http({"internal_states": states})) as server:
            assert f"records {tmp_path / 'trace'}, which" in sentence(capsys, "explain", "--url", server.url)
            assert top.total(top.fetch(server.url))["steps"] == 3 + sum(len(trace) for trace in order)


def test_a_real_process_says_what_is_read() -> None:
    told = {**Counters(kv_by_queries={1: 2, 70_000: 3}).report(3), "nodes": 0, "faults": 0, "bound": 0, "trace": "/x y"}
    told["unpacked_because"] = ""
    assert set(top.Counters.__annotations__) <= set(told)
    body = msgspec.json.encode({"internal_states": [{"pat": told}, {}]})
    (read,) = msgspec.json.decode(body, type=top.ServerInfo).internal_states[:1]
    assert read.pat["kv_bytes_by_queries"] == {1: 6, 70_000: 9} and read.pat["trace"] == "/x y"


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
NUMBERS = st.integers(0, 2**63 - 1)
SIZES = st.dictionaries(st.integers(1, 1 << 20).map(str), NUMBERS, max_size=4)
NAMES = sorted(set(top.Counters.__annotations__) - {"kv_bytes_by_queries", "trace"})
PLAUSIBLE = st.fixed_dictionaries(dict.fromkeys(NAMES, NUMBERS) | {"kv_bytes_by_queries": SIZES, "trace": st.just("")})
DAMAGED = st.builds(lambda whole, change: {**whole, **change}, PLAUSIBLE, st.dictionaries(st.sampled_from(NAMES), JUNK))
INFOS = st.builds(
    lambda states: {"internal_states": states},
    st.lists(PLAUSIBLE.map(lambda pat: {"pat": pat}), min_size=1, max_size=3),
)


@given(st.lists(INFOS | JUNK | DAMAGED.map(lambda pat: {"internal_states": [{"pat": pat}]}), min_size=1, max_size=3))
@settings(max_examples=300, deadline=None)
def test_an_answer_is_shown_or_refused_and_nothing_else(answers: list) -> None:
    old = None
    for answer in answers:
        with mock.patch.object(top, "_get_in_time", return_value=json.dumps(answer).encode()):
            try:
                new = top.total(top.fetch("http://127.0.0.1:30000"))
            except top.TopError:
                continue
        found = top.picture(new, old, 2.0)
        assert all(len(line) < 300 for line in found.lines(True)), "bars have an end"
        assert json.loads(msgspec.json.encode(found))["faults"] == new["faults"]
        old = new


def watch(monkeypatch: pytest.MonkeyPatch, answers: list[bytes], *flags: str) -> None:
    """Run `top` until all answers were given."""
    given = iter(answers)

    def wait(_: float, turns: Iterator[int] = iter(range(len(answers)))) -> None:  # noqa: B008
        if next(turns) == len(answers) - 1:
            raise KeyboardInterrupt

    with port(lambda connection: connection.sendall(next(given))) as server:
        # Not `time.sleep` itself: a port of an earlier test may still answer slowly on its thread.
        monkeypatch.setattr(top, "time", SimpleNamespace(sleep=wait, monotonic=time.monotonic))
        assert cli.main(["top", "--url", server.url, *flags]) == 0


@pytest.mark.parametrize("terminal", [True, False])
def test_a_server_that_is_started_again_is_waited_for_and_counted_from_its_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    watch(monkeypatch, [http(info(steps=100)), b"", http(b"", "503 x"), http(info(steps=7)), http(info(steps=9))])
    shown = capsys.readouterr().out
    assert (top.CLEAR in shown) == terminal
    first, none, refused, again, last = shown.split("sglang-pat top, ")[1:]
    assert "; 100 decode steps since the server started\n" in first
    for waiting, why in ((none, "does not speak HTTP"), (refused, "503 Service Unavailable")):
        assert why in waiting and "trying again. Before that:" in waiting and "; 100 decode steps" in waiting
    assert "the server was started again\n" in again and "; 7 decode steps since the server started\n" in again
    assert "in the last " in last and "; 2 decode steps, " in last


def test_a_picture_stays_while_nothing_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch(monkeypatch, [http(info(steps=100)), http(info(steps=100))])
    _, idle = capsys.readouterr().out.split("sglang-pat top, ")[1:]
    assert "no decode step for 0 s. Before that:" in idle and "; 100 decode steps" in idle


def test_json_has_what_the_page_says(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [http(info(steps=100)), http(b"", "503 x"), http(info(steps=104, kv_bytes=3, kv_bytes_unpacked=6))]
    watch(monkeypatch, answers, "--json")
    shown = capsys.readouterr()
    first, second = map(json.loads, shown.out.splitlines())
    assert shown.err.count("trying again") == 1
    assert first["seconds"] is None and first["steps"] == 100 and second["steps"] == 4 and second["seconds"] > 0
    assert first["less_kv_read"] == 2 and first["kv_by_requests"] == {"1": 0.5714, "2": 0.1429, "4": 0.2857}
    assert set(first) == set(second) == set(top.Picture.__struct_fields__)
    section = (Path(__file__).parent.parent / "docs" / "watch.md").read_text().split("## JSON\n")[1].split("\n## ")[0]
    assert {*first, "null"} == set(re.findall(r"`(\w+)`", section))


def test_nothing_run_yet() -> None:
    assert lines({**counters(), "kv_bytes_by_queries": {}}, None)[0] == "no KV was read"


def test_the_dashboard_shows_metrics_that_there_are() -> None:
    """In the classic model that Grafana imports: panels side by side, each with its own number, on a data source that is chosen."""
    dashboard = json.loads((Path(__file__).parent.parent / "docs" / "grafana.json").read_text())
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time", "annotations"} <= set(dashboard)
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    known = {f"{name}_total" for name in metrics.COUNTERS} | set(metrics.GAUGES)
    known |= {f"{shown}_total" for shown, _ in metrics.BY_QUERIES.values()}
    covered, used, numbers = set(), set(), []
    for panel in dashboard["panels"]:
        assert {"type", "title", "description", "fieldConfig", "options"} <= set(panel) and panel["targets"]
        numbers.append(panel["id"])
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not covered & cells and place["x"] + place["w"] <= 24, panel["title"]
        covered |= cells
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert target["expr"].count("(") == target["expr"].count(")")
            used |= set(re.findall(r"sglang_pat:(\w+)", target["expr"]))
    assert len(set(numbers)) == len(numbers) and used <= known
    wanted = {"kv_bytes_total", "kv_bytes_unpacked_total", "kv_bytes_by_queries_total", "requests_total", "bound"}
    assert wanted | {"fallbacks_total", "too_large_total", "faults_total"} <= used
