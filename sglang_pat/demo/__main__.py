"""Serve a small model with PAT, ask it a few hundred questions, check every answer, show what packing did and what it brings.

The model has random weights. Trained ones, which answer in sentences, are taken where they are: a folder that --model names, or what
`python -m sglang_pat.demo.trained_model` downloaded.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sglang_pat.backend.metrics import new_by_size
from sglang_pat.cli.parser import Parser, count, run
from sglang_pat.demo import tiny_model, trained_model, workload
from sglang_pat.demo.server import Server
from sglang_pat.demo.trained_model import CACHE
from sglang_pat.text import say

SHARED, RACERS, RACE_TOKENS = 3800, 32, 128
"""In the timed part: tokens of the system prompt (enough for attention to matter), requests, and tokens per answer."""

FLAGS = ["--max-running-requests", "64", "--dtype", "float32"]
TINY, TRAINED = 65536, 16384
"""Tokens of a pool with each kind of model: SmolLM2-135M's take 46 KB each in float32, those of a tiny one 2 KB."""


def main(words: list[str] | None = None, prog: str = "python -m sglang_pat.demo") -> int:
    """Run the command; returns the exit status."""
    parser = Parser(prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cache", type=Path, default=CACHE, help="folder for the model and the logs (default: %(default)s)"
    )
    parser.add_argument("--model", type=Path, help="a folder with a trained model, small enough for this machine's CPU")
    parser.add_argument(
        "--questions", type=count, help="questions per tool description (default: 16, with trained weights 4)"
    )
    parser.add_argument(
        "--tokens", type=count, default=24, help="tokens to generate per request (default: %(default)s)"
    )
    arguments = parser.parse_args(words)
    # Servers are in sessions of their own: whoever ends the demo, or closes its terminal, must not leave them.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(number, lambda ended, _: sys.exit(128 + ended))
    return run(parser.prog, lambda: _show(parser.prog, arguments))


def _show(prog: str, arguments: argparse.Namespace) -> int:
    try:
        return demo(arguments)
    except (OSError, RuntimeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # a file or the output
        say(f"\n{prog}: {error}")
        return 2


def demo(arguments: argparse.Namespace) -> int:
    """Serve, ask and compare, as the arguments say; 0 where all answers are right."""
    trained = model_at_hand(arguments)
    model = trained or tiny_model.write(arguments.cache / "tiny-qwen3")
    prompts = workload.nested_prompts(3, 4, arguments.questions or (4 if trained else 16), unrelated=24)
    topics = [workload.prose(f"topic {i}", 60) for i in range(6)]
    flags = [*FLAGS, "--max-total-tokens", str(TRAINED if trained else TINY)]
    print(f"model: {model}\nlogs:  {arguments.cache}/demo-*.log")
    with ExitStack() as stack:
        servers = {
            backend: stack.enter_context(Server(model, backend, arguments.cache / f"demo-{backend}.log", flags))
            for backend in ("pat", "torch_native")
        }
        answers = {
            backend: ask(server, backend, prompts, topics, arguments.tokens) for backend, server in servers.items()
        }
        counters = servers["pat"].counters()
        if trained:
            print(conversation(servers["pat"]))
        print(report(len(prompts), len(answers["pat"]) - len(prompts), counters))
        speeds = {}
        for backend, server in servers.items():
            timed, speeds[backend] = race(server, backend)
            answers[backend] += timed
    print(f"Tokens a second, {RACERS} requests that share {SHARED:,} tokens, {RACE_TOKENS} tokens each")
    for backend, speed in speeds.items():
        print(
            f"  {backend:<13} {speed:6.1f}"
            + (f"  {speed / speeds['torch_native']:.1f} times as fast" * (backend == "pat"))
        )
    print()
    return compare(answers["pat"], answers["torch_native"])


def model_at_hand(arguments: argparse.Namespace) -> Path | None:
    """A folder with trained weights; None where there is none.

    Raises:
        RuntimeError: The one that was named has no model.
    """
    found: Path = arguments.model or arguments.cache / "smollm2-135m"
    if arguments.model and not (found / "config.json").exists():
        raise RuntimeError(f"--model: {found} has no config.json: name a model's folder")
    return found if arguments.model or trained_model.is_there(found) else None


def conversation(server: Server) -> str:
    """Questions about one document, asked at once, and their answers."""
    answers = workload.in_parallel(
        lambda question: workload.chat(server.url, workload.HANDBOOK, question, 48),
        workload.QUESTIONS,
        len(workload.QUESTIONS),
    )
    lines = [f"  {question}\n    {answer}" for question, answer in zip(workload.QUESTIONS, answers, strict=True)]
    return "\n".join(
        [
            "",
            "Asked at once about one handbook, so that they share most of their KV; so small a model is often wrong",
            *lines,
        ]
    )


def ask(server: Server, backend: str, prompts: Sequence[str], topics: Sequence[str], tokens: int) -> list[str]:
    """Wait for the server and send it everything."""
    server.wait(lambda seconds: show(f"waiting for sglang with --attention-backend {backend}: {seconds:.0f} s"))
    show(f"sglang with --attention-backend {backend} serves", end="\n")
    answers = workload.in_parallel(
        lambda prompt: workload.stream_completion(server.url, prompt, tokens),
        prompts,
        32,
        lambda done: show(f"{backend}: {done} of {len(prompts)} streamed completions"),
    )
    answers += workload.fork_program(server.url, topics, 8, tokens)
    show(f"{backend}: {len(answers)} requests answered", end="\n")
    return answers


def race(server: Server, backend: str) -> tuple[list[str], float]:
    """Answers to requests that share a long, cached prefix, and their tokens per second."""
    prefix = workload.prose("the handbook", SHARED)
    workload.stream_completion(server.url, prefix, 2)
    show(f"{backend}: {RACERS} requests that share {SHARED:,} tokens")
    began = time.monotonic()
    answers = workload.in_parallel(
        lambda question: workload.stream_completion(server.url, prefix + question, RACE_TOKENS),
        [workload.prose(f"question {i}", 40) for i in range(RACERS)],
        RACERS,
    )
    seconds = time.monotonic() - began
    show(f"{backend}: {RACERS} requests that share {SHARED:,} tokens took {seconds:.1f} s", end="\n")
    return answers, RACERS * RACE_TOKENS / seconds


def report(completions: int, forks: int, counters: dict[str, Any]) -> str:
    """A table of what packing did."""
    read, unpacked = counters["kv_bytes"], counters["kv_bytes_unpacked"]
    rows = [
        ("requests", f"{completions} streamed completions, {forks} branches of forking programs"),
        ("tree nodes followed", f"{counters['nodes']:,}"),
        ("packs (work items run)", f"{counters['work_items']:,}"),
        ("queries in a work item", histogram(counters["query_sizes"])),
        ("KV bytes read by decode", f"{read / 1e6:,.0f} MB"),
        ("without packing", f"{unpacked / 1e6:,.0f} MB, {unpacked / read:.1f} times as much"),
        (
            "plans made",
            f"{counters['plans']:,} for {counters['steps']:,} decode steps, {counters['plans_ahead']:,} of them ahead",
        ),
        ("steps that fell back", f"{counters['fallbacks']:,}"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(["", "What packing did", *(f"  {name:<{width}}  {value}" for name, value in rows), ""])


def histogram(sizes: dict[str, int]) -> str:
    """Shares of packs by query size, in powers of two."""
    total = sum(sizes.values())
    parts = []
    for low, items in new_by_size(sizes, {}).items():
        name = "1" if low == 1 else f"{low}-{2 * low - 1}"
        parts.append(f"{name}: {items / total:.0%}" if items * 100 >= total else f"{name}: <1%")
    return ", ".join(parts)


def compare(answers: Sequence[str], expected: Sequence[str]) -> int:
    """Returns 0 if every answer is as expected, else 1."""
    wrong = [i for i, (answer, right) in enumerate(zip(answers, expected, strict=True)) if answer != right]
    if wrong:
        i = wrong[0]
        print(f"WRONG: {len(wrong)} of {len(answers)} answers differ from torch_native's, the first is request {i}:")
        print(f"  pat:          {answers[i]!r}\n  torch_native: {expected[i]!r}")
        return 1
    print(f"All {len(answers)} greedy answers equal those of torch_native on the same weights.")
    return 0


def show(text: str, end: str = "", last: list[float] = [0.0]) -> None:  # noqa: B006
    """Show a line of progress: overwritten on a terminal, every five seconds elsewhere."""
    if sys.stdout.isatty():
        print(f"\r\x1b[2K{text}", end=end, flush=True)
    elif end or time.monotonic() - last[0] > 5:
        last[0] = time.monotonic()
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
