"""The prefix tree of a whole job, from its sorted prompts and what neighbours among them begin with together (BatchLLM, section 4.1).

Prompts are bytes: text in UTF-8, tokens by four bytes each. A block of them is known by its CRC-32, so that a million prompts of 8,000 bytes
are 248 MB of checksums, which are sorted and compared as the prompts would be. Prompts that differ and look alike would have to do so in
all blocks of a node; they would be asked in an order that saves nothing, and answered all the same.

A rank is a request's place among all sorted ones. A node is what two or more ranks begin with; -1 stands for none.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_pat.batch.lines import Json, Request
from sglang_pat.jsonl import whole

BYTES = 4
"""Of a token: of text about, in English and in code; of prompts that are tokens exactly."""

SHARED = 128 * BYTES
"""Bytes that requests must begin with to share a node: as many tokens as siblings wait for (`radix_bridge.siblings.BLOCK`)."""

BLOCKS = 4
"""Of the shortest node: nodes are whole blocks, so that a path is no longer than its prompt has blocks."""

ANSWER = {"/v1/chat/completions": 256, "/v1/completions": 16}
"""Tokens of an answer where a request sets no limit: a guess, as of `sglang-pat estimate`, and SGLang's limit."""

LONGEST_ANSWER = 4096
"""Tokens that an answer counts at most, as in SGLang (`CLIP_MAX_NEW_TOKENS`): limits far above are meant to be none."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def beginning(request: Request) -> tuple[bytes, bool]:
    """What a prompt is made of, in the order in which a chat template puts it together: requests whose prompts begin alike do so here too. And
    whether that is tokens."""
    body, chat = request.body, request.url == "/v1/chat/completions"
    tokens = _tokens(body.get("input_ids" if chat else "prompt"))
    if tokens:
        return tokens, True
    if not chat:
        return _bytes(_text(body.get("prompt"))), False
    messages = body.get("messages")
    parts = [_text(body.get("tools")), *map(_text, messages if isinstance(messages, list) else [])]
    return _bytes("\n".join(parts)), False


def _tokens(prompt: object) -> bytes:
    """Empty if it is not one list of tokens."""
    if isinstance(prompt, list):
        for tokens in (prompt, map(whole, prompt)):  # seldom has any to be changed
            with contextlib.suppress(TypeError, OverflowError):
                return array("I", tokens).tobytes()
    return b""


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _text(part: object) -> str:
    try:
        return _text_of(part)
    except (RecursionError, TypeError, ValueError):
        # Nested too deep, or no JSON: the engine will say so.
        return ""


def _text_of(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("content"), str):
        rest: Json = {name: value for name, value in part.items() if name not in ("role", "content")}
        return f"{part.get('role')}\n{part['content']}" + (json.dumps(rest) if rest else "")
    return "" if part is None else json.dumps(part)


def checksums(text: bytes, block: int) -> bytes:
    """Four bytes for each whole block of a prompt."""
    ends = range(block, len(text) + 1, block)
    return array("I", [zlib.crc32(text[end - block : end]) for end in ends]).tobytes()


def common(first: bytes, second: bytes) -> int:
    """Blocks that two prompts begin with, from their checksums."""
    low, high = 0, min(len(first), len(second)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        if first[4 * low : 4 * middle] == second[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low


def limit_of(request: Request) -> int:
    """Tokens that all answers to a request have at most, as far as that is known."""
    limits = (whole(request.body.get(name)) for name in ("max_completion_tokens", "max_tokens"))
    limit = next((one for one in limits if isinstance(one, int)), ANSWER[request.url])
    several, prompt = whole(request.body.get("n")), request.body.get("prompt")
    answers = max(1, min(several, LONGEST_ANSWER)) if isinstance(several, int) else 1
    # One prompt, if it is text or a list of tokens.
    prompts = len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)) else 1
    return min(answers * prompts, LONGEST_ANSWER) * max(1, min(limit, LONGEST_ANSWER))


class Tree:
    """All requests of a job.

    Attributes:
        origin: By rank, the request's place in what the tree was made of.
        sizes: Bytes of its prompt.
        common: Bytes that it begins with as the rank before does, in whole blocks; 0 for the first.
        limits: As `limit_of`.
        tokens: Whether its prompt is one list of tokens.
        node: The longest node that it is below.
        parent: By node.
        depth: By node, bytes from the root.
    """

    def __init__(self, requests: Iterable[Request], shared: int = SHARED) -> None:
        block = max(1, shared // BLOCKS)
        sums: list[bytes] = []
        sizes, limits, tokens = array("q"), array("q"), bytearray()
        for request in requests:
            text, is_tokens = beginning(request)
            sums.append(checksums(text, block))
            sizes.append(len(text))
            limits.append(limit_of(request))
            tokens.append(is_tokens)
        places = sorted(range(len(sums)), key=sums.__getitem__)
        self.origin: Ints = np.array(places, np.int64)
        self.sizes: Ints = np.array(sizes, np.int64)[self.origin]
        self.common: Ints = np.zeros(len(places), np.int64)
        for rank in range(1, len(places)):
            self.common[rank] = block * common(sums[places[rank - 1]], sums[places[rank]])
        self.limits: Ints = np.array(limits, np.int64)[self.origin]
        self.tokens = np.frombuffer(bytes(tokens), np.bool_)[self.origin]
        self._grow(shared)
        self._level()

    def __len__(self) -> int:
        return len(self.origin)

    def _grow(self, shared: int) -> None:
        lengths = (self.common * (self.common >= shared)).tolist()
        node, parent, depth = array("q", [-1]) * len(lengths), array("q"), array("q")
        path: list[int] = []  # nodes that the last rank is below
        for rank, length in enumerate(lengths):
            below = -1
            while path and depth[path[-1]] > length:
                below = path.pop()
            if length and (not path or depth[path[-1]] < length):
                # What the rank before shares with this one: it is below the new node, by itself or with what it was below.
                parent.append(path[-1] if path else -1)
                depth.append(length)
                if below >= 0:
                    parent[below] = len(depth) - 1
                else:
                    node[rank - 1] = len(depth) - 1
                path.append(len(depth) - 1)
            node[rank] = path[-1] if path else -1
        self.node: Ints = np.array(node, np.int64)
        self.parent: Ints = np.array(parent, np.int64)
        self.depth: Ints = np.array(depth, np.int64)

    def _level(self) -> None:
        """Nodes by how many are above them."""
        levels, above = [], np.flatnonzero(self.parent < 0)
        order = np.argsort(self.parent, kind="stable")
        parents = self.parent[order]
        while len(above):
            levels.append(above)
            first, last = np.searchsorted(parents, above), np.searchsorted(parents, above, "right")
            above = order[_ranges(first, last)]
        self._levels = levels

    def path(self, rank: int) -> Iterator[int]:
        """The nodes that a rank is below, the longest first."""
        node = int(self.node[rank])
        while node >= 0:
            yield node
            node = int(self.parent[node])

    def known(self) -> Ints:
        """Bytes of each rank's prompt that others share."""
        return np.where(self.node >= 0, self.depth[self.node], 0) if len(self.depth) else np.zeros_like(self.sizes)

    def steps(self, ranks: Sequence[int]) -> list[int]:
        """The same as `common` for some ranks, in ascending order, as if there were no others."""
        if len(ranks) < 2:
            return [0] * len(ranks)
        found: list[int] = np.minimum.reduceat(self.common[: ranks[-1] + 1], np.asarray(ranks[:-1]) + 1).tolist()
        return [0, *found]

    def arrange(self, answers: Floats, scale: Floats) -> Ints:
        """The tree's ranks from node to node, below each those first that bring most decoding for their prefill (BatchLLM, section 4.2).

        Args:
            answers: By rank, tokens of an answer.
            scale: By rank, tokens of a byte.

        Returns:
            By rank, its place.
        """
        count, nodes = len(self), len(self.depth)
        prefill, decode = np.zeros(nodes + count), np.zeros(nodes + count)
        leaves = np.ones(nodes + count, np.int64)
        leaves[:nodes] = 0
        above = np.concatenate((self.parent, self.node))
        # Of a node's own part: all below it have prompts of one kind.
        inner = np.zeros(nodes)
        inner[self.node[self.node >= 0]] = scale[self.node >= 0]
        for level in reversed(self._levels):
            upper = self.parent[level]
            inner[upper[upper >= 0]] = inner[level][upper >= 0]
        prefill[:nodes] = (self.depth - np.where(self.parent >= 0, self.depth[self.parent], 0)) * inner if nodes else 0
        prefill[nodes:], decode[nodes:] = (self.sizes - self.known()) * scale, answers
        for figures in (prefill, decode, leaves):
            np.add.at(figures, self.node[self.node >= 0], figures[nodes:][self.node >= 0])
            for level in reversed(self._levels):
                upper = self.parent[level]
                np.add.at(figures, upper[upper >= 0], figures[level][upper >= 0])
        ratio = decode / np.maximum(prefill, 1)
        order = np.lexsort((-ratio, above))
        begins = np.zeros(nodes + count, np.int64)
        owners = above[order]
        for level in (np.array([-1]), *self._levels):
            first, last = np.searchsorted(owners, level), np.searchsorted(owners, level, "right")
            items = order[_ranges(first, last)]
            lengths = last - first
            # Leaves of the items in front, less those of other nodes.
            front = np.cumsum(leaves[items]) - leaves[items]
            heads = np.repeat(np.cumsum(lengths) - lengths, lengths)
            starts = np.where(level >= 0, begins[level], 0)
            begins[items] = front - front[heads] + np.repeat(starts, lengths)
        return begins[nodes:]


def _ranges(first: Any, last: Any) -> Ints:
    """All numbers of some ranges, one range after the other."""
    lengths = last - first
    total = int(lengths.sum())
    found: Ints = np.arange(total) + np.repeat(first - (np.cumsum(lengths) - lengths), lengths)
    return found
