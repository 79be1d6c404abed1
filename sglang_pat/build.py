"""`python -m sglang_pat.build` compiles kernels ahead (`cli/build.py`)."""

import sys

from sglang_pat.cli.build import main

if __name__ == "__main__":
    sys.exit(main())
