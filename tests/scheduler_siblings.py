"""Drives SGLang's real scheduler with requests that share prefixes, one scene after another, and prints what each computed in which step.

    python tests/scheduler_siblings.py MODEL [launch_server arguments]

Prints one JSON object: of each scene, for each step, how many tokens each request computes in it, by its name.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# As in scheduler_soak.py.
if __name__ == "__main__" and (child := os.fork()):
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0)

from scheduler_soak import computed, drive, generate
from sglang.srt.managers.io_struct import AbortReq, FlushCacheReqInput

from sglang_pat import compat
from sglang_pat.radix_bridge import hooks

Step = list[Any]
"""What is given to the scheduler before a step."""

OWN = 8
"""Tokens of each request that no other has."""


def scenes() -> dict[str, Iterator[Step]]:
    return {
        "together": together(),
        "after each other": after_each_other(),
        "nested": nested(),
        "aborted": aborted(),
        "a long leader": a_long_leader(),
        "another namespace": another_namespace(),
        "log-probabilities": log_probabilities(),
        "a lost leader": a_lost_leader(),
    }


def tokens(key: str, count: int) -> list[int]:
    return random.Random(key).choices(range(1, 250), k=count)


def sibling(name: str, prefix: list[int], **options: Any) -> Any:
    return generate(name, prefix + tokens(name, OWN), 4, **options)


def together() -> Iterator[Step]:
    prefix = tokens("together", 100)
    yield [sibling(f"t{i}", prefix) for i in range(5)]


def after_each_other() -> Iterator[Step]:
    prefix = tokens("after", 100)
    for i in range(4):
        yield [sibling(f"a{i}", prefix)]


def nested() -> Iterator[Step]:
    prefix = tokens("nested", 100)
    branches = [prefix + tokens(f"branch {i}", 50) for i in range(2)]
    yield [sibling(f"n{i}{j}", branches[i]) for i in range(2) for j in range(2)]


def aborted() -> Iterator[Step]:
    prefix = tokens("aborted", 100)
    yield [sibling(f"x{i}", prefix) for i in range(3)]
    yield [AbortReq(rid="x0")]


def a_long_leader() -> Iterator[Step]:
    prefix = tokens("long", 60)
    yield [generate("l0", prefix + tokens("l0", 240), 4), sibling("l1", prefix), sibling("l2", prefix)]


def another_namespace() -> Iterator[Step]:
    prefix = tokens("namespace", 100)
    yield [sibling("o0", prefix), sibling("o1", prefix, extra_key="a"), sibling("o2", prefix, extra_key="a")]


def log_probabilities() -> Iterator[Step]:
    prefix = tokens("log", 100)
    yield [sibling("p0", prefix), sibling("p1", prefix, return_logprob=True, logprob_start_len=0)]


def a_lost_leader() -> Iterator[Step]:
    """One that no hook ever hears of again."""
    prefix = tokens("lost", 100)
    assert hooks._siblings is not None
    lose = hooks._siblings.ended
    hooks._siblings.ended = lambda req: None if req.rid == "s0" else lose(req)  # type: ignore[method-assign]
    yield [sibling("s0", prefix)]
    for _ in range(6):
        yield []
    del hooks._siblings.ended
    # The tree loses what it computed.
    yield [FlushCacheReqInput()]
    yield [sibling("s1", prefix)]


class Script:
    """Plays the scenes.

    Attributes:
        found: By scene, for each step, tokens that each request computes in it.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._scenes = iter(scenes().items())
        self._scene: Iterator[Step] = iter(())
        self.found: dict[str, list[dict[str, int]]] = {}
        self._next = scheduler.get_next_batch_to_run
        scheduler.get_next_batch_to_run = self.next

    def next(self, *args: Any, **kwargs: Any) -> Any:
        scheduler = self._scheduler
        step = next(self._scene, None)
        if step:
            scheduler.process_input_requests(step)
        elif step is None and not (scheduler.waiting_queue or scheduler.running_batch.reqs or scheduler.last_batch):
            name, self._scene = next(self._scenes, ("", iter(())))
            if name:
                self.found[name] = []
            else:
                scheduler.gracefully_exit = True
        plan = self._next(*args, **kwargs)
        batch = plan.batch_to_run
        if self.found:
            new = batch.reqs if batch is not None and compat.batch.is_extend(batch.forward_mode) else []
            self.found[list(self.found)[-1]].append({req.rid: computed(req)[1] - computed(req)[0] for req in new})
        return plan


def main() -> None:
    script = drive(Path(sys.argv[1]), sys.argv[2:], Script)
    assert hooks._siblings is not None, "it has failed"
    print(json.dumps({"scenes": script.found, "deferred": hooks.deferred(), "leaders": len(hooks._siblings._leaders)}))


if __name__ == "__main__":
    main()
