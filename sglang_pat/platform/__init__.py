"""The CPU platform: lets SGLang serve `--attention-backend pat` on a machine without an accelerator.

SGLang asks every installed platform plugin whether it is active before it has read a single flag.
So `activate` offers a platform that changes nothing, and `DormantPlatform` turns itself into `CpuPlatform`
when the server arguments turn out to choose PAT. Subprocesses inherit that decision through the environment.
"""

from __future__ import annotations

import os

AWAKE = "SGLANG_PAT_CPU_PLATFORM"


def activate() -> str | None:
    """Entry point of the group `sglang.srt.platforms`.

    Returns:
        The class to use, or None on a machine with an accelerator and where the user asked for SGLang's
        own CPU engine: SGLang then behaves as if this package were not installed.
    """
    import torch

    accelerator = torch.cuda.is_available() or torch.xpu.is_available()
    if accelerator or os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    if os.environ.get(AWAKE) == "1" or os.environ.get("SGLANG_PLATFORM") == "pat_cpu":
        announce()
        return "sglang_pat.platform.cpu.CpuPlatform"
    return "sglang_pat.platform.cpu.DormantPlatform"


def announce() -> None:
    """Tell this process's children that the CPU platform is on, and SGLang's Triton kernels to be interpreted.

    Triton reads the variable when a kernel is defined, that is while a child imports SGLang.
    """
    os.environ[AWAKE] = "1"
    os.environ.setdefault("TRITON_INTERPRET", "1")
