"""LMCache behind the prefix cache: what is evicted comes back from its server, and is packed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import assert_sound, generate_all
from forked import ForkedServer

from sglang_pat import compat
from sglang_pat.demo import workload
from sglang_pat.demo.server import free_port

# pip install lmcache: without a GPU it keeps KV in shared memory.
pytest.importorskip(
    "lmcache.integration.sglang.unified_lmcache_mp_connector", reason="needs LMCache", exc_type=ImportError
)
pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.skipif(compat.cache.radix_cache_serves(), reason="this SGLang has another cache for it"),
]

PRIVATE = {"LMCACHE_TRACK_USAGE": "false"}
FLAGS = ["--dtype", "float32", "--max-running-requests", "24"]


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    """LMCache's server, and the file that tells where it is."""
    port, log = free_port(), tmp_path / "lmcache.log"
    command = [sys.executable, "-m", "lmcache.v1.multiprocess.server", "--host", "127.0.0.1", "--port", str(port), "--l1-size-gb", "0.5",
               "--eviction-policy", "LRU", "--chunk-size", "16", "--supported-transfer-mode", "auto"]  # fmt: skip
    config = tmp_path / "lmcache.yaml"
    config.write_text(f"mp_host: 127.0.0.1\nmp_port: {port}\nchunk_size: 16\n")
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | PRIVATE)
    try:
        yield config
    finally:
        process.kill()
        process.wait()


def test_what_was_evicted_comes_back(config: Path, model: Path, tmp_path: Path) -> None:
    prompts = workload.nested_prompts(2, 2, 6, unrelated=4)
    with ForkedServer(
        model, "torch_native", tmp_path / "reference.log", [*FLAGS, "--max-total-tokens", "20000"]
    ) as server:
        server.wait()
        expected = generate_all(server, prompts)
    flags = [
        "--max-total-tokens",
        "4000",
        "--page-size",
        "16",
        "--enable-lmcache",
        "--lmcache-config-file",
        str(config),
    ]
    with ForkedServer(
        model, "pat", tmp_path / "pat.log", [*FLAGS, *flags], {"SGLANG_PAT_VERIFY": "1", **PRIVATE}
    ) as server:
        server.wait()
        for _ in range(3):
            assert generate_all(server, prompts) == expected
        found = (tmp_path / "lmcache.log").read_text()
        assert re.search(r"Prefetch request completed \(L1\+L2\): [1-9]", found), "chunks that its server has"
        counters = assert_sound(server)
        assert 0 < counters["kv_bytes"] < counters["kv_bytes_unpacked"]
