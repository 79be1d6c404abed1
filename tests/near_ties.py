"""Greedy answers of two servers on the same weights, where exact equality is too much to ask.

Two right attentions round differently, so greedy answers may part where two tokens are all but equally likely. Up to there
they must be the same, with the same probabilities.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from sglang_pat.demo.server import Server

TOKENS = 32
CLOSE = 0.03
"""Log-probabilities that differ by less than this may change places: some ten times what rounding to float16 does here."""


class Answer(NamedTuple):
    """Greedy tokens, and (log-probability, id) of the two likeliest at each step, the chosen one first."""

    ids: list[int]
    likeliest: list[list[tuple[float, int]]]


def generate(
    server: Server, prompt: str, rid: str | None = None, tokens: int = TOKENS, logprobs: bool = True
) -> Answer:
    """With `logprobs` an answer's `likeliest` are known, without they are empty: SGLang mixes only requests that ask for none."""
    body: dict[str, Any] = {
        "text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
    }  # fmt: skip
    if logprobs:
        body |= {"return_logprob": True, "top_logprobs_num": 2}
    result = server.post("/generate", body | ({"rid": rid} if rid else {}))
    steps, retracted = result["meta_info"].get("output_top_logprobs", []), result["meta_info"]["num_retractions"]
    # SGLang 0.5.17 loses a step's log-probabilities of some requests that it retracted.
    lost = logprobs * len(result["output_ids"]) - len(steps)
    assert 0 <= lost <= retracted, f"{lost} log-probabilities of {len(result['output_ids'])} are missing"
    return Answer(result["output_ids"], [[(logprob, token) for logprob, token, _ in step] for step in steps])


def generate_all(
    server: Server, prompts: list[str], concurrency: int = 48, tokens: int = TOKENS, logprobs: bool = True
) -> list[Answer]:
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda prompt: generate(server, prompt, tokens=tokens, logprobs=logprobs), prompts))


def fill_cache(server: Server, prompts: list[str]) -> None:
    """So that servers with KV of 8 bits have the same of these prompts. Prefill reads its own tokens' KV in 16 bits and what is cached in 8: where other
    prefixes are cached, a first token's probability differs by up to 0.28, whoever decodes (an H100, 2026-11-26)."""
    generate_all(server, prompts, concurrency=1, tokens=1)


def assert_agree(
    answers: list[Answer], expected: list[Answer], close: float = CLOSE, least: float = 0.25, beyond: bool = False,
) -> None:  # fmt: skip
    """Each answer is the expected one, up to a step where two tokens are close; so far must be at least so much of all. `beyond` goes on there while
    the tokens are the same."""
    compared = total = 0
    for answer, right in zip(answers, expected, strict=True):
        known = len(answer.likeliest) == len(answer.ids)  # see `generate`
        total += len(right.ids)
        for step, (first, second) in enumerate(right.likeliest):
            compared += 1
            same, tie = answer.ids[step] == right.ids[step], first[0] - second[0] < close
            assert same or tie, (step, first, second)
            if tie and not (same and beyond):
                break
            if known:
                found = answer.likeliest[step][0][0]
                assert found == pytest.approx(first[0], abs=close), (step, found, first, second)
    assert compared > least * total, "too few tokens to prove anything"


def parted(answers: list[Answer], expected: list[Answer], close: float, beyond: bool = False) -> int:
    """How many answers are not the expected ones, as above."""
    wrong = 0
    for answer, right in zip(answers, expected, strict=True):
        try:
            assert_agree([answer], [right], close, least=0, beyond=beyond)
        except AssertionError:
            wrong += 1
    return wrong
