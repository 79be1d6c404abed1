"""What the emulator is for: a barrier or a wait that the kernels lack is found without a GPU (faults.py, emulated.py)."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import emulated
import faults
import pytest
from conftest import selected
from forked import ForkedProcess

from sglang_pat import jit

pytestmark = pytest.mark.once

SLOW = (
    "pages",
    "tails",
    "tails of 8 bits",
    "8 bits",
    "unequal, 16 bits",
    "unequal, 8 bits",
    "unequal 8 bits by mma",
    "latents of 8 bits",
    "direct",
    "16 bits",
    "own queries",
)
"""Kinds that `make test` leaves out. Of most of them test_cuda_kernel.py and test_page_kernel.py show there that they are right in any order of threads."""

TEXT = r"\n((?:(?!emulator::planted).)*?)\n"
SWITCH = re.compile(
    r"(?:if )?\(emulator::planted == (\d+)(?:\) {| \? \()" + TEXT + r"(?:} else {|\) : \()" + TEXT + r"(?:}|\)\))",
    re.DOTALL,
)
"""As `emulated.with_changes` makes them, the inner ones where several changes have one place."""


def with_planted(number: int, source: str) -> str:
    """What a source with switches says while this number is planted."""
    while SWITCH.search(source):
        source = SWITCH.sub(lambda found: found[2 if int(found[1]) == number else 3], source)
    return source


def test_planted_is_what_the_change_says_and_nothing_else() -> None:
    # The last one is where another one is.
    changes = [*faults.FAULTS, ("kv/plain_convert.cuh", "cursor_.wait_empty();", "cursor_.wait_full();")]
    for number, change in enumerate(changes):
        name = change[0]
        source, switched = (jit.CSRC / "cuda" / name).read_text(), emulated.with_changes(name, changes)
        changed = source
        for text, replacement in emulated.pairs(change):
            changed = changed.replace(text, replacement)
        assert with_planted(number, switched) == changed != source
        assert with_planted(len(changes), switched) == source


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future]]:
    """Exit codes and output. In processes of their own, because what is missing may end one; forked, as importing torch takes seconds."""
    logs = tmp_path_factory.mktemp("changes")

    def start(name: str) -> tuple[int, str]:
        log = logs / f"{[*faults.SOUND, *faults.CHANGES].index(name)}.log"
        process = ForkedProcess([sys.executable, faults.__file__, name], dict(os.environ), log)
        try:
            return process.wait(300), log.read_text()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {name: pool.submit(start, name) for name in selected(request, "kind") + selected(request, "name")}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind in SLOW else ()) for kind in faults.SOUND]
)
def test_nothing_is_found_where_nothing_is_missing(kind: str, results: dict[str, Future]) -> None:
    """The kernels have what they need. Or else `test_what_is_missing_is_found` would prove nothing of this kind."""
    code, output = results[kind].result()
    assert code == 0 and "found: nothing" in output, output[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", faults.CHANGES)
def test_what_is_missing_is_found(name: str, results: dict[str, Future]) -> None:
    code, output = results[name].result()
    print(output)
    # A fault can be a crash.
    assert code < 0 or (code == 0 and "found: " in output and "found: nothing" not in output), output[-3000:]
