"""Prefix trees to measure with: the paper's, regular ones, random ones, recorded ones."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sglang_pat.cli.explain import recorded
from sglang_pat.kernels import capabilities
from sglang_pat.packing import AttentionSpec, Batch, CostModel, Node, PackConfig, TileTable
from sglang_pat.packing.spec import FORMATS
from sglang_pat.packing.tree import walk

RECORDED = Path(__file__).parent / "recorded"
"""Traces of servers (`SGLANG_PAT_TRACE`). `random-128`: that workload of serving.py on two GPUs, Qwen3-8B's
shape, 2026-11-22; bench_serving's random prompts share more than a fifth of their KV."""

LATENTS = {"A": "1,256_4096,256", "B": "1,32_8192,128", "C": "8,256_2048,128", "alone": "128_4096"}
"""Of attention over latents: one system prompt for many; a long document for few; eight prompts; requests that share nothing."""

PAPER = (
    "1,10_4096,416", "1,256_256,32", "1,1024_2048,32", "1,2,64_1024,256,256", "1,4,256_32,256,32", "1,8,512_32,512,256",
    "1,8,512_32,2048,256", "1,8,512_512,512,256", "1,4,8,256_32,256,256,32", "1,4,16,512_1024,256,128,32",
    "1,4,16,64,256,1024_256,32,256,64,32,256", "1,16,32,64,128,1024_256,128,64,32,32,32",
    "1,16,32,64,256,1024_256,128,64,32,32,32", "1,8,16,32,64,128,1024_256,128,64,32,32,32,32",
    "1,8,16,32,64,256,1024_256,128,64,32,32,32,32", "2,8,16,256_256,256,32,32", "4,16,256,512_512,32,128,32",
    "8,16,32,256_512,512,256,32", "256_1024", "256_4096",
)  # fmt: skip
"""PAT §8.1, figure 10: nodes per level _ tokens per node; the last level are the requests' own tails."""

H200_SPEC = AttentionSpec(32, 8, 128, 128, FORMATS["bfloat16"])

H200 = PackConfig(
    # 790 TFLOP/s at 4.4 TB/s, measured on an H200 with torch 2.11.0 on 2026-11-20. An item takes 0.3 us of an SM beyond
    # its bytes, a part nothing: csrc/device_costs.cu on the same on 2026-11-21.
    CostModel(heads=32, kv_heads=8, head_dim=128, v_head_dim=128, kv_bytes=2, flop_per_byte=180, start_price=80_000),
    # The paper's candidates (§5.2).
    TileTable(query_tiles=(16, 32, 64, 128), kv_tile=128),
    workers=132,
)
"""Llama-3-8B's attention on an H200, by the cost model alone."""

SERVED = PackConfig.of(H200_SPEC, capabilities.tile_table("9.0a", H200_SPEC.head_dim, "NVIDIA H200"), H200.workers)
"""The same as a server plans it: with the tiles of our kernels, and their prices as measured."""


def parse(notation: str) -> tuple[list[int], list[int]]:
    """(nodes, tokens) of each level of a tree like `1,4,256_32,256,32`."""
    nodes, tokens = ([int(number) for number in part.split(",")] for part in notation.split("_"))
    return nodes, tokens


def regular(batch: int, depth: int) -> tuple[list[int], list[int]]:
    """`depth` levels of shared prefixes of 64 tokens that fan out evenly, and tails of 256 tokens."""
    nodes = [max(1, round(batch ** (level / (depth + 1)))) for level in range(depth)]
    return [*nodes, batch], [64] * depth + [256]


def build(nodes: list[int], tokens: list[int]) -> Batch:
    """The batch of a tree."""
    size = nodes[-1]
    seq_lens = [sum(tokens)] * size
    above: list[Node] = []
    roots: list[Node] = []
    start = 0
    for count, length in zip(nodes[:-1], tokens[:-1], strict=True):
        level = [
            Node(start, start + length, list(range(-(-i * size // count), -(-(i + 1) * size // count))), [])
            for i in range(count)
        ]
        for i, node in enumerate(level):
            (above[i * len(above) // count].children if above else roots).append(node)
        above, start = level, start + length
    return Batch(seq_lens, roots)


def shape_of_cell(cell: str) -> tuple[list[int], list[int]] | None:
    """As `parse`, of a tree's notation or BATCHxCONTEXT where nothing is shared; None for a trace, a file."""
    if Path(cell).is_file():
        return None
    if shape := re.fullmatch(r"(\d+)x(\d+)", cell):
        return [int(shape[1])], [int(shape[2])]
    return parse(cell)


def of_cell(cell: str) -> Batch:
    """The batch of what `shape_of_cell` takes; of a trace's largest batches the last."""
    if shape := shape_of_cell(cell):
        return build(*shape)
    batches = [batch for _, _, _, batch in recorded(Path(cell), truncated=True)]
    return max(reversed(batches), key=lambda batch: len(batch.seq_lens))


def pieces(batch: Batch) -> Iterator[tuple[int, int, list[int]]]:
    """KV that is stored once: (where it begins in its requests, tokens, requests), tails last."""
    ends = [0] * len(batch.seq_lens)
    for node in walk(batch.roots):
        yield node.start, node.end - node.start, node.queries
        for query in node.queries:
            ends[query] = node.end
    for query, (end, length) in enumerate(zip(ends, batch.seq_lens, strict=True)):
        yield end, length - end, [query]


def slots(cell: str, batch: Batch, page_size: int, contiguous: bool = False) -> np.ndarray:
    """The slot of each token of each request, [requests, longest], int32, where the pages of a node lie anywhere, or one after the other."""
    stored = list(pieces(batch))
    if page_size > 1 and any(length % page_size for _, length, _ in stored):
        raise SystemExit(f"--page-sizes: the nodes of {cell} are not whole pages of {page_size}")
    num_pages = sum(length for _, length, _ in stored) // page_size
    pages = np.arange(num_pages) if contiguous else np.random.default_rng(0).permutation(num_pages)
    order = (pages[:, None] * page_size + np.arange(page_size)).ravel()
    found = np.zeros((len(batch.seq_lens), max(batch.seq_lens)), dtype=np.int32)
    begin = 0
    for start, length, queries in stored:
        found[queries, start : start + length] = order[begin : begin + length]
        begin += length
    return found


def randomly(generator: random.Random, batch: int, max_tokens: int) -> Batch:
    """A tree with uneven fan-out, depth and lengths; some requests share nothing."""
    ends = [0] * batch

    def grow(queries: list[int], start: int, depth: int) -> list[Node]:
        nodes = []
        while len(queries) > 1 and depth < 8:
            size = min(len(queries), max(1, int(len(queries) * generator.random())))
            group, queries = queries[:size], queries[size:]
            node = Node(start, start + int(max_tokens ** generator.random()), group, [])
            for query in group:
                ends[query] = node.end
            node.children = grow(group[: int(size * generator.random() * 1.3)], node.end, depth + 1)
            nodes.append(node)
            if generator.random() < 0.2:
                break
        return nodes

    roots = grow(list(range(batch)), 0, 0)
    return Batch([end + int(max_tokens ** generator.random()) for end in ends], roots)
