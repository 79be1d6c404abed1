"""Draws docs/packing.svg, and docs/step.svg that moves, from plans that the scheduler really makes, and docs/speed.svg from measurements:
python docs/picture.py"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import serving_tables

from sglang_pat.packing import CPU_TILES, Batch, CostModel, Node, PackConfig, Plan, WorkItem
from sglang_pat.packing.oracle import make_plan
from sglang_pat.packing.tree import walk

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
ROW, SCALE, LEFT = 22, 0.34, 64

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
            label = f"{tokens} tokens, read once for {queries} requests"
            shapes.append(f'<text x="{x:.1f}" y="{y + 4:.0f}" class="in">{label}</text>')
    return shapes + request_names(top)


def request_names(top: int) -> list[str]:
    return [
        f'<text x="{LEFT - 8}" y="{top + query * ROW + 14}" class="name">req {query}</text>'
        for query in range(len(BATCH.seq_lens))
    ]


COST = CostModel(32, 8, 128, 128, 2)
STYLE = (
    "text{font-family:sans-serif;font-size:12px;fill:#57606a}.title{font-weight:bold;font-size:14px}"
    ".in{fill:#fff;text-anchor:middle}.name{text-anchor:end;font-size:11px}"
    "@media(prefers-color-scheme:dark){text{fill:#b1bac4}.in{fill:#fff}}"
)


def draw_packing() -> str:
    """Who reads what, without packing and with it."""
    body, top = [], 34
    for policy, title in (("query", "Each request reads its whole context"), ("pat", "Each shared part is read once")):
        plan = make_plan(BATCH, PackConfig(COST, CPU_TILES, workers=2, policy=policy))
        megabytes = plan.kv_tokens * COST.token_bytes / 1e6
        body.append(
            f'<text x="{LEFT}" y="{top - 10}" class="title">{title}: {megabytes:.0f} MB per layer and step</text>'
        )
        body += rows(plan, top)
        top += len(BATCH.seq_lens) * ROW + 44
    return svg(LEFT + max(BATCH.seq_lens) * SCALE + 10, top - 30, STYLE, body)


PHASES = (
    "1. The radix tree says who shares what.",
    "2. Packs: requests that share a prefix read it together. One colour is one read.",
    "3. Bins of equal work: every CTA reads its packs, one after the other.",
    "4. Merge: the parts of each request become its output.",
)
SECONDS = 16
"""Of a turn."""

LANE, GAP = 26, 44


def draw_step() -> str:
    """A decode step in four phases, again and again; where motion is not wanted, its end."""
    plan = make_plan(BATCH, PackConfig(COST, CPU_TILES, workers=4 * COST.runs))
    bins = [plan.items[first:last] for first, last in pairwise(plan.bins)]
    size = len(BATCH.seq_lens)
    top, lanes_top = 34, 34 + size * ROW + GAP
    right = LEFT + max(BATCH.seq_lens) * SCALE + 40
    middles = [top + query * ROW + (ROW - 4) / 2 for query in range(size)]
    colours: dict[tuple[int, ...], str] = {}
    tree, packs, reads, merges = [], [], [], []
    for node in [*walk(BATCH.roots), *(Node(ends(query), BATCH.seq_lens[query], [query]) for query in range(size))]:
        tree.append(frame(node.start, node.end, node.queries, top, 'class="node"'))
    most = max(sum(length(item) for item in members) for members in bins)
    lane_scale = (right - LEFT) / most
    for lane, members in enumerate(bins):
        y, x = lanes_top + lane * LANE, float(LEFT)
        reads.append(f'<text x="{LEFT - 8}" y="{y + 15}" class="name">CTA {lane}</text>')
        for item in members:
            colour = colours.setdefault(tuple(item.queries), COLOURS[len(colours) % len(COLOURS)])
            packs.append(frame(item.start, item.start + length(item), item.queries, top, f'fill="{colour}"'))
            width = length(item) * lane_scale
            reads.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width - 2:.1f}" height="{LANE - 6}" rx="3" fill="{colour}" class="read"/>'
            )
            for query in item.queries:
                merges.append(f'<path d="M{x + width / 2:.1f} {y}L{right:.1f} {middles[query]}" stroke="{colour}"/>')
            x += width
    for query, middle in enumerate(middles):
        merges.append(f'<circle cx="{right:.1f}" cy="{middle}" r="6" fill="#24292f"/>')
        merges.append(f'<text x="{right + 12:.1f}" y="{middle + 4}">{plan.num_parts[query]} parts</text>')
    tree += request_names(top)
    phases = [tree, packs, reads, merges]
    body = [f'<g class="p{number}">{"".join(shapes)}</g>' for number, shapes in enumerate(phases)]
    body += [f'<text x="{LEFT}" y="22" class="title c{number}">{text}</text>' for number, text in enumerate(PHASES)]
    return svg(right + 70, lanes_top + len(bins) * LANE + 8, STYLE + moves(), body)


def draw_speed() -> str:
    """The README's workloads: milliseconds per token with FA3 and with PAT."""
    rows = list(serving_tables.in_readme())
    width, bar, step = 470, 16, 70
    scale = width / max(record["mean_tpot_ms"] for _, *records in rows for record in records)
    body = []
    for number, (name, ours, other) in enumerate(rows):
        top = 14 + number * step
        body.append(f'<text x="8" y="{top + 8}" class="workload">{name}</text>')
        for place, (label, record) in enumerate((("FA3", other), ("PAT", ours))):
            y, length = top + 16 + place * (bar + 3), record["mean_tpot_ms"] * scale
            body.append(f'<text x="40" y="{y + 12}" class="name">{label}</text>')
            body.append(f'<rect x="48" y="{y}" width="{length:.0f}" height="{bar}" rx="2" class="{label}"/>')
            body.append(f'<text x="{54 + length:.0f}" y="{y + 12}">{record["mean_tpot_ms"]:.1f} ms</text>')
    style = STYLE + ".workload{font-weight:bold;font-size:13px}.FA3{fill:#a3a3a3}.PAT{fill:#2563eb}"
    return svg(width + 130, len(rows) * step + 10, style, body)


def moves() -> str:
    """Each phase stays once it has come; its caption goes with it."""
    rules = [
        ".node{fill:#eaeef2;stroke:#8c959f}path{fill:none;opacity:.6}.read{transform-box:fill-box;transform-origin:left}"
    ]
    for number in range(len(PHASES)):
        begin, end = (100 * at / len(PHASES) for at in (number, number + 1))
        shown = "1" if number == len(PHASES) - 1 else "0"
        rules.append(
            f"@keyframes p{number}{{0%,{max(0, begin - 0.1):.1f}%{{opacity:0}}{begin + 4:.1f}%,100%{{opacity:1}}}}"
            f"@keyframes c{number}{{0%,{max(0, begin - 0.1):.1f}%{{opacity:0}}{begin:.1f}%,{end - 0.1:.1f}%{{opacity:1}}{end:.1f}%,100%{{opacity:{shown}}}}}"
            f".p{number}{{animation:p{number} {SECONDS}s linear infinite}}"
            f".c{number}{{opacity:{shown};animation:c{number} {SECONDS}s linear infinite}}"
        )
    rules.append("@keyframes read{0%,50%{transform:scaleX(0)}70%,100%{transform:scaleX(1)}}")
    rules.append(f".read{{animation:read {SECONDS}s linear infinite}}")
    rules.append("@media(prefers-reduced-motion:reduce){*{animation:none!important}}")
    return "".join(rules)


def length(item: WorkItem) -> int:
    """Its tokens now."""
    start, end = item.span(BATCH.seq_lens)
    return end - start


def ends(query: int) -> int:
    """Where a request's own tokens begin."""
    return max(node.end for node in walk(BATCH.roots) if query in node.queries)


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


def main() -> None:
    folder = Path(__file__).parent
    (folder / "packing.svg").write_text(draw_packing())
    (folder / "step.svg").write_text(draw_step())
    (folder / "speed.svg").write_text(draw_speed())


if __name__ == "__main__":
    main()
