"""Runs SGLang without waiting for its imports: its processes are forked from one that has done them.

Importing SGLang takes 30 s of a core, and a server does it in three processes. What runs after the imports is the same;
`test_server.py` starts servers by each of their real commands too.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import IO
from unittest import mock

import torch

from sglang_pat import platform
from sglang_pat.demo.server import Server

CHOSEN = {"SGLANG_PLATFORM": platform.NAME, "TRITON_INTERPRET": "1"}
"""With these SGLang is imported as in a server's processes where PAT was chosen on a CPU (platform/__init__.py)."""

_lock = threading.Lock()
_context: ForkServerContext | None = None


class ForkedProcess:
    """A Python command, `python -m MODULE …` or `python SCRIPT …`, in a session of its own; used like `subprocess.Popen`."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        """Start it. Its output goes to `log`."""
        self._process: ForkServerProcess = _forks().Process(target=_run, args=(command[1:], environment, log))
        # Starting one asks all others whether they have ended. Whoever of two threads asks second is told 255.
        with _lock:
            self._process.start()
        assert self._process.pid
        self.pid = self._process.pid
        # Who ends it ends its process group.
        with contextlib.suppress(ProcessLookupError):
            while os.getpgid(self.pid) != self.pid:
                time.sleep(0.01)

    def poll(self) -> int | None:
        with _lock:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        connection.wait([self._process.sentinel], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0)
        return code


class ForkedServer(Server):
    """A server that is up within five seconds."""

    def _start(self, command: Sequence[str], environment: dict[str, str], output: IO[str]) -> ForkedProcess:
        return ForkedProcess(command, environment, Path(output.name))

    def wait_failed(self) -> str:
        """Block until it ends by itself; returns its log."""
        self._process.wait(600)
        return self.log.read_text()


def _forks() -> ForkServerContext:
    global _context
    with _lock:
        if _context is None:
            _context = multiprocessing.get_context("forkserver")
            _context.set_forkserver_preload(["imported"])
            path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
            with mock.patch.dict(os.environ, CHOSEN | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}):
                forkserver.ensure_running()
        return _context


def _run(command: Sequence[str], environment: dict[str, str], log: Path) -> None:
    os.setsid()
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    # multiprocessing says nothing when it cannot import what it shall.
    assert "imported" in sys.modules
    from sglang.srt.environ import envs
    from sglang.srt.managers import scheduler

    os.environ.clear()
    os.environ.update(environment | CHOSEN)
    platform.announce()
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    for name in ("TEST_RETRACT", "TEST_RETRACT_INTERVAL"):  # which the scheduler's module reads when it is imported
        setattr(scheduler, name, getattr(envs, f"SGLANG_{name}").get())
    # SGLang spawns its processes, and they would import everything again.
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *_, **__: None  # type: ignore[assignment]
    if command[0] == "-m":
        sys.argv = list(command[1:])
        runpy.run_module(command[1], run_name="__main__")
    else:
        sys.argv = list(command)
        sys.path.insert(0, str(Path(command[0]).parent))
        runpy.run_path(command[0], run_name="__main__")
