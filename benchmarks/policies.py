"""Which policy moves the fewest bytes, and how evenly the work is spread: python benchmarks/policies.py [--trace FILE]

Over the paper's 20 trees, random trees, and, with --trace, batches of a Mooncake-style trace replayed through SGLang's
RadixCache. Everything is by the model (32/8 heads, dim 128, bfloat16, 132 SMs); planning time is measured.

bytes   KV read and parts passed, before and after packs are cut, over the theoretical minimum: each KV token once, no parts
span    when the last SM finishes, over the even share of the work before anything is cut; `paper` is §6: what is longer
        than the mean is cut into equal parts, longest first to whoever is free. `own` is over the even share of the plan's
        own work, in which every piece that a cut made costs its start

    python benchmarks/policies.py --waves    # how many bins per worker are worth it, for any number of heads and SMs
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import trees
from about import about

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from oracle import PACKERS, make_packs, pack_price, packs_price
from oracle.heuristic import Pack, kv_length, split_by_tile

from sglang_pat.packing import OPEN, POLICIES, Batch, PackConfig, native
from sglang_pat.packing.tree import compact, kv_minimum

BENCHMARKS = {
    "policies": {"what": "bytes and balance of every policy", "minutes": 0.2, "results": "policies.json"},
}
"""For run.py, which reads it without importing this file."""

RESULTS = Path(__file__).parent / "results" / "policies.json"
BYTES = msgspec.structs.replace(
    trees.H200, cost=msgspec.structs.replace(trees.H200.cost, flop_per_byte=0, start_price=0)
)
"""The paper's model: bytes alone."""


def evaluate(batch: Batch, policy: str) -> dict[str, float]:
    """Bytes over the minimum, before and after cuts, and planning time."""
    config = msgspec.structs.replace(trees.H200, policy=policy)
    cost = config.cost
    prefixes = compact(batch)
    least = kv_minimum(prefixes, batch.seq_lens) * cost.token_bytes
    packs = split_by_tile(PACKERS[policy](prefixes, batch, config), batch.seq_lens, config)
    scheduler = native.NativeScheduler(config, len(batch.seq_lens))
    requests = native.load(scheduler, batch)
    seq_lens = np.array(batch.seq_lens, dtype=np.int64)
    times = []
    for _ in range(9):
        began = time.perf_counter()
        scheduler.take(requests, seq_lens, 1)
        times.append(time.perf_counter() - began)
    kv_tokens, parts, _ = scheduler.current()
    return {
        "packs": packs_price(packs, batch, BYTES) / least,
        "plan": cost.bytes(kv_tokens, parts) / least,
        "us": statistics.median(times) * 1e6,
    }


def spans(batch: Batch) -> dict[str, float] | None:
    """Makespans over the even share of the work; None where the work does not fill the device twice."""
    config = trees.H200
    packs = make_packs(batch, config)
    found = native.inspect(batch, config)
    config = config.for_bins
    share = sum(pack_price(pack, batch.seq_lens, config) for pack in packs) / config.workers
    tile = (config.tiles.kv_tile * config.cost.token_bytes + config.start_price(1)) / config.cost.runs
    if share < 2 * tile:
        return None
    pieces = [
        Pack(item.start, None if item.end == OPEN else item.end, item.queries, tails=item.tails)
        for item in found.plan.items
    ]
    own = sum(pack_price(piece, batch.seq_lens, config) for piece in pieces) / config.workers
    paper = paper_makespan(packs, batch.seq_lens, config)
    return {"paper": paper / share, "bins": found.makespan / share, "own": found.makespan / own}


def paper_makespan(packs: list[Pack], seq_lens: list[int], config: PackConfig) -> float:
    """PAT §6: packs above the mean KV length are cut into equal parts; the longest goes first to whoever is free."""
    lengths = [kv_length(pack, seq_lens) for pack in packs]
    mean = sum(lengths) / len(lengths)
    heads = config.cost.runs
    prices = []
    for pack, length in zip(packs, lengths, strict=True):
        pieces = max(1, -int(-length // mean))
        whole = length * config.token_price(len(pack.queries)) / pieces + config.start_price(len(pack.queries))
        prices += [whole / heads] * (pieces * heads)
    free = [0.0] * config.workers
    for price in sorted(prices, reverse=True):
        heapq.heapreplace(free, free[0] + price)
    return max(free)


def workloads(arguments: argparse.Namespace) -> Iterator[tuple[str, Batch]]:
    """(workload, batch)."""
    for notation in trees.PAPER:
        yield "paper " + notation, trees.build(*trees.parse(notation))
    generator = random.Random(0)
    for _ in range(arguments.random):
        yield (
            "random",
            trees.randomly(generator, generator.choice([16, 64, 256, 512]), generator.choice([256, 2048, 8192])),
        )
    if arguments.trace:
        from mooncake import Replay

        replay = Replay(arguments.trace, trees.H200)
        for number, (_, batch) in enumerate(replay.batches(arguments.minutes)):
            if number % arguments.every == 0:
                yield "trace", batch
        assert replay.observer.faults == 0


def waves() -> None:
    """What several bins per worker save at worst, over the KV heads of common models and the SMs of common GPUs."""
    worst: dict[int, float] = defaultdict(float)
    for heads in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 36, 40, 64):
        for workers in (78, 108, 114, 132, 144, 148):
            idle = [1 - w * workers // heads * heads / (w * workers) for w in range(1, 17)]
            for limit in (1, 2, 4, 8, 16):
                worst[limit] = max(worst[limit], min(idle[:limit]))
    for limit, idle in worst.items():
        print(f"up to {limit:2} waves: at most {idle:.1%} of the device idle")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="a Mooncake-style trace, one JSON object a line")
    parser.add_argument("--minutes", type=float, default=60, help="how much of it")
    parser.add_argument("--every", type=int, default=20, help="take every n-th batch of it")
    parser.add_argument("--random", type=int, default=60, help="random trees")
    parser.add_argument("--waves", action="store_true")
    arguments = parser.parse_args()
    if arguments.waves:
        return waves()
    results: dict[str, dict[str, list[dict[str, float]]]] = defaultdict(lambda: defaultdict(list))
    balance: dict[str, list[dict[str, float]]] = defaultdict(list)
    for workload, batch in workloads(arguments):
        for policy in POLICIES:
            results[workload][policy].append(evaluate(batch, policy))
        if (span := spans(batch)) is not None:
            balance[workload].append(span)

    print(f"{'workload':48}{'batches':>8}  " + "".join(f"{policy:>22}" for policy in POLICIES))
    print(f"{'':58}" + f"{'packs   plan      us':>22}" * len(POLICIES))
    records = []
    for workload, by_policy in results.items():
        row = ""
        for policy, values in by_policy.items():
            mean = {key: statistics.fmean(value[key] for value in values) for key in values[0]}
            row += f"{mean['packs']:8.2f}{mean['plan']:7.2f}{mean['us']:7.1f}"
            records.append({"workload": workload, "policy": policy, "batches": len(values), **mean})
        print(f"{workload:48}{len(values):8}  {row}")
    print(
        f"\n{'workload':48}{'batches':>8}{'paper mean':>12}{'worst':>8}{'bins mean':>12}{'worst':>8}{'within 5%':>12}"
    )
    for workload, values in balance.items():
        record = {"workload": workload, "batches": len(values)}
        for kind in ("paper", "bins", "own"):
            spread = [value[kind] for value in values]
            record |= {f"{kind}_mean": statistics.fmean(spread), f"{kind}_worst": max(spread)}
        record["within_5_percent"] = sum(value["own"] <= 1.05 for value in values) / len(values)
        records.append(record)
        print(
            f"{workload:48}{len(values):8}{record['paper_mean']:12.3f}{record['paper_worst']:8.3f}"
            f"{record['bins_mean']:12.3f}{record['bins_worst']:8.3f}{record['own_mean']:12.3f}{record['own_worst']:8.3f}"
            f"{record['within_5_percent']:12.1%}"
        )
    where = about()
    RESULTS.write_text("[\n" + ",\n".join(json.dumps(record | where) for record in records) + "\n]\n")


if __name__ == "__main__":
    main()
