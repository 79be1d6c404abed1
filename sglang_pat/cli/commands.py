"""The `sglang-pat` command."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sglang_pat.batch.job import IN_FLIGHT, TIMEOUT
from sglang_pat.batch.lines import BatchError
from sglang_pat.cli import explain
from sglang_pat.cli.addresses import completed, is_address, is_in_the_clear, is_key
from sglang_pat.cli.parser import Parser, as_json, count, counts, patience, run
from sglang_pat.cli.replay import replay
from sglang_pat.cli.top import SilenceError, TopError, top
from sglang_pat.config import KEY
from sglang_pat.estimate import GPUS, KV_CACHES, EstimateError, estimate, load, read_model
from sglang_pat.jit import BuildError
from sglang_pat.model_config import ModelError, find
from sglang_pat.packing import POLICIES
from sglang_pat.packing.native import make_plan
from sglang_pat.radix_bridge.trace import TraceError, is_trace
from sglang_pat.text import printable, say

PROG = "sglang-pat"

DEFAULT_ANSWER = 256
"""Tokens of an answer, where a file of requests does not say."""

URL = "http://127.0.0.1:30000"
"""Of a server with SGLang's defaults."""

MODEL = "folder, its config.json, or its name in the cache of Hugging Face (nothing is downloaded)"
"""How a model is named."""

OPENAI_KEY = "OPENAI_API_KEY"
"""The environment variable from which SGLang's own clients take a server's key. Where it holds a key of OpenAI's, a server that nobody named must not
get it."""


def _seconds(text: str) -> float:
    """Parse a time to wait."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 86,400")
    return value


def _batches(text: str) -> list[int]:
    """Parse the value of `--batch`, which takes several words and so a file behind them too."""
    try:
        return counts(text)
    except argparse.ArgumentTypeError as error:
        is_file = re.search(r"/|\.[A-Za-z]", text) or os.path.exists(text)
        hint = " (put the file first, or write --batch 4,8)" if is_file else ""
        raise argparse.ArgumentTypeError(f"{error}{hint}") from None


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal may be unable to show the bars of `top`, or a file's name.
        sys.stdout.reconfigure(errors="replace")
    return run(PROG, lambda: _run(arguments))


def _run(arguments: list[str] | None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if not words:
        _parser().print_help()
        return 0
    try:
        return _other(words) if words[0] in OTHERS else _own(words)
    except BuildError as error:
        # With what the compiler says.
        message = "\n".join(map(printable, str(error).splitlines()))
        say(f"{PROG}: {message.removeprefix(f'{PROG} ')}")
    except (TraceError, TopError, EstimateError, ModelError, explain.ExplainError, BatchError) as error:
        say(f"{PROG}: {printable(str(error))}")
    return 2


def _other(words: list[str]) -> int:
    try:
        module = importlib.import_module(OTHERS[words[0]][0])
    except ImportError as error:
        say(f"{PROG}: {printable(str(error))}; {PROG} doctor says what is missing")
        return 2
    return int(module.main(words[1:], f"{PROG} {words[0]}"))


def _own(words: list[str]) -> int:
    parsed, others = _parser().parse_known_args(words)
    if others and parsed.run is not _batch:
        parsed.parser.error(f"unrecognized arguments: {' '.join(others)}")
    parsed.others = others
    return parsed.run(parsed) or 0


def _version() -> str:
    try:
        return version(PROG)
    except PackageNotFoundError:
        return "of a folder that is not installed"


def _parser() -> Parser:
    """The command's arguments."""
    result = Parser(
        prog=PROG,
        description="Faster decoding for SGLang where requests share prefixes: each step reads a shared prefix once for all of them (packing). Start with doctor, estimate and top.",
        epilog="Each command has a --help of its own.",
    )
    result.add_argument("--version", action="version", version=f"{PROG} {_version()}")
    commands = result.add_subparsers(required=True, metavar="command")
    for add in (_add_doctor, _add_estimate, _add_batch, _add_top, _add_explain, _add_replay):
        add(commands)
    for name, (_, what) in OTHERS.items():
        commands.add_parser(name, help=what)
    return result


OTHERS = {
    "demo": ("sglang_pat.demo.__main__", "serve a tiny model, check its answers, and show what packing did"),
    "build": ("sglang_pat.cli.build", "compile ahead what a server needs on a GPU"),
    "tune": ("sglang_pat.cli.tune", "measure this GPU for packing"),
}
"""Modules with a `main(arguments, prog)` of their own, by the command that runs it, and what that does. Imported when they are called, as some import
torch."""


def _add_doctor(commands: Any) -> None:
    command = commands.add_parser(
        "doctor",
        help="say what a server would find here, and what keeps it from its start",
        epilog="The exit status is 1 if there is a problem.",
    )
    _add_json(command)
    command.add_argument(
        "--model",
        help=f"whether a model is supported, before it is loaded: the model's {MODEL}",
    )
    command.add_argument("--url", type=completed, help="a running server, whose counters are added")
    _add_key(command)
    command.set_defaults(run=_doctor, parser=command)


def _add_replay(commands: Any) -> None:
    command = commands.add_parser(
        "replay", help="run a trace recorded with SGLANG_PAT_TRACE through the scheduler and print what packing does"
    )
    command.add_argument("trace", type=Path, help="a file recorded with SGLANG_PAT_TRACE")
    command.add_argument("--policy", choices=POLICIES, action="append", help="instead of the recorded one")
    command.add_argument(
        "--oracle", action="store_true", help="compare every plan with one made of the batch's tree anew; slow"
    )
    command.add_argument("--truncated", action="store_true", help="accept a file that was cut off")
    _add_json(command)
    command.set_defaults(run=_replay, parser=command)


def _add_estimate(commands: Any) -> None:
    command = commands.add_parser("estimate", help="say what packing would bring a workload")
    command.add_argument(
        "requests",
        type=Path,
        help="an OpenAI batch, a request log of SGLang, a Mooncake trace, coding agents' sessions, or one prompt per line; the first line decides which, "
        "and later lines that do not fit are refused",
    )
    command.add_argument("--model", required=True, help=f"the model's {MODEL}")
    _add_gpu(command)
    command.add_argument(
        "--kv-cache-dtype", choices=list(KV_CACHES), default="auto", help="as SGLang's; auto is bfloat16 (%(default)s)"
    )
    command.add_argument(
        "--batch",
        type=_batches,
        nargs="+",
        default=[[8, 32, 128, 256]],
        help="how many requests run at once (8,32,128,256); more than the file has counts as the whole file",
    )
    command.add_argument(
        "--answer-tokens", type=count, default=DEFAULT_ANSWER, help="tokens of an answer, if unknown (%(default)s)"
    )
    command.add_argument(
        "--draft-tokens",
        type=count,
        default=1,
        help="of a request in a step, as --speculative-num-draft-tokens: 4, or 1 without drafts",
    )
    _add_json(command)
    command.set_defaults(run=_estimate, parser=command)


def _add_top(commands: Any) -> None:
    command = commands.add_parser("top", help="show live what packing does in a running server")
    command.add_argument("--url", type=completed, help=f"the server's address ({URL})")
    _add_key(command)
    command.add_argument("--interval", type=_seconds, default=2, help="seconds between two pictures (%(default)s)")
    command.add_argument("--once", action="store_true", help="one picture, of everything since the server started")
    command.add_argument("--verbose", action="store_true", help="plans, work items and nodes too")
    _add_json(command, "print a line of JSON in place of a picture")
    command.set_defaults(run=_top, parser=command)


def _add_explain(commands: Any) -> None:
    command = commands.add_parser("explain", help="write a page that shows how recorded batches were packed, and why")
    command.add_argument(
        "trace",
        type=Path,
        nargs="?",
        help="a file recorded with SGLANG_PAT_TRACE; with --model, what `estimate` takes: the tree of a job that has not run",
    )
    command.add_argument("--model", help=f"for a file of requests: the model's {MODEL}")
    _add_gpu(command)
    command.add_argument(
        "--url", type=completed, help="in place of a file: a running server on this machine that records one"
    )
    _add_key(command)
    command.add_argument("--output", type=Path, default=Path("explain.html"), help="the page (%(default)s)")
    command.add_argument("--steps", type=count, default=20, help="plans shown, evenly spread (%(default)s)")
    command.add_argument("--truncated", action="store_true", help="accept a file that was cut off")
    command.set_defaults(run=_explain, parser=command)


def _add_batch(commands: Any) -> None:
    command = commands.add_parser(
        "batch",
        help="answer a file of requests, ordered by the prefixes that they share",
        epilog="Without --url, all other flags, behind the two files, are those of SGLang's server: --model-path and whatever else it takes.",
        allow_abbrev=False,
    )
    command.add_argument("requests", type=Path, help="an OpenAI batch: a request a line")
    command.add_argument("answers", type=Path, help="where records go; what is there already is not asked again")
    command.add_argument(
        "--in-flight",
        type=count,
        default=IN_FLIGHT,
        help="requests that SGLang, each of its replicas, or each server holds at a time, at most (%(default)s)",
    )
    command.add_argument(
        "--answer-timeout",
        metavar="SECONDS",
        type=_seconds,
        default=TIMEOUT,
        help="that an answer may take, its time in the server's queue included (%(default)s)",
    )
    command.add_argument(
        "--url", action="append", default=[], help="a server that runs, in place of a model; more than once for more"
    )
    _add_key(command)
    command.set_defaults(run=_batch, parser=command)


def _add_gpu(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--gpu", type=str.lower, default="h200", help=f"one that was measured: {', '.join(GPUS)} (%(default)s)"
    )


def _add_json(command: argparse.ArgumentParser, text: str = "print JSON in place of text") -> None:
    command.add_argument("--json", action="store_true", help=text)


def _add_key(command: argparse.ArgumentParser) -> None:
    # The default is looked up later, because --help would show it.
    command.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"what the server was started with. Prefer the environment variable {KEY}: everybody on this machine can read command lines. "
        f"If neither is given, {OPENAI_KEY} is sent to what --url names",
    )


def _key(arguments: argparse.Namespace) -> str:
    """The API key for the servers that are asked; empty for none. Says so if others can read it on its way."""
    urls = [arguments.url] if isinstance(arguments.url, str) else arguments.url or []
    key = arguments.api_key
    if key is None:
        key = os.environ.get(KEY, os.environ.get(OPENAI_KEY, "") if urls else "")
    clear = [url for url in urls if is_address(url) and is_in_the_clear(url)]
    if key and is_key(key) and clear:
        others = f" and {len(clear) - 1} more" if clear[1:] else ""
        say(f"{PROG}: the API key is sent in the clear to {clear[0]}{others}: everybody on the way can read it")
    return key


def _doctor(arguments: argparse.Namespace) -> int:
    from sglang_pat.cli.doctor import doctor

    return doctor(arguments.model, arguments.url, _key(arguments), arguments.json)


def _estimate(arguments: argparse.Namespace) -> None:
    with patience(f"{PROG}: reading {arguments.requests} and planning its batches"):
        model = read_model(arguments.model)
        workload = load(arguments.requests, arguments.answer_tokens)
        sizes = list(itertools.chain.from_iterable(arguments.batch))
        found = estimate(
            workload.prompts, model, arguments.gpu, sizes, arguments.kv_cache_dtype, arguments.draft_tokens
        )
        found.source, found.warnings = workload.source, workload.warnings
    print(as_json(found) if arguments.json else "\n".join(found.lines()))


def _batch(arguments: argparse.Namespace) -> int:
    from sglang_pat.batch.command import Place, batch

    if arguments.requests.is_dir() or (arguments.others and not arguments.requests.exists()):
        what = "is a folder" if arguments.requests.is_dir() else "is not there"
        raise BatchError(
            f"{arguments.requests} {what}, and no file of requests; the two files come before all other flags"
        )
    place = Place(arguments.others, arguments.url, _key(arguments), arguments.in_flight, arguments.answer_timeout)
    return 1 if batch(arguments.requests, arguments.answers, place) else 0


def _explain(arguments: argparse.Namespace) -> None:
    if (arguments.trace is None) == (arguments.url is None):
        raise explain.ExplainError("give either a trace or --url")
    if arguments.url is not None and arguments.model is not None:
        raise explain.ExplainError("--model is for a file of requests, and --url names a server")
    # A running server is still writing: its file may end within a record.
    live, output = arguments.url is not None, arguments.output
    path = explain.trace_of(arguments.url, _key(arguments)) if live else arguments.trace
    inputs = {"trace" if arguments.model is None else "input": path}
    if arguments.model is not None:
        with contextlib.suppress(ModelError):  # said later, behind what is wrong with the requests
            inputs["model's config.json"] = find(arguments.model)
    for kind, file in inputs.items():
        if os.path.realpath(output) == os.path.realpath(file):
            raise explain.ExplainError(f"--output {output} is the {kind}: name another file")
    if is_trace(output):
        raise explain.ExplainError(f"--output {output} is another trace, which would be lost: name another file")
    try:
        if arguments.model is not None:
            prompts = load(path, DEFAULT_ANSWER).prompts
            steps = explain.explain_job(prompts, read_model(arguments.model), arguments.gpu, output, arguments.steps)
        else:
            steps = explain.explain(path, output, arguments.steps, arguments.truncated or live)
    except OSError as error:
        raise explain.ExplainError(f"--output {output} cannot be written: {error.strerror}") from None
    print(f"{output}: {steps} plan{'' if steps == 1 else 's'} of {path}")


def _top(arguments: argparse.Namespace) -> None:
    url = URL if arguments.url is None else arguments.url
    try:
        top(url, arguments.interval, arguments.once, _key(arguments), arguments.json, arguments.verbose)
    except SilenceError as error:
        raise TopError(f"{error}{' Or give its address with --url' * (arguments.url is None)}") from None


def _replay(arguments: argparse.Namespace) -> None:
    found = []
    for number, policy in enumerate(arguments.policy or [None]):
        try:
            replayed = replay(arguments.trace, policy, make_plan if arguments.oracle else None, arguments.truncated)
        except AssertionError as error:
            raise TraceError(f"{arguments.trace}: {error}") from None
        if arguments.json:
            found.append(replayed.summary())
        else:
            print("\n" * (number > 0) + "\n".join(replayed.lines()))
    if arguments.json:
        print(as_json(found))
