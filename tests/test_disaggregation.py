"""Prompts on one server, answers on another: greedy answers are those of a stock server, and packed on both."""

from __future__ import annotations

import os
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from conftest import TOKENS, UNPINNED, amid_aborts, assert_sound, generate, generate_all, wait_for_router
from forked import ForkedServer

from sglang_pat import compat
from sglang_pat.demo import workload
from sglang_pat.demo.server import Server, free_port

# Moves KV over TCP too: pip install mooncake-transfer-engine-non-cuda; its libraries need libibverbs1.
pytest.importorskip("mooncake.engine", reason="needs a transfer engine", exc_type=ImportError)
pytestmark = [pytest.mark.server, pytest.mark.slow]

COMMON = ["--dtype", "float32", "--max-running-requests", "32", "--max-total-tokens", "20000"]
LOCAL = {"SGLANG_HOST_IP": "127.0.0.1", "MC_TCP_BIND_ADDRESS": "127.0.0.1", "SGLANG_PAT_VERIFY": "1"} | UNPINNED
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "10"}


class Router(Server):
    """SGLang's router, in front of one server of each role. It does not pass aborts on."""

    def __init__(self, prefill: Server, bootstrap: int, decode: Server, log: Path) -> None:
        port = free_port()
        self.url, self.log, self._backend, self._behind = f"http://127.0.0.1:{port}", log, "router", (prefill, decode)
        command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port",
                   str(free_port()), "--policy", "round_robin", "--pd-disaggregation", "--prefill", prefill.url, str(bootstrap), "--decode",
                   decode.url]  # fmt: skip
        with log.open("w") as output:
            self._process = self._start(command, dict(os.environ), output)

    def post(self, path: str, body: dict[str, Any] | None = None, timeout: float = 600) -> Any:
        if path != "/abort_request":
            return super().post(path, body, timeout)
        return [server.post(path, body, timeout) for server in self._behind]


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    folder, bootstrap = tmp_path_factory.mktemp("disaggregation"), free_port()
    transfer = ["--disaggregation-transfer-backend", "mooncake_tcp", "--disaggregation-bootstrap-port", str(bootstrap)]
    roles = {
        "prefill": ["--disaggregation-mode", "prefill", "--chunked-prefill-size", "256", *transfer],
        "decode": ["--disaggregation-mode", "decode", "--disaggregation-decode-enable-radix-cache", *transfer],
    }
    roles |= {"retracting": roles["decode"], "dying": [*roles["prefill"][:-1], str(dying := free_port())]}
    with ExitStack() as stack:
        started: dict[str, Server] = {}
        for name, flags in roles.items():
            environment = LOCAL | (RETRACTING if name == "retracting" else {})
            server = ForkedServer(model, "pat", folder / f"{name}.log", [*COMMON, *flags], environment)
            started[name] = stack.enter_context(server)
        started["reference"] = stack.enter_context(
            ForkedServer(model, "torch_native", folder / "reference.log", COMMON)
        )
        for server in started.values():
            server.wait()
        for name, prefill, port, decode in (
            ("router", "prefill", bootstrap, "decode"),
            ("router of retracting", "prefill", bootstrap, "retracting"),
            ("router of dying", "dying", dying, "decode"),
        ):
            log = folder / f"{name}.log"
            started[name] = stack.enter_context(Router(started[prefill], port, started[decode], log))
            wait_for_router(started[name].url, log)
        yield started


def test_answers_are_those_of_one_server(servers: dict[str, Server]) -> None:
    prompts = workload.nested_prompts(2, 2, 6, unrelated=4)
    expected = generate_all(servers["reference"], prompts)
    # Again with what both caches have kept of it.
    for _ in range(2):
        assert generate_all(servers["router"], prompts) == expected
    counters = assert_sound(servers["decode"])
    assert 0 < counters["kv_bytes"] < counters["kv_bytes_unpacked"]
    assert counters["plans_ahead"] > 0.5 * counters["plans"], "requests that come with their KV are foreseen"
    counters = assert_sound(servers["prefill"])
    assert counters["deferred"] > 0 and counters["extends_shared"] > 0


def test_aborts_leave_nothing_behind(servers: dict[str, Server]) -> None:
    """While prompts are computed, KV is moved, and answers are decoded."""
    prompts = workload.nested_prompts(2, 2, 3, unrelated=2)
    expected = generate_all(servers["reference"], prompts)

    def send(number: int, rid: str) -> None:
        sampling = {"temperature": 0, "max_new_tokens": 8 * TOKENS, "ignore_eos": True}
        try:
            servers["router"].post(
                "/generate", {"text": workload.prose(rid, 600), "rid": rid, "sampling_params": sampling}
            )
        except urllib.error.HTTPError as error:  # what the router makes of an abort
            error.close()

    assert amid_aborts(servers["router"], send, lambda: generate_all(servers["router"], prompts)) == expected
    for role in ("prefill", "decode"):
        assert_sound(servers[role])


@pytest.mark.skipif(compat.release() == "0.5.17", reason="SGLang finds a leak in its pool there, and ends")
def test_retracted_requests_get_their_kv_back(servers: dict[str, Server]) -> None:
    """A decode server keeps their KV in the host's memory, and waits for none from the other server."""
    prompts = workload.nested_prompts(2, 2, 6, unrelated=4)
    expected = generate_all(servers["reference"], prompts)
    for _ in range(2):
        assert generate_all(servers["router of retracting"], prompts) == expected
    counters = assert_sound(servers["retracting"])
    assert 0 < counters["kv_bytes"] < counters["kv_bytes_unpacked"]
    assert re.search(r"#retracted_reqs: [1-9]", servers["retracting"].log.read_text())


def test_a_prefill_server_that_dies(servers: dict[str, Server]) -> None:
    """Its requests fail, and the decode server goes on for those of another one, with nothing left behind."""
    prompts = workload.nested_prompts(2, 2, 3, unrelated=2)
    expected = generate_all(servers["reference"], prompts)
    assert generate_all(servers["router of dying"], prompts) == expected

    def ask(number: int) -> list[int] | None:
        try:
            return generate(servers["router of dying"], workload.prose(f"dying {number}", 3000))
        except (urllib.error.URLError, OSError):
            return None

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, number) for number in range(8)]
        time.sleep(1)
        servers["dying"].stop()
        assert generate_all(servers["router"], prompts) == expected
        assert None in [one.result() for one in asked]
    assert generate_all(servers["router"], prompts) == expected
    assert_sound(servers["decode"])
