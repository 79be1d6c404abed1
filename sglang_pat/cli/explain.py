"""`sglang-pat explain`: one HTML page that shows what packing did with a recorded batch, and why."""

from __future__ import annotations

import functools
import json
import os
import secrets
from collections import Counter
from collections.abc import Collection, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from sglang_pat.cli.top import TopError, fetch
from sglang_pat.estimate import Model, Prompt, batch_of, job
from sglang_pat.packing import POLICIES, Batch, PackConfig
from sglang_pat.packing.native import NativeScheduler, Pack, TooDeepError, batch_in, inspect
from sglang_pat.packing.tree import InconsistentError, Prefix, compact, in_windows, kv_minimum
from sglang_pat.radix_bridge import trace
from sglang_pat.radix_bridge.events import RequestsExpected
from sglang_pat.radix_bridge.observer import apply

TEMPLATE = Path(__file__).with_name("explain.html")


class ExplainError(Exception):
    """There is nothing to explain; the message says why, and what to do."""


def recorded(
    path: Path, truncated: bool = False, chosen: Collection[int] | None = None
) -> Iterator[tuple[trace.Header, int, list[str], Batch]]:
    """Plans of a trace: (the header, decode steps before it, its requests' ids, its batch).

    Args:
        truncated: Accept a file that was cut off.
        chosen: Which plans, by number from 0; all if None.

    Raises:
        TraceError: The file is no trace, or not a whole one.
        ExplainError: A batch's tree is too deep.
    """
    step = number = 0
    names: dict[int, str] = {}
    batch: list[int] = []
    for record in trace.read(path, truncated):
        try:
            if isinstance(record, trace.Header):
                header, scheduler = record, NativeScheduler(record.config, record.max_batch)
            elif isinstance(record, trace.PlanMade):
                step += record.steps
                batch = trace.apply_difference(batch, record)
                if chosen is None or number in chosen:
                    shown = [names.get(request, "?") for request in batch]
                    yield header, step, shown, batch_in(scheduler, batch, record.seq_lens)
                number += 1
            else:
                trace.repeat(functools.partial(apply, scheduler), record)
                if isinstance(record, RequestsExpected):
                    names.update(zip(record.requests, record.rids, strict=False))
        except (InconsistentError, ValueError) as fault:
            if isinstance(fault, trace.TraceError):
                raise
            raise trace.TraceError(f"{path} is damaged: {fault}") from None
        except TooDeepError as error:
            raise ExplainError(f"{path}, step {step}: {error}") from None


def trace_of(url: str, key: str = "") -> Path:
    """Where a running server on this machine records; one with replicas: where the first of them that records does.

    Args:
        key: The API key that it was started with; none if empty.

    Raises:
        ExplainError: It does not answer, does not record, or records on another machine.
    """
    try:
        # Sorted, because SGLang lists replicas in the order in which they answered.
        paths = sorted(counters["trace"] for counters in fetch(url, key) if counters["trace"])
    except TopError as error:
        raise ExplainError(str(error)) from None
    if not paths:
        raise ExplainError(
            f"the server at {url} does not record: start it with SGLANG_PAT_TRACE=<file>, or name its file if it has recorded"
        )
    path = paths[0]
    if not os.path.isfile(path):
        raise ExplainError(f"the server at {url} records {path}, which is not a file on this machine")
    return Path(path)


def describe(step: int, names: list[str], batch: Batch, config: PackConfig) -> dict[str, Any]:
    """The page's data for one step, with every policy. Requests are numbered in tree order, so those of a node are adjacent."""
    prefixes = compact(batch)
    order = _tree_order(prefixes)
    place = {query: number for number, query in enumerate(order)}
    seen = in_windows(batch, config.window)
    return {
        "step": step,
        "requests": [names[query] for query in order],
        "lengths": [batch.seq_lens[query] for query in order],
        "minimum": config.cost.bytes(kv_minimum(compact(seen), seen.seq_lens), 0),
        "nodes": [
            [prefix.start, prefix.end, place[prefix.queries[0]], len(prefix.queries)] for prefix in prefixes[1:]
        ],
        "policies": {
            policy: _describe_plan(batch, prefixes, place, msgspec.structs.replace(config, policy=policy))
            for policy in POLICIES
        },
    }  # fmt: skip


def _tree_order(prefixes: list[Prefix]) -> list[int]:
    """Queries in depth-first order: a node's leaves, then those of each child."""
    order: list[int] = []
    stack = [0]
    while stack:
        prefix = prefixes[stack.pop()]
        order += prefix.leaves
        stack.extend(reversed(prefix.children))
    # Prefix.queries starts with the leaves too, so the queries of a node are consecutive in this order.
    return order


def _describe_plan(batch: Batch, prefixes: list[Prefix], place: dict[int, int], config: PackConfig) -> dict[str, Any]:
    try:
        found = inspect(batch, config)
    except ValueError as error:
        raise ExplainError(f"a batch cannot be planned: {error}") from None
    plan, config, cost = found.plan, found.config, found.config.cost
    packs: dict[tuple[int, ...], int] = {}
    items: list[list[Any]] = []
    bins = [0]
    for begin, behind in pairwise(plan.bins):
        # The GPU runs the items of single warps after all others, or before them on every second worker (`Plan.narrow_first`), where the page turns them.
        priced = zip(plan.items[begin:behind], found.prices[begin:behind], strict=True)
        members = sorted(priced, key=lambda member: member[0].m <= config.tiles.warp_m)
        others = sum(item.m > config.tiles.warp_m for item, _ in members)
        for number, (item, price) in enumerate(members):
            start, end = item.span(batch.seq_lens)
            pack = packs.setdefault(tuple(item.queries), len(packs))
            turn = found.turn_price // cost.runs if 0 < number == others else 0
            runs = _runs(sorted(place[query] for query in item.queries))
            items.append([start, end, pack, item.m, price // cost.runs, runs, turn, 0])
            # Tails are drawn where they are read, behind what their queries share.
            for query in item.queries if item.tails else []:
                tail = found.tail_price * (batch.seq_lens[query] - end) // cost.runs
                items.append([end, batch.seq_lens[query], pack, item.m, tail, [[place[query], 1]], 0, 1])
        bins.append(len(items))
    work = sum(item[4] for item in items) * cost.runs / config.workers
    return {
        "items": items,
        "work_items": len(plan.items),
        "bins": bins,
        "parts": plan.merged_parts,
        "narrow_first": plan.narrow_first,
        "kv_bytes": cost.bytes(plan.kv_tokens, 0),
        "part_bytes": cost.bytes(0, plan.merged_parts),
        "tiles": {str(m): count for m, count in sorted(Counter(item.m for item in plan.items).items())},
        "even": round(found.makespan / work, 3) if work else 1,
        "decisions": _decisions(found.packs, prefixes, config),
    }


def _runs(places: list[int]) -> list[list[int]]:
    """[first, count] of each run of neighbours."""
    runs: list[list[int]] = []
    for number in places:
        if runs and runs[-1][0] + runs[-1][1] == number:
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return runs


def _decisions(packs: list[Pack], prefixes: list[Prefix], config: PackConfig) -> list[list[int]]:
    """For each node: whether its queries read the KV above it together with the node, in a pack of their own; the price of reading that KV again;
    and the price of the parts otherwise (PAT §5.1)."""
    by_query: dict[int, list[Pack]] = {}
    together: dict[tuple[int, int, int | None], set[int]] = {}
    for pack in packs:
        # What has more queries than a work item is in several.
        together.setdefault((pack.node, pack.start, pack.end), set()).update(pack.queries)
        for query in pack.queries:
            by_query.setdefault(query, []).append(pack)
    decisions = []
    for prefix in prefixes[1:]:
        above = prefix.start - 1
        if above < 0:
            decisions.append([0, 0, 0])
            continue
        mine = by_query[prefix.queries[0]]
        pack = next(pack for pack in mine if pack.start <= above and (pack.end is None or above < pack.end))
        again = (prefix.start - pack.start) * config.token_price(len(prefix.queries))
        first = all(other.start >= pack.start for other in mine)
        parts = len(prefix.queries) * config.cost.part_bytes * (2 if first else 1)
        joins = pack.end is None or together[pack.node, pack.start, pack.end] <= set(prefix.queries)
        decisions.append([int(joins), again, parts])
    return decisions


def explain(path: Path, output: Path, steps: int = 20, truncated: bool = False) -> int:
    """Write the page. Returns how many steps it shows, evenly spread over the trace.

    Raises:
        TraceError: The file is no trace, or not a whole one.
        ExplainError: It has no plan, or one that cannot be made; plotly is missing.
    """
    plotly = _plotly()
    if path.is_file() and not trace.is_trace(path):
        raise ExplainError(
            f"{path} is not a trace of sglang-pat: record one with SGLANG_PAT_TRACE=<file>, or give --model for a file of requests"
        )
    # (tokens that a step reads without packing, that its plan reads, steps that the plan before was used for)
    plans = [
        (sum(record.seq_lens), record.kv_tokens, record.steps)
        for record in trace.read(path, truncated)
        if isinstance(record, trace.PlanMade)
    ]
    if not plans:
        raise ExplainError(f"{path} has no decode step: send the server requests first")
    # How long the last plan was used is not recorded: for one step at least.
    used = [steps for _, _, steps in plans[1:]] + [1]
    saved = [(alone - packed) * steps for (alone, packed, _), steps in zip(plans, used, strict=True)]
    best = saved.index(max(saved))
    chosen = _with(best, _spread(len(plans), steps))
    shown = []
    for header, step, names, batch in recorded(path, truncated, chosen):
        try:
            shown.append(describe(step, names, batch, header.config))
        except ExplainError as error:
            raise ExplainError(f"{path}, step {step}: {error}") from None
    for number, page in zip(sorted(chosen), shown, strict=True):
        page["used"] = used[number] if number + 1 < len(plans) else None
    _write(output, plotly, header.config, header.layers, len(plans), shown, sorted(chosen).index(best))
    return len(shown)


def explain_job(prompts: list[Prompt], model: Model, gpu: str, output: Path, steps: int = 20) -> int:
    """Write the same page of a job that has not run: its requests in the order of their tree, some at a time; how many times.

    Raises:
        EstimateError: There are no measurements for the GPU, or no kernel for the model.
        ExplainError: plotly is missing.
    """
    plotly = _plotly()
    config, layers, parts = job(prompts, model, gpu)
    shown = []
    for number in sorted(_spread(len(parts), steps)):
        places = parts[number]
        batch = batch_of([prompts[place] for place in places])
        shown.append(describe(number, [f"request {place + 1}" for place in places], batch, config))
    saved = [page["policies"]["query"]["kv_bytes"] - page["policies"][config.policy]["kv_bytes"] for page in shown]
    _write(output, plotly, config, layers, len(parts), shown, saved.index(max(saved)), job=True)
    return len(shown)


def _spread(total: int, most: int) -> set[int]:
    """Up to so many numbers below `total`, evenly spread."""
    count = min(max(1, most), total)
    return {round(i * (total - 1) / max(1, count - 1)) for i in range(count)}


def _with(number: int, chosen: set[int]) -> set[int]:
    """The chosen numbers with this one in place of the nearest."""
    return chosen - {min(sorted(chosen), key=lambda other: abs(other - number))} | {number}


def _plotly() -> str:
    """The script that draws, asked for before anything long is done."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ExplainError("the page needs plotly: pip install 'sglang-pat[explain]'") from None
    return str(get_plotlyjs())


def _write(
    output: Path,
    plotly: str,
    config: PackConfig,
    layers: int,
    plans: int,
    shown: list[dict[str, Any]],
    opened: int,
    job: bool = False,
) -> None:
    """Write the page, which opens on one of the plans that are shown."""
    data = {
        "policy": config.policy, "layers": layers, "workers": config.workers, "heads": config.cost.runs,
        "plans": plans, "steps": shown, "open": opened, "job": job,
    }  # fmt: skip
    # Request ids come from clients: they must not end the script.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = TEMPLATE.read_text("utf-8").replace("/*plotly*/", plotly).replace("/*data*/null", text)
    if output.exists() and not output.is_file():  # a pipe, say
        output.write_text(page, "utf-8")
        return
    # A disk that is full leaves the page that was there before. The folder may be others' too: what they put there is not opened. Unlike tempfile's
    # files, this one has the mode that the umask gives to any new file.
    partial = output.with_name(f".{secrets.token_hex(8)}.html")
    with partial.open("x", encoding="utf-8") as file:
        try:
            file.write(page)
            file.flush()
            partial.replace(output)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
