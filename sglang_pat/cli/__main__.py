"""`python -m sglang_pat.cli` is `sglang-pat`."""

import sys

from sglang_pat.cli import main

sys.exit(main())
