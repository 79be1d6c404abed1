"""The entry point that SGLang calls in the launcher, in `Engine` and in every scheduler process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_pat import compat


def register() -> None:
    """Make `--attention-backend pat` known to SGLang."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import add_attention_backend_choices

    add_attention_backend_choices(["pat"])
    compat.around_model_adjustments(adjust_for_model)

    @register_attention_backend("pat")
    def create(runner: Any) -> Any:
        # Imported here, not above: every process of every server loads this plugin, few use it.
        from sglang_pat.backend import attention

        return attention.create(runner)


def adjust_for_model(step: Callable[[Any], None], server_args: Any) -> None:
    """SGLang's step that adjusts arguments to the model, around which this is hooked (radix_bridge/hooks.py lists it)."""
    if "pat" in compat.backends_chosen(server_args) and compat.lists_backends(server_args):
        with compat.shown_as(server_args, "pat", compat.LISTED):
            step(server_args)
    else:
        step(server_args)
