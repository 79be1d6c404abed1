"""Tables of attention alone, from what `kernels.py` and `low_bit_kernels.py` left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tables import NAMES, RIVALS, SHOWN, TIMES, bold, load, mean, table


def advantage(record: dict[str, Any]) -> float:
    """Of PAT over the best of the others."""
    return min(record["rivals"].values()) / record["pat_us"]


def over_bf16(record: dict[str, Any]) -> float:
    """How many times as fast PAT is with KV of 8 bits as with 16."""
    return record["bf16_us"] / record["pat_us"]


def tree_rows(
    records: list[dict[str, Any]], rivals: Iterable[str], before: Callable[[dict[str, Any]], list[str]], after: Callable[[dict[str, Any]], list[str]]
) -> list[list[str]]:  # fmt: skip
    """A row for each tree with SHOWN heads: its name, cells `before`, the times of PAT and its rivals, the best over PAT, cells `after`."""
    rows = []
    for record in records:
        if record["heads"] == SHOWN and record["page_size"] == 1:
            times = {"pat": record["pat_us"], **{name: record["rivals"].get(name) for name in rivals}}
            cells = bold(times, lambda us: f"{us:,.1f}")
            best = f"{advantage(record):.2f}{TIMES}"
            rows.append([f"`{record['tree']}`", *before(record), *cells, best, *after(record)])
    return rows


def kernels() -> str:
    return kernels_of("kernels-h200.json")


def kernels_h100() -> str:
    return kernels_of("kernels-h100.json")


def kernels_of(name: str) -> str:
    """The trees beside their floor and all rivals."""
    result = load(name)
    records = result["records"]
    rows = tree_rows(records, RIVALS, lambda record: [f"{record['floor_us']:,.1f}"], lambda record: [])
    ratios = [advantage(record) for record in records]
    shared = [advantage(record) for record in records if not record["tree"].startswith("256_")]
    device = result["device"]
    note = (
        f"*{device['name']} ({device['read_tbps']} TB/s read), torch {device['torch']}, {device['date']}.* Of all "
        f"{len(records)} cases (20 trees {TIMES} 32/32, 16/8, 32/8, 64/8 heads {TIMES} page sizes 1 and 32) PAT is ahead in "
        f"{sum(ratio > 1 for ratio in ratios)}. It is {min(ratios):.2f} to {max(ratios):.2f} times as fast as the best of the others, "
        f"on average {mean(shared):.2f} times where anything is shared."
    )
    head = ["tree", "floor, us", "PAT", *RIVALS.values(), "best other / PAT"]
    return f"{table(head, rows)}\n\n{note}"


LATENTS = {"fa3": "FA3", "flashinfer": "FlashInfer", "flashmla": "FlashMLA"}


def latents() -> str:
    """MLA with pages of 64, which all rivals have: one table for KV of 16 and of 8 bits."""
    result = load("mla-h200.json")
    tables = []
    for kv, title in (("bfloat16", "16 bits"), ("fp8_e4m3", "8 bits")):
        rows = []
        for record in result["records"]:
            if (record["kv"], record["page_size"], record["tokens"]) == (kv, 64, 1):
                times = {"pat": record["pat_us"], **{name: record["rivals"].get(name) for name in LATENTS}}
                cells = bold(times, lambda us: f"{us:,.1f}")
                rows.append(
                    [record["tree"], f"{record['heads']}", f"{record['floor_us']:,.1f}", *cells, f"{advantage(record):.2f}{TIMES}"]
                )  # fmt: skip
        rows.sort(key=lambda row: (int(row[1]), row[0]))
        tables.append(table([f"{title}, us", "heads", "floor", "PAT", *LATENTS.values(), "best other / PAT"], rows))
    device = result["device"]
    return "\n\n".join(
        [*tables, f"*{device['name']} ({device['read_tbps']} TB/s read), torch {device['torch']}, {device['date']}.*"]
    )


def deterministic() -> str:
    """Decode with the same bits in any batch: the shown heads, and how all do."""
    result = load("deterministic-h200.json")
    records, rows = result["records"], []
    for record in records:
        if record["heads"] == SHOWN:
            times = {"pat": record["pat_us"], **record["rivals"]}
            cells = bold({name: times[name] for name in ("pat", "fa3", "triton")}, lambda us: f"{us:,.1f}")
            rows.append([f"`{record['tree']}`", f"{record['free_us']:,.1f}", *cells, f"{advantage(record):.2f}{TIMES}"])
    said = []
    for shared, what in ((True, "Where anything is shared"), (False, "Where nothing is")):
        some = [record for record in records if record["shared"] == shared]
        ratios = [advantage(record) for record in some]
        costs = [record["pat_us"] / record["free_us"] for record in some]
        said.append(
            f"{what}, PAT is ahead of the others in this mode in {sum(ratio > 1 for ratio in ratios)} of {len(some)} cases, {min(ratios):.2f} to "
            f"{max(ratios):.2f} times as fast as the better one, and takes {mean(costs):.2f} times as long as without the promise"
        )
    device = result["device"]
    head = ["tree, us", "PAT without the promise", "PAT", "FA3", "SGLang's Triton", "best other / PAT"]
    return f"{table(head, rows)}\n\n*{device['name']}, torch {device['torch']}, {device['date']}.* {'. '.join(said)}."


def kernels_dim256() -> str:
    """Heads of more than 128 dimensions: how all cases of a kind do."""
    result = load("kernels-dim256-h200.json")
    kinds: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for record in result["records"]:
        dims = f"{record['dim']}" if record["dim"] == record["v_dim"] else f"{record['dim']}/{record['v_dim']}"
        kinds.setdefault((record["kv"], f"{record['heads']} of {dims}", record["tokens"]), []).append(record)
    rows = []
    for (kv, heads, tokens), records in sorted(kinds.items(), key=lambda kind: kind[0][0] != "bfloat16"):
        cells = []
        for shared in (True, False):
            ratios = [advantage(one) for one in records if ("," in one["tree"]) == shared]
            cells += [
                f"{mean(ratios):.2f}",
                f"{min(ratios):.2f}",
                f"{sum(ratio >= 0.99 for ratio in ratios)} of {len(ratios)}",
            ]
        rows.append([kv, heads, f"{tokens}", *cells])
    device = result["device"]
    head = ["KV", "heads", "tokens"]
    for what in ("shared", "not shared"):
        head += [f"{what}: mean", "least", "at least 0.99"]
    return f"{table(head, rows)}\n\n*{device['name']} ({device['read_tbps']} TB/s read), torch {device['torch']}, {device['date']}.* Best other / PAT."


def larger_behind() -> str:
    ratios = [advantage(one) for one in load("kernels-dim256-h200.json")["records"] if "," not in one["tree"]]
    return (
        f"Heads of 256 and 192/128 dimensions that share nothing: PAT's kernel has less than 0.99 of the best other's speed in {sum(ratio < 0.99 for ratio in ratios)} "
        f"of {len(ratios)} cases, {min(ratios):.2f} at least."
    )


def kernels_fp8() -> str:
    result = load("kernels-fp8-h200.json")
    records = result["records"]
    rows = tree_rows(
        records, ("flashinfer", "fa3"), lambda record: [], lambda record: [f"{over_bf16(record):.2f}{TIMES}"]
    )  # fmt: skip
    ratios = [advantage(record) for record in records]
    device = result["device"]
    dates = sorted({record["date"] for record in records if "date" in record})
    against_bf16 = [over_bf16(record) for record in records]
    note = (
        f"*{device['name']}, torch {device['torch']}, {device['date']}.* Of all {len(ratios)} cases (20 trees {TIMES} 32/32, 16/8, 32/8, 64/8 heads, "
        f"and unshared batches with 32/8 and 64/8{''.join(f', of {date}' for date in dates)}) PAT is ahead in {sum(ratio > 1 for ratio in ratios)}, "
        f"{min(ratios):.2f} to {max(ratios):.2f} times as fast as the best of the others. It is {min(against_bf16):.2f} to {max(against_bf16):.2f} times as "
        f"fast as with a bf16 cache, slower in {sum(ratio < 1 for ratio in against_bf16)}. Errors against float64 on what the cache holds: PAT's at most "
        f"{max(record['pat_error'] for record in records):.1e}, FlashInfer's {worst(result, 'flashinfer'):.1e}, FA3's "
        f"{worst(result, 'fa3'):.1e} (it rounds Q to 8 bits too)."
    )
    return f"{table(['tree, us', 'PAT', 'FlashInfer', 'FA3', 'best other / PAT', 'PAT with a bf16 cache / PAT'], rows)}\n\n{note}"


def kernels_low_bit() -> str:
    return low_bit_of("kernels-lowbit-h200.json")


def kernels_low_bit_h100() -> str:
    """With the paper's trees, and what other heads come to."""
    by_heads: dict[str, list[float]] = {}
    for record in load("kernels-lowbit-h100.json")["records"]:
        if record["bits"] == 4 and record["heads"] != SHOWN:
            by_heads.setdefault(record["heads"], []).append(record["own_us"]["fp8"] / record["pat_tail_us"])
    others = "; ".join(
        f"{heads}: {min(ratios):.2f} to {max(ratios):.2f}, {mean(ratios):.2f} on average" for heads, ratios in by_heads.items()
    )  # fmt: skip
    return (
        f"{low_bit_of('kernels-lowbit-h100.json')} FP8 / 4 bits over the paper's 20 trees with other heads: {others}."
    )


def low_bit_of(name: str) -> str:
    """Trees with SHOWN heads."""
    result = load(name)
    cases: dict[str, dict[int, dict[str, Any]]] = {}
    for record in result["records"]:
        if record["heads"] != SHOWN:
            continue
        cases.setdefault(f"`{record['tree']}`", {})[record["bits"]] = record
    rows = []
    for tree, by_bits in cases.items():
        four, two = by_bits[4], by_bits[2]
        theirs = {
            form: min(us for name, us in four["rivals"].items() if name.endswith(form)) for form in ("bf16", "fp8")
        }
        times = {
            "4": four["pat_tail_us"],
            "2": two["pat_tail_us"],
            "fp8": four["own_us"]["fp8"],
            "bf16": four["own_us"]["bf16"],
        }
        rows.append(
            [tree, *bold({**times, **{f"their {form}": us for form, us in theirs.items()}}, lambda us: f"{us:,.1f}"),
             f"{times['fp8'] / times['4']:.2f}{TIMES}", f"{times['bf16'] / times['4']:.2f}{TIMES}", f"{four['store_us']:.1f}"]
        )  # fmt: skip
    device = result["device"]
    errors = {bits: max(case[bits]["pat_error"] for case in cases.values()) for bits in (4, 2)}
    note = (
        f"{device['name']}, torch {device['torch']}, {device['date']}, {SHOWN} heads, pages of 64 tokens, cold L2. Errors against float64 on what "
        f"the pages hold: at most {errors[4]:.1e} with 4 bits, {errors[2]:.1e} with 2."
    )
    head = [
        "tree, us", "4 bits", "2 bits", "PAT, fp8", "PAT, bf16", "best other, bf16", "best other, fp8", "fp8 / 4 bits", "bf16 / 4 bits",
        "store of a token each",
    ]  # fmt: skip
    return f"{table(head, rows)}\n\n{note}"


def steps_low_bit() -> str:
    """Steps of the model runner with each format of KV."""
    result = load("steps-lowbit-h200.json")
    cells: dict[str, dict[str, float]] = {}
    for record in result["records"]:
        cells.setdefault(record["cell"], {})[record["kv"]] = record["step_ms"]
    rows = [
        [f"`{cell}`", *bold({form: times[form] for form in ("int4", "int2", "fp8_e4m3")}, "{:.2f}".format),
         *(f"{times['fp8_e4m3'] / times[form]:.2f}{TIMES}" for form in ("int4", "int2"))]
        for cell, times in cells.items()
    ]  # fmt: skip
    head = ["batch x context, ms", "4 bits", "2 bits", "fp8", "fp8 / 4 bits", "fp8 / 2 bits"]
    device = result["device"]
    return f"{table(head, rows)}\n\n{device['name']}, {result['model']} shape, random weights, PAT with each, {device['date']}."


def steps_extend() -> str:
    """Extends of a few new tokens in the model runner."""
    result = load("steps-extend-h200.json")
    cells: dict[tuple[str, int], dict[str, float]] = {}
    for record in result["records"]:
        cells.setdefault((record["cell"], record["new"]), {})[record["backend"]] = record["step_ms"]
    backends = list(dict.fromkeys(record["backend"] for record in result["records"]))
    rows = [
        [f"`{cell}`", f"{new}", *bold(times, "{:.1f}".format),
         f"{min(ms for name, ms in times.items() if name != 'pat') / times['pat']:.2f}{TIMES}"]
        for (cell, new), times in cells.items()
    ]  # fmt: skip
    head = ["requests", "new tokens of each", *(f"{NAMES[name]}, ms" for name in backends), "best other / PAT"]
    device = result["device"]
    return f"{table(head, rows)}\n\n{device['name']}, {result['model']} shape, random weights, {device['date']}."


VERIFY_HEAD = ["shared", "rows", "tokens of a draft, heads", "PAT ahead in", "FA3 / PAT", "mean"]


def verify() -> str:
    return verify_of("verify-h200.json")


def verify_h100() -> str:
    return verify_of("verify-h100.json")


def verify_of(name: str) -> str:
    """Verify steps by the rows that a KV head has of each request: its query heads, once for each token of a draft."""
    result = load(name)
    rows = [cells for cells, _ in by_rows(result)]
    device = result["device"]
    note = (
        f"{device['name']}, torch {device['torch']}, {device['date']}, page size 1, cold L2: {len(result['records'])} cases, 20 trees "
        f"{TIMES} 32/32, 16/8, 32/8, 64/8 heads {TIMES} 2, 4, 8 tokens, and unshared batches, beside FA3. Errors against float64: PAT's at "
        f"most {max(record['pat_error'] for record in result['records']):.1e}, FA3's {worst(result, 'fa3'):.1e}."
    )
    return f"{table(VERIFY_HEAD, rows)}\n\n{note}"


def verify_fp8() -> str:
    """The same for an FP8 cache: two heads, two drafts, and what a cache of 16 bits takes."""
    result = load("verify-fp8-h200.json")
    rows = []
    for cells, records in by_rows(result):
        against_bf16 = [over_bf16(record) for record in records]
        rows.append([*cells, f"{min(against_bf16):.2f} to {max(against_bf16):.2f}{TIMES}"])
    device = result["device"]
    note = (
        f"{device['name']}, torch {device['torch']}, {device['date']}, page size 1, cold L2. Errors against float64 on what the cache holds: PAT's at "
        f"most {max(record['pat_error'] for record in result['records']):.1e}, FA3's {worst(result, 'fa3'):.1e} (it rounds Q to 8 bits too)."
    )
    return f"{table([*VERIFY_HEAD, 'PAT with a bf16 cache / PAT'], rows)}\n\n{note}"


def by_rows(result: dict[str, Any]) -> Iterator[tuple[list[str], list[dict[str, Any]]]]:
    """A row of such a table (VERIFY_HEAD), and its records."""
    groups: dict[tuple[bool, int], list[dict[str, Any]]] = {}
    for record in result["records"]:
        groups.setdefault(("," not in record["tree"], rows_of(record)), []).append(record)
    for (unshared, size), records in sorted(groups.items()):
        ratios = [advantage(record) for record in records]
        cases = ", ".join(dict.fromkeys(f"{record['tokens']} with {record['heads']}" for record in records))
        yield (
            ["nothing" if unshared else "prefixes", str(size), cases, f"{sum(ratio > 1 for ratio in ratios)} of {len(ratios)}",
             f"{min(ratios):.2f} to {max(ratios):.2f}{TIMES}", f"{mean(ratios):.2f}{TIMES}"],
            records,
        )  # fmt: skip


def rows_of(record: dict[str, Any]) -> int:
    """Rows of a KV head that a request's draft has."""
    heads, kv_heads = map(int, record["heads"].split("/"))
    return heads // kv_heads * record["tokens"]


def drafts_behind() -> list[str]:
    """Where FA3's kernel verifies drafts faster on an H200: with nothing shared, with the most rows, and over KV of 8 bits."""
    records, fp8 = load("verify-h200.json")["records"], load("verify-fp8-h200.json")["records"]
    unshared = [advantage(record) for record in records if "," not in record["tree"]]
    longest = [advantage(record) for record in records if "," in record["tree"] and rows_of(record) == 64]
    over_fp8 = [record for record in fp8 if rows_of(record) > 16]
    ratios = [advantage(record) for record in over_fp8]
    bf16_faster = sum(over_bf16(record) < 1 for record in over_fp8)
    return [
        f"Drafts that share nothing: FA3's kernel takes up to {100 - 100 * min(unshared):.0f} % less time on an H200. It is ahead in {sum(ratio < 1 for ratio in unshared)} of {len(unshared)} "
        f"cases; on average PAT is {100 * mean(unshared) - 100:.1f} % faster.",
        f"Drafts of 8 tokens with 64/8 heads behind shared prefixes: FA3's kernel is ahead in {sum(ratio < 1 for ratio in longest)} of {len(longest)} cases.",
        f"Drafts of more than 4 tokens with 32/8 heads (2 with 64/8) and FP8 KV: FA3's kernel is ahead in {sum(ratio < 1 for ratio in ratios)} of {len(ratios)} "
        f"cases, and takes {100 - 100 * min(ratios):.0f} % less time there. In {bf16_faster} of them PAT is faster with KV of 16 bits.",
    ]


def fp8_behind() -> str:
    """Where decode steps are slower over KV of 8 bits."""
    records = load("kernels-fp8-h200.json")["records"]
    slower = sum(over_bf16(record) < 1 for record in records)
    return f"FP8 KV without drafts: PAT's kernel is slower than with KV of 16 bits in {slower} of {len(records)} cases. It is ahead of the others in all."


def verify_rivals() -> str:
    """Verify steps beside all others, by rows and by what is shared."""
    result = load("verify-rivals-h200.json")
    groups: dict[tuple[bool, str, int], list[dict[str, Any]]] = {}
    for record in result["records"]:
        groups.setdefault(("," not in record["tree"], record["heads"], record["tokens"]), []).append(record)
    rivals, rows = ("fa3", "flashinfer", "triton"), []
    for (unshared, heads, tokens), records in sorted(groups.items()):
        cells = ["nothing" if unshared else "prefixes", f"{tokens} with {heads}"]
        for rival in rivals:
            ratios = [record["rivals"][rival] / record["pat_us"] for record in records if rival in record["rivals"]]
            cells += [f"{min(ratios):.2f} to {max(ratios):.2f}{TIMES}", f"{len(ratios)}"]
        rows.append(cells)
    head = ["shared", "tokens of a draft, heads"]
    for rival in rivals:
        head += [f"{RIVALS[rival]} / PAT", "cases"]
    device = result["device"]
    return f"{table(head, rows)}\n\n{device['name']}, {device['date']}; where FlashInfer is missing, its plan did not fit its workspace."


def worst(result: dict[str, Any], rival: str) -> float:
    """The greatest error that a rival made."""
    return max(record["rival_errors"][rival] for record in result["records"] if rival in record["rival_errors"])


def ablations() -> str:
    result = load("kernel-ablations-h200.json")
    names = list(result["records"][0]["us"])
    rows = [[f"`{row['tree']}`", *bold(row["us"], "{:,.0f}".format)] for row in result["records"]]
    device = result["device"]
    return (
        f"{table(['tree, us', *names], rows)}\n\n{device['name']}, {SHOWN} heads, page size 1, cold L2, {device['date']}: kernels of that day, "
        "to be compared within this table only."
    )


def errors() -> str:
    """The greatest error of each kernel, over all cases of a benchmark."""
    rows = []
    for what, names in ERRORS.items():
        results = [load(name) for name in names]
        records = [record for result in results for record in result["records"]]
        ours = max(record["pat_error"] for record in records)
        others = [
            max((worst(result, rival) for result in results if any(rival in record["rival_errors"] for record in result["records"])), default=None)
            for rival in ("fa3", "flashinfer", "triton")
        ]  # fmt: skip
        rows.append([what, f"{len(records)}", f"{ours:.4f}", *(f"{error:.4f}" if error else "" for error in others)])
    return table(["greatest relative error", "cases", "PAT", "FA3", "FlashInfer", "SGLang's Triton"], rows)


ERRORS = {
    "decode, bfloat16": ("kernels-h200.json", "kernels-h100.json"),
    "drafts of 2, 4, 8 tokens, bfloat16": ("verify-h200.json", "verify-h100.json"),
    "decode, FP8 KV": ("kernels-fp8-h200.json",),
    "drafts of 4 and 8 tokens, FP8 KV": ("verify-fp8-h200.json",),
}
"""What the kernels' benchmarks compared with float64, by result."""
