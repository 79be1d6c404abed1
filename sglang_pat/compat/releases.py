"""Which SGLang is installed."""

from importlib.metadata import version
from typing import NamedTuple


class Run(NamedTuple):
    """Where tests ran with a release.

    Attributes:
        on_cpu: What ran on a CPU.
        on_gpu: What ran on a GPU.
        last: When last on a CPU.
    """

    on_cpu: str
    on_gpu: str
    last: str


RUN = {
    "0.5.17": Run("servers and what meets SGLang, in CI", "most tests, H200, H100", "with every change"),
    "0.5.18": Run("`make test-releases`", "not run", "2026-12-01"),
    "0.5.19": Run("`make test-releases`", "not run", "2026-12-01"),
    "0.5.20": Run("`make test-releases`", "not run", "2026-12-01"),
    "0.5.21": Run("`make test-releases`", "not run", "2026-12-01"),
    "0.5.22": Run("`make test-releases`", "not run", "2026-12-01"),
    "0.5.23": Run("all tests, in CI", "all tests, H200", "with every change"),
}
"""Releases that tests ran with, oldest first (docs/support.md). CI runs the oldest and the newest, `make test-releases` each of them."""

TESTED = tuple(RUN)
"""Releases that served in tests; with others the server warns."""


def release() -> str:
    """The SGLang that is installed."""
    return version("sglang")
