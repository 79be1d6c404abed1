"""Draws docs/packing.svg and docs/step.svg from plans that the scheduler really makes, docs/speed.svg and docs/kernels-h200.svg from
measurements: python docs/picture.py. With --check it only looks whether they are as they would be drawn."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import kernel_tables
import serving_tables

from sglang_pat.packing import CPU_TILES, Batch, CostModel, Node, PackConfig, Plan, WorkItem
from sglang_pat.packing.native import make_plan

COLOURS = [
    "#4c78a8",
    "#f58518",
    "#54a24b",
    "#b279a2",
    "#e45756",
    "#72b7b2",
    "#9d755d",
    "#8a8f98",
    "#d6618f",
    "#7f7f1f",
    "#2a6f6b",
    "#6b4fa0",
]
ROW, SCALE, LEFT = 22, 0.19, 56
"""Pixels: of a request's row, of a token, and left of the first. Narrow enough to be read on a phone."""

# Eight requests: one system prompt, two tool descriptions, eight questions.
BATCH = Batch(
    [2100, 2040, 2160, 1990, 2080, 2230, 2150, 2180],
    [Node(0, 1100, list(range(8)), [Node(1100, 1800, [0, 1, 2, 3]), Node(1100, 1950, [4, 5, 6, 7])])],
)


def rows(plan: Plan, top: int) -> list[str]:
    """A row for each request; what is read together has one colour and one frame."""
    shapes = []
    ordered = sorted(plan.items, key=lambda item: (item.start, min(item.queries)))
    for number, item in enumerate(ordered):
        tokens, queries = length(item), len(item.queries)
        look = f'fill="{COLOURS[number % len(COLOURS)]}"'
        shapes.append(frame(item.start, item.start + tokens, item.queries, top, look))
        if queries > 1:
            x, y = LEFT + (item.start + tokens / 2) * SCALE, top + min(item.queries) * ROW + (queries * ROW - 4) / 2
            shapes.append(f'<text x="{x:.1f}" y="{y - 3:.0f}" class="in">{tokens:,} tokens</text>')
            shapes.append(f'<text x="{x:.1f}" y="{y + 13:.0f}" class="in">read once for {queries}</text>')
    return shapes + request_names(top)


def request_names(top: int) -> list[str]:
    return [
        f'<text x="{LEFT - 8}" y="{top + query * ROW + 14}" class="name">req {query + 1}</text>'
        for query in range(len(BATCH.seq_lens))
    ]


COST = CostModel(32, 8, 128, 128, 2)
STYLE = (
    "text{font-family:sans-serif;font-size:13px;fill:#57606a}.title{font-weight:bold;font-size:15px}"
    ".in{fill:#fff;text-anchor:middle}.name{text-anchor:end;font-size:12px}"
    ".axis{stroke:#57606a}.grid{stroke:#57606a;opacity:.25}"
    "@media(prefers-color-scheme:dark){text{fill:#b1bac4}.in{fill:#fff}.axis,.grid{stroke:#b1bac4}}"
)
"""Nothing behind the shapes: pages are light or dark."""


def draw_packing() -> str:
    """Who reads what, without packing and with it."""
    kinds = {
        "query": ("Without sglang-pat", "each request reads its whole context"),
        "pat": ("With sglang-pat", "each shared part is read once"),
    }
    body, top = [], 52
    read = {policy: plan_of(policy).kv_tokens * COST.token_bytes / 1e6 for policy in kinds}
    for policy, (title, what) in kinds.items():
        less = "" if policy == "query" else f", {read['query'] / read[policy]:.1f} times less"
        body.append(f'<text x="{LEFT}" y="{top - 30}" class="title">{title}: {read[policy]:.1f} MB{less}</text>')
        body.append(f'<text x="{LEFT}" y="{top - 11}">per layer and step: {what}</text>')
        body += rows(plan_of(policy), top)
        top += len(BATCH.seq_lens) * ROW + 68
    return svg(LEFT + max(BATCH.seq_lens) * SCALE + 10, top - 60, STYLE, body)


def plan_of(policy: str) -> Plan:
    return make_plan(BATCH, PackConfig(COST, CPU_TILES, workers=2, policy=policy))


LANE = 26


def draw_step() -> str:
    """A decode step: above who reads what together, below which CTA reads it."""
    plan = make_plan(BATCH, PackConfig(COST, CPU_TILES, workers=4 * COST.runs))
    bins = [plan.items[first:last] for first, last in pairwise(plan.bins)]
    top = 34
    lanes_top = top + len(BATCH.seq_lens) * ROW + 44
    right = LEFT + max(BATCH.seq_lens) * SCALE
    colours: dict[tuple[int, ...], str] = {}
    body = [
        f'<text x="{LEFT}" y="20" class="title">Packs: one colour is read together</text>',
        f'<text x="{right + 12:.0f}" y="20">parts</text>',
        f'<text x="{LEFT}" y="{lanes_top - 14}" class="title">Bins: what each CTA reads, in order</text>',
        *request_names(top),
    ]
    lane_scale = (right - LEFT) / max(sum(length(item) for item in members) for members in bins)
    for lane, members in enumerate(bins):
        y, x = lanes_top + lane * LANE, float(LEFT)
        body.append(f'<text x="{LEFT - 8}" y="{y + 15}" class="name">CTA {lane + 1}</text>')
        for item in members:
            colour = colours.setdefault(tuple(item.queries), COLOURS[len(colours) % len(COLOURS)])
            look, width = f'fill="{colour}"', length(item) * lane_scale
            body.append(frame(item.start, item.start + length(item), item.queries, top, look))
            body.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width - 2:.1f}" height="{LANE - 6}" rx="3" fill="{colour}"/>'
            )
            x += width
    for query, parts in enumerate(plan.num_parts):
        body.append(f'<text x="{right + 24:.0f}" y="{top + query * ROW + 14}">{parts}</text>')
    return svg(right + 56, lanes_top + len(bins) * LANE, STYLE, body)


def draw_speed() -> str:
    """The README's workloads: milliseconds per token with FA3 and with PAT, FA3's bars all as long."""
    found = list(serving_tables.in_readme())
    width, bar, step = 290, 18, 72
    body = ['<text x="8" y="16">Milliseconds per token; bars are scaled to FA3 = 100 %.</text>']
    for number, (name, ours, other) in enumerate(found):
        top = 42 + number * step
        body.append(f'<text x="8" y="{top + 4}" class="workload">{name}</text>')
        for place, (label, record) in enumerate((("FA3", other), ("PAT", ours))):
            y, long = top + 13 + place * (bar + 3), record["mean_tpot_ms"] / other["mean_tpot_ms"] * width
            body.append(f'<text x="40" y="{y + 14}" class="name">{label}</text>')
            body.append(f'<rect x="48" y="{y}" width="{long:.0f}" height="{bar}" rx="2" class="{label}"/>')
            body.append(f'<text x="{54 + long:.0f}" y="{y + 14}">{record["mean_tpot_ms"]:.1f} ms</text>')
    style = STYLE + ".workload{font-weight:bold;font-size:14px}.FA3{fill:#a3a3a3}.PAT{fill:#2563eb}"
    return svg(width + 120, len(found) * step + 30, style, body)


def draw_kernels() -> str:
    """Each tree's time of the best other kernel over PAT's, a dot for each kind of heads; pages of one token, 16 bits."""
    records = [one for one in kernel_tables.load("kernels-h200.json")["records"] if one["page_size"] == 1]
    heads = list(dict.fromkeys(one["heads"] for one in records))
    trees = list(dict.fromkeys(one["tree"] for one in records))
    top, left, step, unit = 62, 12, 40, 52
    most = int(max(map(kernel_tables.advantage, records))) + 1
    bottom = top + len(trees) * step
    body = [f'<text x="{left}" y="18" class="title">How many times as fast as the best of the others</text>']
    for at in range(most + 1):
        x = left + at * unit
        body.append(f'<line x1="{x}" y1="{top - 8}" x2="{x}" y2="{bottom}" class="{"axis" if at == 1 else "grid"}"/>')
        body.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{at}</text>')
    for number, kind in enumerate(heads):
        x = left + 8 + number * 100
        body.append(f'<circle cx="{x}" cy="34" r="5" fill="{COLOURS[number]}"/>')
        body.append(f'<text x="{x + 10}" y="39">{kind} heads</text>')
    for number, tree in enumerate(trees):
        y = top + number * step
        body.append(f'<text x="{left + unit + 6}" y="{y + 10}" class="tree">{tree}</text>')
        for one in records:
            if one["tree"] == tree:
                x = left + kernel_tables.advantage(one) * unit
                body.append(f'<circle cx="{x:.1f}" cy="{y + 24}" r="5" fill="{COLOURS[heads.index(one["heads"])]}"/>')
    return svg(left + most * unit + 12, bottom + 24, STYLE + ".tree{font-size:12px}circle{opacity:.85}", body)


def length(item: WorkItem) -> int:
    """Its tokens now."""
    start, end = item.span(BATCH.seq_lens)
    return end - start


def frame(start: int, end: int, queries: list[int], top: int, look: str) -> str:
    """Tokens [start, end) of requests that are beside each other."""
    x, width = LEFT + start * SCALE, (end - start) * SCALE - 2
    return f'<rect x="{x:.1f}" y="{top + min(queries) * ROW}" width="{width:.1f}" height="{len(queries) * ROW - 4}" rx="3" {look}/>'


def svg(width: float, height: float, style: str, body: list[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}"><style>{style}</style>'
        + "\n".join(body)
        + "</svg>\n"
    )


DRAWN = {"packing": draw_packing, "step": draw_step, "speed": draw_speed, "kernels-h200": draw_kernels}


def main() -> None:
    for name, draw in DRAWN.items():
        path, picture = Path(__file__).parent / f"{name}.svg", draw()
        if "--check" not in sys.argv:
            path.write_text(picture)
        elif path.read_text() != picture:
            sys.exit(f"{path} is not what `python docs/picture.py` draws")


if __name__ == "__main__":
    main()
