"""What a chaos did, and what it found."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

SHOWN = 20
"""Problems that are kept; more of them are counted."""


@dataclass
class Report:
    """What a chaos did, and what it found.

    Attributes:
        actions: How often each kind of action was done.
        outcomes: What came of requests.
        compared: Answers that were compared with the right one, by kind; "partial" ones were cut off, and "retracted" ones of all were
            computed anew in between.
        problems: What is wrong; none, if all is well.
        counters: sglang-pat's, at the end.
    """

    seed: int
    seconds: float = 0.0
    actions: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    compared: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    unlisted: int = 0
    counters: dict[str, Any] = field(default_factory=dict)

    def problem(self, text: str) -> None:
        if len(self.problems) < SHOWN:
            self.problems.append(text)
        else:
            self.unlisted += 1

    def __str__(self) -> str:
        return json.dumps({field.name: getattr(self, field.name) for field in fields(self)}, indent=1, sort_keys=True)


def our_tracebacks(log: str) -> list[str]:
    """The last lines of the tracebacks in a server's log that pass through sglang-pat; numbers in them are #."""
    found: dict[str, None] = {}
    for block in re.split(r"Traceback \(most recent call last\):\n", log)[1:]:
        ours = False
        for line in block.splitlines():
            content = re.sub(r"^\[[^]]*\] ", "", line)
            if content.startswith((" ", "\t")) or not content.strip() or set(content.strip()) <= set("|+-^~ "):
                ours |= "sglang_pat" in content
            else:
                if ours:
                    found[re.sub(r"[0-9a-f]{16,}|\d+", "#", content)[:160]] = None
                break
    return list(found)
