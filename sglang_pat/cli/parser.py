"""The argument parser of all commands."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from sglang_pat.text import printable, say


class Parser(argparse.ArgumentParser):
    """Says in one sentence what is wrong with an argument."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {printable(message)}; see {self.prog} --help\n")


def run(prog: str, command: Callable[[], int | None]) -> int:
    """Run a command; returns its exit status. Ctrl-C and an output that is closed or full end it without a traceback."""
    try:
        try:
            return command() or 0
        finally:
            print(end="", flush=True)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:
        # Python must not try to write the rest again when it exits.
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 128 + signal.SIGPIPE
        said = f"{error.filename or 'the output'}: {error.strerror or error}"
        say(f"{prog}: {printable(said)}")
        return 2


def count(text: str) -> int:
    """Parse a count.

    Raises:
        ArgumentTypeError: It is not a number, or is 0.
    """
    if re.fullmatch("[0-9]{1,9}", text) is None or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 999,999,999")
    return int(text)
