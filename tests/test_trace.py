from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from sglang_pat import cli
from sglang_pat.backend.planner import Planner
from sglang_pat.kernels.scheduler import NativeScheduler
from sglang_pat.packing import CPU_TILES, CostModel, PackConfig
from sglang_pat.radix_bridge import trace
from sglang_pat.radix_bridge.events import (
    ROOT,
    Event,
    NodeInserted,
    NodeSplit,
    RequestAdvanced,
    RequestBound,
    RequestReleased,
    TreeReset,
)
from sglang_pat.radix_bridge.observer import apply
from sglang_pat.replay import replay

CONFIG = PackConfig(CostModel(8, 2, 64, 64, 2), CPU_TILES, 16)
HEADER = trace.Header(trace.FORMAT, CONFIG, max_batch=64, layers=3)


class Server:
    """A scheduler and planner with a recorder, as the backend joins them."""

    def __init__(self, path: Path, limit: int = 10**9) -> None:
        self.writer = trace.TraceWriter(path, HEADER, limit)
        self.scheduler = NativeScheduler(CONFIG, max_batch=64)
        self.planner = Planner(self.scheduler, ahead=False, on_plan=self.writer.on_plan)
        self.lengths: dict[str, int] = {}

    def event(self, event: Event) -> None:
        apply(self.scheduler, event)
        self.writer.on_event(event)

    def step(self) -> None:
        lengths = np.array(list(self.lengths.values()), dtype=np.int64)
        self.planner.plan(list(self.lengths), lambda: lengths)
        for rid in self.lengths:
            self.lengths[rid] += 1

    def run(self, steps: int) -> None:
        generator = random.Random(1)
        self.event(NodeInserted(1, ROOT, 900, bytes(16)))
        self.event(NodeSplit(1, 2, 300, b"lower".ljust(16)))
        for step in range(steps):
            if step % 4 == 0:
                rid = f"request {step}"
                self.event(RequestBound(rid, step, generator.choice([1, 2]), 0))
                self.event(RequestAdvanced(rid, step, 1, 950))
                self.lengths[rid] = 950
            if step % 9 == 8:
                rid = generator.choice(list(self.lengths))
                del self.lengths[rid]
                self.event(RequestReleased(rid))
            if step == 30:
                self.lengths = dict(reversed(self.lengths.items()))
            self.step()
        # The recorder cannot know how long the last plan will run.
        self.event(RequestReleased(self.lengths.popitem()[0]))
        self.step()


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Path, Server]:
    server = Server(tmp_path / "trace")
    server.run(60)
    return tmp_path / "trace", server


def test_a_replay_makes_the_recorded_plans_and_counts_what_the_server_counted(recorded: tuple[Path, Server]) -> None:
    path, server = recorded
    result = replay(path, oracle=True)
    counters = server.planner.counters()
    assert (result.plans, result.fallbacks, result.differing) == (counters.plans, 0, 0)
    expected = {name: getattr(counters, name) for name in result.totals.__struct_fields__}
    assert msgspec.structs.asdict(result.totals) == expected


def test_other_policies_can_be_replayed(recorded: tuple[Path, Server]) -> None:
    path, _ = recorded
    by_policy = {policy: replay(path, policy).totals.kv_tokens for policy in ("query", "optimal", "naive")}
    assert by_policy["query"] == replay(path).totals.kv_tokens_unpacked
    assert by_policy["optimal"] < by_policy["query"]


def test_a_recording_ends_at_its_limit_and_is_whole(tmp_path: Path) -> None:
    server = Server(tmp_path / "trace", limit=3000)
    server.run(60)
    assert 2000 < (tmp_path / "trace").stat().st_size <= 3000
    assert replay(tmp_path / "trace").plans > 3


def test_without_sglang_and_torch_the_command_prints_the_statistics(
    recorded: tuple[Path, Server], tmp_path: Path
) -> None:
    path, _ = recorded
    for name in ("sglang", "torch"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('not here')")
    result = subprocess.run(
        [sys.executable, "-m", "sglang_pat.cli", "replay", str(path), "--policy", "optimal", "--policy", "query"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "policy                   optimal" in result.stdout and "policy                   query" in result.stdout
    assert "times as much" in result.stdout


def cut_off(data: bytes) -> bytes:
    return data[:-3]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_off, r"is cut off after \d+ records: --truncated takes what is there"),
        (lambda data: data[: len(trace.MAGIC) + 2], "is cut off after 0 records"),
        (lambda data: trace.MAGIC, "is an empty trace"),
        (lambda data: b"PK\x03\x04 something else", "is not a trace of sglang-pat"),
        (lambda data: b"", "is not a trace of sglang-pat"),
        (lambda data: data.replace(b"Header", b"Reader"), "is damaged in record 1"),
        (lambda data: data + b"\x02\x00\x00\x00\xc1\xc1", r"is damaged in record \d+"),
        (lambda data: data.replace(b"format\x02", b"format\x09"), "has trace format 9"),
        (lambda data: trace.MAGIC + b"\x01\x00\x00\x00\x05", "does not begin with a header"),
    ],
)
def test_what_is_no_whole_trace_gets_one_sentence(recorded: tuple[Path, Server], damage, message: str, capsys) -> None:
    path, _ = recorded
    damaged = damage(path.read_bytes())
    path.write_bytes(damaged)
    with pytest.raises(trace.TraceError, match=message):
        replay(path)
    assert cli.main(["replay", str(path)]) == 2
    output = capsys.readouterr()
    assert output.out == "" and len(output.err.splitlines()) == 1 and str(path) in output.err


def test_what_there_is_of_a_truncated_trace_can_be_replayed(recorded: tuple[Path, Server]) -> None:
    path, _ = recorded
    whole = replay(path).plans
    path.write_bytes(cut_off(path.read_bytes()))
    assert replay(path, truncated=True).plans == whole - 1


def test_events_that_cannot_follow_one_another_are_named(recorded: tuple[Path, Server]) -> None:
    path, server = recorded
    server.writer.on_event(NodeSplit(77, 78, 1, bytes(16)))
    server.writer.on_plan(["x"], steps=1, seq_lens=[5], kv_tokens=5, parts=0, ahead=False, fallback=False)
    with pytest.raises(trace.TraceError, match="is damaged: node 77 is not known"):
        replay(path)


def test_a_missing_and_an_unwritable_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(trace.TraceError, match=r"nothing cannot be read: No such file"):
        replay(tmp_path / "nothing")
    with pytest.raises(trace.TraceError, match=r"SGLANG_PAT_TRACE: .* cannot be written: No such file"):
        trace.TraceWriter(tmp_path / "no" / "folder", HEADER, 100)


def test_a_reset_can_be_replayed(tmp_path: Path) -> None:
    server = Server(tmp_path / "trace")
    server.run(20)
    server.event(TreeReset())
    server.step()
    assert replay(tmp_path / "trace", oracle=True).plans == server.planner.counters().plans


def test_a_gpu_servers_batches_are_planned_as_the_oracle_does() -> None:
    """The recording that benchmarks use: 128 prompts by bench_serving, of which some begin alike."""
    result = replay(Path(__file__).parents[1] / "benchmarks" / "recorded" / "random-128", oracle=True, truncated=True)
    totals = result.totals
    assert totals.query_sizes[2] and totals.query_sizes[3] and totals.query_sizes[29]
    assert totals.kv_tokens < totals.kv_tokens_unpacked
