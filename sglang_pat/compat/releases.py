"""Which SGLang is installed."""

from importlib.metadata import version

BRIDGE = "the bridge alone"
"""Of `make test-releases` only the part that starts no server."""

RUN = {
    "0.5.17": ("all tests, in CI", "H200, H100", "with every change"),
    "0.5.18": (BRIDGE, "not run", "2026-11-29"),
    "0.5.19": ("`make test-releases` but for drafts, with which SGLang does not start there", "not run", "2026-11-29"),
    "0.5.20": ("`make test-releases`", "not run", "2026-11-29"),
    "0.5.21": ("`make test-releases`", "not run", "2026-11-29"),
    "0.5.22": (BRIDGE, "not run", "2026-11-29"),
    "0.5.23": ("all tests, in CI", "H200; draft models without graphs only", "with every change"),
}
"""Releases that tests ran with, oldest first: what ran on a CPU, what on a GPU, and when last on a CPU (docs/support.md). CI runs the oldest and the newest,
`make test-releases` each of them."""

TESTED = tuple(name for name, (on_cpu, *_) in RUN.items() if on_cpu != BRIDGE)
"""Releases that served in tests; with others the server warns."""


def release() -> str:
    """The SGLang that is installed."""
    return version("sglang")
