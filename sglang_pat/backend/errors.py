"""What is said where PAT does not do what is asked for."""

from __future__ import annotations


class UnsupportedError(ValueError):
    """`--attention-backend pat` does not support a flag, or a property of the model."""


def unsupported(what: str, instead: str) -> UnsupportedError:
    """The error for something that PAT does not do, and what to do instead."""
    return UnsupportedError(f"--attention-backend pat does not support {what}: {instead}")
