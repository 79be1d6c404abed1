"""The cache of built modules: read-only, shared, and never in the way of a start."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sglang_pat import jit
from sglang_pat.jit import builds, modules
from sglang_pat.jit.library import is_sealed

pytestmark = pytest.mark.once

# Without tvm-ffi's C++ headers, which take a second of each build.
SOURCE = """
#include <tvm/ffi/c_api.h>
extern "C" TVM_FFI_DLL int __tvm_ffi_answer(void*, const TVMFFIAny*, int32_t, TVMFFIAny* result) {
  result->type_index = kTVMFFIInt;
  result->v_int64 = 42;
  return 0;
}
"""
RUN = """
import sys; from pathlib import Path; from sglang_pat import jit
sys.modules['torch'] = None  # tvm-ffi would import it, for two seconds
print(jit.load('tiny', Path(sys.argv[1])).answer())
"""


@pytest.fixture
def csrc(tmp_path: Path) -> Path:
    (tmp_path / "csrc" / "tiny").mkdir(parents=True)
    (tmp_path / "csrc" / "tiny" / "module.cpp").write_text(SOURCE)
    return tmp_path / "csrc"


def run(
    csrc: Path, cache: Path, *wrapper: str, code: str = RUN, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A process that loads the module."""
    return subprocess.run(
        [*wrapper, sys.executable, "-c", code, str(csrc)],
        env={**os.environ, jit.CACHE: str(cache), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_build_goes_on_without_its_watcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where no process can be started: the cache is not to blame."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert builds._start_watch(str(tmp_path)) is None
    assert "compilers go on without it" in caplog.text and "/nowhere/python" in caplog.text


def as_a_user() -> list[str]:
    """Root may write everywhere: without that capability it is a user like others."""
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.getuid() == 0 else []


def libraries(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.so"))


def test_a_cache_that_was_filled_ahead_may_be_read_only_and_needs_no_compiler(csrc: Path, tmp_path: Path) -> None:
    """An image built as root and run as another user."""
    cache = tmp_path / "cache"
    assert run(csrc, cache).stdout == "42\n"
    cache.chmod(stat.S_IRUSR | stat.S_IXUSR)
    result = run(csrc, cache, *as_a_user(), CXX="/nowhere")
    assert result.stdout == "42\n", result.stderr
    (csrc / "tiny" / "module.cpp").write_text(SOURCE.replace("42", "43"))
    result = run(csrc, cache, *as_a_user())
    assert f"cannot keep what it builds in {cache} (Permission denied)" in result.stderr.splitlines()[-1]


def test_a_library_that_was_damaged_is_named(csrc: Path, tmp_path: Path) -> None:
    """Loading it may end the process by a signal."""
    cache = tmp_path / "cache"
    assert run(csrc, cache).stdout == "42\n"
    (library,) = libraries(cache)
    whole = library.read_bytes()
    cut_off = [whole[:size] for size in (0, 3, 32, 100, len(whole) // 2, len(whole) - 32, len(whole) - 1)]
    hole = whole[:8192] + bytes(4096) + whole[12288:]
    assert len(hole) == len(whole) and hole != whole
    # What belongs to another name is damaged too.
    other = library.with_name("sglang_pat_other_0.so")
    other.write_bytes(whole)
    content = other.read_bytes()
    assert is_sealed(library.name, content) and not is_sealed(other.name, content)
    other.unlink()
    for damaged in (*cut_off, hole, whole[:-1] + bytes([whole[-1] ^ 1]), whole + b"\n"):
        library.write_bytes(damaged)
        result = run(csrc, cache)
        assert f"cannot load {library}, which it built earlier: remove it" in result.stderr.splitlines()[-1], result
        assert result.stderr.endswith(": it is damaged\n") and result.returncode == 1
    library.write_bytes(whole)
    assert run(csrc, cache, CXX="false").stdout == "42\n"
    library.unlink()
    os.mkfifo(library)
    assert run(csrc, cache).stderr.endswith(": it is not a file\n"), "reading it would wait for ever"


def test_machines_with_other_instructions_have_libraries_of_their_own(csrc: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv(jit.CACHE, str(tmp_path / "cache"))
    for instructions, number in (("flags : avx2", 1), ("flags : avx2 avx512f", 2), ("flags : avx2", 2)):
        monkeypatch.setattr(modules, "_cpu_flags", lambda instructions=instructions: instructions)
        jit.load.cache_clear()
        assert jit.load("tiny", csrc).answer() == 42
        assert len(libraries(tmp_path / "cache")) == number
    jit.load.cache_clear()


def test_a_compiler_may_have_arguments_or_be_run_by_another(csrc: Path, tmp_path: Path) -> None:
    assert run(csrc, tmp_path / "cache", CXX="env c++").stdout == "42\n"
    assert run(csrc, tmp_path / "empty", CXX="").stdout == "42\n"
    result = run(csrc, tmp_path / "other", CXX="no-such c++")
    assert "needs a C++ compiler and 'no-such c++' is not there" in result.stderr.splitlines()[-1]
    result = run(csrc, tmp_path / "other", CXX="true")
    assert (
        "true could not build sglang-pat's 'sglang_pat_tiny' module: it made nothing" in result.stderr.splitlines()[-1]
    )


def test_a_lock_that_was_left_behind_is_in_nobody_s_way(csrc: Path, tmp_path: Path) -> None:
    """With whatever rights. Nobody else may open it."""
    cache = tmp_path / "cache"
    assert run(csrc, cache).stdout == "42\n"
    (library,) = libraries(cache)
    lock = library.with_suffix(".lock")
    assert stat.S_IMODE(lock.stat().st_mode) == 0o600
    for mode in (0o444, 0o600):
        library.unlink()
        lock.chmod(mode)
        result = run(csrc, cache, *as_a_user())
        assert result.stdout == "42\n", result.stderr


def test_a_disk_that_is_full_is_one_sentence(csrc: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'cannot write: No space left on device' >&2; exit 1\n")
    compiler.chmod(0o755)
    last = run(csrc, tmp_path / "cache", CXX=str(compiler)).stderr.splitlines()[-1]
    assert "'sglang_pat_tiny' module has no room in" in last and last.endswith(": No space left on device"), last


def test_a_cache_that_cannot_be_searched_is_one_sentence(csrc: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert run(csrc, cache).stdout == "42\n"
    cache.chmod(0o600)
    last = run(csrc, cache, *as_a_user()).stderr.splitlines()[-1]
    assert f"BuildError: sglang-pat cannot keep what it builds in {cache} (Permission denied)" in last, last


@pytest.mark.parametrize("obstacle", ["a file", "a missing folder that cannot be made"])
def test_a_cache_that_cannot_be_is_one_sentence(csrc: Path, tmp_path: Path, obstacle: str) -> None:
    file = tmp_path / "file"
    file.write_text("")
    result = run(csrc, file if obstacle == "a file" else file / "below")
    last = result.stderr.splitlines()[-1]
    assert "BuildError: sglang-pat cannot keep what it builds in" in last and "set TVM_FFI_CACHE_DIR" in last


def test_a_user_without_a_home_gets_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(jit.CACHE, raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 4_000_000)
    with pytest.raises(jit.BuildError, match="this user has no home: set TVM_FFI_CACHE_DIR"):
        jit.cache_folder()


def load(csrc: str, cache: str) -> int:
    os.environ[jit.CACHE] = cache
    return jit.load("tiny", Path(csrc)).answer()


def test_processes_that_start_at_once_build_once(csrc: Path, tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        assert pool.starmap(load, [(str(csrc), str(tmp_path / "cache"))] * 4) == [42] * 4
    assert len(libraries(tmp_path / "cache")) == 1


def test_another_version_of_tvm_ffi_gets_a_build_of_its_own(
    csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two environments over one checkout: a library that one of them has loaded is not built anew by the other."""
    monkeypatch.setenv(jit.CACHE, str(tmp_path / "cache"))
    jit.load.__wrapped__("tiny", csrc)
    (first,) = libraries(tmp_path / "cache")
    before = first.read_bytes()
    monkeypatch.setattr(modules, "version", lambda name: "0.0")
    jit.load.__wrapped__("tiny", csrc)
    assert len(libraries(tmp_path / "cache")) == 2 and first.read_bytes() == before


def test_a_build_that_is_killed_leaves_neither_compilers_nor_folders(csrc: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\nsleep 100 & wait\n")
    compiler.chmod(0o755)
    (tmp_path / "tmp").mkdir()
    environment = {**os.environ, jit.CACHE: str(tmp_path / "cache"), "CXX": str(compiler), "TMPDIR": f"{tmp_path}/tmp"}

    def at_work() -> list[int]:
        """Ninja, the compiler, and what that started."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if str(process.joinpath("cwd").readlink()).startswith(str(tmp_path)):
                    found.append(int(process.name))
        return found

    def wait_for(number: int) -> None:
        until = time.monotonic() + 30
        while len(at_work()) < number if number else at_work() or list(tmp_path.rglob(".sglang_pat_*")):
            assert time.monotonic() < until, (at_work(), list(tmp_path.rglob(".sglang_pat_*")))
            time.sleep(0.1)

    with subprocess.Popen([sys.executable, "-c", RUN, str(csrc)], env=environment) as server:
        try:
            wait_for(3)
            server.kill()
            server.wait()
            wait_for(0)
        finally:
            server.kill()
            for process in at_work():
                os.kill(process, signal.SIGKILL)


SLOW_AND_QUICK = """
import os, pathlib, sys, threading
from tvm_ffi import cpp
sys.modules["torch"] = None
from sglang_pat import jit
csrc, folder = map(pathlib.Path, sys.argv[1:])
before, build, slow_builds, quick_builds = dict(os.environ), cpp.build, threading.Event(), threading.Event()
def in_turn(name, **options):
    if "slow" in name:
        slow_builds.set()
        quick_builds.wait(60)
    else:
        quick_builds.set()
        while not (folder / "slow compiles").exists():
            pass
    return build(name, **options)
cpp.build = in_turn
slow = threading.Thread(target=jit.load, args=("slow", csrc))
slow.start()
slow_builds.wait(60)
jit.load("quick", csrc)
(folder / "quick is there").touch()
slow.join()
print(jit.load("slow", csrc).answer(), {name for name in before | os.environ if before.get(name) != os.environ.get(name)} - {"PATH"})
"""


def test_builds_at_the_same_time_keep_their_files(csrc: Path, tmp_path: Path) -> None:
    """The environment belongs to all threads. One that is done must not take the folder of another's compiler along, and the last puts the environment back."""
    compiler = tmp_path / "c++"
    compiler.write_text(
        f"""#!/bin/sh
case "$PWD" in *slow*)
    touch "{tmp_path}/slow compiles"
    until [ -e "{tmp_path}/quick is there" ]; do sleep 0.1; done
    touch "$TMPDIR/part" || exit 1
esac
exec c++ "$@"
"""
    )
    compiler.chmod(0o755)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    for name in ("slow", "quick"):
        shutil.copytree(csrc / "tiny", csrc / name)
    environment = {jit.CACHE: str(tmp_path / "cache"), "CXX": str(compiler), "TMPDIR": str(temporary)}
    result = subprocess.run(
        [sys.executable, "-c", SLOW_AND_QUICK, csrc, tmp_path],
        env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (result.stdout, result.stderr) == ("42 set()\n", "")
    assert not list(temporary.iterdir())


FORKS = """
import os, pathlib, sys, time
from tvm_ffi import cpp
sys.modules["torch"] = None
from sglang_pat import jit
csrc, folder = map(pathlib.Path, sys.argv[1:])
environment, build = dict(os.environ), cpp.build
def forking(name, **options):
    if name.endswith("slow") and not os.fork():
        cpp.build = build
        same = all(os.environ.get(variable) == environment.get(variable) for variable in ("TMPDIR", "LD_PRELOAD"))
        (folder / "child").write_text(f"{jit.load('quick', csrc).answer()} {same}")
        time.sleep(60)
        os._exit(0)
    while not (folder / "child").exists():
        time.sleep(0.1)
    return build(name, **options)
cpp.build = forking
print(jit.load("slow", csrc).answer())
"""


def test_a_child_that_is_forked_meanwhile_builds_by_itself(csrc: Path, tmp_path: Path) -> None:
    """And who builds does not wait until it ends."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    for name in ("slow", "quick"):
        shutil.copytree(csrc / "tiny", csrc / name)
    environment = {jit.CACHE: str(tmp_path / "cache"), "TMPDIR": str(temporary)}
    with subprocess.Popen(
        [sys.executable, "-c", FORKS, csrc, tmp_path], env=os.environ | environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as builder:  # fmt: skip
        try:
            assert builder.stdout is not None and builder.stdout.readline() == "42\n"
            builder.wait(30)
            assert (tmp_path / "child").read_text() == "42 True"
            assert not list(temporary.iterdir())
        finally:
            os.killpg(builder.pid, signal.SIGKILL)


@pytest.mark.parametrize("swapped", ["at first", "meanwhile"])
def test_a_killed_build_s_folder_is_not_sought_through_a_link(tmp_path: Path, swapped: str) -> None:
    """Who works there would be ended, and what is there removed."""
    scratch, other = tmp_path / "scratch", tmp_path / "other"
    (other / "module").mkdir(parents=True)
    (other / "file").touch()
    if swapped == "at first":
        scratch.symlink_to(other)
    else:
        (scratch / "module").mkdir(parents=True)
    command = [sys.executable, "-I", "-S", str(Path(jit.__file__).with_name("watch.py")), str(scratch)]
    with (
        subprocess.Popen(["sleep", "100"], cwd=other / "module") as bystander,
        subprocess.Popen(["sleep", "100"], cwd=(other if swapped == "at first" else scratch) / "module") as worker,
        subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as watch,
    ):
        try:
            assert watch.stdin is not None
            if swapped == "meanwhile":
                until = time.monotonic() + 30
                opened = Path(f"/proc/{watch.pid}/fd")
                while str(scratch) not in [os.readlink(file) for file in opened.iterdir()]:
                    assert time.monotonic() < until
                    time.sleep(0.05)
                scratch.rename(tmp_path / "away")
                scratch.symlink_to(other)
            watch.stdin.close()
            watch.wait(30)
            assert bystander.poll() is None and (other / "file").exists()
            if swapped == "meanwhile":
                assert worker.wait(30) == -signal.SIGKILL
            else:
                assert worker.poll() is None
        finally:
            for process in (bystander, worker, watch):
                process.kill()


def test_what_builds_left_long_ago_is_removed(csrc: Path, tmp_path: Path) -> None:
    cache, temporary = tmp_path / "cache", tmp_path / "tmp"
    for folder in (cache, temporary):
        for name in (".sglang_pat_tiny-old", ".sglang_pat_tiny-new", ".other-old"):
            (folder / name).mkdir(parents=True)
            (folder / name / "module.o").touch()
        (folder / ".sglang_pat_tiny_0.so-old").touch()
        for old in folder.glob("*-old"):
            os.utime(old, (0, 0))
    assert run(csrc, cache, TMPDIR=str(temporary)).stdout == "42\n"
    for folder in (cache, temporary):
        assert {path.name for path in folder.glob(".*")} == {".sglang_pat_tiny-new", ".other-old"}


def test_folders_that_are_made_are_their_user_s_only(
    csrc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(jit.CACHE, str(tmp_path / "above" / "cache"))
    umask = os.umask(0)
    try:
        jit.load.__wrapped__("tiny", csrc)
    finally:
        os.umask(umask)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "above", tmp_path / "above" / "cache")] == [
        0o700
    ] * 2
    (library,) = libraries(tmp_path / "above" / "cache")
    assert stat.S_IMODE(library.stat().st_mode) == 0o644


def test_a_cache_deep_down_is_made_and_one_that_cannot_be_looked_at_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(jit.CACHE, str(tmp_path / ("a" * 300)))
    found = jit.find_cache()
    assert not found.usable and "cannot be looked at" in found.problem
    deep = tmp_path.joinpath(*"a" * 1200)
    monkeypatch.setenv(jit.CACHE, str(deep))
    jit.check_cache()
    assert deep.is_dir()
    os.removedirs(deep)


@pytest.mark.parametrize("number", ["4294967295", "9999999999"])
def test_a_number_that_no_user_has_is_no_owner(number: str) -> None:
    with pytest.raises(jit.BuildError, match="must be the name or number of a user"):
        jit.uid_of(number)
