"""The argument parser of all commands."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import msgspec

from sglang_pat.text import printable, say

PATIENCE = 1
"""Seconds that a command may take without saying what it does."""


class Parser(argparse.ArgumentParser):
    """Says in one sentence what is wrong with an argument."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {printable(message)}{self._meant(message)}; see {self.prog} --help\n")

    def _meant(self, message: str) -> str:
        """What may have been meant in place of what argparse does not know."""
        if wrong := re.match(r"argument .*: invalid choice: '([^']*)' \(choose from (.*)\)", message, re.DOTALL):
            meant = difflib.get_close_matches(wrong[1], re.findall(r"[\w.-]+", wrong[2]), 1)
        elif wrong := re.match(r"unrecognized arguments:(?: [^ -][^ ]*)* (--?[\w-]+)", message):
            known = [option for action in self._actions for option in action.option_strings]
            meant = difflib.get_close_matches(wrong[1], known, 1)
        else:
            meant = []
        return f": did you mean {meant[0]}?" if meant else ""


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


def as_json(value: Any) -> str:
    """What `--json` prints: over several lines, for people too. A stdout that knows few letters can show it."""
    return json.dumps(msgspec.to_builtins(value), indent=2)


@contextlib.contextmanager
def patience(text: str) -> Iterator[None]:
    """Say in a terminal what takes so long, if it takes longer than a second. In a log or a pipe, where errors are looked for, nobody waits for it."""
    timer = threading.Timer(PATIENCE, say, [printable(text)])
    timer.daemon = True
    if sys.stderr is not None and sys.stderr.isatty():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def counts(text: str) -> list[int]:
    """Parse counts with commas between them."""
    return [count(part) for part in text.split(",")]


def count(text: str) -> int:
    """Parse a count."""
    if re.fullmatch("[0-9]{1,9}", text) is None or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 999,999,999")
    return int(text)
