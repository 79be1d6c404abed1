"""Serves on a CPU what `--enable-deterministic-inference` makes of attention on a GPU: requests are cut into pieces, here of 64 tokens.

    python tests/in_pieces.py FLAGS

The flag itself is refused there, as SGLang's operators on a CPU depend on the batch.
"""

import runpy

from sglang_pat import compat
from sglang_pat.backend import executors

compat.arguments.is_deterministic = lambda server_args: True
executors.LEAST_PIECE = 64

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
