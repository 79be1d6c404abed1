"""Attention sinks on a CPU, where no stock backend computes them: answers are the same however they are packed, chunked and paged."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import mimo
import pytest
from conftest import assert_sound, generate, generate_all
from forked import ForkedServer

from sglang_pat import compat
from sglang_pat.demo import workload

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(compat.arguments.has_one_pool(), reason="its pools on a CPU have one dimension for K and V"),
]

FLAGS = ["--dtype", "float32", "--trust-remote-code", "--max-running-requests", "32", "--max-total-tokens"]
VERIFY = {"SGLANG_PAT_VERIFY": "1"}


@pytest.mark.release
def test_answers_do_not_depend_on_packing(model: Path, tmp_path: Path) -> None:
    """The same weights without sinks give others."""
    models = {sinks: mimo.write(tmp_path / f"sinks {sinks}", model, 64, sinks=sinks) for sinks in (True, False)}
    servers = {
        "packed": (True, ["20000"], VERIFY),
        "alone": (True, ["20000"], {"SGLANG_PAT_POLICY": "query"}),
        "small": (True, ["4000", "--chunked-prefill-size", "48", "--page-size", "16", "--enable-mixed-chunk"], VERIFY),
        "without": (False, ["20000"], {}),
    }
    prompts = workload.nested_prompts(2, 2, 3, unrelated=3)
    answers, counters = {}, {}
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(
                ForkedServer(models[sinks], "pat", tmp_path / f"{name}.log", [*FLAGS, *flags], environment)
            )
            for name, (sinks, flags, environment) in servers.items()
        }
        for name, server in started.items():
            server.wait()
            answers[name] = generate_all(server, prompts)
            # All but their ends is cached, and they come at once: extends that share.
            again = {"text": [prompts[0]] * 4, "sampling_params": {"temperature": 0, "max_new_tokens": 2}}
            generate(server, prompts[0])
            server.post("/generate", again)
            counters[name] = assert_sound(server)
    assert answers["packed"] == answers["alone"] == answers["small"]
    different = sum(a != b for a, b in zip(answers["packed"], answers["without"], strict=True))
    assert different > len(prompts) / 2
    assert counters["packed"]["kv_bytes"] < counters["alone"]["kv_bytes"]
    assert counters["small"]["extends_shared"] > counters["alone"]["extends_shared"] == 0
