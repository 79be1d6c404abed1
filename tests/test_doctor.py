"""What `sglang-pat doctor` finds, also where everything is missing or wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from test_top import http, info, port

from sglang_pat import cli, jit
from sglang_pat.cli import build, doctor, top
from sglang_pat.compat import TESTED, release
from sglang_pat.jit import modules
from sglang_pat.jit.library import seal
from sglang_pat.packing import devices

pytestmark = pytest.mark.once

TREE = Path(__file__).parent.parent
CONFIG = TREE / "docs" / "examples" / "config.json"
CPU = doctor.Torch("2.11.0", None, [], "")
H200 = doctor.Torch("2.11.0+cu130", "13.0", [doctor.Gpu("NVIDIA H200", (9, 0), 150 << 30)], "")


def with_gpu(name: str, *capability: int) -> doctor.Torch:
    return msgspec.structs.replace(H200, gpus=[doctor.Gpu(name, capability, 80 << 30)])


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_all_is_well_here_and_is_said_to_people_and_programs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = doctor._torch()
    monkeypatch.setattr(doctor, "_torch", lambda: torch)
    assert cli.main(["doctor", "--model", str(CONFIG)]) == 0
    text = capsys.readouterr().out
    assert cli.main(["doctor", "--model", str(CONFIG), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == [] and "no problem was found" in text
    assert found["sglang"]["version"] == release() and found["sglang"]["tested"] == (release() in TESTED)
    assert found["plugin"]["registered"] and "SGLang knows --attention-backend pat" in text
    assert found["python"]["torch"] in text and found["compilers"]["g++"]["version"] in text
    assert {verdict["verdict"] for verdict in found["model"]["verdicts"].values()} == {"supported"}


def test_without_sglang_torch_and_a_compiler_it_says_what_is_missing(tmp_path: Path) -> None:
    """In an environment with nothing but what this package itself imports."""
    venv.create(tmp_path / "env", symlinks=True)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    for package in (
        Path(msgspec.__file__).parent,
        Path(np.__file__).parent,
        Path(np.__file__).parents[1] / "numpy.libs",
    ):
        if package.exists():
            (site / package.name).symlink_to(package)
    (tmp_path / "tree").mkdir()  # without what pip leaves in a checkout
    (tmp_path / "tree" / "sglang_pat").symlink_to(TREE / "sglang_pat")
    variables = {"PATH": "", "PYTHONPATH": str(tmp_path / "tree"), "HOME": str(tmp_path)}
    command = [tmp_path / "env" / "bin" / "python", "-m", "sglang_pat.cli", "doctor", "--model", str(CONFIG)]
    result = subprocess.run(
        command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert (result.returncode, result.stderr) == (1, "")
    problems = [line for line in result.stdout.splitlines() if line.startswith("problem: ")]
    for wanted in (
        "sglang-pat: it is not installed",
        "SGLang: it is not installed: pip install sglang",
        "Python: torch cannot be used: ModuleNotFoundError: No module named 'torch'",
        "Python: apache-tvm-ffi is not installed: pip install apache-tvm-ffi",
        "plugin: there is no entry point pat in sglang.srt.plugins",
        "compilers: sglang-pat needs a C++ compiler and 'c++' is not there: install g++, or set CXX to yours",
    ):
        assert any(line.startswith(f"problem: {wanted}") for line in problems), (wanted, result.stdout)
    assert "not found out" not in result.stdout and "not known" not in result.stdout


def test_a_torch_that_crashes_or_hangs_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os; os.kill(os.getpid(), 11)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert doctor._torch() == f"cannot be used: it says nothing ({sys.executable} ends by signal 11)"
    (tmp_path / "torch.py").write_text("import time; time.sleep(600)")
    monkeypatch.setattr(doctor, "PATIENCE", 1)
    began = time.monotonic()
    assert str(doctor._torch()).endswith("does not end within 1 s")
    assert time.monotonic() - began < 20
    (tmp_path / "torch.py").write_text("print('hello')")
    monkeypatch.setattr(doctor, "PATIENCE", 60)
    assert "AttributeError" in str(doctor._torch())


def test_what_lies_in_the_working_directory_is_not_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    assert isinstance(doctor._torch(), doctor.Torch)
    assert not (tmp_path / "ran").exists()


def test_a_check_that_fails_is_a_problem() -> None:
    def fail() -> doctor.Section:
        raise RecursionError("a" * 1000)

    found = doctor._checked("GPU", fail)
    assert found.problems[0].startswith("this was not found out: RecursionError: aaa") and len(found.problems[0]) < 300


@pytest.mark.parametrize(
    ("name", "capability", "prices"),
    [
        ("NVIDIA H200", (9, 0), "measured"),
        ("NVIDIA H100 80GB HBM3", (9, 0), "measured"),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "derived"),
        ("another Hopper", (9, 0), "as of NVIDIA H200"),
        ("NVIDIA B200", (10, 0), "none"),
    ],
)
def test_a_gpu_has_prices_or_not(name: str, capability: tuple[int, int], prices: str) -> None:
    found = doctor._gpu(with_gpu(name, *capability))
    assert found.facts["gpus"][0]["prices"] == prices and not found.problems
    assert name in found.text and prices in found.text


def test_a_gpu_that_is_too_old_is_a_problem() -> None:
    assert doctor._gpu(with_gpu("Tesla T4", 7, 5)).problems == [
        "Tesla T4 has compute capability 7.5, and 8.0 or more is needed"
    ]


def test_a_gpu_that_torch_does_not_see_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script(tmp_path / "nvidia-smi", "echo NVIDIA H200, 470.57; echo; echo broken")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = doctor._gpu(msgspec.structs.replace(CPU, said="The NVIDIA driver on your system is too old"))
    assert found.problems == ["torch does not see it: The NVIDIA driver on your system is too old"]
    assert "NVIDIA H200, driver 470.57" in found.text
    script(tmp_path / "nvidia-smi", "exit 9")
    found = doctor._gpu(CPU)
    assert found.text == "none: a server runs on the CPU" and not found.warnings


def test_a_torch_for_cuda_that_sees_no_gpu_is_warned_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container without GPUs: a server starts, on the CPU."""
    monkeypatch.setattr(doctor, "_torch", lambda: msgspec.structs.replace(H200, gpus=[]))
    monkeypatch.setattr(doctor, "_nvidia_smi", list)
    assert cli.main(["doctor"]) == 0
    *_, warning, last = capsys.readouterr().out.splitlines()
    assert warning == (
        "warning: GPU: no GPU is visible, though torch is built for CUDA 13.0 (a container without --gpus? the driver?): "
        "a server would run on the CPU, slowly"
    )
    assert last == "no problem was found, but what is warned of may be one"
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == [] and [f"warning: {one}" for one in found["warnings"]] == [warning]


def test_releases_are_said_to_be_tested_where_tests_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda _: "0.5.23")
    found = doctor._sglang()
    assert found.text == "0.5.23, tested with sglang-pat"
    assert found.more == [
        "tests on CPUs: all tests, in CI",
        "tests on GPUs: all tests, H200",
    ]


def test_a_toolkit_of_another_cuda_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    script(tmp_path / "bin" / "nvcc", "echo Cuda compilation tools, release 12.4, V12.4.131")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert doctor._compilers(H200, doctor._ready(H200, None)).problems == [
        "nvcc is of CUDA 12, torch of CUDA 13: set CUDA_HOME to a toolkit of CUDA 13"
    ]
    assert not doctor._compilers(CPU, doctor._ready(CPU, None)).problems, "not needed without a GPU"


def test_a_compiler_is_missed_where_there_is_something_to_compile(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH", "PATH", jit.CACHE):
        monkeypatch.setenv(name, str(tmp_path))
    problems = doctor._compilers(H200, doctor._ready(H200, None)).problems
    assert len(problems) == 2 and "found no nvcc" in problems[1]
    monkeypatch.setattr(jit, "is_ready_for_cuda", lambda *_: True)
    assert len(doctor._compilers(H200, doctor._ready(H200, None)).problems) == 1
    monkeypatch.setattr(jit, "is_ready", lambda *_: True)
    found = doctor._compilers(H200, doctor._ready(H200, None))
    assert not found.problems and "no nvcc, which is not needed here" in found.text


def test_a_compiler_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(jit.CACHE, str(tmp_path))
    monkeypatch.setenv("CXX", str(script(tmp_path / "c++", "echo broken >&2; exit 3")))
    assert doctor._compilers(CPU, doctor._ready(CPU, None)).problems == [
        f"g++: broken ({tmp_path}/c++ ends with status 3)"
    ]


def test_modules_are_ready_once_they_are_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    jit.load("packing")
    assert jit.is_ready("packing")
    built = list(jit.find_cache().folder.glob("sglang_pat_packing_*.so"))
    cache = tmp_path / "cache"
    monkeypatch.setenv(jit.CACHE, str(cache))
    found = doctor._cache(None, doctor._ready(CPU, None))
    assert found.facts["ready"] == {"planner": False, "CPU kernels": False} and not found.problems
    assert not cache.exists(), "looking makes no folder"
    cache.mkdir(mode=0o700)
    for library in built:
        (cache / library.name).write_bytes(library.read_bytes())
    found = doctor._cache(None, doctor._ready(CPU, None))
    assert found.facts["ready"] == {"planner": True, "CPU kernels": False} and not found.problems
    assert "planner ready, CPU kernels not built yet" in found.text
    for library in built:
        (cache / library.name).write_bytes(library.read_bytes()[:-1])
    assert not jit.is_ready("packing"), "a damaged one is not loaded"


def test_a_gpus_modules_are_those_that_build_makes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(jit.CACHE, str(tmp_path))
    found = doctor._cache(str(CONFIG), doctor._ready(H200, str(CONFIG)))
    wanted = build.variants(str(CONFIG), "9.0a")
    assert set(found.facts["ready"]) == {"planner", *(variant.name for variant in wanted)}
    assert f"0 of {len(wanted)} modules that `build` makes for this model are ready" in found.text
    # What has the name that a build would give it, and is whole, is ready.
    one = wanted[0]
    name = modules._cuda(one.name, one.arch, one.flags).file
    (tmp_path / name).write_bytes(b"module" + seal(name, b"module"))
    assert doctor._cache(str(CONFIG), doctor._ready(H200, str(CONFIG))).facts["ready"][one.name]


def test_a_cache_that_cannot_be_used_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    def problem(folder: Path) -> str:
        monkeypatch.setenv(jit.CACHE, str(folder))
        (found,) = doctor._cache(None, doctor._ready(CPU, None)).problems
        return found

    (tmp_path / "file").write_text("")
    assert f"cannot keep what it builds in {tmp_path}/file (Not a directory)" in problem(tmp_path / "file")
    assert "cannot be made in" in problem(tmp_path / "file" / "below")
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert f"{tmp_path}/.cache/sglang-pat is used instead" in problem(open_to_all)
    assert "this user has no home: set TVM_FFI_CACHE_DIR" in problem(Path("~nobody-of-this-name"))
    assert not doctor._compilers(CPU, doctor._ready(CPU, None)).problems, "which are there"
    (tmp_path / "link").symlink_to(tmp_path)
    assert "it is a link" in problem(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    assert "(Not a directory)" in problem(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"SGLANG_PAT_POLICY": "fast"}, "SGLANG_PAT_POLICY='fast' must be one of"),
        ({"SGLANG_PAT_NONE": "1"}, "SGLANG_PAT_NONE is not a setting of sglang-pat"),
        ({"SGLANG_PAT_TRACE_MB": "-1"}, "SGLANG_PAT_TRACE_MB='-1' must be a number of megabytes"),
        ({"SGLANG_PAT_TRACE": "\x1b[31m"}, "has characters that cannot be shown"),
        ({"SGLANG_PAT_CACHE_OWNER": "nobody knows"}, "must be the name or number of a user"),
        ({"SGLANG_PAT_TILES": "/dev/zero"}, "SGLANG_PAT_TILES: /dev/zero is not a table of tiles"),
        ({"SGLANG_PAT_TILES": "/nowhere"}, "SGLANG_PAT_TILES: /nowhere is not a table of tiles"),
        ({"SGLANG_PAT_TILES": str(devices.TABLES / "h100.json"), "SGLANG_PAT_DEFER": "0"}, None),
        ({}, None),
    ],
)
def test_settings_are_checked(variables: dict[str, str], problem: str | None) -> None:
    found = doctor._settings(variables)
    assert [problem in one for one in found.problems] == [True] if problem else found.problems == []


def test_what_others_say_makes_no_lines_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_torch", lambda: CPU)
    monkeypatch.setenv("SGLANG_PAT_TRACE", "x\nproblem: none\x1b[31m")
    monkeypatch.setenv("SGLANG_PLUGINS", "pat,pat_cpu\n\n")
    assert cli.main(["doctor", "--model", "no\nname"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("problem")] == ["settings:", "model:"]
    assert all(line.isprintable() for line in lines)


def test_a_model_is_judged_for_what_is_here(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": 8, "head_dim": 80, "layer_types": ["mamba"]}')
    found = doctor._model(str(tmp_path), CPU)
    assert found.text.startswith("refused on a GPU: a head dimension of 80")
    assert found.more == ["refused on this CPU: hybrid models on a CPU"] and len(found.problems) == 1
    (tmp_path / "config.json").write_text('{"num_attention_heads": 8, "head_dim": 80}')
    found = doctor._model(str(tmp_path), CPU)
    assert found.more[0].startswith("as far as config.json says, supported on this CPU: ") and not found.problems
    assert doctor._model(str(tmp_path), H200).problems, "it is not served on this GPU"
    (tmp_path / "config.json").write_text("{}")
    found = doctor._model(str(tmp_path), H200)
    assert found.text == "unknown on this GPU: it does not say what head dimension there is" and not found.problems
    assert found.warnings == ["whether pat supports this model is not known"]


def test_a_key_is_not_shown() -> None:
    found = doctor._settings({"SGLANG_PAT_API_KEY": "secret"})
    assert "secret" not in str(found) and found.facts == {"api_key_set": True}
    assert doctor._settings({}).facts == {"api_key_set": False}


@pytest.mark.parametrize(
    ("variables", "torch", "problem"),
    [
        ({"SGLANG_PLUGINS": "other"}, H200, "SGLANG_PLUGINS leaves out pat: "),
        ({"SGLANG_PLUGINS": "pat"}, CPU, "SGLANG_PLUGINS leaves out pat_cpu: "),
        ({"SGLANG_PLUGINS": "pat"}, H200, None),
        ({"SGLANG_PLUGINS": " pat , pat_cpu"}, CPU, None),
        ({"SGLANG_PLATFORM": "other"}, H200, "SGLANG_PLATFORM leaves it out"),
        ({"SGLANG_PLATFORM": "pat_cpu"}, CPU, None),
    ],
)
def test_what_keeps_sglang_from_the_plugin_is_a_problem(
    variables: dict[str, str], torch: doctor.Torch, problem: str | None
) -> None:
    found = doctor._plugin(torch, variables)
    assert [one.startswith(problem) for one in found.problems] == [True] if problem else found.problems == []


def test_a_server_adds_its_counters() -> None:
    with port(http(info(kv_bytes=1, kv_bytes_unpacked=4, steps=1000))) as server:
        found = doctor._server(server.url, "secret")
    assert "1,000 decode steps by PAT, 75% of KV reads saved" in found.text and not found.problems
    assert b"Authorization: Bearer secret" in server.requests[0]
    with port(http(info(unpacked_because="SGLang has no X", faults=1))) as server:
        problems = doctor._server(server.url, "").problems
    assert problems[0] == "nothing is packed: SGLang has no X" and "its log says why" in problems[1]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"garbage\r\n\r\n", "does not speak HTTP"),
        (b"", "something answers at http://127"),
        (http(b"\xff\x00"), "is not an SGLang server"),
        (http({"internal_states": [{}]}), "decodes with another backend"),
        (http({}, "401 Unauthorized"), "give its key with --api-key or in SGLANG_PAT_API_KEY"),
        (http({}, "302 Found", "Location: file:///etc/passwd\r\n"), "answers 302 Found to"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * (17 << 20), "sends more than 16 MiB"),
        (lambda _: time.sleep(5), "not within 1 s"),
    ],
)
def test_what_is_no_server_is_a_problem(monkeypatch: pytest.MonkeyPatch, answer: Any, problem: str) -> None:
    monkeypatch.setattr(top, "PATIENCE", 1)
    with port(answer) as server:
        (found,) = doctor._server(server.url, "").problems
    assert problem in found


@pytest.mark.parametrize("url", ["", "nonsense", "ftp://x", "http://a:b@c", "http://[", "http://\x1b", "http://ü.de"])
def test_what_is_no_address_is_a_problem(url: str) -> None:
    (found,) = doctor._server(url, "").problems
    assert "must be like http" in found


def test_others_keys_go_where_url_says_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_torch", lambda: CPU)
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    with port(http(info())) as server:
        assert cli.main(["doctor", "--url", server.url]) == 0
        monkeypatch.setenv("SGLANG_PAT_API_KEY", "ours")
        assert cli.main(["doctor", "--url", server.url]) == 0
    assert [b"Bearer theirs" in server.requests[0], b"Bearer ours" in server.requests[1]] == [True, True]
    assert "theirs" not in (shown := capsys.readouterr().out) and "ours" not in shown
