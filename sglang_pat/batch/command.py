"""`sglang-pat batch`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_pat.batch import job, lines
from sglang_pat.batch.lines import BatchError, Failure, Json, Output

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine

DEFAULTS = {"--attention-backend": "pat", "--log-level": "warning"}
"""Flags of SGLang's server that a job has if it is not told otherwise."""


def engine(flags: Sequence[str]) -> Engine:
    """An engine with flags of SGLang's server, and those of DEFAULTS that are not among them."""
    import sglang
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    given = {flag.partition("=")[0] for flag in flags}
    added = [word for name, value in DEFAULTS.items() if name not in given for word in (name, value)]
    return sglang.Engine(server_args=prepare_server_args([*flags, *added]))


class Progress:
    """A bar of requests; tokens a second, and what prefixes saved, beside it."""

    def __init__(self, total: int, done: int) -> None:
        from tqdm import tqdm

        self._bar: Any = tqdm(total=total, initial=done, unit="req", dynamic_ncols=True, file=sys.stderr)
        self._began = time.monotonic()
        self._prompt = self._cached = self._answers = self.failed = 0

    def count(self, record: Json) -> None:
        """A record was written."""
        response = record["response"]
        self.failed += response is None or response["status_code"] != 200
        usage = (response or {}).get("body", {}).get("usage") or {}
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
    """Answer what is not answered yet; how many records are errors of those that were written now.

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
    with Output(target) as output:
        total, failures, requests = 0, [], []
        for found in lines.read(source):
            total += 1
            if found.number in output.done:
                if output.done[found.number] != found.custom_id:
                    raise BatchError(f"{target} has answers to another input than {source}: name another file")
            elif isinstance(found, Failure):
                failures.append(found)
            else:
                requests.append(found)
        for failure in failures:
            output.write(lines.refusal(failure))
        if not requests:
            return len(failures)
        running = engine(["--enable-cache-report", *flags])
        progress = Progress(total, total - len(requests))

        def keep(record: Json) -> None:
            output.write(record)
            progress.count(record)

        try:
            running.loop.run_until_complete(job.answer_all(requests, job.asker(running), keep, in_flight))
        finally:
            progress.close()
            running.shutdown()
        return len(failures) + progress.failed
