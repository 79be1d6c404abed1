"""Sessions of coding agents: what their prompts share, in `sglang-pat estimate` and as tokens of benchmarks/agentic.py."""

from __future__ import annotations

import asyncio
import json
import lzma
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_top import sentence

from sglang_pat import cli
from sglang_pat.estimate import EstimateError, batch_of, estimate, load, prompts, read_model
from sglang_pat.estimate.agentic import KEPT_BLOCK, Session, session_of
from sglang_pat.estimate.costs import repeated

pytestmark = pytest.mark.once

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "docs" / "examples" / "config.json"


def session(number: int, turns: list[dict], tools: int = 640, system: int = 128, **more: Any) -> dict:
    return {"session": number, "tool_tokens": tools, "system_tokens": system, "turns": turns, **more}


def turn(tokens: int, out: int = 10, **more: Any) -> dict:
    return {"in": tokens, "out": out, "think_s": 0.5, **more}


def write(path: Path, rows: list[dict]) -> Path:
    path.write_bytes(lzma.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


@st.composite
def files(draw: st.DrawFn) -> list[dict]:
    """Sessions of whole blocks, so that blocks share exactly what tokens do."""
    rows: list[dict] = []
    for number in range(draw(st.integers(1, 5))):
        tools, system = (KEPT_BLOCK * draw(st.integers(1, 3)) for _ in range(2))
        turns = [turn(KEPT_BLOCK * draw(st.integers(1, 12)), draw(st.integers(0, 9)))]
        for _ in range(draw(st.integers(0, 4))):
            more = {}
            tokens = draw(st.integers(1, 12))
            if draw(st.booleans()):
                like = draw(st.integers(0, len(turns) - 1))
                more = {"like": like, "keep_blocks": draw(st.integers(0, min(tokens, turns[like]["in"] // KEPT_BLOCK)))}
            turns.append(turn(KEPT_BLOCK * tokens, draw(st.integers(0, 9)), **more))
        rows.append(session(number, turns, tools, system))
    return rows


def shared(one: list, other: list) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def tokens_of(one: Session, number: int) -> list[tuple]:
    """A prompt, with a token of its own for each place behind each key."""
    return [(key, place) for key, count in one.pieces(number) for place in range(count)]


@given(files())
@settings(max_examples=200, deadline=None)
def test_prompts_share_what_the_file_says_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, rows: list
) -> None:
    sessions = [session_of(row, {}) for row in rows]
    prompts = [tokens_of(one, number) for one in sessions for number in range(len(one.turns))]
    places = [(one, number) for one in sessions for number in range(len(one.turns))]
    for (one, number), prompt in zip(places, prompts, strict=True):
        said = one.turns[number]
        assert len(prompt) == said.tokens
        if said.like is not None:
            assert shared(prompt, tokens_of(one, said.like)) >= said.keep_blocks * KEPT_BLOCK
            assert one.kept(number) == said.keep_blocks * KEPT_BLOCK
            new = set(prompt[one.kept(number) :])
            assert not any(new & set(tokens_of(one, before)) for before in range(number)), "all after it is new"
    firsts = [tokens_of(one, 0) for one in sessions]
    for one, first in zip(sessions, firsts, strict=True):
        for other, second in zip(sessions, firsts, strict=True):
            if other is not one:
                alike = one.tool_tokens if one.tool_tokens == other.tool_tokens else 0
                alike += one.system_tokens if alike and one.system_tokens == other.system_tokens else 0
                assert shared(first, second) == min(alike, len(first), len(second))
    # The same in blocks, as a batch has them: one turn of each session.
    found = load(write(tmp_path_factory.getbasetemp() / "sessions", rows), 1).prompts
    assert [prompt.tokens for prompt in found] == [len(prompt) for prompt in prompts]
    for number in range(5):
        chosen = [one for one in range(len(found)) if places[one][1] == min(number, len(places[one][0].turns) - 1)]
        batch = batch_of([found[one] for one in chosen])
        assert repeated(batch.roots) == sum(len(prompts[one]) for one in chosen) - distinct(
            [prompts[one] for one in chosen]
        )
    row = estimate(found, read_model(CONFIG), "h200", [64]).batches[-1]
    assert row.batch == len(sessions), "turns of a session follow one another"
    assert estimate(found, read_model(CONFIG), "h200", [1]).prompt_tokens_once == distinct(prompts)


def distinct(prompts: list[list[tuple]]) -> int:
    """Tokens that are computed if each prefix is computed once; all share whole blocks."""
    found = set()
    for prompt in prompts:
        before = 0
        for token in prompt[::KEPT_BLOCK]:
            before = hash((before, token))
            found.add(before)
    return len(found) * KEPT_BLOCK


def test_a_turn_with_a_long_answer_is_the_likelier_in_a_batch(tmp_path: Path) -> None:
    turns = [turn(1000, out=1), turn(5000, out=97), turn(2000, out=2, like=0, keep_blocks=15)]
    path = write(tmp_path / "sessions", [session(number, turns) for number in range(100)])
    found = estimate(load(path, 1).prompts, read_model(CONFIG), "h200", [100])
    # Turns that are like none share nothing: 2 sessions in 100 share the tools and the system prompt, about.
    assert found.requests == 300 and found.batches[0].shared < 0.02
    assert "Consecutive sessions of the file run at once" in "\n".join(found.lines())


def test_sessions_are_read_as_they_are_published(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        session(0, [turn(1000), turn(1500, like=0, keep_blocks=15)]),
        session(1, [turn(900)], 640, 64),
        session(2, [turn(700)], 320, 64, parent=0, after_turn=1),
    ]
    path = write(tmp_path / "sessions.jsonl.xz", rows)
    assert cli.main(["estimate", str(path), "--model", str(CONFIG), "--batch", "3"]) == 0
    assert "4 requests, 3 sessions of coding agents, from sessions.jsonl.xz" in capsys.readouterr().out
    found = sentence(capsys, "explain", str(path), "--model", str(CONFIG), "--output", str(tmp_path / "page.html"))
    assert "turns of agents' sessions follow one another: they are no job" in found


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (session(0, [turn(1)]), "there is a session 0 before it"),
        (session(1, []), "it has no turns"),
        (session(1, [turn(0)]), "turns[0].in must be a whole number of 1 or more"),
        (session(1, [turn(1 << 25)]), "turns[0].in must be a whole number of 16,777,216 or less"),
        (session(1, [turn(1, think_s=-1)]), "turns[0].think_s must be a number of 0 or more"),
        (session(1, [turn(1, think_s=float("nan"))]), "turns[0].think_s must be a number of 0 or more"),
        (session(1, [turn(1, think_s="1")]), "turns[0].think_s must be a number, not a text"),
        (session(1, [turn(1)] * ((1 << 16) + 1)), "turns must be a list of length 65,536 or less"),
        (session(1, [turn(1)], tools=1 << 40), "tool_tokens must be a whole number of 16,777,216 or less"),
        (session(1, [turn(640, like=0, keep_blocks=1)]), "turn 0 is like turn 0, which is not before it"),
        (session(1, [turn(63), turn(640, like=0, keep_blocks=1)]), "turn 1 keeps 1 blocks of turn 0: one of them is"),
        (session(1, [turn(640), turn(63, like=0, keep_blocks=1)]), "turn 1 keeps 1 blocks of turn 0: one of them is"),
        (session(1, [turn(1)], parent=1), "no session 1 with 0 turns is before it"),
        (session(1, [turn(1)], parent=0, after_turn=2), "no session 0 with 2 turns is before it"),
        ({"turns": 7}, "turns must be a list, not a whole number"),
        ({"turns": []}, "it has no session"),
    ],
)
def test_a_bad_session_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, row: dict, message: str) -> None:
    path = write(tmp_path / "sessions", [session(0, [turn(640)]), row])
    found = sentence(capsys, "estimate", str(path), "--model", str(CONFIG))
    assert f"{path}, line 2: " in found and message in found


def test_what_is_read_of_tools_has_a_limit(tmp_path: Path) -> None:
    """A line of a hundred bytes may name millions of tokens."""
    rows = [session(number, [turn(1 << 24)], (1 << 24) - number, 0) for number in range(100)]
    with pytest.raises(EstimateError, match="line 9: more than 134,217,728 tokens of different tools"):
        load(write(tmp_path / "sessions", rows), 1)


def test_a_small_xz_with_too_much_in_it_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    monkeypatch.setattr(prompts, "MOST_LINES", 5)
    path.write_bytes(lzma.compress(b"\n" * 6))
    assert f"{path} has more than 5 lines" in sentence(capsys, "estimate", str(path), "--model", str(CONFIG))
    rows = [session(number, [turn(9)] * 3) for number in range(2)]
    found = sentence(capsys, "estimate", str(write(path, rows)), "--model", str(CONFIG))
    assert f"{path}, line 2: more than 5 turns, with those of the lines before" in found


def test_a_python_without_lzma_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "file", [session(0, [turn(9)])])
    monkeypatch.setitem(sys.modules, "lzma", None)
    found = sentence(capsys, "estimate", str(path), "--model", str(CONFIG))
    assert f"{path} is xz, and this Python cannot unpack it" in found


def test_the_benchmark_says_what_is_wrong_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import agentic

    good = session(0, [turn(640)])
    assert [one.session for one in agentic.read(write(tmp_path / "good", [good]))] == [0]
    for rows, message in (
        ([good, good], ", line 2: there is a session 0 before it$"),
        ([good, {"a": 1}], ", line 2: it has no session$"),
        ([], " has no session$"),
    ):
        with pytest.raises(SystemExit, match=f"^{tmp_path / 'bad'}{message}"):
            agentic.read(write(tmp_path / "bad", rows))
    # Whatever a file is called, its line is named.
    monkeypatch.chdir(tmp_path)
    write(Path("no"), [good, {"a": 1}])
    with pytest.raises(SystemExit, match=r"^no, line 2: it has no session$"):
        agentic.read(Path("no"))
    (tmp_path / "bad").write_bytes(lzma.compress(b"{}")[:20])
    with pytest.raises(SystemExit, match=r"^[^ ]*/bad is xz, but damaged: it cannot be unpacked$"):
        agentic.read(tmp_path / "bad")


def test_tools_of_one_version_are_shared_as_far_as_they_are_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import agentic

    rows = [session(0, [turn(900)], tools=500), session(1, [turn(900)], tools=400)]
    for same, alike in ((False, 0), (True, 400)):
        load = agentic.Load(1, same_tools=same)
        prompts = [agentic.prompt_of(one, 0, load) for one in agentic.read(write(tmp_path / "sessions", rows))]
        assert shared(*prompts) == alike and {len(prompt) for prompt in prompts} == {900}


INFO = {
    "max_req_input_len": 4000,
    "model_path": "m",
    "version": "0",
    "attention_backend": "none",
    "internal_states": [],
}


@contextmanager
def anything(info: bytes, answer: Callable[[int, int], Iterator[bytes]]) -> Iterator[str]:
    """The address of what is no SGLang server: it says `info` of itself, and to a prompt `answer` of its length and of the tokens that are wanted."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(info)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.end_headers()
            if self.path == "/generate":
                asked = json.loads(body)
                try:
                    for line in answer(len(asked["input_ids"]), asked["sampling_params"]["max_new_tokens"]):
                        self.wfile.write(line + b"\n")
                except OSError:
                    pass  # who asked is gone

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def counted(count: int, **more: Any) -> bytes:
    return b"data: " + json.dumps({"meta_info": {"completion_tokens": count, **more}}).encode()


def all_at_once(tokens: int, wanted: int) -> Iterator[bytes]:
    yield counted(wanted)


def call(monkeypatch: pytest.MonkeyPatch, url: str, trace: Path, flags: str = "--sessions 1") -> None:
    """benchmarks/agentic.py from the command line."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import agentic

    arguments = f"--url {url} --trace {trace} --output {trace}.json --minutes 0.05 --warm-up 0 {flags}"
    monkeypatch.setattr(sys, "argv", ["agentic.py", *arguments.split()])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    agentic.main()


@pytest.mark.parametrize("info", [b"<html>", b"{}", b"[1]", json.dumps(INFO | {"internal_states": None}).encode()])
def test_what_is_no_sglang_server_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, info: bytes) -> None:
    with (
        anything(info, all_at_once) as url,
        pytest.raises(SystemExit, match=f"^{url}: no SGLang server answers: "),
    ):
        call(monkeypatch, url + "/", write(tmp_path / "file", [session(0, [turn(9)])]))


def test_a_server_that_is_silent_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import agentic

    monkeypatch.setattr(agentic, "PATIENCE", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(SystemExit, match=f"^{url}: /server_info was not answered in 0.2 s$"):
            call(monkeypatch, url, write(tmp_path / "file", [session(0, [turn(9)])]))


@pytest.mark.parametrize(
    "rubbish",
    [b"data: {", b'data: {"a": 1}', b'data: {"meta_info": null}', counted(0, cached_tokens=None), b"x" * (40 << 20)],
    ids=["cut", "other", "null", "types", "long"],
)
def test_an_answer_that_is_rubbish_costs_its_session_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rubbish: bytes
) -> None:
    path = write(tmp_path / "file", [session(number, [turn(900 + number), turn(50)]) for number in range(4)])

    def answer(tokens: int, wanted: int) -> Iterator[bytes]:
        return iter([rubbish]) if tokens == 902 else all_at_once(tokens, wanted)

    with anything(json.dumps(INFO).encode(), answer) as url:
        call(monkeypatch, url, path, "--sessions 2 --from-start")
    (record,) = json.loads(Path(f"{path}.json").read_text())["records"]
    assert (record["failed"], record["turns"]) == (1, 6)
    said = capsys.readouterr().out
    assert "session 2 ended at turn 0: " in said
    assert "the file has no more sessions: fewer than 2 ran at once at the end" in said


def test_a_run_begins_when_all_sessions_have_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Long prompts take longer than any warm-up that one would choose for short ones."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import agentic

    path = write(tmp_path / "file", [session(number, [turn(900 + number), *[turn(50)] * 999]) for number in range(2)])

    def answer(tokens: int, wanted: int) -> Iterator[bytes]:
        time.sleep(4 if tokens == 901 else 0.01)
        yield counted(wanted)

    with anything(json.dumps(INFO).encode(), answer) as url:
        for longest, least, most in ((600, 4, 60), (0.4, 0.4, 4)):
            monkeypatch.setattr(agentic, "LONGEST_WARM_UP", longest)
            call(monkeypatch, url, path, "--sessions 2 --from-start --warm-up 0.001")
            (record,) = json.loads(Path(f"{path}.json").read_text())["records"]
            assert least <= record["warm_up"] < most and record["turns"] > 1
    late = re.compile(r"^1 of 2 sessions had no answer in \d\.\d s: the run begins$", re.MULTILINE)
    assert len(late.findall(capsys.readouterr().out)) == 1


def test_tokens_of_answers_that_are_not_over_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a backend is the worse the longer answers take, beyond what it is."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import agentic

    def answer(tokens: int, wanted: int) -> Iterator[bytes]:
        if tokens == 9:
            yield from (counted(i + 1) for i in range(wanted))
        else:
            yield counted(300)
            time.sleep(5)

    sessions = [session_of(session(number, [turn(9 + number, out=400)]), {}) for number in range(2)]
    with anything(json.dumps(INFO).encode(), answer) as url:
        record = asyncio.run(agentic.replay(url, sessions, agentic.Load(2, seconds=2)))
    assert (record.turns, record.failed) == (1, 0)
    assert record.output_tps * record.seconds == pytest.approx(700, rel=0.1)


def test_agents_of_agents_of_any_depth_end_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import agentic

    def answer(tokens: int, wanted: int) -> Iterator[bytes]:
        yield counted(wanted if tokens == 9 else 0)
        time.sleep(4 * (tokens != 9))

    # All but the first and the last do not fit: each waits for the next one, and the last one is never answered.
    left_out = [session(number, [turn(5000)], parent=number - 1) for number in range(1, 2000)]
    rows = [session(0, [turn(9)]), *left_out, session(2000, [turn(10)], parent=1999)]
    sessions = agentic.read(write(tmp_path / "file", rows))
    with anything(json.dumps(INFO).encode(), answer) as url:
        record = asyncio.run(agentic.replay(url, sessions, agentic.Load(1, seconds=2)))
    assert (record.turns, record.failed, record.left_out) == (1, 0, 1999)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--sessions 2", r"--sessions 2: \S* has 1, sub-agents aside"),
        ("--minutes nan", "must be above 0, and finite"),
        ("--context 0", "must be above 0, and finite"),
        ("--longest-think -1", "--longest-think and --warm-up must be 0 or more"),
        ("--warm-up inf", "--longest-think and --warm-up must be 0 or more"),
        ("--output /nowhere/file", "--output: there is no folder /nowhere"),
        ("--url 127.0.0.1:30000", "--url must be like http"),
    ],
)
def test_bad_flags_are_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    path = write(tmp_path / "file", [session(0, [turn(9)]), session(1, [turn(9)], parent=0)])
    with pytest.raises(SystemExit, match=r"^2$"):
        call(monkeypatch, "http://127.0.0.1:1", path, f"--sessions 1 {flags}")
    assert re.search(message, capsys.readouterr().err)
