"""What planning costs: python benchmarks/packing.py [--quick]

The native scheduler behind the same calls that the backend makes, beside the Python oracle and a rebuild of the tree
from block tables (pages of 32 tokens, as in the paper), all in this run and, but for `ahead`, on one core. Plans are
those of a server on an H200, with the measured prices of its tiles. Cases:

scratch     a plan for a batch and a tree that the scheduler knows
reset       the same, after another batch in another order was expected: every request is looked up by its id
join        a request is bound and joins; event and plan
leave       a request is released and leaves; event and plan
outgrown    tails have grown: the same batch, new lengths
ahead       a request is bound and joins, and its plan was made by the scheduler's thread meanwhile; event and hand-over
unchanged   a step of a batch that stands still, with a plan that stays good
event       one event: a node is inserted, a request bound to it, released again (a third of the three)
trace event, trace plan   what recording one of them adds (SGLANG_PAT_TRACE)
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import trees
import tvm_ffi
from about import about

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from oracle import make_plan
from oracle.mirror import Mirror

from sglang_pat import jit
from sglang_pat.backend.planner import Planner
from sglang_pat.packing import POLICIES, Batch, PackConfig, native
from sglang_pat.packing.constants import LEAST_STEPS
from sglang_pat.radix_bridge.events import NodeInserted, RequestBound
from sglang_pat.radix_bridge.trace import FORMAT, Header, TraceWriter

BENCHMARKS = {
    "packing": {"what": "what planning takes, 1 to 16,384 requests", "minutes": 0.7, "results": "packing.json"},
}
"""For run.py, which reads it without importing this file."""

RESULTS = Path(__file__).parent / "results" / "packing.json"
PAGE = 32
ORACLE_LIMIT = 20_000
"""Requests times depth beyond which the oracle, which needs seconds there, is left out."""


class Served:
    """A batch that is being decoded: a scheduler, a planner, and what the engine would tell them."""

    def __init__(self, batch: Batch, config: PackConfig, ahead: bool = False) -> None:
        size = len(batch.seq_lens)
        self.scheduler = native.NativeScheduler(config, max_batch=size + 1)
        self.planner = Planner(self.scheduler, ahead=ahead)
        self.alone = native.load(self.scheduler, batch)
        self.joined = self.requests = self.alone
        self.seq_lens = np.array(batch.seq_lens, dtype=np.int64)
        self.longer = np.array([*batch.seq_lens, batch.seq_lens[0]], dtype=np.int64)
        self.node = self.scheduler.binding(0)[0]

    def step(self) -> None:
        self.planner.plan(
            self.requests, lambda: self.longer if len(self.requests) == len(self.longer) else self.seq_lens
        )

    def grow(self) -> None:
        """A step is over: every request has one token more."""
        self.seq_lens += 1
        self.longer += 1

    def join(self) -> None:
        """Another request gets the row behind all others."""
        request = int(self.joined[-1]) + (1 << 32) if len(self.joined) > len(self.alone) else len(self.alone)
        self.scheduler.bind(request, self.node)
        self.scheduler.expect(request, int(self.longer[-1]))
        self.planner.on_change()
        self.joined = self.requests = np.append(self.alone, request)

    def leave(self) -> None:
        self.scheduler.release(int(self.requests[-1]))
        self.planner.on_change()
        self.requests = self.alone


def median_us(action: Callable[[], None], repeats: int, before: Callable[[], None] = lambda: None) -> float:
    times = []
    for _ in range(repeats):
        before()
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def measure(batch: Batch, config: PackConfig, repeats: int) -> dict[str, float]:
    """Microseconds of each case."""
    served = Served(batch, config)
    served.step()
    results = {}

    def fresh() -> None:
        served.planner._good = 0

    results["scratch"] = results["outgrown"] = median_us(served.step, repeats, fresh)
    reverse = served.requests[::-1].copy()
    other = itertools.cycle([reverse, served.requests])
    results["reset"] = median_us(lambda: served.planner.plan(next(other), lambda: served.seq_lens), repeats)

    def join() -> None:
        served.join()
        served.step()

    def leave() -> None:
        served.leave()
        served.step()

    joins, leaves = [], []
    for _ in range(repeats):
        joins.append(median_us(join, 1))
        leaves.append(median_us(leave, 1))
    results["join"], results["leave"] = statistics.median(joins), statistics.median(leaves)

    served.step()
    calls = LEAST_STEPS - 1  # for which every plan stays good

    def stand_still() -> None:
        for _ in range(calls):
            served.planner.plan(served.requests, lambda: served.seq_lens)

    def untouched() -> None:
        served.planner._used = 0

    results["unchanged"] = median_us(stand_still, repeats, untouched) / calls

    def events() -> None:
        served.scheduler.insert(10**9, served.node, 7, bytes(16))
        served.scheduler.bind(1 << 20, 10**9)
        served.scheduler.release(1 << 20)

    results["event"] = median_us(events, repeats) / 3

    results["ahead"] = ahead_us(batch, config, min(repeats, 30), 4 * results["scratch"] + 1000)
    return results


def ahead_us(batch: Batch, config: PackConfig, repeats: int, busy_us: float) -> float:
    """What a join costs the scheduler process where the scheduler's has a core of its own and `busy_us` to work."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    served = Served(batch, config, ahead=True)
    served.step()
    times = []
    for _ in range(repeats):
        served.grow()
        began = time.perf_counter()
        served.join()
        joined = time.perf_counter()
        while time.perf_counter() < joined + busy_us * 1e-6:
            pass
        ready = served.planner.counters().plans_ahead
        handed = time.perf_counter()
        served.step()
        over = time.perf_counter()
        # Another process may have had the second core.
        if served.planner.counters().plans_ahead > ready:
            times.append(over - handed + joined - began)
        served.grow()
        served.leave()
        served.step()
    os.sched_setaffinity(0, cores)
    assert len(times) > repeats // 2, "plans were not ready"
    return statistics.median(times) * 1e6


def trace_us(batch: Batch, config: PackConfig, repeats: int) -> dict[str, float]:
    """What recording an event and a plan takes; every time one request left and one joined."""
    with tempfile.TemporaryDirectory() as folder:
        writer = TraceWriter(Path(folder) / "trace", Header(FORMAT, config, len(batch.seq_lens), 36), 10**9)
        event = RequestBound(1 << 40, 2, 3)
        requests = list(range(len(batch.seq_lens)))

        def plan() -> None:
            lens = np.array(batch.seq_lens).tolist()
            writer.on_plan(requests, steps=1, seq_lens=lens, kv_tokens=1, parts=1, ahead=False, fallback=False)

        def change() -> None:
            nonlocal requests
            requests = [*requests[1:], requests[0]]

        return {
            "trace event": median_us(lambda: writer.on_event(event), 20 * repeats),
            "trace plan": median_us(plan, repeats, change),
        }


def oracle_us(batch: Batch, config: PackConfig) -> float:
    """The same plan from the Python mirror and scheduler."""
    mirror = Mirror()
    last = {}
    stack = [(node, -1) for node in batch.roots]
    number = 0
    while stack:
        node, parent = stack.pop()
        number += 1
        mirror.apply(NodeInserted(number, parent, node.end - node.start, number.to_bytes(16, "little")))
        last.update(dict.fromkeys(node.queries, number))
        stack.extend((child, number) for child in node.children)
    requests = range(len(batch.seq_lens))
    for request in requests:
        mirror.apply(RequestBound(request, last.get(request, -1), 0))
    return median_us(lambda: make_plan(mirror.batch(requests, batch.seq_lens), config), 1)


class Rebuilding(native.NativeScheduler):
    """With the module that can make its tree from block tables."""

    @staticmethod
    def load_module() -> Any:
        return jit.load("rebuild", Path(__file__).parent / "csrc")


def rebuild_us(batch: Batch, config: PackConfig, repeats: int) -> float:
    """The same plan from block tables."""
    size, width = len(batch.seq_lens), -(-max(batch.seq_lens) // PAGE)
    rows = np.arange(size * width, dtype=np.int32).reshape(size, width)
    stack = list(batch.roots)
    while stack:
        node = stack.pop()
        rows[node.queries, node.start // PAGE : node.end // PAGE] = rows[
            node.queries[0], node.start // PAGE : node.end // PAGE
        ]
        stack.extend(node.children)
    scheduler = Rebuilding(config, max_batch=size)
    module = scheduler.load_module()
    seq_lens = tvm_ffi.from_dlpack(np.array(batch.seq_lens, dtype=np.int64))
    table = tvm_ffi.from_dlpack(rows)
    return median_us(lambda: module.rebuild(scheduler._handle, table, PAGE, seq_lens), min(repeats, 20))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the paper's deepest tree only; writes nothing")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {0})
    shapes = [("paper's deepest", trees.parse(trees.PAPER[14]))]
    if not arguments.quick:
        shapes.append(("939 prefixes", trees.parse("1,2,8,32,128,256,512,1024_64,64,64,64,64,64,64,256")))
        for batch in (1, 4, 16, 64, 256, 1024, 4096, 16384):
            for depth in (1, 4, 8, 16, 32):
                shapes.append((f"regular, depth {depth}", trees.regular(batch, depth)))
    print(
        f"{'tree':18}{'batch':>6} {'policy':8}{'case':>12}{'us':>9}{'us/node':>9}{'oracle':>9}{'rebuild':>9}{'B/node':>8}"
    )
    records, where = [], about()
    for name, (nodes, tokens) in shapes:
        batch = trees.build(nodes, tokens)
        size, depth, count = len(batch.seq_lens), len(nodes) - 1, sum(nodes)
        for policy in POLICIES:
            if size * depth > ORACLE_LIMIT and policy not in ("optimal", "pat"):
                continue
            config = msgspec.structs.replace(trees.SERVED, policy=policy)
            repeats = max(5, min(200, 100_000 // size))
            results = measure(batch, config, repeats)
            if policy == "optimal":
                results |= trace_us(batch, config, repeats)
            rebuild = rebuild_us(batch, config, repeats)
            oracle = oracle_us(batch, config) if size * depth <= ORACLE_LIMIT else None
            scheduler = Served(batch, config)
            scheduler.step()
            memory = scheduler.scheduler.bytes / max(1, scheduler.scheduler.num_nodes)
            for case, us in results.items():
                plan = case not in ("unchanged", "event", "trace event", "trace plan")
                ratios = [f"{value / us:8.1f}x" if value and plan else " " * 9 for value in (oracle, rebuild)]
                print(f"{name:18}{size:6} {policy:8}{case:>12}{us:9.2f}{us / count:9.4f}{''.join(ratios)}{memory:8.0f}")
                shape = {"tree": name, "policy": policy, "batch": size, "depth": depth, "nodes": count}
                beside = {"oracle_us": oracle if plan else None, "rebuild_us": rebuild if plan else None}
                records.append({"case": case, **shape, "us": us, **beside, "bytes_per_node": memory, **where})
    if not arguments.quick:
        RESULTS.write_text("[\n" + ",\n".join(map(json.dumps, records)) + "\n]\n")


if __name__ == "__main__":
    main()
