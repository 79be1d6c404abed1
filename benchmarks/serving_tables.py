"""Tables of served workloads and of jobs, from what `serving.py`, `short_extends.py` and `batch.py` left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tables import NAMES, TIMES, bold, folded, load, table

ORDER = ("pat", "fa3", "flashinfer", "triton")
"""Of columns."""


class Measure(NamedTuple):
    """A number of served workloads.

    Attributes:
        field: Its name in a record.
        title: What tables call it.
        text: How it is written.
        sign: -1 if more is better.
        shown: Whether its table is open; the others are folded.
    """

    field: str
    title: str
    text: str
    sign: int = 1
    shown: bool = False


MEASURES = (
    Measure("mean_tpot_ms", "ms per token (mean TPOT)", "{:,.1f}", shown=True),
    Measure("output_tps", "tokens/s", "{:,.0f}", sign=-1, shown=True),
    Measure("mean_ttft_ms", "ms to the first token (mean TTFT)", "{:,.0f}"),
    Measure("step_ms", "decode step, ms", "{:.1f}"),
    Measure("median_itl_ms", "ms between two tokens (median ITL); two can arrive at once", "{:.1f}"),
    Measure("mean_itl_ms", "ms between two tokens (mean ITL)", "{:.1f}"),
    Measure("p99_tpot_ms", "ms per token (P99 TPOT)", "{:,.0f}"),
)

Row = tuple[str, dict[str, dict[str, Any]]]
"""A workload, and its record in each column."""


def measured(rows: list[Row], columns: dict[str, str], measure: Measure, baseline: str = "") -> str:
    """A row for each workload, a column for each server (`columns`: key and name); its best number is bold.

    With a `baseline`, a last column says how many times as good PAT is."""
    lines = []
    for workload, records in rows:
        found = {key: records.get(key, {}).get(measure.field) or None for key in columns}
        if not any(found.values()):
            continue
        if measure.field == "step_ms":
            # At the beginning and at the end of the answers.
            cells = [
                " to ".join(measure.text.format(steps[i]) for i in (0, -1)) if steps else "" for steps in found.values()
            ]
        else:
            signed = {key: number and measure.sign * number for key, number in found.items()}
            cells = bold(signed, lambda number: measure.text.format(abs(number)))
        line = [workload, *cells]
        if baseline:
            ratio = found[baseline] and (found[baseline] / found["pat"]) ** measure.sign
            line.append(f"{ratio:.2f}{TIMES}" if ratio else "")
        lines.append(line)
    last = [f"PAT vs {columns[baseline]}"] if baseline else []
    return table([measure.title, *columns.values(), *last], lines) if lines else ""


def tables_of(
    rows: list[Row], columns: dict[str, str], baseline: str = "", measures: Iterable[Measure] = MEASURES
) -> str:
    """A table for each measure: the first ones open, the others folded."""
    made = {
        measure: measured(rows, columns, measure, baseline if measure.shown else "") for measure in measures
    }  # fmt: skip
    shown = [text for measure, text in made.items() if measure.shown]
    others = [text for measure, text in made.items() if not measure.shown and text]
    return "\n\n".join(
        [*shown, folded("First tokens, steps and gaps" if len(others) > 1 else "First tokens", "\n\n".join(others))]
    )


def by_workload(results: dict[str, str], measures: Iterable[Measure] = MEASURES) -> str:
    """The workloads of some results (file: what sets it apart), with a column for each backend."""
    rows = [
        (title, {record["backend"]: record for record in group}) for title, group in served(results)
    ]  # fmt: skip
    backends = [name for name in ORDER if any(name in records for _, records in rows)]
    baseline = "fa3" if "fa3" in backends else backends[1]
    return f"{tables_of(rows, {name: NAMES[name] for name in backends}, baseline, measures)}\n\n{on(results)}"


def on(results: dict[str, str]) -> str:
    """What some results were measured on."""
    found: dict[str, list[str]] = {}
    for name, what in results.items():
        result = load(name)
        device = result["device"]
        where = f"{device['name']}, SGLang {device['sglang']}"
        found.setdefault(where, []).append(f"{MODELS[result['model']]}{what}, {device['date']}")
    return "*" + "; ".join(f"{where}. {'; '.join(runs)}" for where, runs in found.items()) + ". Random weights.*"


MODELS = {
    "qwen3-8b": "Qwen3-8B's shape", "llama3-8b": "Llama 3 8B's shape", "gpt-oss-20b": "gpt-oss 20B's shape",
    "qwen3-30b-a3b": "Qwen3-30B-A3B's shape", "deepseek-v2-lite": "DeepSeek V2 Lite's shape",
}  # fmt: skip


def serving_mixed() -> str:
    """The trace with mixed chunks and without."""
    return "\n\n".join(f"#### {gpu.upper()}\n\n{_serving_mixed(gpu)}" for gpu in ("h200", "h100"))


def _serving_mixed(gpu: str) -> str:
    files = {"mixed": f"serving-mixed-{gpu}.json", "apart": f"serving-unmixed-{gpu}.json"}
    found: dict[float, dict[str, dict[str, Any]]] = {}
    for chunks, name in files.items():
        for record in load(name)["records"]:
            found.setdefault(record["rate"], {})[f"{record['backend']} {chunks}"] = record
    columns = {f"{name} {chunks}": f"{NAMES[name]}, {chunks}" for chunks in files for name in ("pat", "fa3")}
    rows = [(f"`trace`, {rate:g}/s", records) for rate, records in sorted(found.items(), reverse=True)]
    return f"{tables_of(rows, columns)}\n\n{on({files['mixed']: ''})}"


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
    # What SGLang's log says of a step, and gaps between tokens, mean something else where a step has several.
    return by_workload({"serving-verify-h200.json": ", H200", "serving-verify-h100.json": ", H100"}, MEASURES[:3])


LONGER = ", longer prompts"
"""What sets results apart whose tokenizer made 1.7 times as many tokens as were asked for."""

NEWEST = "serving-0.5.23-h200.json"
"""What the README shows: the newest SGLang, PAT beside its default on a GPU of the same host at the same time."""

IN_README = {
    ("gsp-8x32x2048", None): "256 requests, 8 system prompts of 2,048 tokens",
    ("gsp-4x64x8192", None): "256 requests, 4 system prompts of 8,192 tokens",
    ("trace", 4.0): "a conversation trace, 4 requests a second",
    ("random-128", None): "128 requests, random prompts of 1,024 tokens",
}
"""Its rows: workload, requests a second, and what they are called there."""


def serving_newest() -> str:
    return by_workload({NEWEST: ""})


def serving_h200() -> str:
    return by_workload({"serving-nominal-h200.json": ""})


def serving_h100() -> str:
    return by_workload({"serving-nominal-h100.json": ""})


def serving_two_h200() -> str:
    return by_workload({"serving-2xh200.json": ""})


def serving_two_h100() -> str:
    return by_workload({"serving-2xh100.json": ""})


def serving_longer() -> str:
    return by_workload({"serving-h200.json": ""})


def serving_models() -> str:
    return by_workload(
        {
            "serving-llama3-8b-h200.json": f", Llama 3 8B{LONGER}",
            "serving-gpt-oss-20b-h200.json": ", gpt-oss 20B in bfloat16",
            "serving-gpt-oss-20b-fp8-h200.json": ", gpt-oss 20B with FP8 KV",
            "serving-qwen3-30b-a3b-h200.json": ", Qwen3-30B-A3B",
            "serving-mla-h200.json": ", DeepSeek V2 Lite",
        }
    )


def served(results: dict[str, str]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Each workload with the records of all backends."""
    for name, what in results.items():
        records = load(name)["records"]
        for workload, rate in dict.fromkeys((record["workload"], record["rate"]) for record in records):
            title = f"`{workload}`{f', {rate:g}/s' if rate else ''}{what}"
            group = [record for record in records if (record["workload"], record["rate"]) == (workload, rate)]
            # Alone where the others' run was cut short.
            if len(group) > 1:
                yield title, group


def in_readme(name: str = NEWEST) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Each row of the README: what it is called, PAT's record and FA3's."""
    records = {(one["workload"], one["rate"], one["backend"]): one for one in load(name)["records"]}
    for (workload, rate), title in IN_README.items():
        yield title, records[workload, rate, "pat"], records[workload, rate, "fa3"]


def serving(name: str = NEWEST) -> str:
    """The README's rows, one baseline and one unit."""
    rows, gains = [], []
    for title, ours, other in in_readme(name):
        gains.append(f"{ours['output_tps'] / other['output_tps']:.2f}")
        times = bold({"fa3": other["mean_tpot_ms"], "pat": ours["mean_tpot_ms"]}, "{:.1f}".format)
        rows.append([title, *times, f"{other['mean_tpot_ms'] / ours['mean_tpot_ms']:.2f}{TIMES}"])
    served = f"Tokens/s, row by row: {', '.join(gains[:-1])} and {gains[-1]} times FA3's."
    return f"{table(['milliseconds per token', 'FA3', 'PAT', 'faster'], rows)}\n\n{served}\n\n{on({name: ''}).replace('*NVIDIA', '*One NVIDIA')}"


def serving_summary_h100() -> str:
    return serving("serving-nominal-h100.json")


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
    names = [server_of({"backend": backend, "policy": policy, "defer": defer}) for backend, policy, defer in settings]
    rows = []
    by_order: dict[str, list[list[str]]] = {"sorted": [], "shuffled": []}
    for job, rates in jobs.items():
        title = f"{job[0]}, {job[1]}"
        ours = rates["pat", "fcfs", True]
        best = max(max(orders.values()) for (backend, *_), orders in rates.items() if backend != "pat")
        saved = shares[job]
        rows.append(
            [title, f"{saved['requests']}", *bold({"batch": -ours["batch"], "best": -best}, lambda rate: f"{-rate:.1f}"),
             f"{ours['batch'] / best:.2f}{TIMES}", f"{saved['prefill_saved'] / saved['saved_at_most']:.1%}"]
        )  # fmt: skip
        for order, lines in by_order.items():
            found = {name: rates.get(setting, {}).get(order) for name, setting in zip(names, settings, strict=True)}
            lines.append(
                [title, *bold({name: rate and -rate for name, rate in found.items()}, lambda rate: f"{-rate:.1f}")]
            )
    head = [
        "shared/own tokens, by",
        "requests",
        "`batch`",
        "best without PAT",
        "`batch` vs best",
        "prefill saved, of what can be",
    ]
    every = [table([f"{order}, requests/s", *names], lines) for order, lines in by_order.items()]
    some = result["records"][0]
    return (
        f"{table(head, rows)}\n\n{folded('Every server, with the file sorted and shuffled', chr(10).join([every[0], '', every[1]]))}\n\n"
        f"*{result['device']['name']}, {MODELS[result['model']]}, random weights, a pool of {some['pool']:,} tokens, answers of "
        f"{some['answer']} tokens, {result['device']['date']}. Requests a second.*"
    )
