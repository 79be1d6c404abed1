"""Rollouts of reinforcement learning: P prompts with N samples each, through `sglang.Engine`, by each setting in turn:

    python benchmarks/rollouts.py --model MODEL --dummy --settings pat fa3 pat/deterministic fa3/deterministic
    python benchmarks/rollouts.py --model MODEL --dummy --shapes 32x16 --turns 2+2

A setting is a backend, behind a slash perhaps `deterministic` (`--enable-deterministic-inference`). Each has a process of its own. A shape is PxN. With `--turns S+D` a
sample is a conversation: of its turns the first S are asked once for each prompt and shared by its N samples, and in the D others every sample goes on alone; each
turn's prompt is all that was before it and a message of `--message` tokens.

All samples are asked for at once, and a sample's next turn when the one before it is answered. Lengths of prompts are uniform between their bounds; those of answers are spread as a
lognormal distribution with a SIGMA of 0.6 around the bounds' geometric mean, and cut at the bounds: most are short, and a few that are long keep a step waiting. They
and all tokens are drawn by the seed, so every setting has the same.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import math
import os
import random
import re
import subprocess
import sys
import time
from typing import Any

import msgspec
from about import gpu, result_file
from serving import make_parser, sglang_flags

BENCHMARKS = {
    "rollouts": {
        "what": "samples of prompts, and of conversations, as reinforcement learning asks for them",
        "gpu": True,
        "inputs": "--model FOLDER",
        "results": "rollouts-h200.json",
    },
}
"""For run.py, which reads it without importing this file."""

VOCABULARY = 500
"""Token ids below this are in every vocabulary, the tiny model's too."""

SIGMA = 0.6
"""Of the logarithm of an answer's tokens: between 512 and 4,096 tokens 4 % of the answers reach the upper bound."""


class Sizes(msgspec.Struct):
    """The options that say what is asked for."""

    prompt: list[int]
    answer: list[int]
    turns: str
    message: int
    seed: int


class Record(msgspec.Struct):
    """One setting with one shape.

    Attributes:
        shape: PxN.
        turns: S+D.
        backend, deterministic: The setting.
        seconds: Until the last sample was complete.
        output_tps: Tokens of answers a second.
        prompt_share: Of the tokens that decode steps read in all, those that samples of a prompt share.
        cached: Of all prompts' tokens, those that came from the cache.
        tail: The share of the time in which fewer than a tenth of the samples ran.
        answer: The least and the most tokens of an answer.
        answers: Tokens of all answers.
        seed: Of lengths and tokens.
        date, machine, server: When and where it ran, and SGLang's flags: a file may have runs of several days.
    """

    shape: str
    turns: str
    backend: str
    deterministic: bool
    seconds: float
    output_tps: float
    prompt_share: float
    cached: float
    tail: float
    answer: list[int]
    answers: int
    seed: int
    date: str
    machine: str
    server: list[str]


def pair(text: str) -> tuple[int, int]:
    """The numbers of PxN or S+D."""
    first, second = re.split("[x+]", text)
    return int(first), int(second)


def problem(options: argparse.Namespace) -> str | None:
    """What is wrong with the options; None if nothing is."""
    for shape in options.shapes:
        if not re.fullmatch(r"[1-9]\d{0,3}x[1-9]\d{0,3}", shape):
            return f"--shapes: {shape} is not PxN"
    if not re.fullmatch(r"\d{1,2}\+[1-9]\d?", options.turns):
        return f"--turns: {options.turns} is not S+D, with D at least 1"
    for name in ("prompt", "answer"):
        least, most = getattr(options, name)
        if not 1 <= least <= most:
            return f"--{name}: {least} to {most} tokens are none"
    if options.message < 0:
        return "--message: there are no fewer than 0 tokens"
    modes = {setting.partition("/")[2] for setting in options.settings} - {"", "deterministic"}
    return f"--settings: there is no mode {min(modes)}" if modes else None


class Rollouts:
    """Samples, and what was measured of them."""

    def __init__(self, engine: Any, sizes: Sizes, shape: str, deterministic: bool) -> None:
        (self.prompts, self.samples), (self.shared, self.own) = pair(shape), pair(sizes.turns)
        self.engine, self.sizes, self.deterministic = engine, sizes, deterministic
        self.numbers = random.Random(f"{sizes.seed} {shape}")
        self.ended: list[float] = []  # of each sample
        self.answered = self.prompted = self.cached = self.read = self.read_shared = 0

    def tokens(self, count: int) -> list[int]:
        return self.numbers.choices(range(1, VOCABULARY), k=count)

    def length(self) -> int:
        """Of an answer."""
        low, high = self.sizes.answer
        return min(high, max(low, round(self.numbers.lognormvariate(math.log(low * high) / 2, SIGMA))))

    async def ask(self, prompt: list[int], length: int, seed: int, shared: int) -> list[int]:
        """The tokens of an answer; `shared`: how many of the prompt's tokens other samples have too."""
        parameters = {"max_new_tokens": length, "ignore_eos": True, "temperature": 1.0}
        if self.deterministic:
            parameters["sampling_seed"] = seed
        found = await self.engine.async_generate(input_ids=prompt, sampling_params=parameters)
        ids, about = list(found["output_ids"]), found["meta_info"]
        assert len(ids) == length, f"an answer of {len(ids)} tokens in place of {length}"
        self.answered += length
        self.prompted += len(prompt)
        self.cached += about["cached_tokens"]
        self.read_shared += shared * length
        self.read += len(prompt) * length + length * (length - 1) // 2
        return ids

    async def sample(self, prompt: list[int], turns: list[tuple[int, list[int], int]], shared: int) -> None:
        for length, message, seed in turns:
            prompt = prompt + await self.ask(prompt, length, seed, shared) + message
        self.ended.append(time.perf_counter())

    async def prompt(
        self, prompt: list[int], turns: list[tuple[int, list[int], int]], samples: list[list[Any]]
    ) -> None:
        for length, message, seed in turns:
            prompt = prompt + await self.ask(prompt, length, seed, 0) + message
        await asyncio.gather(*(self.sample(prompt, own, len(prompt)) for own in samples))

    def turns(self, count: int) -> list[tuple[int, list[int], int]]:
        return [(self.length(), self.tokens(self.sizes.message), self.numbers.randrange(1 << 31)) for _ in range(count)]

    async def run(self) -> tuple[float, float]:
        """Seconds, and the tail."""
        drawn = [
            (
                self.tokens(self.numbers.randint(*self.sizes.prompt)),
                self.turns(self.shared),
                [self.turns(self.own) for _ in range(self.samples)],
            )
            for _ in range(self.prompts)
        ]
        began = time.perf_counter()
        await asyncio.gather(*(self.prompt(*one) for one in drawn))
        ended = sorted(self.ended)
        seconds = ended[-1] - began
        return seconds, (ended[-1] - ended[int(0.9 * (len(ended) - 1))]) / seconds


def measure(engine: Any, sizes: Sizes, shape: str, backend: str, deterministic: bool, flags: list[str]) -> Record:
    rollouts = Rollouts(engine, sizes, shape, deterministic)
    engine.flush_cache()
    seconds, tail = engine.loop.run_until_complete(rollouts.run())
    return Record(
        shape, sizes.turns, backend, deterministic, round(seconds, 2), round(rollouts.answered / seconds, 1),
        round(rollouts.read_shared / rollouts.read, 4), round(rollouts.cached / rollouts.prompted, 4), round(tail, 4),
        sizes.answer, rollouts.answered, sizes.seed, str(datetime.date.today()), gpu()["machine"], flags,
    )  # fmt: skip


def run(options: argparse.Namespace) -> None:
    """One setting, in this process; its records are added to the output."""
    from sglang_pat.batch.command import engine as start

    backend, _, mode = options.only_setting.partition("/")
    flags = ["--model-path", str(options.model), "--attention-backend", backend, *sglang_flags(options)]
    engine = start([*flags, *(["--enable-deterministic-inference"] if mode else [])])
    try:
        # What compiles or fills with the first requests.
        measure(engine, Sizes([300, 300], [8, 8], "0+1", 1, 0), "2x4", backend, bool(mode), options.server)
        for shape in options.shapes:
            sizes = msgspec.convert(vars(options), Sizes)
            record = measure(engine, sizes, shape, backend, bool(mode), options.server)
            print(record, flush=True)
            result = json.loads(options.output.read_text())
            result["records"].append(msgspec.structs.asdict(record))
            options.output.write_text(json.dumps(result, indent=1) + "\n")
    finally:
        engine.shutdown()


def main() -> None:
    parser = make_parser(__doc__, result_file("rollouts"))
    parser.add_argument("--settings", nargs="+", default=["pat", "fa3", "pat/deterministic", "fa3/deterministic"])
    parser.add_argument("--shapes", nargs="+", default=["32x16", "8x64"])
    parser.add_argument("--turns", default="0+1", help="S+D: turns that samples share, and that each has alone")
    parser.add_argument("--prompt", nargs=2, type=int, default=[1024, 8192], metavar=("LEAST", "MOST"), help="tokens")
    parser.add_argument("--answer", nargs=2, type=int, default=[512, 4096], metavar=("LEAST", "MOST"), help="tokens")
    parser.add_argument("--message", type=int, default=200, help="tokens of a user's message behind a turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only-setting", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if found := problem(options):
        parser.error(found)
    if options.only_setting:
        run(options)
        # An engine leaves threads behind that may keep a process for long.
        sys.stdout.flush()
        os._exit(0)
    result: dict[str, Any] = {"device": gpu(), "model": options.model.name, "records": []}
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    # One that fails must not cost the others' numbers.
    failed = [
        setting
        for setting in options.settings
        if subprocess.run([sys.executable, *sys.argv, "--only-setting", setting], check=False).returncode
    ]
    if failed:
        sys.exit(f"failed: {' '.join(failed)}")


if __name__ == "__main__":
    main()
