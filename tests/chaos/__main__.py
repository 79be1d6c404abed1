"""`python tests/chaos`: any length, by hand."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chaos import FEATURES, Chaos


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Put a server under everything that its API allows at once: it aborts everybody's requests, flushes the cache and loads weights. "
        "Never do that to a server that somebody uses."
    )
    parser.add_argument("--url", required=True, help="of the server")
    parser.add_argument("--reference", help="URL of a server on the same weights with another attention backend")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=48, help="different ordinary prompts")
    parser.add_argument(
        "--features",
        nargs="+",
        choices=sorted(FEATURES),
        metavar="FEATURE",
        help="all that the server can do, if left out",
    )
    parser.add_argument(
        "--close", type=float, default=1e-3, help="log-probabilities that differ by less may change places"
    )
    parser.add_argument("--patience", type=float, default=180, help="seconds after which a request hangs")
    options = parser.parse_args()
    chaos = Chaos(
        options.url, options.reference, options.seed, options.seconds, options.concurrency, options.features, options.prompts,
        close=options.close, patience=options.patience,
    )  # fmt: skip
    report = asyncio.run(chaos.run())
    print(report)
    if report.problems:
        sys.exit(1)


if __name__ == "__main__":
    main()
