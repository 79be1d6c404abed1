from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import pytest
from oracle import make_plan
from oracle.mirror import Mirror

from sglang_pat import cli
from sglang_pat.backend.planner import Planner
from sglang_pat.cli.explain import describe
from sglang_pat.cli.explain import recorded as recorded_steps
from sglang_pat.cli.replay import _replay, replay
from sglang_pat.packing import CPU_TILES, CostModel, PackConfig
from sglang_pat.packing.native import NativeScheduler
from sglang_pat.radix_bridge import trace
from sglang_pat.radix_bridge.events import (
    ROOT,
    Event,
    NodeInserted,
    NodeSplit,
    RequestBound,
    RequestReleased,
    RequestsExpected,
    TreeReset,
)
from sglang_pat.radix_bridge.observer import Observer, apply

pytestmark = pytest.mark.once

CONFIG = PackConfig(CostModel(8, 2, 64, 64, 2), CPU_TILES, 16)
HEADER = trace.Header(trace.FORMAT, CONFIG, max_batch=64, layers=3)


class Server:
    """A scheduler and planner with a recorder, as the backend joins them."""

    def __init__(self, path: Path, limit: int = 10**9) -> None:
        self.writer = trace.TraceWriter(path, HEADER, limit)
        self.scheduler = NativeScheduler(CONFIG, max_batch=64)
        self.planner = Planner(self.scheduler, ahead=False)
        self.planner.on_plan = self.writer.on_plan
        self.lengths: dict[int, int] = {}

    def event(self, event: Event) -> None:
        apply(self.scheduler, event)
        self.writer.on_event(event)

    def step(self) -> None:
        lengths = np.array(list(self.lengths.values()), dtype=np.int64)
        self.planner.plan(np.array(list(self.lengths), dtype=np.int64), lambda: lengths)
        for request in self.lengths:
            self.lengths[request] += 1

    def run(self, steps: int) -> None:
        generator = random.Random(1)
        self.event(NodeInserted(1, ROOT, 900, bytes(16)))
        self.event(NodeSplit(1, 2, 300, b"lower".ljust(16)))
        for step in range(steps):
            if step % 4 == 0:
                self.event(RequestsExpected([step], [940], [f"request {step}"]))
                self.event(RequestBound(step, generator.choice([1, 2]), 0))
                self.event(RequestBound(step, 1, 950))
                self.lengths[step] = 950
            if step % 9 == 8:
                request = generator.choice(list(self.lengths))
                del self.lengths[request]
                self.event(RequestReleased(request))
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
    result = replay(path, oracle=make_plan, mirror=Mirror())
    counters = server.planner.counters()
    assert (result.plans, result.fallbacks, result.differing) == (counters.plans, 0, 0)
    expected = {name: getattr(counters, name) for name in result.totals.__struct_fields__}
    assert msgspec.structs.asdict(result.totals) == expected


def test_plans_that_are_not_as_recorded_are_counted(recorded: tuple[Path, Server]) -> None:
    path, _ = recorded
    header, *records = trace.read(path)
    changed = 0

    def change(record: trace.Record) -> trace.Record:
        nonlocal changed
        if not isinstance(record, trace.PlanMade) or record.ahead or record.fallback or changed == 3:
            return record
        changed += 1
        return msgspec.structs.replace(record, kv_tokens=record.kv_tokens + 1)

    result = _replay(iter([header, *map(change, records)]), None, None)
    assert (changed, result.differing) == (3, 3)
    assert "not as recorded          3 plans: another version of sglang-pat wrote the trace" in list(result.lines())
    assert _replay(iter([header, *records]), "naive", None).differing == 0, "another policy was asked for"


def test_other_policies_can_be_replayed(recorded: tuple[Path, Server]) -> None:
    path, _ = recorded
    by_policy = {policy: replay(path, policy).totals.kv_tokens for policy in ("query", "optimal", "naive")}
    assert by_policy["query"] == replay(path).totals.kv_tokens_unpacked
    assert by_policy["optimal"] < by_policy["query"]


def test_plans_that_do_not_fit_are_replayed_as_they_are_served(tmp_path: Path) -> None:
    """With fewer levels: `naive` would merge at each of so many."""
    path = tmp_path / "deep"
    config = PackConfig(CONFIG.cost, CPU_TILES, workers=1)
    writer = trace.TraceWriter(path, trace.Header(trace.FORMAT, config, max_batch=64, layers=1), 10**7)
    for level in range(1, 65):
        writer.on_event(NodeInserted(level, level - 1 if level > 1 else ROOT, 30, level.to_bytes(16, "big")))
    for query in range(64):
        writer.on_event(RequestBound(query, query + 1, 2000))
    writer.on_plan(list(range(64)), steps=0, seq_lens=[2000] * 64, kv_tokens=0, parts=0, ahead=True, fallback=False)
    found = replay(path, policy="naive", truncated=True)
    assert (found.plans, found.fallbacks, found.totals.steps) == (1, 1, 1)
    unpacked = replay(path, policy="query", truncated=True)
    assert unpacked.fallbacks == 0 and found.totals.kv_tokens < unpacked.totals.kv_tokens


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
        (
            lambda data: data[: len(trace.MAGIC) + 2],
            "is cut off within its first record: its server had hardly started",
        ),
        (lambda data: trace.MAGIC, "is an empty trace"),
        (lambda data: b"PK\x03\x04 something else", "is not a trace of sglang-pat"),
        (lambda data: b"", "is empty: somebody emptied it, or its server never started"),
        (lambda data: data.replace(b"Header", b"Reader"), "is damaged in record 1"),
        (lambda data: data + b"\x02\x00\x00\x00\xc1\xc1", r"is damaged in record \d+"),
        (lambda data: data.replace(b"format" + bytes([trace.FORMAT]), b"format\x09"), "has trace format 9"),
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
    # What is there of it may be replayed, or is nothing.
    assert cli.main(["replay", "--truncated", str(path)]) == 2 * (damage is not cut_off)


def test_what_there_is_of_a_truncated_trace_can_be_replayed(recorded: tuple[Path, Server]) -> None:
    path, _ = recorded
    whole = replay(path).plans
    path.write_bytes(cut_off(path.read_bytes()))
    assert replay(path, truncated=True).plans == whole - 1


def test_events_that_cannot_follow_one_another_are_named(recorded: tuple[Path, Server]) -> None:
    path, server = recorded
    server.writer.on_event(NodeSplit(77, 78, 1, bytes(16)))
    server.writer.on_plan([77], steps=1, seq_lens=[5], kv_tokens=5, parts=0, ahead=False, fallback=False)
    with pytest.raises(trace.TraceError, match="is damaged: node 77 is not known"):
        replay(path)


def mutated(data: bytes, generator: random.Random) -> bytes:
    """A few bytes of `data` changed, left out, repeated or put in."""
    changed = bytearray(data)
    for _ in range(generator.choice([1, 1, 2, 5])):
        at = generator.randrange(len(changed))
        match generator.randrange(5):
            case 0:
                changed[at] = generator.randrange(256)
            case 1:
                changed[at] ^= 1 << generator.randrange(8)
            case 2:
                del changed[at : at + generator.choice([1, 1, 4, 100])]
            case 3:
                changed[at:at] = generator.randbytes(generator.choice([1, 4, 9]))
            case _:
                changed[at:at] = changed[at : at + generator.randrange(200)]
    return bytes(changed)


@pytest.mark.parametrize("seed", range(4))
def test_a_trace_that_somebody_changed_is_refused_or_replayed_and_nothing_else(
    recorded: tuple[Path, Server], seed: int
) -> None:
    """Users are asked to send such files. `make sanitize` runs this with the native scheduler's memory watched."""
    path, _ = recorded
    data = path.read_bytes()
    # Most of a file is events; its header is what everything else hangs on.
    head = data.index(b"NodeInserted") + 40
    generator = random.Random(seed)
    refused = 0
    for _ in range(150):
        short = generator.random() < 0.5
        path.write_bytes(mutated(data[:head], generator) + data[head:] if short else mutated(data, generator))
        for look in (
            replay,
            lambda path: [describe(*step[1:], step[0].config) for step in islice(recorded_steps(path), 2)],
        ):
            try:
                look(path)
            except trace.TraceError:
                refused += 1
    assert 100 < refused < 300, "neither all files are refused nor none"


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("config", {"workers": 0}),
        ("config", {"workers": 10**9}),
        ("config", {"policy": "fast"}),
        ("config", {"piece": 8}),
        ("tiles", {"query_tiles": []}),
        ("tiles", {"query_tiles": [64, 16, 128]}),
        ("tiles", {"kv_tile": 0}),
        ("tiles", {"kv_tiles": [32, 64, 128]}),
        ("tiles", {"token_ns": [1], "bytes_per_ns": 1}),
        ("tiles", {"item_ns": [1, -1, 1], "bytes_per_ns": 1}),
        ("tiles", {"item_ns": [1, float("nan"), 1], "bytes_per_ns": 1}),
        ("tiles", {"turn_ns": 1}),
        ("tiles", {"wave_ns": 1e300, "bytes_per_ns": 1}),
        ("tiles", {"bytes_per_ns": float("inf")}),
        ("cost", {"kv_heads": 0}),
        ("cost", {"heads": 2**40}),
        ("cost", {"head_dim": 4096, "kv_heads": 4096, "heads": 4096}),
        ("header", {"max_batch": 0}),
        ("header", {"max_batch": 2**40}),
        ("header", {"layers": -1}),
    ],
)
def test_a_device_or_model_that_cannot_be_is_refused(recorded: tuple[Path, Server], part: str, changes: dict) -> None:
    path, _ = recorded
    header = msgspec.to_builtins(HEADER)
    parts = {"header": header, "config": header["config"], **header["config"]}
    parts[part] |= changes
    _rewrite(path, 0, header)
    with pytest.raises(trace.TraceError, match="is damaged"):
        replay(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"seq_lens": [5]},
        {"seq_lens": [-1]},
        {"seq_lens": [2**40]},
        {"left": [99], "seq_lens": [950]},
        {"left": [-1], "seq_lens": [950]},
        {"joined": [-7]},
        {"steps": 2**40},
        {"steps": -1},
    ],
)
def test_a_plan_for_no_batch_is_refused(recorded: tuple[Path, Server], changes: dict) -> None:
    path, _ = recorded
    records = list(trace.read(path))
    number = [i for i, record in enumerate(records) if isinstance(record, trace.PlanMade)][3]
    _rewrite(path, number, msgspec.to_builtins(records[number]) | changes)
    for look in (replay, lambda path: list(recorded_steps(path))):
        with pytest.raises(trace.TraceError, match="is damaged"):
            look(path)


def _rewrite(path: Path, number: int, record: dict) -> None:
    """Put `record` in place of record `number`."""
    data, at = path.read_bytes(), len(trace.MAGIC)
    for _ in range(number):
        at += 4 + int.from_bytes(data[at : at + 4], "little")
    end = at + 4 + int.from_bytes(data[at : at + 4], "little")
    new = msgspec.msgpack.encode(record)
    path.write_bytes(data[:at] + len(new).to_bytes(4, "little") + new + data[end:])


def test_two_servers_do_not_record_in_one_file(tmp_path: Path) -> None:
    """The second one is refused, and the first one's recording stays; when that has ended, the file may be used again."""
    server = Server(tmp_path / "x.pat")
    server.run(20)
    size = (tmp_path / "x.pat").stat().st_size
    code = "import sys; from pathlib import Path; from test_trace import HEADER, trace; trace.TraceWriter(Path(sys.argv[1]), HEADER, 1 << 20)"
    command = [sys.executable, "-c", code, str(tmp_path / "x.pat")]
    environment = {**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.stderr.splitlines()[-1].endswith(f"another server records in {tmp_path / 'x.pat'}: name another file")
    assert (tmp_path / "x.pat").stat().st_size == size
    server.writer._file.close()
    subprocess.run(command, env=environment, check=True)
    assert 0 < (tmp_path / "x.pat").stat().st_size < size


def test_a_recording_is_named_though_its_folder_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`/server_info` has its path."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    writer = trace.TraceWriter(Path("x.pat"), HEADER, 1 << 20)
    shutil.rmtree(folder)
    assert writer.recording == str(folder / "x.pat")


def test_the_eviction_of_a_node_in_use_is_recorded_and_repeated(tmp_path: Path) -> None:
    """The server counted a fault and went on; so does a replay, and what is inserted there afterwards is no fault of the file."""
    scheduler = NativeScheduler(HEADER.config, 8)
    observer = Observer(scheduler)
    writer = trace.TraceWriter(tmp_path / "x.pat", HEADER, 1 << 20)
    observer.subscribers.append(writer.on_event)
    for event in (NodeInserted(1, ROOT, 50, bytes(16)), RequestBound(1, 1, 60)):
        observer._emit(event)
    observer.on_evicted(1)
    assert observer.faults == 1
    observer._emit(NodeInserted(2, ROOT, 50, bytes(16)))
    writer.on_plan([1], steps=0, seq_lens=[60], kv_tokens=60, parts=0, ahead=False, fallback=False)
    assert [type(record).__name__ for record in trace.read(tmp_path / "x.pat")][3] == "NodeEvicted"
    assert replay(tmp_path / "x.pat").plans == 1


def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(tmp_path / "trace")
    server.run(4)
    server.writer._file.close()
    server.writer._file = open("/dev/full", "wb")  # noqa: SIM115
    server.run(60)
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == [
        f"SGLANG_PAT_TRACE: {tmp_path / 'trace'} cannot be written any more and ends here: No space left on device"
    ]
    assert server.planner.counters().fallbacks == 0 and not server.writer.is_open
    with pytest.raises(trace.TraceError, match=r"/dev/full is not a file: name a file"):
        trace.TraceWriter(Path("/dev/full"), HEADER, 10**6)


@pytest.mark.parametrize("kind", ["a full disk", "a limit of files"])
def test_a_trace_is_whole_up_to_where_the_disk_is_full(tmp_path: Path, kind: str) -> None:
    path, full, limits = tmp_path / "disk" / "trace", kind == "a full disk", resource.getrlimit(resource.RLIMIT_FSIZE)
    path.parent.mkdir()
    if full and subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", path.parent], check=False).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        server = Server(path)
        server.run(20)
        assert server.writer.recording == str(path)
        if not full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (65521, limits[1]))  # Python ignores the signal
        for _ in range(5_000):
            server.event(TreeReset())
            server.step()
            if not server.writer.is_open:
                break
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert server.writer.recording == "" and server.planner.counters().fallbacks == 0
        assert 60_000 < path.stat().st_size < 65_521
        assert isinstance(list(trace.read(path))[-1], trace.PlanMade), "not --truncated"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if full:
            subprocess.run(["umount", "--lazy", path.parent], check=True)


def test_a_trace_is_its_owners_alone(tmp_path: Path) -> None:
    """Unless its owner has made the file for others to read."""
    (tmp_path / "shared").touch()
    (tmp_path / "shared").chmod(0o640)
    for name, mode in [("trace", 0o600), ("shared", 0o640)]:
        trace.TraceWriter(tmp_path / name, HEADER, 10**6)
        assert (tmp_path / name).stat().st_mode & 0o777 == mode


def test_a_record_is_not_read_without_end(tmp_path: Path) -> None:
    """A file may be long and take no disk."""
    trace.TraceWriter(tmp_path / "trace", HEADER, 10**6)
    with (tmp_path / "trace").open("ab") as file:
        file.write((trace.LONGEST + 1).to_bytes(4, "little"))
        file.truncate(file.tell() + trace.LONGEST + 1)
    with pytest.raises(trace.TraceError, match=r"is damaged in record 2: it would be longer than 64 MiB"):
        replay(tmp_path / "trace")


@pytest.mark.parametrize("steps", [0, 20])
@pytest.mark.parametrize("events", [1, 5000])
@pytest.mark.parametrize("end", ["a plan", "the process", "the limit"])
def test_the_next_server_records_in_a_file_that_was_emptied(tmp_path: Path, steps: int, events: int, end: str) -> None:
    """However much is pending then, and whatever comes next."""
    path = tmp_path / "trace"
    server = Server(path)
    if steps:
        server.run(steps)
    for _ in range(events // 2):
        server.event(TreeReset())
    os.truncate(path, 0)
    for _ in range(events - events // 2):
        server.event(TreeReset())
    if end == "a plan":
        server.step()
        assert not server.writer.is_open
    elif end == "the limit":
        server.writer._left = 1
        server.event(TreeReset())
        assert not server.writer.is_open
    server.writer._file.close()
    del server
    assert path.stat().st_size == 0
    trace.TraceWriter(path, HEADER, 10**6)._file.close()


def test_a_trace_without_plans_is_written_all_the_same(tmp_path: Path) -> None:
    server = Server(tmp_path / "trace")
    before = (tmp_path / "trace").stat().st_size
    while len(server.writer._pending) or before == (tmp_path / "trace").stat().st_size:
        server.event(TreeReset())
        assert len(server.writer._pending) <= trace.PENDING
    assert (tmp_path / "trace").stat().st_size - before > trace.PENDING


@pytest.mark.parametrize("size", [10, 1000])
def test_what_somebody_else_wrote_into_a_trace_stays(tmp_path: Path, size: int) -> None:
    path = tmp_path / "trace"
    server = Server(path)
    server.run(60)
    path.write_bytes(b"x" * size)
    server.event(TreeReset())
    server.step()
    assert path.read_bytes()[:size] == b"x" * size and not server.writer.is_open


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: os.truncate(path, 0), "somebody else has emptied or shortened it"),
        (lambda path: os.truncate(path, path.stat().st_size // 2), "somebody else has emptied or shortened it"),
        (lambda path: path.unlink(), "it was removed"),
    ],
)
def test_a_file_that_is_taken_away_ends_the_recording(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[Path], None], why: str
) -> None:
    path = tmp_path / "trace"
    server = Server(path)
    server.run(20)
    assert server.writer.is_open and server.writer.recording == str(path)
    spoil(path)
    server.event(TreeReset())
    server.step()
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == [f"SGLANG_PAT_TRACE: {tmp_path / 'trace'} cannot be written any more and ends here: {why}"]
    assert server.planner.counters().fallbacks == 0 and not server.writer.is_open
    assert server.writer.recording == "", "`explain --url` has nothing to look for"
    if path.exists() and path.stat().st_size:
        assert replay(path, truncated=True).plans > 0, "nothing was written behind what is left"


def test_a_clients_id_may_be_long_and_no_text(tmp_path: Path) -> None:
    server = Server(tmp_path / "trace")
    server.event(RequestsExpected([1, 2], [5, 5], ["\udcff" + "x" * 10**6, "\x00"]))
    server.writer._save()
    names = [record.rids for record in trace.read(tmp_path / "trace") if isinstance(record, RequestsExpected)]
    assert names == [["?" + "x" * (trace.LABEL - 1), "\x00"]]


def test_a_missing_and_an_unwritable_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(trace.TraceError, match=r"nothing cannot be read: No such file"):
        replay(tmp_path / "nothing")
    with pytest.raises(trace.TraceError, match=r"SGLANG_PAT_TRACE: .* cannot be written: No such file"):
        trace.TraceWriter(tmp_path / "no" / "folder", HEADER, 100)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(trace.TraceError, match=r"SGLANG_PAT_TRACE: .*pipe is not a file: name a file"):
        trace.TraceWriter(tmp_path / "pipe", HEADER, 100)
    with pytest.raises(trace.TraceError, match=r"pipe is a pipe: name a file"):
        replay(tmp_path / "pipe")
    folder = tmp_path / "\udcff"
    folder.mkdir()
    for name in (folder / "trace", tmp_path / "a\u2028b"):
        with pytest.raises(trace.TraceError, match=r"SGLANG_PAT_TRACE: .* has characters that cannot be shown"):
            trace.TraceWriter(name, HEADER, 100)
    with pytest.raises(trace.TraceError, match=r"SGLANG_PAT_TRACE: .* cannot be written: File name too long"):
        trace.TraceWriter(tmp_path / ("x" * 300), HEADER, 100)


def test_only_a_trace_is_recorded_over(tmp_path: Path) -> None:
    """Of a trace maybe only a beginning is there."""
    for begin in (b"", trace.MAGIC[:5], trace.MAGIC + b"..."):
        (tmp_path / "x").write_bytes(begin)
        trace.TraceWriter(tmp_path / "x", HEADER, 1 << 20)._file.close()
        assert list(trace.read(tmp_path / "x")) == [HEADER]
    (tmp_path / "x").write_text("a checkpoint")
    with pytest.raises(trace.TraceError, match=r"SGLANG_PAT_TRACE: .*x has something else in it, which would be lost"):
        trace.TraceWriter(tmp_path / "x", HEADER, 1 << 20)
    assert (tmp_path / "x").read_text() == "a checkpoint"


@pytest.mark.parametrize("there", ["a file", "nothing"])
@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_a_trace_is_not_written_through_a_link(tmp_path: Path, link: Callable[[Path, Path], None], there: str) -> None:
    if there == "a file":
        (tmp_path / "empty").touch()
    elif link is Path.hardlink_to:
        pytest.skip("has no link to it")
    link(tmp_path / "x", tmp_path / "empty")
    with pytest.raises(trace.TraceError, match=r"SGLANG_PAT_TRACE: .*x (is a link|has other names too)"):
        trace.TraceWriter(tmp_path / "x", HEADER, 1 << 20)
    assert (tmp_path / "empty").exists() == (there == "a file")
    assert there == "nothing" or (tmp_path / "empty").stat().st_size == 0


def test_a_trace_is_not_written_where_others_can_write(tmp_path: Path) -> None:
    for mode in (0o620, 0o602):
        (tmp_path / "x").touch()
        (tmp_path / "x").chmod(mode)
        with pytest.raises(trace.TraceError, match=r"SGLANG_PAT_TRACE: .*x may be written by others"):
            trace.TraceWriter(tmp_path / "x", HEADER, 1 << 20)
        assert (tmp_path / "x").stat().st_size == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")
def test_another_user_s_file_gets_no_trace(tmp_path: Path) -> None:
    (tmp_path / "x").touch(0o600)
    os.chown(tmp_path / "x", 65534, 65534)
    with pytest.raises(trace.TraceError, match=r"SGLANG_PAT_TRACE: .*x belongs to user 65534: remove it"):
        trace.TraceWriter(tmp_path / "x", HEADER, 1 << 20)
    assert (tmp_path / "x").stat().st_size == 0


def test_what_a_trace_says_of_itself_is_shown_without_escapes(tmp_path: Path) -> None:
    data = msgspec.msgpack.encode({"format": "\x1b[2J" + "x" * 1_000})
    (tmp_path / "x").write_bytes(trace.MAGIC + len(data).to_bytes(4, "little") + data)
    with pytest.raises(trace.TraceError, match=r"has trace format \\x1b\[2Jx+, this version") as error:
        replay(tmp_path / "x")
    assert len(str(error.value)) < len(str(tmp_path)) + 400


def test_replay_prints_json_as_the_page_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = Server(tmp_path / "trace")
    server.run(20)
    flags = ["--json", "--policy", "query", "--policy", "optimal"]
    assert cli.main(["replay", str(tmp_path / "trace"), *flags]) == 0
    alone, packed = json.loads(capsys.readouterr().out)
    assert (alone["policy"], packed["policy"]) == ("query", "optimal") and alone["less_kv_read"] == 1
    assert packed["less_kv_read"] == packed["kv_bytes_unpacked"] / packed["kv_bytes"] > 1
    page = Path(__file__).parents[1] / "docs" / "explain.md"
    section = page.read_text().split("## JSON\n")[1].split("\n## ")[0]
    keys = {*packed, *packed["planning_us"]}
    assert keys <= set(re.findall(r"`(\w+)`", section))


def test_a_reset_can_be_replayed(tmp_path: Path) -> None:
    server = Server(tmp_path / "trace")
    server.run(20)
    server.event(TreeReset())
    server.step()
    assert replay(tmp_path / "trace", oracle=make_plan).plans == server.planner.counters().plans


def test_a_gpu_servers_batches_are_planned_as_the_oracle_does() -> None:
    """The recording that benchmarks use: 128 prompts by bench_serving, of which some begin alike."""
    result = replay(
        Path(__file__).parents[1] / "benchmarks" / "recorded" / "random-128", oracle=make_plan, truncated=True
    )
    totals = result.totals
    assert totals.query_sizes[2] and totals.query_sizes[3] and totals.query_sizes[29]
    assert totals.kv_tokens < totals.kv_tokens_unpacked
    assert sum(totals.kv_by_queries.values()) == totals.kv_tokens
    assert sum(size * tokens for size, tokens in totals.kv_by_queries.items()) == totals.kv_tokens_unpacked
