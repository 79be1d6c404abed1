"""Makes tables of the JSON that the benchmarks left, and writes them into the README and the pages of docs that PAGES names: `python benchmarks/report.py`.

A row's best number is bold.

`--check` changes nothing and fails where these have other numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import kernel_tables
import serving_tables
from tables import NAMES, ROOT, TIMES, bold, load, table

from sglang_pat.packing import POLICIES


def soak() -> str:
    result = load("soak-h200.json")
    record = result["records"][0]
    counters = record["counters"]
    return (
        f"{record['requests']:,} requests, as many as a conversation trace has in {record['minutes']} minutes (prompts of a "
        f"{record['divide_prompt']}th of their length, answers of a {record['divide_answer']}th), at full load on one "
        f"{result['device']['name']} with a pool of {record['pool']:,} tokens: {record['finished']:,} got all of their tokens, "
        f"{record['aborted']} were aborted, {record['retracted']} retracted, the cache was flushed {record['flushed']} times; "
        f"{counters['plans']:,} plans for {counters['steps']:,} steps, {counters['fallbacks']} fallbacks, "
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
        f"{len(record['problems'])} wrong; {counters['fallbacks']} fallbacks, {counters['faults']} faults, {counters['bound']} requests "
        f"left behind. {result['device']['date']}, `python benchmarks/soak.py --model MODEL --chaos {record['chaos']:.0f} --seed {record['seed']}`."
    )


def by_cell(result: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Each cell's records, by backend."""
    cells: dict[str, dict[str, dict[str, Any]]] = {}
    for record in result["records"]:
        cells.setdefault(record["cell"], {})[record["backend"]] = record
    return cells


def step_advantage(records: dict[str, dict[str, Any]]) -> float:
    """Of PAT's step over the best of the others in a cell."""
    return min(record["step_ms"] for backend, record in records.items() if backend != "pat") / records["pat"]["step_ms"]


def steps_table(result: dict[str, Any]) -> str:
    cells = by_cell(result)
    others = [backend for backend in next(iter(cells.values())) if backend != "pat"]
    rows = []
    for cell, records in cells.items():
        ours = records["pat"]
        rows.append(
            [
                f"`{cell}`", *bold({backend: records[backend]["step_ms"] for backend in ("pat", *others)}, "{:.2f}".format),
                f"{step_advantage(records):.3f}{TIMES}", f"{ours['metadata_us']:.0f}", f"{ours['metadata_changed_us']:.0f}",
                *(f"{records[backend]['metadata_us']:.0f}" for backend in others),
            ]
        )  # fmt: skip
    head = [
        "batch x context", "PAT, ms", *(f"{NAMES[backend]}, ms" for backend in others), "best other / PAT", "metadata, us", "new plan, us",
        *(f"{NAMES[backend]}'s, us" for backend in others),
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
        + ", ".join(f"{NAMES[backend]} {count}" for backend, count in launches.items())
        + "; of PAT's own there are forward and merge once a layer, nothing else.\n\n"
        "Batches that do not fit one H200's pool, with two of the model's 36 layers:\n\n"
        f"{steps_table(load('steps-2-layers-h200.json'))}"
    )


def behind() -> str:
    """Where PAT brings little or nothing, as far as it was measured anew."""
    ratios = [
        step_advantage(records)
        for name in ("steps-h200.json", "steps-2-layers-h200.json")
        for cell, records in by_cell(load(name)).items()
        if "," not in cell
    ]
    steps = f"Decode steps that share nothing: {min(ratios):.2f} to {max(ratios):.2f} times the speed of the best other backend."
    return "\n".join(
        f"- {line}"
        for line in [steps, kernel_tables.larger_behind(), *kernel_tables.drafts_behind(), kernel_tables.fp8_behind()]
    )


def steps_h100() -> str:
    return steps_of("steps-h100.json")


def steps_verify() -> str:
    return steps_of("steps-verify-h200.json")


def steps_verify_h100() -> str:
    return steps_of("steps-verify-h100.json")


def steps_of(name: str) -> str:
    result = load(name)
    device, tokens = result["device"], result["records"][0]["tokens"]
    drafts = f"drafts of {tokens} tokens, " if tokens > 1 else ""
    return f"{steps_table(result)}\n\n{device['name']}, {result['model']} shape, random weights, {drafts}torch {device['torch']}, {device['date']}."


def agreement() -> str:
    """How far greedy answers of whole models go together."""
    result = load("steps-h200.json")
    rows = [
        [
            " and ".join(NAMES[backend] for backend in row["backends"]),
            f"{row['tokens']:.1%}",
            f"{row['max_logit_difference']:.2f}",
        ]
        for row in result["agreement"]
    ]
    head = ["greedy answers of", "tokens before the first that differs", "logits apart by at most"]
    deviation = result["agreement"][0]["logit_std"]
    return (
        f"{table(head, rows)}\n\n*{result['device']['name']}, {result['model']} shape, random weights, {result['agreement_date']}. "
        f"Logits have a standard deviation of {deviation:.1f}.*"
    )


def trained() -> str:
    """What each backend and KV format makes of trained models."""
    result = load("accuracy-h200.json")
    records: list[dict[str, Any]] = result["records"]
    rows = []
    for record in records:
        alike: dict[str, float | None] = {
            other["backend"]: other["perplexity"]
            for other in records
            if (other["model"], other["kv"]) == (record["model"], record["kv"])
        }
        first = next(other for other in records if other["model"] == record["model"])
        decode = dict(zip(alike, bold(alike, "{:.2f}".format), strict=True))[record["backend"]]
        again = record["again"]
        rows.append([
            record["model"], record["kv"], NAMES[record["backend"]],
            decode if len(alike) > 1 else decode.strip("*"), f"{record['prefill_perplexity']:.2f}",
            "" if record is first else f"{record['answers_equal']} ({record['largest_lead_where_they_part']:.2f})",
            f"{again['answers_equal']} ({again['largest_lead_where_they_part']:.2f})",
            f"{record['kv_read']:.2f}" if "kv_read" in record else "",
        ])  # fmt: skip
    heads = [
        "model",
        "KV",
        "backend",
        "perplexity of decode",
        "of prefill",
        "answers equal to FA3's",
        "to its own, run again",
        "KV read",
    ]
    device, tokens, answers = result["device"], records[0]["tokens"], records[0]["answers"]
    return (
        f"{table(heads, rows)}\n\n*{device['name']}, SGLang {device['sglang']}, {device['date']}. {tokens:,} decoded tokens; of {answers} answers. In brackets: how much likelier the "
        "other's token was, at most, where they part (log-probabilities). KV read: share of what unpacked steps would read. int2: before its scales were fitted and its "
        "heads rotated.*"
    )


def where(record: dict[str, Any]) -> str:
    """What a CPU's numbers were measured on."""
    versions = ", ".join(f"{name} {record[name]}" for name in ("python", "torch", "sglang") if name in record)
    return f"{record['machine']}, {versions}, {record['date']}."


def beside_torch_native(record: dict[str, Any]) -> list[str]:
    """Two times and their ratio."""
    times = {name: record[f"{name}_ms"] for name in ("torch_native", "pat")}
    return [*bold(times, "{:,.1f}".format), f"{times['torch_native'] / times['pat']:.1f}{TIMES}"]


def cpu() -> str:
    records = load("cpu_decode.json")
    rows = [
        [
            f"{r['batch']}", f"{r['shared']:,}", f"{r['private']:,}", *beside_torch_native(r),
        ]
        for r in records
    ]  # fmt: skip
    head = ["batch", "shared tokens", "own tokens", "`torch_native`, ms", "PAT, ms", "ratio"]
    return f"{table(head, rows)}\n\n{where(records[0])}"


def cpu_extend() -> str:
    records = load("cpu_extend.json")
    rows = [
        [
            f"{r['requests']}", f"{r['shared']:,}", f"{r['new']:,}", *beside_torch_native(r),
        ]
        for r in records
    ]  # fmt: skip
    head = ["requests", "cached, shared by all", "new tokens of each", "`torch_native`, ms", "PAT, ms", "ratio"]
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
        numbers = bold({policy: plans[workload, policy]["plan"] for policy in POLICIES}, "{:.2f}".format)
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
    found = {gpu: load(f"estimate-{gpu}.json") for gpu in ("h200", "h100")}
    backends = ("pat", "fa3", "flashinfer")
    off = []
    for gpu, of in found.items():
        for fit in of["kernels"]:
            what = [gpu.upper(), {128: "", 256: "heads of 256", 576: "latents (MLA)"}[fit["dims"][0]]]
            what += ["FP8 KV" * (fit["bits"] == 8), f"drafts of {fit['tokens']} tokens" * (fit["tokens"] > 1)]
            errors = [fit[one]["error"] if one in fit else None for one in backends]
            cells = ["" if one is None else f"{one['median']:.0%}, {one['most']:.0%}" for one in errors]
            off.append([", ".join(filter(None, what)), *cells])
    rows, served, apart = [], [], []
    for gpu, result in found.items():
        steps: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}
        for row in result["steps"]:
            steps.setdefault((row["file"], row["workload"]), {})[row["backend"]] = (
                row["measured_ms"],
                row["predicted_ms"],
            )
        for (file, workload), cells in steps.items():
            gains = [fa3 / pat for fa3, pat in zip(cells["fa3"], cells["pat"], strict=True)]
            if file.startswith("serving"):
                # Prompts of one file are longer than their workloads' names say.
                name = f"`{workload}`{serving_tables.LONGER * (file == 'serving-h200.json')}"
                times = ["{:.1f}, {:.1f}".format(*cells[one]) for one in backends]
                rows.append([gpu.upper(), name, *times, f"{gains[0]:.1f}{TIMES}, {gains[1]:.1f}{TIMES}"])
                served.append(cells["fa3"][0] / cells["fa3"][1])
            elif "_" not in workload:
                apart.append(gains)
    heads = [NAMES[one] for one in backends]
    (low, about_low), (high, about_high) = (map(end, zip(*apart, strict=True)) for end in (min, max))
    return (
        "Attention of one layer, in the cases of the kernels' benchmark: the estimate's error in the median, and at most:\n\n"
        + table(["", *heads], off)
        + "\n\nDecode steps of served workloads, half way through the answers, in milliseconds: measured, estimated:\n\n"
        + table(["GPU", "workload", *heads, "faster than FA3"], rows)
        + f"\n\nPrompts that are longer have 1.7 times the tokens of their workload's name. FA3's steps took {min(served):.2f} to {max(served):.2f} times the estimate: in a "
        "server its kernels take longer than in their benchmark. So where much is shared, the estimate promises too little. Where nothing is shared, steps of 1 to 256 "
        f"requests in SGLang's model runner were {low:.2f} to {high:.2f} times as fast as FA3's, and the estimate says {about_low:.2f} to {about_high:.2f}."
    )


PAGES = {
    "README.md": ("serving",),
    "docs/measured.md": ("serving", "serving_summary_h100", "behind"),
    "docs/measured-serving.md": (
        "serving_overview", "serving_newest", "serving_h200", "serving_h100", "serving_two_h200", "serving_two_h100", "serving_longer", "serving_models",
        "serving_mixed", "short_extends", "steps_extend",
    ),
    "docs/measured-kernels.md": (
        "steps", "steps_h100", "kernels", "kernels_h100", "kernels_dim256", "latents", "deterministic", "ablations", "planning", "packing", "cpu", "cpu_extend",
    ),
    "docs/measured-drafts.md": (
        "serving_verify", "steps_verify", "steps_verify_h100", "verify", "verify_h100", "verify_rivals", "kernels_fp8", "verify_fp8",
        "steps_low_bit", "kernels_low_bit", "kernels_low_bit_h100",
    ),
    "docs/measured-batches.md": ("batch", "batch_pool"),
    "docs/accuracy.md": ("trained", "errors", "agreement", "soak"),
}  # fmt: skip
"""Which tables stand where, in this order."""
SECTIONS: dict[str, Callable[[], str]] = {
    name: next(getattr(module, name) for module in (kernel_tables, serving_tables, sys.modules[__name__]) if hasattr(module, name))
    for name in [*dict.fromkeys(name for names in PAGES.values() for name in names), "estimates"]
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
