"""What only tests ask of a native scheduler."""

from __future__ import annotations

import numpy as np
import tvm_ffi

from sglang_pat.packing.native import NativeScheduler


def next_batch(scheduler: NativeScheduler) -> list[int]:
    """The next batch, in order, as `expect`, `withdraw`, `release` and `take` left it."""
    found = np.empty(1 << 10, dtype=np.int64)
    size = scheduler._module.batch(scheduler._handle, tvm_ffi.from_dlpack(found))
    assert size <= len(found)
    return found[:size].tolist()


def settle(scheduler: NativeScheduler) -> None:
    """Wait until the scheduler's thread has made the plan that `prepare` asked for."""
    scheduler._module.settle(scheduler._handle)


def set_delays(scheduler: NativeScheduler, before_copy: int = 0, before_publish: int = 0) -> None:
    """How many microseconds the scheduler's thread waits before it reads the batch and before it publishes the plan."""
    scheduler._module.set_delays(scheduler._handle, before_copy, before_publish)
