"""The `sglang-pat` command."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sglang_pat import explain
from sglang_pat.estimate import EstimateError, estimate, read, read_model
from sglang_pat.packing import POLICIES
from sglang_pat.radix_bridge.trace import TraceError
from sglang_pat.replay import replay
from sglang_pat.top import TopError, top


def main(arguments: list[str] | None = None) -> int:
    """Run a subcommand; the exit status."""
    parser = argparse.ArgumentParser(prog="sglang-pat", description="Tools for sglang-pat; none of them needs a GPU.")
    commands = parser.add_subparsers(required=True, metavar="command")
    command = commands.add_parser(
        "replay", help="run a trace recorded with SGLANG_PAT_TRACE through the scheduler and print what packing does"
    )
    command.add_argument("trace", type=Path)
    command.add_argument("--policy", choices=list(POLICIES), action="append", help="instead of the recorded one")
    command.add_argument("--oracle", action="store_true", help="compare every plan with the Python scheduler's; slow")
    command.add_argument("--truncated", action="store_true", help="take what there is of a file that was cut off")
    command.set_defaults(run=_replay)
    command = commands.add_parser("estimate", help="say what packing would bring a workload")
    command.add_argument(
        "requests", type=Path, help="an OpenAI batch, a request log of SGLang, a Mooncake trace, or a prompt a line"
    )
    command.add_argument("--model", type=Path, required=True, help="the model's folder or config.json")
    command.add_argument("--gpu", default="h200", help="%(default)s")
    command.add_argument("--batch", type=int, nargs="+", default=[8, 32, 128, 256], help="batch sizes")
    command.add_argument("--output", type=int, default=256, help="tokens of an answer, where unknown (%(default)s)")
    command.set_defaults(run=_estimate)
    command = commands.add_parser("top", help="show live what packing does in a running server")
    command.add_argument("--url", default="http://127.0.0.1:30000", help="the server's address (%(default)s)")
    command.add_argument("--interval", type=float, default=2, help="seconds between two pictures (%(default)s)")
    command.add_argument("--once", action="store_true", help="one picture, of everything since the server started")
    command.set_defaults(run=_top)
    command = commands.add_parser("explain", help="write a page that shows how recorded batches were packed, and why")
    command.add_argument("trace", type=Path, nargs="?", help="a file recorded with SGLANG_PAT_TRACE")
    command.add_argument("--url", help="in place of a file: a running server on this machine that records one")
    command.add_argument("--output", type=Path, default=Path("explain.html"), help="the page (%(default)s)")
    command.add_argument("--steps", type=int, default=20, help="plans shown, evenly spread (%(default)s)")
    command.add_argument("--truncated", action="store_true", help="take what there is of a file that was cut off")
    command.set_defaults(run=_explain)
    parsed = parser.parse_args(arguments)
    try:
        parsed.run(parsed)
    except KeyboardInterrupt:
        return 0
    except (TraceError, TopError, EstimateError, explain.ExplainError) as error:
        print(f"sglang-pat: {error}", file=sys.stderr)
        return 2
    return 0


def _estimate(arguments: argparse.Namespace) -> None:
    prompts = read(arguments.requests, arguments.output)
    for line in estimate(prompts, read_model(arguments.model), arguments.gpu, arguments.batch):
        print(line)


def _explain(arguments: argparse.Namespace) -> None:
    if (arguments.trace is None) == (arguments.url is None):
        raise explain.ExplainError("give either a trace or --url")
    # A server that runs is writing: its file ends anywhere.
    path = arguments.trace or explain.trace_of(arguments.url)
    steps = explain.explain(path, arguments.output, arguments.steps, arguments.truncated or bool(arguments.url))
    print(f"{arguments.output}: {steps} plans of {path}")


def _top(arguments: argparse.Namespace) -> None:
    top(arguments.url, arguments.interval, arguments.once)


def _replay(arguments: argparse.Namespace) -> None:
    for number, policy in enumerate(arguments.policy or [None]):
        if number:
            print()
        for line in replay(arguments.trace, policy, arguments.oracle, arguments.truncated).lines():
            print(line)


if __name__ == "__main__":
    sys.exit(main())
