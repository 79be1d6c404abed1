"""Requests that no client should send. Whatever the server says to them, it has to go on serving the others."""

from __future__ import annotations

import json
import random
from typing import Any

from .questions import CHAT, COMPLETIONS, GENERATE

NAN, INFINITE = float("nan"), float("inf")
BIG = "x" * 1_000_000

SAMPLING: list[dict[str, Any]] = [
    {"max_new_tokens": -1}, {"max_new_tokens": 10**9}, {"max_new_tokens": 2**70}, {"max_new_tokens": "5"},
    {"max_new_tokens": NAN}, {"temperature": -1}, {"temperature": NAN}, {"temperature": INFINITE}, {"temperature": "hot"},
    {"temperature": 1e-300}, {"top_p": NAN}, {"top_p": 0}, {"top_k": -7}, {"min_p": 2},
    {"n": 0}, {"n": -1}, {"n": "2"}, {"unknown": 1},
]  # fmt: skip
"""Changes to `sampling_params` that SGLang answers or refuses."""

FIELDS: list[dict[str, Any]] = [
    {"input_ids": None}, {"input_ids": []}, {"input_ids": [2**63]}, {"input_ids": [1.5]}, {"input_ids": ["a"]},
    {"input_ids": [True]}, {"input_ids": [1, [2]]}, {"input_ids": {"a": 1}}, {"input_ids": [7] * 100_000},
    {"text": 5, "input_ids": None}, {"text": [], "input_ids": None}, {"text": "and ids"},
    {"text": "a\ud800b", "input_ids": None}, {"text": "\0\0", "input_ids": None},
    {"rid": 5}, {"rid": ""}, {"rid": "\ud800"}, {"rid": "a\0b"}, {"rid": BIG}, {"rid": ["a", "b"]}, {"rid": [None]},
    {"rid": "\N{GRINNING FACE}" * 50}, {"rid": "HEALTH_CHECK"}, {"rid": ["a", "a"], "input_ids": [[11], [12]]},
    {"sampling_params": "x"}, {"sampling_params": None},
]  # fmt: skip
"""Changes to the rest of the body, likewise; 0.5.23 ends where a text is empty ("index is out of bounds" in `_get_pruned_states`)."""

RAW: list[bytes] = [
    b"", b"[1, 2]", b"null", b'{"text":"\xff\xfe"}', b'{"input_ids":[11,12', b'{"text":"a","sampling_params":{"temperature":NaN}}',
    b'\xef\xbb\xbf{"text":"a"}', b'{"text":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    b'{"text":"a","text":"b","sampling_params":{"max_new_tokens":1}}',
    b'{"text":"a","rid":"\\ud800","sampling_params":{"max_new_tokens":1}}',
]  # fmt: skip


def request(chance: random.Random) -> tuple[str, bytes]:
    """Path and body of one that is chosen at random."""
    body: dict[str, Any] = {"input_ids": [11, 12, 13], "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    kind = chance.randrange(4)
    if kind == 0:
        return chance.choice([GENERATE, COMPLETIONS, CHAT]), chance.choice(RAW)
    if kind == 1:
        body["sampling_params"] |= chance.choice(SAMPLING)
    else:
        body |= chance.choice(FIELDS)
    return GENERATE, json.dumps(body).encode()
