"""The entry point that SGLang calls in the launcher, in `Engine` and in every scheduler process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_pat import compat, platform


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

    compat.around_model_adjustments(adjust_for_model)
    compat.after_row_headroom(widened)
    if platform.is_chosen():
        # Imported here, as it imports torch.
        from sglang_pat.platform import speculation

        speculation.install()
    else:
        compat.around_draft_backends(draft_backend)


def adjust_for_model(step: Callable[[Any], None], server_args: Any) -> None:
    """SGLang's step that adjusts arguments to the model, around which this is hooked (radix_bridge/hooks.py lists it).

    Raises:
        AssertionError: SGLang does not serve the model with the backend that was chosen beside `pat`.
    """
    chosen = compat.backends_chosen(server_args)
    if "pat" in chosen and compat.lists_backends(server_args):
        try:
            with compat.shown_as(server_args, "pat", compat.LISTED):
                step(server_args)
        except AssertionError as error:
            # Its message has names that nobody chose.
            raise AssertionError(f"with {chosen[0]} for prefill and {chosen[1]} for decode: {error}") from error
    else:
        step(server_args)


def widened(headroom: int) -> int:
    """Tokens that a row of `req_to_token` holds behind its context, where SGLang says `headroom`: with drafts and pages of one token that is
    less than it writes for a request that ends with its context, and the rest would be written over the slots of another request."""
    served = compat.serving_arguments()
    drafts = "pat" in compat.backends_chosen(served) and compat.draft_tokens(served)
    return max(headroom, compat.row_headroom()) if drafts else headroom


def draft_backend(create: Callable[..., Any], factory: Any, *args: Any, **kwargs: Any) -> Any:
    """SGLang's step that makes attention backends of drafts: a stock one stands in for `pat`."""
    if factory.draft_attn_backend in (None, "pat"):
        runner = factory.draft_model_runner
        factory.draft_attn_backend = compat.prefill_backend(False, runner.kv_cache_dtype, compat.has_scales(runner))
    return create(factory, *args, **kwargs)
