"""What the process that others are forked from imports (forked.py)."""

import sglang.launch_server
import sglang.srt.entrypoints.http_server
import sglang.srt.managers.scheduler
import sglang.srt.models.registry  # noqa: F401
