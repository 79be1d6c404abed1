"""Prompts on one server, answers on another: greedy answers are those of a stock server, and packed on both."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
ROLES = {"prefill": ["--chunked-prefill-size", "256"], "decode": ["--disaggregation-decode-enable-radix-cache"]}
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "10"}


class Router(Server):
    """SGLang's router, in front of one server of each role. It does not pass aborts on."""

    def __init__(self, prefill: Server, bootstrap: int, decode: Server, log: Path) -> None:
        port = free_port()
        self.url, self.log, self._backend, self._behind = f"http://127.0.0.1:{port}", log, "router", (prefill, decode)
        command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port",
                   str(free_port()), "--worker-startup-check-interval", "1", "--pd-disaggregation", "--prefill", prefill.url, str(bootstrap),
                   "--decode", decode.url, "--prefill-policy", "cache_aware", "--decode-policy", "cache_aware"]  # fmt: skip
        with log.open("w") as output:
            self._process = self._start(command, dict(os.environ), output)

    def post(self, path: str, body: dict[str, Any] | None = None, timeout: float = 600) -> Any:
        if path != "/abort_request":
            return super().post(path, body, timeout)
        return [server.post(path, body, timeout) for server in self._behind]


def server_of(role: str, model: Path, log: Path, bootstrap: int, *flags: str, **environment: str) -> ForkedServer:
    """A server of one role; a prefill server tells decode servers about itself at the port `bootstrap`."""
    transfer = ["--disaggregation-transfer-backend", "mooncake_tcp", "--disaggregation-bootstrap-port", str(bootstrap)]
    flags = (*COMMON, "--disaggregation-mode", role, *ROLES[role], *transfer, *flags)
    return ForkedServer(model, "pat", log, flags, LOCAL | environment)


def wait_for_both(router: Server) -> None:
    """Block until a router knows both of its servers: with one it says that it is ready."""
    for _ in range(100):
        with urllib.request.urlopen(f"{router.url}/workers", timeout=10) as response:
            if json.load(response)["total"] == 2:
                return
        time.sleep(0.1)
    pytest.fail(f"the router does not know both servers: {router.tail()}")


@contextmanager
def behind(folder: Path, prefill: Server, bootstrap: int, decode: Server) -> Iterator[Router]:
    """A router of two servers, when all three are ready."""
    for server in (prefill, decode):
        server.wait()
    log = folder / "router.log"
    with Router(prefill, bootstrap, decode, log) as router:
        wait_for_router(router.url, log)
        wait_for_both(router)
        yield router


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """One of each role behind a router, and the reference."""
    folder, bootstrap = tmp_path_factory.mktemp("disaggregation"), free_port()
    with (
        ForkedServer(model, "torch_native", folder / "reference.log", COMMON) as reference,
        server_of("prefill", model, folder / "prefill.log", bootstrap) as prefill,
        server_of("decode", model, folder / "decode.log", bootstrap) as decode,
        behind(folder, prefill, bootstrap, decode) as router,
    ):
        reference.wait()
        yield {"reference": reference, "prefill": prefill, "decode": decode, "router": router}


def test_answers_are_those_of_one_server(servers: dict[str, Server]) -> None:
    prompts = workload.nested_prompts(2, 2, 6, unrelated=4)
    expected = generate_all(servers["reference"], prompts)
    # Again with what both caches have kept of it.
    for _ in range(2):
        assert generate_all(servers["router"], prompts) == expected
    counters = assert_sound(servers["decode"])
    assert 0 < counters["kv_bytes"] < counters["kv_bytes_unpacked"]
    assert counters["plans_ahead"] > 0.5 * counters["plans"], "requests that come with their KV are foreseen"
    assert assert_sound(servers["prefill"])["extends_shared"] > 0


def test_one_request_computes_a_prefix_for_those_that_come_with_it(servers: dict[str, Server]) -> None:
    """The prefill server is paused while they come and get their places on the decode server, and then takes all at once. One that is late
    still meets the first, which computes eight chunks."""
    prefix = workload.prose("awaited", 2000)
    prompts = [prefix + workload.prose(f"question {number}", 30) for number in range(6)]
    expected = generate_all(servers["reference"], prompts)
    prefill, decode = servers["prefill"], servers["decode"]
    before, seen = prefill.counters()["deferred"], len(prefill.log.read_text())
    prefill.post("/pause_generation", {"mode": "in_place"})
    with ThreadPoolExecutor(1) as pool:
        try:
            asked = pool.submit(generate_all, servers["router"], prompts)
            time.sleep(3)
        finally:
            prefill.post("/continue_generation")
        assert asked.result() == expected
    assert assert_sound(prefill)["deferred"] > before
    computed = sum(map(int, re.findall(r"Prefill batch.*#new-token: (\d+)", prefill.log.read_text()[seen:])))
    assert computed < 2 * 2000
    assert_sound(decode)


def test_prefixes_come_back_from_the_host_of_the_prefill_server(
    model: Path, servers: dict[str, Server], tmp_path: Path
) -> None:
    """Its pool holds a part of the prompts."""
    prompts = workload.nested_prompts(2, 2, 6, unrelated=4)
    expected = generate_all(servers["reference"], prompts)
    host = ["--max-total-tokens", "1500", "--enable-hierarchical-cache", "--hicache-io-backend", "direct", "--hicache-ratio", "4"]  # fmt: skip
    bootstrap = free_port()
    with (
        server_of("prefill", model, tmp_path / "prefill.log", bootstrap, *host) as prefill,
        server_of("decode", model, tmp_path / "decode.log", bootstrap) as decode,
        behind(tmp_path, prefill, bootstrap, decode) as router,
    ):
        for _ in range(2):
            assert generate_all(router, prompts) == expected
        # As the prefill server tells the decode server, which answers.
        once = {"temperature": 0, "max_new_tokens": 1}
        answers = [router.post("/generate", {"text": prompt, "sampling_params": once}) for prompt in prompts]
        cached = [answer["meta_info"].get("cached_tokens_details") or {} for answer in answers]
        assert sum(tiers.get("host", 0) for tiers in cached) > 0
        assert_sound(prefill)
        counters = assert_sound(decode)
        assert 0 < counters["kv_bytes"] < counters["kv_bytes_unpacked"]


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


@pytest.mark.skipif(
    compat.release() == "0.5.17",
    reason="SGLang loses the slots of each retracted request and ends, with torch_native in both roles too (docs/crashes.md)",
)
def test_retracted_requests_get_their_kv_back(model: Path, servers: dict[str, Server], tmp_path: Path) -> None:
    """A decode server keeps their KV in the host's memory, and waits for none from the other server."""
    prompts = workload.nested_prompts(2, 2, 6, unrelated=4)
    expected = generate_all(servers["reference"], prompts)
    bootstrap = free_port()
    with (
        server_of("prefill", model, tmp_path / "prefill.log", bootstrap) as prefill,
        server_of("decode", model, tmp_path / "decode.log", bootstrap, **RETRACTING) as decode,
        behind(tmp_path, prefill, bootstrap, decode) as router,
    ):
        for _ in range(2):
            assert generate_all(router, prompts) == expected
        counters = assert_sound(decode)
        assert 0 < counters["kv_bytes"] < counters["kv_bytes_unpacked"]
        assert re.search(r"#retracted_reqs: [1-9]", decode.log.read_text())


def test_a_prefill_server_that_dies(model: Path, servers: dict[str, Server], tmp_path: Path) -> None:
    """Its requests fail, and the decode server goes on for those of another one, with nothing left behind."""
    prompts = workload.nested_prompts(2, 2, 3, unrelated=2)
    expected = generate_all(servers["reference"], prompts)
    bootstrap = free_port()
    with (
        server_of("prefill", model, tmp_path / "prefill.log", bootstrap) as dying,
        behind(tmp_path, dying, bootstrap, servers["decode"]) as router,
    ):
        assert generate_all(router, prompts) == expected

        def ask(number: int) -> list[int] | None:
            try:
                return generate(router, workload.prose(f"dying {number}", 3000))
            except (urllib.error.URLError, OSError):
                return None

        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(ask, number) for number in range(8)]
            time.sleep(1)
            dying.stop()
            assert generate_all(servers["router"], prompts) == expected
            assert None in [one.result() for one in asked]
        assert generate_all(servers["router"], prompts) == expected
        assert_sound(servers["decode"])
