"""Draws docs/packing.svg from plans that the scheduler really makes: python docs/picture.py"""

from __future__ import annotations

from pathlib import Path

from sglang_pat.packing import CPU_TILES, OPEN, Batch, CostModel, Node, PackConfig, Plan, make_plan

COLOURS = ["#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#bab0ac"]
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
        end = BATCH.seq_lens[item.queries[0]] if item.end == OPEN else item.end
        x, width = LEFT + item.start * SCALE, (end - item.start) * SCALE
        y, height = top + min(item.queries) * ROW, len(item.queries) * ROW - 4
        colour = COLOURS[number % len(COLOURS)]
        shapes.append(f'<rect x="{x:.1f}" y="{y}" width="{width - 2:.1f}" height="{height}" rx="3" fill="{colour}"/>')
        if len(item.queries) > 1:
            label = f"{end - item.start} tokens, read once for {len(item.queries)} requests"
            shapes.append(f'<text x="{x + width / 2:.1f}" y="{y + height / 2 + 4:.0f}" class="in">{label}</text>')
    for query in range(len(BATCH.seq_lens)):
        shapes.append(f'<text x="{LEFT - 8}" y="{top + query * ROW + 14}" class="name">req {query}</text>')
    return shapes


def main() -> None:
    cost = CostModel(32, 8, 128, 128, 2)
    body, top = [], 34
    for policy, title in (("query", "One query per CTA"), ("pat", "PAT")):
        plan = make_plan(BATCH, PackConfig(cost, CPU_TILES, workers=2, policy=policy))
        megabytes = plan.kv_tokens * cost.token_bytes / 1e6
        body.append(
            f'<text x="{LEFT}" y="{top - 10}" class="title">{title}: {megabytes:.0f} MB of KV per layer and step</text>'
        )
        body += rows(plan, top)
        top += len(BATCH.seq_lens) * ROW + 44
    style = (
        "text{font-family:sans-serif;font-size:12px;fill:#57606a}.title{font-weight:bold;font-size:14px}"
        ".in{fill:#fff;text-anchor:middle}.name{text-anchor:end;font-size:11px}"
    )
    width = int(LEFT + max(BATCH.seq_lens) * SCALE + 10)
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top - 30}" width="{width}"><style>{style}</style><rect width="100%" height="100%" fill="#fff"/>'
    Path(__file__).with_name("packing.svg").write_text(svg + "\n".join(body) + "</svg>\n")


if __name__ == "__main__":
    main()
