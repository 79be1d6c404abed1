"""Which SGLang is installed."""

from importlib.metadata import version

TESTED = ("0.5.17", "0.5.23")
"""Releases that the tests run with."""


def release() -> str:
    """The SGLang that is installed."""
    return version("sglang")
