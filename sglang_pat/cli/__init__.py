"""The command line, `sglang-pat`: `commands.py` has its arguments, and each command is a file or a folder of the package."""

from __future__ import annotations


def main(arguments: list[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    # Imported here, as other modules use single files of this folder.
    from sglang_pat.cli import commands

    return commands.main(arguments)
