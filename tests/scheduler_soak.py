"""Drives SGLang's real scheduler in this process and checks the mirror after every batch.

    python tests/scheduler_soak.py MODEL --batches 300 --seed 1 [launch_server arguments]

The scheduler, its policy, cache, allocators and model are SGLang's; only requests are put in by hand, between its
batches. Prints one JSON object; a broken invariant is an AssertionError.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import signal
import sys
from array import array
from collections import Counter
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

# A scheduler that fails sends SIGQUIT to its parent; here that is only this script's other half.
if __name__ == "__main__" and (child := os.fork()):
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0)

os.environ |= {"SGLANG_PAT_CPU_PLATFORM": "1", "TRITON_INTERPRET": "1", "SGLANG_PAT_VERIFY": "1", "HF_HUB_OFFLINE": "1"}

from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.io_struct import AbortReq, CloseSessionReqInput, FlushCacheReqInput, TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, prepare_server_args

from sglang_pat import compat
from sglang_pat.backend.start import support
from sglang_pat.demo.server import free_port
from sglang_pat.radix_bridge import hooks, siblings
from sglang_pat.radix_bridge.events import ROOT, NodeEvicted, RequestBound, RequestReleased, TreeReset
from sglang_pat.radix_bridge.observer import ROW

T = TypeVar("T")

# Prompts are short here, and shall be put off too.
siblings.BLOCK = 16

FLUSH_EVERY = 100
"""Batches after which the server is left to drain, and its cache flushed."""


class Pipe:
    """Where the scheduler reports that it is ready."""

    def send(self, message: Any) -> None:
        pass


class Soak:
    def __init__(
        self, scheduler: Any, batches: int, seed: int, namespaces: bool, priorities: bool, alike: bool
    ) -> None:
        self.scheduler = scheduler
        (self._backend,) = hooks.followers()
        self.observer = self._backend.observer
        self.evicted = 0
        self.observer.subscribers.append(self.count)
        self.remaining = batches
        self.next_flush = batches - FLUSH_EVERY
        self.random = random.Random(seed)
        self.namespaces = namespaces
        self.priorities = priorities
        self.alike = alike
        self.sent: list[str] = []
        self.flushes = self.aborts = self.checked = self.shared = self.running = self.bound = 0
        self.retracted_rids: set[str] = set()
        self.computing: dict[Any, tuple[list[int], int, int]] = {}  # tokens of each request, and which of them
        self.twice = 0
        self.broken = ""
        self.host: Counter[str] = Counter()
        self.watch_host()
        self._next, self._process = scheduler.get_next_batch_to_run, scheduler.process_batch_result
        scheduler.get_next_batch_to_run, scheduler.process_batch_result = self.next, self.process

    def count(self, event: Any) -> None:
        self.evicted += isinstance(event, NodeEvicted)
        self.flushes += isinstance(event, TreeReset)
        if isinstance(
            event, RequestBound | RequestReleased | NodeEvicted | TreeReset
        ):  # with each of which the tree and the mirror agree again
            try:
                self.check(counts=False)
            except Exception as error:
                # It would be contained as a fault of the observer.
                self.broken = self.broken or f"after {event}: {error!r}"

    def watch_host(self) -> None:
        """Count copies to the host and back, how many were made beside running requests, and how often the host was full."""
        cache = getattr(self.scheduler.tree_cache, "inner", self.scheduler.tree_cache)
        controller = getattr(cache, "cache_controller", None)
        self.has_host = controller is not None
        for name in ("write", "load") if controller else ():
            setattr(controller, name, functools.partial(self.copy, controller, name, getattr(controller, name)))

    def copy(self, controller: Any, name: str, copy: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        slots = copy(*args, **kwargs)
        self.host[f"{name}s"] += slots is not None
        self.host[f"{name}s_beside"] += slots is not None and not self.scheduler.running_batch.is_empty()
        if name == "write":
            self.host["full"] += slots is None or controller.mem_pool_host.available_size() == 0
        return slots

    def next(self, *args: Any, **kwargs: Any) -> Any:
        """Put requests in, then let the scheduler choose."""
        busy = len(self.scheduler.waiting_queue) + len(self.scheduler.running_batch.reqs)
        if self.remaining <= 0:
            if busy == 0 and self.scheduler.last_batch is None:
                self.scheduler.gracefully_exit = True
        elif self.remaining < self.next_flush:
            if busy == 0 and self.scheduler.last_batch is None:
                flushes = self.flushes
                self.scheduler.process_input_requests([FlushCacheReqInput()])
                # SGLang refuses while copies to the host are under way.
                self.next_flush -= FLUSH_EVERY * (self.flushes > flushes or not self.has_host)
        elif busy < 12 and self.random.random() < 0.5:
            self.scheduler.process_input_requests([self.request() for _ in range(self.random.randint(1, 5))])
        elif self.scheduler.enable_session_radix_cache and self.random.random() < 0.05:
            self.scheduler.process_input_requests([CloseSessionReqInput(session_id=self.session())])
        elif self.sent and self.random.random() < 0.1:
            self.scheduler.process_input_requests([AbortReq(rid=self.random.choice(self.sent[-16:]))])
            self.aborts += 1
        plan = self._next(*args, **kwargs)
        if plan.batch_to_run is not None and compat.batch.is_extend(plan.batch_to_run.forward_mode):
            self.count_twice(plan.batch_to_run)
        return plan

    def count_twice(self, batch: Any) -> None:
        """Count requests that compute what another one in this batch, or in one whose result is not known yet, computes too."""
        allowed = siblings.BLOCK + self.scheduler.page_size
        for req in batch.reqs:
            start, end = computed(req)
            tokens = list(req.full_untruncated_fill_ids[:end])
            for other, (others, first, last) in self.computing.items():
                pairs = zip(tokens, others[:last], strict=False)
                common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                again = common - max(start, first) >= allowed
                self.twice += (
                    again and other is not req and compat.requests.namespace(other) == compat.requests.namespace(req)
                )
            self.computing[req] = (tokens, start, end)

    def request(self) -> TokenizedGenerateReqInput:
        """A prompt that follows a random walk in a fixed tree of prefixes, so that every kind of split happens."""
        tokens: list[int] = []
        state = self.random.randrange(3)
        for _ in range(self.random.randint(1, 4)):
            branch = random.Random(f"{state}")
            if self.alike:
                # Keys of pairs of tokens tell those apart that begin with the same one.
                tokens.append(1)
            tokens += [branch.randrange(1, 250) for _ in range(branch.randint(5, 60))]
            state = state * 3 + self.random.randrange(3)
        if self.random.random() < 0.3:
            tokens = tokens[: self.random.randint(1, len(tokens))]
        if self.random.random() < 0.5:
            tokens += [self.random.randrange(1, 250) for _ in range(self.random.randint(1, 20))]
        rid = f"r{len(self.sent)}"
        self.sent.append(rid)
        return generate(
            rid,
            tokens,
            self.random.randint(1, 40),
            extra_key=self.random.choice([None, "a", "b"]) if self.namespaces else None,
            priority=self.random.randint(0, 3) if self.priorities else None,
            session_id=self.session() if self.scheduler.enable_session_radix_cache else None,
        )

    def session(self) -> str:
        return f"s{self.random.randrange(4)}"

    def process(self, *args: Any, **kwargs: Any) -> Any:
        """Let the scheduler take a batch's result, then look."""
        result = self._process(*args, **kwargs)
        self.remaining -= 1
        for req in args[0].reqs:
            self.computing.pop(req, None)
        self.check()
        self.retracted_rids |= {req.rid for req in self.scheduler.waiting_queue if req.retracted_stain}
        return result

    def check(self, counts: bool = True) -> None:
        """Compare the mirror with the scheduler's tables; `counts`: whether that counts in the report."""
        mirror, table = self.observer.scheduler, self.scheduler.req_to_token_pool.req_to_token
        pool = self.scheduler.req_to_token_pool
        running = {
            number: req
            for req in self.scheduler.running_batch.reqs
            if not req.finished() and (number := compat.requests.number(pool, req)) is not None
        }
        bound = {number: binding for number in running if (binding := mirror.binding(number))}
        self.running += counts * len(running)
        for number, (_, end) in bound.items():
            # Before a request was cached, nothing is known of its path.
            assert end in (0, compat.requests.protected_len(running[number])), running[number].rid
            self.bound += counts * (end == compat.requests.protected_len(running[number]))
        # Two requests share exactly what their rows share.
        found = [
            (path(mirror, node), table[number & ROW, :end].numpy())
            for number, (node, end) in bound.items()
            if node != ROOT
        ]
        for i, (first, own) in enumerate(found):
            for second, other in found[:i]:
                length = min(len(own), len(other))
                differ = np.flatnonzero(own[:length] != other[:length])
                common = int(differ[0]) if len(differ) else length
                assert common == shared_end(first, second), (first, second, common)
                self.shared += counts * (common > 0)
                self.checked += counts

    def report(self) -> dict[str, Any]:
        assert not self.broken, self.broken
        assert len(self.observer.scheduler) == 0, "requests are left"
        assert self.observer.scheduler.num_nodes == 0, "nodes are left"
        assert not self.observer._reqs, "requests are left in the observer"
        return {
            "cache": type(self.scheduler.tree_cache).__name__,
            "core": type(getattr(self.scheduler.tree_cache, "tree_core", None)).__name__,
            "requests": len(self.sent), "checked": self.checked, "shared": self.shared, "flushes": self.flushes,
            "aborts": self.aborts, "evicted": self.evicted, "retracted": len(self.retracted_rids),
            "twice": self.twice, **self.host, "bound_share": self.bound / max(1, self.running), **self._backend.reporter.counters(),
        }  # fmt: skip


def generate(rid: str, tokens: list[int], new_tokens: int, **options: Any) -> TokenizedGenerateReqInput:
    """What a scheduler gets of a request."""
    parameters = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    parameters.normalize(None)
    parameters.verify(512)
    plain: dict[str, Any] = {
        "input_text": None,
        "input_embeds": None,
        "mm_inputs": None,
        "token_type_ids": None,
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "stream": False,
    }
    return TokenizedGenerateReqInput(
        rid=rid, input_ids=array("q", tokens), sampling_params=parameters, **(plain | options)
    )


def computed(req: Any) -> tuple[int, int]:
    """Which of its tokens a request computes in the batch that was just made."""
    if hasattr(req, "extend_end"):
        return req.prefix_len, req.extend_end
    return req.extend_range.start, req.extend_range.end


def shared_end(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> int:
    """Where two paths part."""
    both = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return sum(length for (_, length), _ in both)


def path(mirror: Any, node: int) -> list[tuple[int, int]]:
    """(node, length) from the first level down to `node`."""
    result = []
    while node != ROOT:
        parent, length = mirror.find(node)
        result.append((node, length))
        node = parent
    return result[::-1]


def allow_mamba() -> None:
    """Let Nemotron-H run on a CPU, where SGLang's kernels for its Mamba layers do not: they give zeros, which to the cache is all one."""
    import torch
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import Mamba2AttnBackend
    from sglang.srt.server_args import ServerArgs

    from sglang_pat.platform.cpu import CpuPlatform

    def forward(self: Any, *, hidden_states: Any, **_: Any) -> Any:
        return torch.zeros_like(hidden_states)

    Mamba2AttnBackend.forward = forward
    support.check_hybrid = lambda *_: None
    # Each release asks one of these whether states can be kept at checkpoints.
    CpuPlatform.support_mamba_cache_extra_buffer = lambda _: True
    ServerArgs._validate_mamba_extra_buffer = lambda *_: None


def drive(model: Path, flags: list[str], driver: Callable[[Any], T]) -> T:
    """Run a scheduler; what `driver`, called with it before its first batch, makes.

    Whoever drives it ends it by its `gracefully_exit`.
    """
    server_args = prepare_server_args(
        ["--model-path", str(model), "--device", "cpu", "--attention-backend", "pat", "--dtype", "float32",
         "--grammar-backend", "none", "--nccl-port", str(free_port()), *flags]
    )  # fmt: skip
    made: list[tuple[Any, T]] = []
    run = scheduler_module.Scheduler.run_event_loop

    def run_event_loop(scheduler: Any) -> None:
        made.append((scheduler, driver(scheduler)))
        run(scheduler)

    scheduler_module.Scheduler.run_event_loop = run_event_loop
    scheduler_module.kill_itself_when_parent_died = lambda: None
    names = scheduler_module.run_scheduler_process.__code__.co_varnames
    keywords = dict.fromkeys(names[2 : names.index("pipe_writer")], 0) | {"dp_rank": None}
    scheduler_module.run_scheduler_process(server_args, PortArgs.init_new(server_args), pipe_writer=Pipe(), **keywords)
    if not made or not made[0][0].gracefully_exit:
        sys.exit("the scheduler failed")
    return made[0][1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--namespaces", action="store_true")
    parser.add_argument("--mamba", action="store_true")
    parser.add_argument("--alike", action="store_true")
    arguments, flags = parser.parse_known_args()
    if arguments.mamba:
        allow_mamba()
    soak = drive(
        arguments.model,
        flags,
        lambda scheduler: Soak(
            scheduler,
            arguments.batches,
            arguments.seed,
            arguments.namespaces,
            "--enable-priority-scheduling" in flags,
            arguments.alike,
        ),
    )
    print(json.dumps(soak.report()))


if __name__ == "__main__":
    main()
