"""The CPU platform: lets SGLang serve `--attention-backend pat` on a machine without an accelerator.

SGLang asks every installed platform plugin whether it is active before it reads any flag. So `activate` offers a platform that changes nothing,
`DormantPlatform`, which turns itself into `CpuPlatform` when the server arguments choose PAT. Subprocesses inherit that decision through the
environment.
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points

NAME = "pat_cpu"
"""Name of the entry point. `SGLANG_PLATFORM=pat_cpu` selects the platform for servers with another attention backend too."""

AWAKE = "SGLANG_PAT_CPU_PLATFORM"
"""Environment variable that is set for subprocesses once a server has chosen PAT."""


def activate() -> str | None:
    """Entry point of the group `sglang.srt.platforms`.

    Returns:
        The class to use. None on a machine with an accelerator, beside another platform plugin, and if the user asked for SGLang's own CPU
        engine: SGLang then behaves as if this package were not installed.
    """
    if _has_accelerator() or os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    if is_chosen():
        announce()
        return "sglang_pat.platform.cpu.CpuPlatform"
    # Two active platforms are an error to SGLang.
    if any(entry.name != NAME for entry in entry_points(group="sglang.srt.platforms")):
        return None
    return "sglang_pat.platform.cpu.DormantPlatform"


def is_chosen() -> bool:
    """Whether this process, or the one that started it, has chosen PAT on a CPU."""
    return os.environ.get(AWAKE) == "1" or os.environ.get("SGLANG_PLATFORM") == NAME


def _has_accelerator() -> bool:
    import torch

    devices = [getattr(torch, name, None) for name in ("cuda", "xpu", "npu", "musa", "hpu")]
    return any(device is not None and device.is_available() for device in [*devices, torch.backends.mps])


def announce() -> None:
    """Tell this process's children that the CPU platform is on, and that SGLang's Triton kernels are to be interpreted.

    Triton reads its variable when a kernel is defined: while a child imports SGLang.
    """
    os.environ[AWAKE] = "1"
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # Move the KV of accepted drafts with torch, not with a kernel.
    os.environ.setdefault("SGLANG_NATIVE_MOVE_KV_CACHE", "1")
    # torch includes NCCL; if SGLang finds none, ranks use gloo.
    os.environ.setdefault("SGLANG_NCCL_SO_PATH", os.devnull)
