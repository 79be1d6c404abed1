"""Runs a script that reads SGLang's flags by itself, as some trainers do (docs/rollouts.md), with SGLang's plugins loaded: before, `pat` is no choice.

python -m sglang_pat.run train.py --sglang-attention-backend pat
"""

import runpy
import sys
from pathlib import Path
from typing import NoReturn

from sglang_pat.text import printable, say


def main() -> None:
    """Run it as Python would: `sys.argv` begins with the script, here its whole path, and `sys.path` with its folder.

    Raises:
        SystemExit: There is no such script, SGLang does not load this package, or the script exits.
    """
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        refuse(
            "give a script and its arguments: python -m sglang_pat.run train.py … (-m and other options of Python are not taken)"
        )
    script = Path(sys.argv[1])
    if not script.is_file():
        refuse(f"there is no script {printable(str(script))}")
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11
        # `-m` has put the current folder there, whose modules Python would not find for a script elsewhere.
        sys.path[0] = str(script.resolve().parent)
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

    load_plugins()
    if "pat" not in ATTENTION_BACKEND_CHOICES:
        refuse("SGLang did not load sglang-pat: `sglang-pat doctor` says why")
    del sys.argv[0]
    runpy.run_path(str(script.absolute()), run_name="__main__")


def refuse(why: str) -> NoReturn:
    say(why)
    sys.exit(2)


if __name__ == "__main__":
    main()
