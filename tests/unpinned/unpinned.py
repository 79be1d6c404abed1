"""Lets SGLang's LoRA, DP attention, prefill servers and DeepSeek's drafts run where there is no GPU: they pin host memory without asking whether that
is possible; prefill servers record events on a GPU's stream, and drafts that share their model's embedding wait for it.

A plugin of SGLang (`sglang.srt.plugins`), found by servers in whose PYTHONPATH this folder is; of no use but for tests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def _without_pinning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*arguments: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        return make(*arguments, **more)

    return made


class Event:
    """Of a stream on a CPU, where what was started is done."""

    def record(self, *_: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


def register() -> None:
    """Make pinning, events and waits do nothing."""
    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign, assignment]
    if not torch.cuda.is_available():
        torch.cuda.Event = Event  # type: ignore[misc, assignment]
        torch.cuda.current_stream = lambda *_: None  # type: ignore[assignment]
        torch.cuda.synchronize = lambda *_: None
