"""The argument parser of all commands."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Says in one sentence what is wrong with an argument."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def count(text: str) -> int:
    """Parse a count.

    Raises:
        ArgumentTypeError: It is not a number, or is 0.
    """
    if re.fullmatch("[0-9]{1,9}", text) is None or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 999,999,999")
    return int(text)
