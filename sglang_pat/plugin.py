"""The entry point that SGLang calls in the launcher, in `Engine` and in every scheduler process."""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Make `--attention-backend pat` known to SGLang."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import add_attention_backend_choices

    add_attention_backend_choices(["pat"])

    @register_attention_backend("pat")
    def create(runner: Any) -> Any:
        # Imported here, not above: every process of every server loads this plugin, few use it.
        from sglang_pat.backend import attention

        return attention.create(runner)
