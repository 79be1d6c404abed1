"""`python -m sglang_pat.tune` measures a GPU (`cli/tune.py`)."""

import sys

from sglang_pat.cli.tune import main

if __name__ == "__main__":
    sys.exit(main())
