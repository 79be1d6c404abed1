"""Trainers: some parse SGLang's flags behind a prefix (slime, miles), some make its ServerArgs by keywords (verl, XTuner), all before SGLang has loaded
its plugins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import assert_sound

from sglang_pat import platform
from sglang_pat.demo.server import Server

PARSES = """
import argparse, json, multiprocessing, os, sys
import beside
from sglang.srt.server_args import ServerArgs

parser = argparse.ArgumentParser()
plain = parser.add_argument
parser.add_argument = lambda *flags, **how: plain(*("--sglang-" + flag.lstrip("-") for flag in flags), **{k: v for k, v in how.items() if k != "dest"})
ServerArgs.add_cli_args(parser)

def child(number):
    print(json.dumps(["child", number, beside.NUMBER]), flush=True)

if __name__ == "__main__":
    os.chdir("/")
    assert "train.py" in open(__file__).name
    print(json.dumps([parser.parse_args().sglang_attention_backend, sys.argv, beside.NUMBER]), flush=True)
    process = multiprocessing.get_context("spawn").Process(target=child, args=(3,))
    process.start()
    process.join()
    sys.exit(4 + process.exitcode)
"""

SERVES = """
import multiprocessing, sys
from sglang.srt.server_args import ServerArgs

def serve(arguments):
    from sglang.srt.entrypoints.http_server import launch_server

    launch_server(arguments)

if __name__ == "__main__":
    given = {}
    for word in sys.argv[1:]:
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            given[name] = True
        else:
            given[name] = int(word) if word.isdigit() else word
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(ServerArgs(**given),))
    process.start()
    process.join()
"""


def run(
    *words: str, cwd: Path, through: tuple[str, ...] = ("-m", "sglang_pat.run")
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *through, *words]
    return subprocess.run(
        command, cwd=cwd, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, check=False
    )


def test_flags_that_a_script_parses(tmp_path: Path) -> None:
    folder = tmp_path / "trainer"
    folder.mkdir()
    (folder / "train.py").write_text(PARSES)
    (folder / "beside.py").write_text("NUMBER = 7")
    flags = ["--sglang-model-path", "model", "--sglang-attention-backend", "pat"]
    plainly = run("trainer/train.py", *flags, cwd=tmp_path, through=())
    assert plainly.returncode == 2 and "invalid choice: 'pat'" in plainly.stderr
    found = run("trainer/train.py", *flags, cwd=tmp_path)
    assert found.returncode == 4, found.stderr
    assert list(map(json.loads, found.stdout.splitlines()[-2:])) == [
        ["pat", [str(folder / "train.py"), *flags], 7],
        ["child", 3, 7],
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "give a script"),
        (["-m", "train"], "give a script"),
        (["--help"], "give a script"),
        (["no.py"], "there is no script no.py"),
        (["."], "there is no script ."),
    ],
)
def test_no_script(words: list[str], says: str, tmp_path: Path) -> None:
    found = run(*words, cwd=tmp_path)
    assert found.returncode == 2
    assert found.stderr.startswith(says) and len(found.stderr.splitlines()) == 1


def test_plugins_that_are_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "another")
    (tmp_path / "train.py").write_text("print('ran')")
    found = run("train.py", cwd=tmp_path)
    assert found.returncode == 2 and "ran" not in found.stdout
    assert found.stderr.splitlines()[-1] == "SGLang did not load sglang-pat: `sglang-pat doctor` says why"


@pytest.mark.server
def test_arguments_that_are_made_before_plugins_are_loaded(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "serve.py"
    script.write_text(SERVES)
    command = [sys.executable, str(script)]
    flags = ["--dtype", "bfloat16", "--max-total-tokens", "8000", "--max-running-requests", "8"]
    environment = {"SGLANG_PLATFORM": platform.NAME}
    with Server(model, "pat", tmp_path / "log", flags, environment, command) as server:
        server.wait()
        body = {
            "text": ["a prompt that all share " * 40] * 6,
            "sampling_params": {"max_new_tokens": 12, "ignore_eos": True},
        }
        assert len(server.post("/generate", body)) == 6
        counters = assert_sound(server)
        assert 0 < counters["kv_tokens"] < counters["kv_tokens_unpacked"]
