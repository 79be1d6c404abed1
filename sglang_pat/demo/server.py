"""Starts a real SGLang server as a user would, in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from sglang_pat import platform
from sglang_pat.cli.top import total

STARTUP_SECONDS = 600
"""Imports take most of a start: 50 s on two cores if Python's byte code is cached, otherwise minutes."""

PORTS = range(20_000, 30_000)
"""Below Linux's ephemeral ports (32768 and up: `net.ipv4.ip_local_port_range`). SGLang starts to listen a minute after its ports are chosen; until
then any outgoing connection of the machine could take an ephemeral port. SGLang 0.5.23 chooses the port of torch.distributed in the same way
(`get_free_port_below_ephemeral`), 0.5.17 does not."""


_held: list[socket.socket] = []
"""What keeps the ports that this process gave."""


def free_port() -> int:
    """A port of IPv4 that nothing listens on. It is kept until this process ends, and those forked from it.

    Servers listen long after they got theirs. So a socket is bound to it that does not listen: nobody else binds to it without SO_REUSEADDR, as this
    function and 0.5.23 do that look for one. Servers set it (uvicorn, torch.distributed's store, gRPC, zmq, Rust's library), and can listen.

    Raises:
        OSError: None was found.
    """
    for _ in range(64):
        port = secrets.choice(PORTS)  # programs seed `random`
        held = socket.socket()
        try:
            with socket.socket() as looking:
                looking.bind(("", port))
            # Before it is bound: sandboxes with a network stack of their own need not heed it later.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("", port))
        except OSError:
            held.close()
            continue
        _held.append(held)
        return port
    raise OSError(f"64 ports from {PORTS.start} to {PORTS.stop - 1} are all in use: stop what listens there")


class Server(contextlib.AbstractContextManager["Server"]):
    """`python -m sglang.launch_server` with a model folder and a backend.

    Attributes:
        url: Where it listens.
        log: Its output.
    """

    def __init__(
        self,
        model: Path,
        backend: str,
        log: Path,
        arguments: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        command: Sequence[str] = (sys.executable, "-m", "sglang.launch_server"),
        on_cpu: bool = True,
    ) -> None:
        """Start it; `wait` blocks until it serves. With `on_cpu` it does not see the machine's GPUs."""
        port = free_port()
        # Replicas choose their own.
        nccl_port = [] if "--dp-size" in arguments else ["--nccl-port", str(free_port())]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._backend = backend
        selection = {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
        # SGLang's default needs a package that a GPU host for tests may lack.
        grammars = [] if on_cpu else ["--grammar-backend", "none"]
        if on_cpu and backend != "pat":
            # torch_native alone does not wake the CPU platform (platform/__init__.py), so it is named.
            selection["SGLANG_PLATFORM"] = platform.NAME
        arguments = ["--model-path", str(model), "--attention-backend", backend, "--host", "127.0.0.1", "--port", str(port),
                     *nccl_port, *grammars, "--sleep-on-idle", *arguments]  # fmt: skip
        variables = {**os.environ, "HF_HUB_OFFLINE": "1", **selection, **(environment or {})}
        with log.open("w") as output:
            self._process = self._start([*command, *arguments], variables, output)

    def _start(self, command: Sequence[str], environment: dict[str, str], output: IO[str]) -> subprocess.Popen:
        """Run the command in a session of its own."""
        return subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )

    def wait(self, progress: Callable[[float], None] = lambda seconds: None) -> Server:
        """Block until it answers.

        Raises:
            RuntimeError: It ended or did not come up; the message has the end of its log.
        """
        began = time.monotonic()
        while time.monotonic() - began < STARTUP_SECONDS:
            if self._process.poll() is not None:
                raise RuntimeError(f"the {self._backend} server ended while starting:\n{self.tail()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=30):
                    return self
            except (OSError, urllib.error.URLError):
                progress(time.monotonic() - began)
                time.sleep(0.2)
        self.stop()
        raise RuntimeError(f"the {self._backend} server did not come up in {STARTUP_SECONDS} s:\n{self.tail()}")

    def post(self, path: str, body: dict[str, Any] | None = None, timeout: float = 600) -> Any:
        """The JSON (else the text) that a POST gives."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body or {}).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as response:
            text = response.read().decode()
        try:
            return json.loads(text)
        except ValueError:
            return text

    def counters(self) -> dict[str, Any]:
        """PAT's counters: the sum of all replicas', which SGLang lists in the order in which they answered."""
        return total([state["pat"] for state in self._info()["internal_states"]])

    def pool(self) -> int:
        """How many tokens its KV pool holds."""
        return self._info()["max_total_num_tokens"]

    def _info(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/server_info", timeout=60) as response:
            return json.load(response)

    def tail(self) -> str:
        """The end of its log."""
        return "\n".join(line[:300] for line in self.log.read_text(errors="replace").splitlines()[-30:])

    def stop(self) -> None:
        """End it and all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def __exit__(self, *_: object) -> None:
        self.stop()
