"""Makes tables of the JSON that the benchmarks left, and writes them into the README and docs/measured.md: `python benchmarks/report.py`.

A row's best number is bold.

`--check` changes nothing and fails where these have other numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import kernel_tables
from tables import RIVALS, ROOT, TIMES, bold, load, table

from sglang_pat.packing import POLICIES


def serving_verify() -> str:
    return served_with("serving-verify-h200.json")


def serving_mixed() -> str:
    return served_with("serving-mixed-h200.json")


def served_with(name: str) -> str:
    """Results of serving.py with flags that all backends had."""
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
            [f"`{workload}`{rate}", record["backend"], *cells]
            for record, cells in zip(records, zip(tpot, ttft, tps, strict=True), strict=True)
        ]
    head = ["workload", "backend", "mean TPOT, ms", "mean TTFT, ms", "output tokens/s"]
    return f"{table(head, rows)}\n\n{result['device']['name']}, {result['model']} shape, random weights, {result['device']['date']}."


SERVING = {
    "serving-h200.json": "",
    "serving-2xh200.json": ", 2 GPUs",
    "serving-llama3-8b-h200.json": ", Llama 3 8B",
    "serving-gpt-oss-20b-h200.json": ", gpt-oss 20B in bfloat16",
    "serving-gpt-oss-20b-fp8-h200.json": ", gpt-oss 20B with FP8 KV",
    "serving-qwen3-30b-a3b-h200.json": ", Qwen3-30B-A3B",
}
"""Results of serving.py, and what sets them apart."""


def served() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Each workload with the records of all backends."""
    for name, what in SERVING.items():
        records = load(name)["records"]
        for workload, rate in dict.fromkeys((record["workload"], record["rate"]) for record in records):
            title = f"`{workload}`{f', {rate:g}/s' if rate else ''}{what}"
            yield title, [record for record in records if (record["workload"], record["rate"]) == (workload, rate)]


def with_device(serving_table: str) -> str:
    result = load("serving-h200.json")
    device = result["device"]
    dates = {what: load(name)["device"]["date"] for name, what in SERVING.items()}
    others = "".join(f"; {what.removeprefix(', ')}: {date}" for what, date in dates.items() if date != device["date"])
    return f"{serving_table}\n\n{device['name']}, {result['model']} shape where none is named, random weights, {device['date']}{others}."


def serving() -> str:
    """A line for each workload."""
    backends = {"pat": "PAT", **{name: RIVALS[name] for name in ("flashinfer", "fa3", "triton")}}
    rows = []
    for title, group in served():
        by_backend = {record["backend"]: record for record in group}
        ours = by_backend.pop("pat")
        best = {name: min(record[name] for record in by_backend.values()) for name in ("median_itl_ms", "mean_tpot_ms")}
        records = {"pat": ours, **by_backend}
        measured = [
            bold({name: records[name][what] if name in records else None for name in backends}, text)
            for what, text in (("median_itl_ms", "{:.1f}".format), ("mean_tpot_ms", "{:.0f}".format))
        ]
        rows.append(
            [
                title, *(f"{itl} / {tpot}" if itl else "" for itl, tpot in zip(*measured, strict=True)),
                f"{best['median_itl_ms'] / ours['median_itl_ms']:.2f} / {best['mean_tpot_ms'] / ours['mean_tpot_ms']:.2f}{TIMES}",
                f"{ours['output_tps']:,.0f}", f"{max(record['output_tps'] for record in by_backend.values()):,.0f}",
            ]
        )  # fmt: skip
    return with_device(
        table(["workload", *backends.values(), "best other / PAT", "PAT, tokens/s", "best other, tokens/s"], rows)
    )


def serving_records() -> str:
    """A line for each record."""
    rows = []
    for title, group in served():
        pat = next(record["mean_tpot_ms"] for record in group if record["backend"] == "pat")
        for record in group:
            steps = record["step_ms"]
            rows.append(
                [
                    title, record["backend"], f"{steps[0]:.1f} to {steps[-1]:.1f}" if steps else "",
                    f"{record['median_itl_ms']:.1f}", f"{record['mean_tpot_ms']:.1f}",
                    "" if record["backend"] == "pat" else f"{record['mean_tpot_ms'] / pat:.2f}{TIMES}",
                    f"{record['p99_tpot_ms']:,.0f}", f"{record['mean_ttft_ms']:,.0f}", f"{record['output_tps']:,.0f}",
                ]
            )  # fmt: skip
    head = [
        "workload", "backend", "decode step, ms", "median ITL, ms", "mean TPOT, ms", "to PAT's", "P99 TPOT, ms",
        "mean TTFT, ms", "output tokens/s",
    ]  # fmt: skip
    return with_device(table(head, rows))


def batch() -> str:
    """Requests a second of a job, a line for each shape and pool."""
    result = load("batch-h200.json")
    jobs: dict[tuple[str, int, int], dict[tuple[str, str, bool], dict[str, float]]] = {}
    shares: dict[tuple[str, int, int], dict[str, Any]] = {}
    for record in result["records"]:
        job = record["shape"], record["degree"], record["pool"]
        setting = record["backend"], record["policy"], record["defer"]
        order = "batch" if record["batch"] else record["order"]
        jobs.setdefault(job, {}).setdefault(setting, {})[order] = record["requests_per_s"]
        if record["batch"] and record["defer"]:
            shares[job] = record
    settings = list(dict.fromkeys(setting for rates in jobs.values() for setting in rates))
    rows = []
    for job, rates in jobs.items():
        shape, degree, pool = job
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
            [f"{shape}, {degree}", f"{pool:,}", first, *pairs, f"{ours['batch'] / best:.2f}{TIMES}",
             f"{saved['prefill_saved'] / saved['saved_at_most']:.1%}"]
        )  # fmt: skip
    names = [
        f"{backend} {policy}{'' if defer or backend != 'pat' else ', nobody waits'}"
        for backend, policy, defer in settings
    ]
    head = ["shared/own tokens, by", "pool", "`batch`", *names, "`batch` / best other", "prefill saved, of what can be"]
    some = result["records"][0]
    return (
        f"{table(head, rows)}\n\n{result['device']['name']}, {result['model']} shape, random weights, {some['requests']} requests, answers of "
        f"{some['answer']} tokens, {result['device']['date']}. Requests a second; two numbers are of the sorted and the shuffled file."
    )


def soak() -> str:
    result = load("soak-h200.json")
    record = result["records"][0]
    counters = record["counters"]
    return (
        f"{record['requests']:,} requests, as many as a conversation trace has in {record['minutes']} minutes (prompts of a "
        f"{record['divide_prompt']}th of their length, answers of a {record['divide_answer']}th), at full load on one "
        f"{result['device']['name']} with a pool of {record['pool']:,} tokens: {record['finished']:,} got all of their tokens, "
        f"{record['aborted']} were aborted, {record['retracted']} retracted, the cache was flushed {record['flushed']} times; "
        f"{counters['plans']:,} plans for {counters['steps']:,} steps, {counters['fallbacks']} fall-backs, "
        f"{counters['faults']} faults, no NaN; {record['same_probes']} of {record['probes']} prompts got the same answers before "
        f"and after. {result['device']['date']}, `python benchmarks/soak.py --model MODEL --dummy --trace FILE "
        f"--divide-answer {record['divide_answer']}`.\n\n" + chaos()
    )


def chaos() -> str:
    result = load("chaos-h200.json")
    record = result["records"][0]
    counters = record["counters"]
    return (
        f"{record['seconds']:.0f} seconds of everything at once that the API allows (`tests/chaos`) on one "
        f"{result['device']['name']}, a tiny model: {sum(record['actions'].values()):,} actions of {len(record['actions'])} kinds, "
        f"{sum(record['compared'].values()):,} answers, whole or cut off, compared with those of SGLang's Triton backend, "
        f"{len(record['problems'])} wrong; {counters['fallbacks']} fall-backs, {counters['faults']} faults, {counters['bound']} requests "
        f"left behind. {result['device']['date']}, `python benchmarks/soak.py --model MODEL --chaos {record['chaos']:.0f} --seed {record['seed']}`."
    )


def steps_table(result: dict[str, Any]) -> str:
    records = {(record["cell"], record["backend"]): record for record in result["records"]}
    backends = list(dict.fromkeys(backend for _, backend in records))
    others = [backend for backend in backends if backend != "pat"]
    rows = []
    for cell in dict.fromkeys(cell for cell, _ in records):
        ours = records[cell, "pat"]
        best = min(records[cell, backend]["step_ms"] for backend in others)
        rows.append(
            [
                f"`{cell}`", *bold({backend: records[cell, backend]["step_ms"] for backend in ("pat", *others)}, "{:.2f}".format),
                f"{best / ours['step_ms']:.3f}{TIMES}", f"{ours['metadata_us']:.0f}", f"{ours['metadata_changed_us']:.0f}",
                *(f"{records[cell, backend]['metadata_us']:.0f}" for backend in others),
            ]
        )  # fmt: skip
    head = [
        "batch x context", "PAT, ms", *(f"{backend}, ms" for backend in others), "best / PAT", "metadata, us", "new plan, us",
        *(f"{backend}'s, us" for backend in others),
    ]  # fmt: skip
    return table(head, rows)


def steps() -> str:
    result = load("steps-h200.json")
    device, profiled = result["device"], [record for record in result["records"] if "kernels" in record]
    cell = profiled[-1]["cell"]
    launches = {record["backend"]: sum(record["kernels"].values()) for record in profiled if record["cell"] == cell}
    return (
        f"{steps_table(result)}\n\n{device['name']}, {result['model']} shape, random weights, torch {device['torch']}, {device['date']}. "
        f"Kernels and copies of a step in a steady state, `{cell}`: "
        + ", ".join(f"{backend} {count}" for backend, count in launches.items())
        + "; of PAT's own there are forward and merge once a layer, nothing else.\n\n"
        "Batches that do not fit one H200's pool, with two of the model's 36 layers:\n\n"
        f"{steps_table(load('steps-2-layers-h200.json'))}\n\n{agreement(result)}"
    )


def agreement(result: dict[str, Any]) -> str:
    pairs = [
        f"{' and '.join(row['backends'])} {row['tokens']:.1%} of the tokens, logits at most {row['max_logit_difference']:.2f} apart"
        for row in result["agreement"]
    ]
    return (
        f"Greedy answers to the same prompts agree up to the first token that differs ({result['agreement_date']}; random weights "
        f"tell rounding apart far more than trained ones): {'; '.join(pairs)}. Logits have a standard deviation of "
        f"{result['agreement'][0]['logit_std']:.1f}."
    )


def where(record: dict[str, Any]) -> str:
    """What a CPU's numbers were measured on."""
    versions = ", ".join(f"{name} {record[name]}" for name in ("python", "torch", "sglang") if name in record)
    return f"{record['machine']}, {versions}, {record['date']}."


def cpu() -> str:
    records = load("cpu_decode.json")
    rows = [
        [
            f"{r['batch']}", f"{r['shared']:,}", f"{r['private']:,}", f"{r['torch_native_ms']:,.1f} ms",
            f"{r['pat_ms']:,.1f} ms", f"{r['torch_native_ms'] / r['pat_ms']:.1f}{TIMES}",
        ]
        for r in records
    ]  # fmt: skip
    head = ["batch", "shared tokens", "private tokens", "`torch_native`", "PAT", "ratio"]
    return f"{table(head, rows)}\n\n{where(records[0])}"


def cpu_extend() -> str:
    records = load("cpu_extend.json")
    rows = [
        [
            f"{r['requests']}", f"{r['shared']:,}", f"{r['new']:,}", f"{r['torch_native_ms']:,.1f} ms", f"{r['pat_ms']:,.1f} ms",
            f"{r['torch_native_ms'] / r['pat_ms']:.1f}{TIMES}",
        ]
        for r in records
    ]  # fmt: skip
    head = ["requests", "cached, shared by all", "new tokens of each", "`torch_native`", "PAT", "ratio"]
    return f"{table(head, rows)}\n\n{where(records[0])}"


CASES = {
    "scratch": "a plan from scratch",
    "join": "one request joins, plan made at once",
    "ahead": "one request joins, plan made ahead by the planning thread",
    "leave": "one request leaves",
    "outgrown": "tails have grown: the same batch again",
    "unchanged": "nothing has changed",
    "event": "one radix-tree event",
    "trace plan": "recording a plan (`SGLANG_PAT_TRACE`)",
    "trace event": "recording an event",
}


def planning() -> str:
    records = {
        r["case"]: r for r in load("packing.json") if r["tree"] == "paper's deepest" and r["policy"] == "optimal"
    }
    rows = []
    for case, what in CASES.items():
        record = records[case]
        rebuild = record["rebuild_us"]
        beside = f"{rebuild:,.0f} us, {rebuild / record['us']:.1f}{TIMES}" if rebuild else ""
        rows.append([what, f"{record['us']:,.1f}", beside])
    some = records["scratch"]
    note = f"{some['batch']:,} requests, {some['nodes']:,} nodes on {some['depth'] + 1} levels. {where(some)}"
    return f"{table(['', 'us', 'rebuild from block tables'], rows)}\n\n{note}"


SHOWN_TREES = (
    "1,10_4096,416", "1,1024_2048,32", "1,4,8,256_32,256,256,32", "1,4,16,512_1024,256,128,32",
    "1,8,16,32,64,256,1024_256,128,64,32,32,32,32",
)  # fmt: skip


def packing() -> str:
    records = load("policies.json")
    plans = {(r["workload"], r["policy"]): r for r in records if "policy" in r}
    spans = {r["workload"]: r for r in records if "policy" not in r}
    rows = []
    for workload in dict.fromkeys(workload for workload, _ in plans):
        tree = workload.removeprefix("paper ")
        if tree != workload and tree not in SHOWN_TREES:
            continue
        numbers = [f"{plans[workload, policy]['plan']:.2f}" for policy in POLICIES]
        span = spans.get(workload)
        last = f"{span['bins_mean']:.3f} ({span['paper_mean']:.3f})" if span else ""
        batches = plans[workload, "query"]["batches"]
        rows.append([f"`{tree}`" if tree != workload else f"{workload}, {batches} batches", *numbers, last])
    head = [
        "batch",
        "one query per CTA",
        *(f"`{policy}`" for policy in POLICIES if policy != "query"),
        "last SM (paper's split)",
    ]
    return f"{table(head, rows)}\n\n{where(records[0])}"


def estimates() -> str:
    result = load("estimate-h200.json")
    rows = [
        [f"`{row['workload']}`", row["backend"], f"{row['measured_ms']:.1f}", f"{row['predicted_ms']:.1f}"]
        for row in result["steps"]
    ]
    off = [
        f"{found[backend]['error']['median']:.0%} off in the median and {found[backend]['error']['most']:.0%} at most"
        for found in (result, result["fp8"])
        for backend in ("pat", "flashinfer")
    ]
    return (
        f"On the cases of the kernels' benchmark the estimate of PAT's attention is {off[0]}, FlashInfer's {off[1]}; with an FP8 cache "
        f"{off[2]}, and FlashInfer's {off[3]}. Decode steps of the serving benchmark, half way through the answers:\n\n"
        + table(["workload", "backend", "measured, ms", "estimated, ms"], rows)
    )


PAGES = {
    "README.md": ("serving",),
    "docs/measured.md": (
        "serving_records",
        "steps",
        "soak",
        "kernels",
        "kernels_fp8",
        "verify",
        "serving_verify",
        "serving_mixed",
        "kernels_low_bit",
        "steps_low_bit",
        "batch",
        "ablations",
        "cpu",
        "cpu_extend",
        "planning",
        "packing",
    ),
}
"""Which tables stand where."""
SECTIONS: dict[str, Callable[[], str]] = {
    "kernels": kernel_tables.kernels, "kernels_fp8": kernel_tables.kernels_fp8, "kernels_low_bit": kernel_tables.kernels_low_bit,
    "steps_low_bit": kernel_tables.steps_low_bit,
    "verify": kernel_tables.verify, "ablations": kernel_tables.ablations, "serving": serving, "serving_records": serving_records,
    "serving_verify": serving_verify, "serving_mixed": serving_mixed, "batch": batch, "steps": steps, "soak": soak, "cpu": cpu,
    "cpu_extend": cpu_extend, "planning": planning, "packing": packing, "estimates": estimates,
}  # fmt: skip


def main() -> None:
    for page, names in PAGES.items():
        text = old = (ROOT / page).read_text()
        for name in names:
            begin, end = f"<!-- {name} -->\n", f"<!-- end {name} -->"
            before, _, rest = text.partition(begin)
            _, found, after = rest.partition(end)
            if not found:
                raise SystemExit(f"{page} has no section {name}")
            text = before + begin + SECTIONS[name]() + "\n" + end + after
        if "--check" not in sys.argv[1:]:
            (ROOT / page).write_text(text)
        elif text != old:
            raise SystemExit(f"{page}: run python benchmarks/report.py")


if __name__ == "__main__":
    main()
