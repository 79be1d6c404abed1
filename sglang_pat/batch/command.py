"""`sglang-pat batch`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_pat.batch import job, lines
from sglang_pat.batch.lines import BatchError, Failure, Json, Output, Request

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine

DEFAULTS = {"--attention-backend": "pat", "--log-level": "warning"}
"""Flags of SGLang's server that a job has if neither flags nor a `--config` file say otherwise."""


def engine(flags: Sequence[str]) -> Engine:
    """An engine with flags of SGLang's server, and with those of DEFAULTS where it is not told otherwise."""
    import sglang
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    # A file may have them too, and flags would win over it.
    added = [] if "--config" in flags else [word for default in DEFAULTS.items() for word in default]
    return sglang.Engine(server_args=prepare_server_args([*added, *flags]))


class Progress:
    """A bar of requests; tokens a second, and what prefixes saved, beside it."""

    def __init__(self, total: int, done: int) -> None:
        from tqdm import tqdm

        self._bar: Any = tqdm(total=total, initial=done, unit="req", dynamic_ncols=True, file=sys.stderr)
        self._began = time.monotonic()
        self._prompt = self._cached = self._answers = 0

    def count(self, record: Json) -> None:
        """A record was written."""
        usage = (record["response"] or {}).get("body", {}).get("usage") or {}
        self._prompt += usage.get("prompt_tokens") or 0
        self._answers += usage.get("completion_tokens") or 0
        self._cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        seconds = max(1e-9, time.monotonic() - self._began)
        saved = f", {self._cached / self._prompt:.0%} of prefill saved" if self._prompt else ""
        self._bar.set_postfix_str(f"{self._answers / seconds:.0f} tokens/s{saved}", refresh=False)
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


def batch(source: Path, target: Path, flags: Sequence[str], in_flight: int) -> int:
    """Answer what is not answered yet; how many of all records are errors.

    Args:
        source: Requests in OpenAI's batch format.
        target: Where their records go.
        flags: Of SGLang's server, `--model-path` among them.
        in_flight: Requests that the engine holds at a time.

    Raises:
        BatchError: A file cannot be read or written, or belongs to another job.
    """
    if target.exists() and source.exists() and target.samefile(source):
        raise BatchError(f"{target} is the input: name another file")
    # Before the output is made: a wrong name must not leave one.
    found = list(lines.read(source))
    with Output(target) as output:
        for one in found:
            if output.done.get(one.number, one.custom_id) != one.custom_id:
                raise BatchError(f"{target} has answers to another input than {source}: name another file")
        left = [one for one in found if one.number not in output.done]
        for one in left:
            if isinstance(one, Failure):
                output.write(lines.refusal(one))
        requests = [one for one in left if isinstance(one, Request)]
        if requests:
            _answer(requests, len(found), output, flags, in_flight)
        return output.failed


def _answer(requests: list[Request], total: int, output: Output, flags: Sequence[str], in_flight: int) -> None:
    running = engine(["--enable-cache-report", *flags])
    progress = Progress(total, total - len(requests))

    def keep(record: Json) -> None:
        output.write(record)
        progress.count(record)

    try:
        told = running.tokenizer_manager
        running.loop.run_until_complete(
            job.answer_all(requests, job.asker(running), keep, in_flight, lambda: told.gracefully_exit)
        )
    finally:
        progress.close()
        running.shutdown()
