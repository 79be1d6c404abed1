"""Servers of tests are forked from a process that answers for SGLang which modules have a name for a function (imported.py)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from forked import ForkedProcess

SCRIPT = """
import imported
from sglang.srt.plugins import hook_registry
from sglang.srt.utils import common


def hook():  # a module's own names would be found too
    original, common.is_cuda = common.is_cuda, lambda: False
    found = hook_registry._propagate_patch(original, common.is_cuda, common)
    left = imported._search(original, None, common)
    print("found", found, "left", left)
    assert found > 50 and left == 0


hook()
hook()  # what is hooked may be hooked again
"""


def test_what_is_looked_up_is_all_that_sglang_would_find(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = ForkedProcess([sys.executable, str(script)], dict(os.environ), tmp_path / "log")
    assert process.wait(300) == 0, (tmp_path / "log").read_text()
