"""The `sglang-pat` command: what every subcommand refuses, and how it ends when a user or a pipe ends it."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest
from test_explain import record
from test_top import http, info, port, sentence

from sglang_pat import cli
from sglang_pat.cli import commands
from sglang_pat.jit import BuildError

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"
ESTIMATE = ["estimate", str(EXAMPLES / "prompts.txt"), "--model", str(EXAMPLES / "config.json")]
COMMAND = [sys.executable, "-m", "sglang_pat.cli"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    record(tmp_path / "trace", requests=4, levels=2, plans=3)
    return tmp_path / "trace"


@pytest.mark.parametrize(
    "value", ["nan", "inf", "-inf", "0", "-1", "0.001", "1e9", "1e400", "9" * 5000, "two", "", "1s"]
)
def test_a_time_to_wait_is_some_seconds(capsys: pytest.CaptureFixture[str], value: str) -> None:
    found = sentence(capsys, "top", f"--interval={value}")
    assert (
        f"argument --interval: '{value}' is not a number of seconds from 0.1 to 86,400; see sglang-pat top --help"
        in found
    )


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "1e3", "nan", "inf", "9" * 5000, "8_0", "٣", "eight", ""])
@pytest.mark.parametrize(
    "arguments", [[*ESTIMATE, "--batch", "8"], [*ESTIMATE, "--answer-tokens"], ["explain", "trace", "--steps"]]
)
def test_a_number_counts_something(capsys: pytest.CaptureFixture[str], arguments: list[str], value: str) -> None:
    found = sentence(capsys, *arguments, value)
    assert "is not a whole number from 1 to 999,999,999; see sglang-pat " in found


def test_numbers_may_be_large(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*ESTIMATE, "--batch", "1", "999999999", "--answer-tokens", "999999999", "--gpu", "H200"]) == 0
    sizes = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "%" in line]
    assert sizes == ["1", "8"], "the file has eight requests"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fly"], "invalid choice: 'fly'"),
        (["estimat"], "'tune'): did you mean estimate?; see sglang-pat --help"),
        (["replay", "trace", "--policy", "optimla"], "did you mean optimal?; see sglang-pat replay --help"),
        (["top", "--urll", "x"], "unrecognized arguments: --urll x: did you mean --url?; see sglang-pat top --help"),
        (["doctor", "--jsn"], "did you mean --json?"),
        (["doctor", "x"], "unrecognized arguments: x; see sglang-pat doctor --help"),
        (["tune", "--onyl", "8"], "sglang-pat tune: unrecognized arguments: --onyl 8: did you mean --only?"),
        (["build", "--arch", "7.5"], "sglang-pat build: argument --arch: '7.5' is no compute capability"),
        (["demo", "--questions", "none"], "sglang-pat demo: argument --questions: 'none' is not a whole number"),
        (["top", "--fast"], "unrecognized arguments: --fast; see sglang-pat top --help"),
        (["top", "http://127.0.0.1:9"], "unrecognized arguments: http://127.0.0.1:9; see sglang-pat top --help"),
        (["top", "--api-key"], "argument --api-key: expected one argument"),
        (["replay"], "the following arguments are required: trace"),
        (["replay", "trace", "--policy", "fast"], "argument --policy: invalid choice: 'fast'"),
        (["estimate", "requests"], "the following arguments are required: --model"),
        (["estimate", "requests", "--model", "folder", "--batch"], "argument --batch: expected at least one argument"),
        (
            ["estimate", "--model", "folder", "--batch", "4", "8", "requests.jsonl"],
            "'requests.jsonl' is not a whole number from 1 to 999,999,999 (put the file first, or write --batch 4,8); see ",
        ),
        (["explain", "trace", "--url", "http://127.0.0.1:9"], "give either a trace or --url"),
        (["explain", "trace", "--url", ""], "give either a trace or --url"),
        (["explain", "/no/trace"], "/no/trace cannot be read: No such file or directory"),
        (["explain", "/"], "/ cannot be read: Is a directory"),
        (["explain", "/dev/null"], "/dev/null is not a trace of sglang-pat"),
        (["replay", "/no/trace"], "/no/trace cannot be read: No such file or directory"),
        (["replay", "\x1b[31m\rtrace"], "\\x1b[31m\\rtrace cannot be read"),
        (["top", "\x1b[31m"], "unrecognized arguments: \\x1b[31m"),
        (["replay", ""], ". cannot be read: Is a directory"),
        (["replay", "/dev/zero", "--truncated"], "/dev/zero is not a trace of sglang-pat"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in sentence(capsys, *arguments)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("", "cannot be written: Is a directory"),
        ("none/page.html", "cannot be written: No such file or directory"),
        ("trace/page.html", "cannot be written: Not a directory"),
        ("/dev/full", "--output /dev/full cannot be written: No space left on device"),
        ("trace", "is the trace: name another file"),
        ("link", "is the trace: name another file"),
        ("another", "is another trace, which would be lost: name another file"),
    ],
)
def test_a_page_that_cannot_be_written_is_one_sentence(
    capsys: pytest.CaptureFixture[str], trace: Path, output: str, message: str
) -> None:
    (trace.parent / "link").symlink_to(trace)
    (trace.parent / "another").write_bytes(trace.read_bytes())
    before = trace.read_bytes()
    assert message in sentence(capsys, "explain", str(trace), "--output", str(trace.parent / output))
    assert trace.read_bytes() == before


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (AssertionError("the schedulers disagree on plan 7"), "sglang-pat: a.pat: the schedulers disagree on plan 7"),
        (BuildError("sglang-pat needs a C++ compiler"), "sglang-pat: needs a C++ compiler"),
    ],
)
def test_what_replay_finds_out_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def replay(*_: object) -> None:
        raise error

    monkeypatch.setattr(commands, "replay", replay)
    assert message in sentence(capsys, "replay", "a.pat", "--oracle")


def test_alone_it_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    alone = capsys.readouterr()
    assert alone.err == "" and alone.out.startswith("usage: sglang-pat ")
    for command in ("doctor", "demo", "estimate", "batch", "top", "explain", "replay", "build", "tune"):
        assert f"\n    {command} " in alone.out
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main(["--help"])
    assert capsys.readouterr() == alone


@pytest.mark.parametrize("name", ["demo", "build", "tune"])
def test_commands_that_were_modules_still_are(name: str) -> None:
    """In processes of their own, as users start them."""
    shown = []
    for command in ([*COMMAND, name], [sys.executable, "-m", f"sglang_pat.{name}"]):
        result = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True, timeout=100)
        usage, _, rest = result.stdout.partition("\n\n")
        shown.append(rest)
        prog = f"sglang-pat {name}" if command[:-1] == COMMAND else f"python -m sglang_pat.{name}"
        assert " ".join(usage.split()).startswith(f"usage: {prog} "), usage
    assert shown[0] == shown[1] != ""


def test_a_package_that_is_missing_is_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "sglang_pat.cli.build", raising=False)
    found = sentence(capsys, "build")
    assert "torch" in found and found.endswith("; sglang-pat doctor says what is missing\n")


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"sglang-pat {version('sglang-pat')}\n"


def test_work_that_is_interrupted_is_not_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def replay(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "replay", replay)
    assert cli.main(["replay", "trace"]) == 130
    assert capsys.readouterr() == ("", "")


def test_a_page_has_all_letters_whatever_the_locale(tmp_path: Path) -> None:
    record(tmp_path / "trace", 4, 1, 1)
    page = tmp_path / "page.html"
    environment = {**os.environ, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    subprocess.run([*COMMAND, "explain", tmp_path / "trace", "--output", page], env=environment, check=True, timeout=60)
    assert page.read_text("utf-8").isascii() is False


@pytest.mark.parametrize("where", ["2>&-", "2>/dev/full"])
def test_what_is_wrong_does_not_go_to_stdout_where_stderr_cannot_be_written(where: str) -> None:
    command = ["sh", "-c", f'exec "$@" {where}', "sh", *COMMAND, "explain", "/no/trace"]
    result = subprocess.run(command, stdout=subprocess.PIPE, check=False, timeout=60)
    assert (result.stdout, result.returncode) == (b"", 2)


def test_ctrl_c_ends_top_quietly() -> None:
    with port(http(info())) as server:
        command = [*COMMAND, "top", "--url", server.url, "--interval", "60"]
        # A shell lets what it starts in the background ignore SIGINT, the tests too. The function takes no lock that another thread may hold.
        heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard)  # noqa: PLW1509
        assert process.stdout is not None
        while "both should be 0" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


def test_a_pipe_that_nobody_reads_is_left_quietly() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "wb") as pipe:
        result = subprocess.run([*COMMAND, *ESTIMATE], stdout=pipe, stderr=subprocess.PIPE, check=False, timeout=60)
    assert (result.stderr, result.returncode) == (b"", 128 + signal.SIGPIPE)


def test_a_full_disk_is_one_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(ESTIMATE) == 2
    assert capsys.readouterr().err == "sglang-pat: the output: No space left on device\n"


def test_a_terminal_may_know_little_and_be_closed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, trace: Path
) -> None:
    page = os.fsdecode(os.fsencode(trace.parent) + b"/\xff\xe2\x82\xac")
    written = io.BytesIO()
    terminal = io.TextIOWrapper(written, encoding="ascii")
    with port(http(info())) as server:
        monkeypatch.setattr(sys, "stdout", terminal)
        assert cli.main(["top", "--once", "--url", server.url]) == 0
        assert cli.main(["explain", str(trace), "--output", page]) == 0
        monkeypatch.setattr(sys, "stdout", None)
        assert cli.main(["top", "--once", "--url", server.url]) == 0
    assert b"????" in written.getvalue() and b"/??: 3 plans of " in written.getvalue()
    assert capsys.readouterr().err == ""
