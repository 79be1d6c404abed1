"""Lets SGLang's LoRA and DP attention run where there is no GPU: both pin host memory without asking whether that is possible.

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


def register() -> None:
    """Make pinning do nothing."""
    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign, assignment]
