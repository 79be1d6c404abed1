"""Tables of served workloads and of jobs, from what `serving.py`, `short_extends.py` and `batch.py` left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tables import NAMES, TIMES, bold, load, table


def serving_mixed() -> str:
    """The trace with mixed chunks and without."""
    return "\n\n".join(map(_serving_mixed, ("h200", "h100")))


def _serving_mixed(gpu: str) -> str:
    runs = {chunks: load(f"serving-{name}-{gpu}.json") for chunks, name in (("mixed", "mixed"), ("apart", "unmixed"))}
    names = {
        "mean_tpot_ms": "mean TPOT, ms", "p99_tpot_ms": "P99 TPOT, ms", "median_itl_ms": "median ITL, ms", "mean_itl_ms": "mean ITL, ms",
        "mean_ttft_ms": "mean TTFT, ms", "output_tps": "output tokens/s",
    }  # fmt: skip
    rows = []
    for rate in dict.fromkeys(record["rate"] for record in runs["mixed"]["records"]):
        found = {
            (record["backend"], chunks): record for chunks, run in runs.items() for record in run["records"] if record["rate"] == rate
        }  # fmt: skip
        columns = []
        for name in names:
            sign = -1 if name == "output_tps" else 1
            text = "{:,.1f}".format if name.endswith("itl_ms") or name == "mean_tpot_ms" else "{:,.0f}".format
            values = bold(
                {str(key): sign * record[name] for key, record in found.items()}, lambda x, text=text: text(abs(x))
            )
            columns.append(values)
        rows += [
            [f"{rate:g}/s", NAMES[backend], chunks, *cells]
            for (backend, chunks), cells in zip(found, zip(*columns, strict=True), strict=True)
        ]  # fmt: skip
    device, model = runs["mixed"]["device"], runs["mixed"]["model"]
    return f"{table(['requests', 'backend', 'chunks', *names.values()], rows)}\n\n{device['name']}, {model} shape, random weights, {device['date']}."


def short_extends() -> str:
    return "\n\n".join(map(_short_extends, ("short-extends-h200.json", "short-extends-h100.json")))


def _short_extends(name: str) -> str:
    result = load(name)
    cells: dict[tuple[int, int, int], dict[str, dict[str, float]]] = {}
    for record in result["records"]:
        cells.setdefault((record["requests"], record["document"], record["new"]), {})[record["backend"]] = record
    rows = [
        [f"{requests} requests of {new} new tokens behind {document:,}",
         *bold({name: record["median_ms"] for name, record in found.items()}, "{:.0f}".format),
         *bold({name: record["least_ms"] for name, record in found.items()}, "{:.0f}".format)]
        for (requests, document, new), found in cells.items()
    ]  # fmt: skip
    names = dict.fromkeys(record["backend"] for record in result["records"])
    head = [
        "until all are answered, ms",
        *(f"{NAMES[name]}, median" for name in names),
        *(f"{NAMES[name]}, least" for name in names),
    ]
    return f"{table(head, rows)}\n\n{result['device']['name']}, {result['model']} shape, random weights, {result['device']['date']}."


def batch_pool() -> str:
    """A job whose prefixes exceed the pool, with parts of `batch` and of the server switched off: a line for each run."""
    result = load("batch-pool-h200.json")
    records = result["records"]
    rates = bold({str(i): -record["requests_per_s"] for i, record in enumerate(records)}, lambda rate: f"{-rate:.1f}")
    rows = []
    for record, rate in zip(records, rates, strict=True):
        without = f", without {record['without']}" if record["without"] else ""
        saved = f"{record['prefill_saved'] / record['saved_at_most']:.1%}"
        rows.append([f"by `batch`{without}" if record["batch"] else "at once", server_of(record), rate, saved])
    some = records[0]
    return (
        f"{table(['sent', 'server', 'requests/s', 'prefill saved, of what can be'], rows)}\n\n{result['device']['name']}, {result['model']} shape, "
        f"random weights, {some['shape']} tokens by {some['degree']}, {some['requests']} requests in no order, answers of {some['answer']} tokens, a pool of "
        f"{some['pool']:,} tokens, {result['device']['date']}."
    )


def server_of(record: dict[str, Any]) -> str:
    """What answered a job."""
    nobody = record["backend"] == "pat" and not record["defer"]
    return f"{NAMES[record['backend']]} {record['policy']}{', nobody waits' if nobody else ''}"


def serving_verify() -> str:
    return "\n\n".join(map(_serving_verify, ("serving-verify-h200.json", "serving-verify-h100.json")))


def _serving_verify(name: str) -> str:
    result = load(name)
    rows = []
    for workload, at in dict.fromkeys((record["workload"], record["rate"]) for record in result["records"]):
        records = [record for record in result["records"] if (record["workload"], record["rate"]) == (workload, at)]
        if len(records) == 1:
            # The others' run was cut short.
            continue
        tpot = bold({record["backend"]: record["mean_tpot_ms"] for record in records}, lambda ms: f"{ms:.1f}")
        ttft = bold({record["backend"]: record["mean_ttft_ms"] for record in records}, lambda ms: f"{ms:,.0f}")
        tps = bold({record["backend"]: -record["output_tps"] for record in records}, lambda rate: f"{-rate:,.0f}")
        rate = f", {records[0]['rate']:g}/s" if records[0]["rate"] else ""
        rows += [
            [f"`{workload}`{rate}", NAMES[record["backend"]], *cells]
            for record, cells in zip(records, zip(tpot, ttft, tps, strict=True), strict=True)
        ]
    head = ["workload", "backend", "mean TPOT, ms", "mean TTFT, ms", "output tokens/s"]
    return f"{table(head, rows)}\n\n{result['device']['name']}, {result['model']} shape, random weights, {result['device']['date']}."


LONGER = ", longer prompts"
"""What sets results apart whose tokenizer made 1.7 times as many tokens as were asked for."""

NEWEST = "serving-0.5.23-h200.json"
"""What the README shows: the newest SGLang, PAT beside its default on a GPU of the same host at the same time."""

SERVING = {
    NEWEST: ", 0.5.23",
    "serving-nominal-h200.json": "",
    "serving-2xh200.json": ", 2 GPUs",
    "serving-h200.json": LONGER,
    "serving-llama3-8b-h200.json": f", Llama 3 8B{LONGER}",
    "serving-gpt-oss-20b-h200.json": ", gpt-oss 20B in bfloat16",
    "serving-gpt-oss-20b-fp8-h200.json": ", gpt-oss 20B with FP8 KV",
    "serving-qwen3-30b-a3b-h200.json": ", Qwen3-30B-A3B",
}
"""Results of serving.py, and what sets them apart."""

IN_README = {
    ("gsp-8x32x2048", None): "256 requests, 8 system prompts of 2,048 tokens",
    ("gsp-4x64x8192", None): "256 requests, 4 system prompts of 8,192 tokens",
    ("trace", 4.0): "60 requests of a conversation trace, 4 a second, which is more than one GPU keeps up with",
    ("random-128", None): "128 requests, random prompts of 1,024 tokens",
}
"""Its rows: workload, requests a second, and what they are called there."""

SERVING_ON_H100 = {"serving-nominal-h100.json": "", "serving-2xh100.json": ", 2 GPUs"}


def served(results: dict[str, str] = SERVING) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Each workload with the records of all backends."""
    for name, what in results.items():
        records = load(name)["records"]
        for workload, rate in dict.fromkeys((record["workload"], record["rate"]) for record in records):
            title = f"`{workload}`{f', {rate:g}/s' if rate else ''}{what}"
            group = [record for record in records if (record["workload"], record["rate"]) == (workload, rate)]
            # Alone where the others' run was cut short.
            if len(group) > 1:
                yield title, group


def with_device(serving_table: str, results: dict[str, str] = SERVING) -> str:
    result = load(next(iter(results)))
    device = result["device"]
    dates = {what: load(name)["device"]["date"] for name, what in results.items()}
    others = "".join(f"; {what.removeprefix(', ')}: {date}" for what, date in dates.items() if date != device["date"])
    return f"{serving_table}\n\n{device['name']}, {result['model']} shape where none is named, random weights, {device['date']}{others}."


def in_readme() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Each row of the README: its name, PAT's record and FA3's."""
    records = {(one["workload"], one["rate"], one["backend"]): one for one in load(NEWEST)["records"]}
    for (workload, rate), name in IN_README.items():
        yield name, records[workload, rate, "pat"], records[workload, rate, "fa3"]


def serving() -> str:
    """The README's rows, one baseline and one unit."""
    rows = []
    for name, ours, other in in_readme():
        times = bold({"fa3": other["mean_tpot_ms"], "pat": ours["mean_tpot_ms"]}, "{:.1f}".format)
        rates = bold({"fa3": -other["output_tps"], "pat": -ours["output_tps"]}, lambda rate: f"{-rate:,.0f}")
        gains = other["mean_tpot_ms"] / ours["mean_tpot_ms"], ours["output_tps"] / other["output_tps"]
        rows.append([name, *times, f"{gains[0]:.1f}{TIMES}", *rates, f"{gains[1]:.1f}{TIMES}"])
    head = ["", "ms per token: FA3", "PAT", "", "tokens/s: FA3", "PAT", ""]
    result = load(NEWEST)
    device = result["device"]
    return (
        f"{table(head, rows)}\n\nOne {device['name']}, Qwen3-8B's shape with random weights, SGLang {device['sglang']}, {device['date']}. "
        "Milliseconds per token: mean TPOT at the client, waiting for other requests' prefill included."
    )


def serving_on_h100() -> str:
    return serving_records(SERVING_ON_H100)


def serving_records(results: dict[str, str] = SERVING) -> str:
    """A line for each record."""
    rows = []
    for title, group in served(results):
        pat = next(record["mean_tpot_ms"] for record in group if record["backend"] == "pat")
        for record in group:
            steps = record["step_ms"]
            rows.append(
                [
                    title, NAMES[record["backend"]], f"{steps[0]:.1f} to {steps[-1]:.1f}" if steps else "",
                    f"{record['median_itl_ms']:.1f}", f"{record['mean_tpot_ms']:.1f}",
                    "" if record["backend"] == "pat" else f"{record['mean_tpot_ms'] / pat:.2f}{TIMES}",
                    f"{record['p99_tpot_ms']:,.0f}", f"{record['mean_ttft_ms']:,.0f}", f"{record['output_tps']:,.0f}",
                ]
            )  # fmt: skip
    head = [
        "workload", "backend", "decode step, ms", "median ITL, ms", "mean TPOT, ms", "TPOT / PAT's", "P99 TPOT, ms",
        "mean TTFT, ms", "output tokens/s",
    ]  # fmt: skip
    return with_device(table(head, rows), results)


def batch() -> str:
    """Requests a second of a job, a line for each shape."""
    result = load("batch-h200.json")
    jobs: dict[tuple[str, int], dict[tuple[str, str, bool], dict[str, float]]] = {}
    shares: dict[tuple[str, int], dict[str, Any]] = {}
    for record in result["records"]:
        job = record["shape"], record["degree"]
        setting = record["backend"], record["policy"], record["defer"]
        order = "batch" if record["batch"] else record["order"]
        jobs.setdefault(job, {}).setdefault(setting, {})[order] = record["requests_per_s"]
        if record["batch"] and record["defer"]:
            shares[job] = record
    settings = list(dict.fromkeys(setting for rates in jobs.values() for setting in rates))
    rows = []
    for job, rates in jobs.items():
        shape, degree = job
        ours = rates["pat", "fcfs", True]
        best = max(max(orders.values()) for (backend, *_), orders in rates.items() if backend != "pat")
        numbers: dict[str, float | None] = {"batch": -ours["batch"]}
        for setting in settings:
            for order in ("sorted", "shuffled"):
                rate = rates.get(setting, {}).get(order)
                numbers[f"{setting} {order}"] = None if rate is None else -rate
        first, *cells = bold(numbers, lambda rate: f"{-rate:.1f}")
        pairs = [f"{one} / {other}" if one or other else "" for one, other in zip(cells[::2], cells[1::2], strict=True)]
        saved = shares[job]
        rows.append(
            [f"{shape}, {degree}", f"{saved['requests']}", first, *pairs, f"{ours['batch'] / best:.2f}{TIMES}",
             f"{saved['prefill_saved'] / saved['saved_at_most']:.1%}"]
        )  # fmt: skip
    names = [server_of({"backend": backend, "policy": policy, "defer": defer}) for backend, policy, defer in settings]
    head = [
        "shared/own tokens, by",
        "requests",
        "`batch`",
        *names,
        "`batch` / best without PAT",
        "prefill saved, of what can be",
    ]
    some = result["records"][0]
    return (
        f"{table(head, rows)}\n\n{result['device']['name']}, {result['model']} shape, random weights, a pool of {some['pool']:,} tokens, answers of "
        f"{some['answer']} tokens, {result['device']['date']}. Requests a second; two numbers are of the sorted and the shuffled file."
    )
