"""`python -m sglang.launch_server` with a fault in decode: each packed attention is a tenth too small."""

import runpy

from sglang_pat.backend.executors import CpuExecutor

right = CpuExecutor.decode
CpuExecutor.decode = lambda *arguments, **options: 0.9 * right(*arguments, **options)  # type: ignore[method-assign]

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
