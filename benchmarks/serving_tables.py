"""Tables of served workloads and of jobs, from what `serving.py`, `short_extends.py` and `batch.py` left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from tables import NAMES, TIMES, bold, folded, load, table

ORDER = ("pat", "fa3", "flashinfer", "triton")
"""Of lines and columns."""


class Measure(NamedTuple):
    """A number of served workloads.

    Attributes:
        field: Its name in a record.
        title: What tables call it.
        text: How it is written.
        sign: -1 if more is better.
    """

    field: str
    title: str
    text: str
    sign: int = 1


RATE = Measure("output_tps", "tokens/s", "{:,.0f}", sign=-1)
TIME = Measure("mean_tpot_ms", "ms per token", "{:,.1f}")
FIRST = Measure("mean_ttft_ms", "first token, ms", "{:,.0f}")
MEASURES = (
    RATE, TIME, Measure("p99_tpot_ms", "P99 of it", "{:,.0f}"), Measure("mean_itl_ms", "mean ITL, ms", "{:.1f}"),
    FIRST, Measure("step_ms", "decode step, ms", "{:.1f}"),
)  # fmt: skip

Row = tuple[str, dict[str, dict[str, Any]]]
"""A workload, and its record of each server."""


def every_number(rows: list[Row], servers: dict[str, str], measures: tuple[Measure, ...] = MEASURES) -> str:
    """A line for each workload and server (`servers`: key and name), a column for each measure; a workload's best is bold."""
    lines = []
    for workload, records in rows:
        there = {key: records[key] for key in servers if key in records}
        columns = [column(list(there.values()), measure) for measure in measures]
        for i, key in enumerate(there):
            lines.append(["" if i else workload, servers[key], *(cells[i] for cells in columns)])
    shown = [0, 1, *(i for i in range(2, len(measures) + 2) if any(line[i] for line in lines))]
    heads = ["workload", "", *(measure.title for measure in measures)]
    return table([heads[i] for i in shown], [[line[i] for i in shown] for line in lines])


def column(records: list[dict[str, Any]], measure: Measure) -> list[str]:
    """A measure's cells in some records of one workload."""
    found = [record.get(measure.field) or None for record in records]
    if measure.field == "step_ms":
        # At the beginning and at the end of the answers.
        return [" to ".join(measure.text.format(steps[i]) for i in (0, -1)) if steps else "" for steps in found]
    if not any(found):
        return [""] * len(found)
    signed = {str(i): number and measure.sign * number for i, number in enumerate(found)}
    return bold(signed, lambda number: measure.text.format(abs(number)))


def by_workload(results: dict[str, str], measures: tuple[Measure, ...] = MEASURES) -> str:
    """The workloads of some results (file: what sets it apart), folded if they have all measures."""
    rows = [
        (f"{workload}{what}{form}", {record["backend"]: record for record in group})
        for workload, what, form, group in served(results)
    ]
    text = every_number(rows, {name: NAMES[name] for name in ORDER}, measures)
    return f"{folded('All numbers', text) if measures == MEASURES else text}\n\n{on(results)}"


def on(results: dict[str, str]) -> str:
    """What some results were measured on."""
    found: dict[str, list[str]] = {}
    for name, what in results.items():
        result = load(name)
        device = result["device"]
        where = f"{device['name']}, SGLang {device['sglang']}"
        dates = sorted({record.get("date") or device["date"] for record in result["records"]})
        others = "".join(
            dict.fromkeys(
                f" and {BESIDE[record['model']]}" for record in result["records"] if record.get("model") in BESIDE
            )
        )
        found.setdefault(where, []).append(f"{MODELS[result['model']]}{what}{others}, {' and '.join(dates)}")
    return "*" + "; ".join(f"{where}. {'; '.join(runs)}" for where, runs in found.items()) + ". Random weights.*"


MODELS = {
    "qwen3-8b": "Qwen3-8B's shape", "llama3-8b": "Llama 3 8B's shape", "gpt-oss-20b": "gpt-oss 20B's shape",
    "qwen3-30b-a3b": "Qwen3-30B-A3B's shape", "deepseek-v2-lite": "DeepSeek V2 Lite's shape", "llama3.1-70b-tp8": "Llama 3.1 70B's shape",
}  # fmt: skip
BESIDE = {"glm-4.7-flash": "GLM-4.7-Flash"}
"""Models whose records are in another one's file."""


def serving_mixed() -> str:
    """The trace with mixed chunks and without."""
    return "\n\n".join(map(_serving_mixed, ("h200", "h100")))


def _serving_mixed(gpu: str) -> str:
    files = {"mixed": f"serving-mixed-{gpu}.json", "apart": f"serving-unmixed-{gpu}.json"}
    found: dict[float, dict[str, dict[str, Any]]] = {}
    for chunks, name in files.items():
        for record in load(name)["records"]:
            found.setdefault(record["rate"], {})[f"{record['backend']} {chunks}"] = record
    servers = {f"{name} {chunks}": f"{NAMES[name]}, {chunks}" for chunks in files for name in ("pat", "fa3")}
    rows = [(f"`trace`, {rate:g}/s", records) for rate, records in sorted(found.items(), reverse=True)]
    return f"{folded(f'All numbers, {gpu.upper()}', every_number(rows, servers))}\n\n{on({files['mixed']: ''})}"


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
    names = {"serving-verify-h200.json": ", H200", "serving-verify-h100.json": ", H100"}
    return by_workload(names, (RATE, TIME, FIRST))


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


OF_MODELS = {
    "serving-llama3-8b-h200.json": f"Llama 3 8B{LONGER}",
    "serving-gpt-oss-20b-h200.json": "gpt-oss 20B in bfloat16",
    "serving-gpt-oss-20b-fp8-h200.json": "gpt-oss 20B with FP8 KV",
    "serving-qwen3-30b-a3b-h200.json": "Qwen3-30B-A3B",
    "serving-mla-h200.json": "DeepSeek V2 Lite",
    "serving-rank-h200.json": "one GPU's part of Llama 3.1 70B on eight",
}
"""Results with other models than most, and what these are called."""

AT_A_GLANCE = {
    NEWEST: "Qwen3-8B", "serving-nominal-h200.json": "Qwen3-8B", "serving-nominal-h100.json": "Qwen3-8B",
    "serving-2xh200.json": "Qwen3-8B, two GPUs", "serving-2xh100.json": "Qwen3-8B, two GPUs", **OF_MODELS,
}  # fmt: skip
"""Results in the first table, and what they are called there."""

SHOWN_RATES = (None, 4.0, 2.0)
"""Requests a second in that table: none where all are sent at once; of 4 a GPU serves fewer."""


def serving_overview() -> str:
    """A row for each workload and model: PAT, and the best of the backends that ran beside it."""
    rows = []
    for name, what in AT_A_GLANCE.items():
        device = load(name)["device"]
        title = ""
        for workload, _, form, group in served({name: ""}):
            if group[0]["rate"] in SHOWN_RATES:
                model = BESIDE.get(group[0].get("model"), what)
                before, title = title, f"{model}, {device['name'].split()[1]}, {device['sglang']}"
                numbers = *beside_the_best(group, RATE), *beside_the_best(group, TIME)
                rows.append(["" if title == before else title, f"{workload}{form}", *numbers])
    heads = [cell for what in (RATE, TIME) for cell in (f"{what.title}, PAT", "best other", "ratio")]
    return table(["model, GPU, SGLang", "workload", *heads], rows)


def beside_the_best(group: list[dict[str, Any]], measure: Measure) -> list[str]:
    """What PAT has in a workload, the best of the others with its name, and how many times as good PAT is."""
    found = {record["backend"]: measure.sign * record[measure.field] for record in group}
    ours = found.pop("pat")
    best = min(found, key=lambda backend: found[backend])
    cells = bold({"pat": ours, "best": found[best]}, lambda number: measure.text.format(abs(number)))
    return [cells[0], f"{cells[1]} {NAMES[best]}", f"{(found[best] / ours) ** measure.sign:.2f}{TIMES}"]


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
    return by_workload({name: f", {what}" for name, what in OF_MODELS.items()})


FORMS = {"fp8_e4m3": "FP8"}
"""What tables call formats of KV."""


def served(results: dict[str, str]) -> Iterator[tuple[str, str, str, list[dict[str, Any]]]]:
    """Each workload with what sets it apart, its KV and drafts, and the records of all backends."""
    for name, what in results.items():
        groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for record in load(name)["records"]:
            served_with = record.get("kv"), record.get("drafts"), BESIDE.get(record.get("model"))
            groups.setdefault((record["workload"], record["rate"], *served_with), []).append(record)
        several = len({kv for _, _, kv, *_ in groups}) > 1
        for (workload, rate, kv, drafts, model), group in groups.items():
            form = f", {FORMS.get(kv, kv)} KV" if several and kv not in (None, "bfloat16") else ""
            form += f", {drafts} drafts" if drafts else ""
            # Alone where the others' run was cut short.
            if len(group) > 1:
                yield f"`{workload}`{f', {rate:g}/s' if rate else ''}", f", {model}" if model else what, form, group


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
