"""Rows of `req_to_token` are written only after a step that reads them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from sglang_pat.backend.fence import TableFence

GIVES_ROWS = """
from array import array
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang_pat.kernels.scheduler import NativeScheduler
from sglang_pat.packing import CPU_TILES, CostModel, PackConfig
from sglang_pat.radix_bridge import Observer, hooks

pool = ReqToTokenPool(4, 16, "cpu", False)
seen = []
observer = Observer(NativeScheduler(PackConfig(CostModel(8, 2, 64, 64, 2), CPU_TILES, 2), max_batch=8))
hooks.install(observer, fence=lambda: seen.append(pool.req_to_token.clone()))
rows = pool.alloc([Req(str(i), "", array("q", [1, 2]), SamplingParams()) for i in range(3)])
assert len(set(rows)) == 3, rows
assert len(seen) == 1 and not seen[0].any(), seen
"""


def test_giving_out_rows_reaches_the_fence() -> None:
    """SGLang's own pool, in a process of its own as it gets hooked."""
    subprocess.run([sys.executable, "-c", GIVES_ROWS], check=True)


@pytest.mark.gpu
@pytest.mark.parametrize("rows_given", [False, True])
def test_only_who_is_given_rows_waits_for_the_step(rows_given: bool) -> None:
    table = torch.ones(4, 1 << 20, dtype=torch.int32, device="cuda")
    read = torch.zeros_like(table)
    forward, schedule = torch.cuda.Stream(), torch.cuda.Stream()
    fence = TableFence()
    torch.cuda.synchronize()
    with torch.cuda.stream(forward):
        fence.on_step()
        torch.cuda._sleep(200_000_000)
        read.copy_(table)
    with torch.cuda.stream(schedule):
        if rows_given:
            fence.on_rows()
        table.fill_(7)
    schedule.synchronize()
    assert forward.query() is rows_given
    torch.cuda.synchronize()
    assert (read == (1 if rows_given else 7)).all()
