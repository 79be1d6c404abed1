"""Runs a script that reads SGLang's flags by itself, as some trainers do (docs/rollouts.md), with SGLang's plugins loaded: before, `pat` is no choice.

python -m sglang_pat.run train.py --sglang-attention-backend pat
"""

import runpy
import sys
from pathlib import Path

from sglang_pat.text import printable


def main() -> None:
    """Run it as Python would: `sys.argv` begins with the script, `sys.path` with its folder.

    Raises:
        SystemExit: There is no such script, or it exits.
    """
    if len(sys.argv) < 2:
        sys.exit("give a script: python -m sglang_pat.run train.py")
    script = Path(sys.argv[1])
    if not script.is_file():
        sys.exit(f"there is no script {printable(str(script))} (modules, `-m`, are not run)")
    from sglang.srt.plugins import load_plugins

    load_plugins()
    del sys.argv[0]
    if not sys.flags.safe_path:
        sys.path[0] = str(script.resolve().parent)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
