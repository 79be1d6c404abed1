"""The entry point that SGLang calls in the launcher, in `Engine` and in every scheduler process."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from sglang_pat import compat, platform


def register() -> None:
    """Make `--attention-backend pat` known to SGLang."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import (
        add_attention_backend_choices,
        add_chunked_prefix_cache_attention_backend,
        add_deterministic_attention_backend_choices,
        add_radix_supported_deterministic_attention_backend_choices,
    )

    add_attention_backend_choices(["pat"])
    add_deterministic_attention_backend_choices(["pat"])
    add_radix_supported_deterministic_attention_backend_choices(["pat"])
    # MLA models on a GPU: the stock backend that prefills beside PAT may read a cached prefix in chunks, as it does alone. SGLang asks before it makes one.
    add_chunked_prefix_cache_attention_backend("pat")

    @register_attention_backend("pat")
    def create(runner: Any) -> Any:
        # Imported here because every process of every server loads this plugin, and few use it.
        from sglang_pat.backend.create import create as create_backend

        return create_backend(runner)

    # First what guards memory.
    compat.registry.hook(compat.pool.ROW_HEADROOM, widened)
    if os.environ.get("SGLANG_PAT_KV"):
        low_bit = {
            compat.pool.CELL_SIZE: "cell_size",
            compat.pool.POOL_SIZES: "pool_sizes",
            compat.pool.POOL: "make_pool",
        }
        for target, name in low_bit.items():
            compat.registry.hook(target, of_low_bit(name), around=True)
    compat.registry.hook(compat.model.LOAD, load_model, around=True)
    compat.arguments.around_model_adjustments(adjust_for_model)
    compat.arguments.around_speculation(allow_branches)
    if platform.is_chosen():
        # Imported here because it imports torch.
        from sglang_pat.platform import speculation

        speculation.install()
    else:
        compat.registry.hook(compat.stock.DRAFT_BACKEND, draft_backend, around=True)


def adjust_for_model(step: Callable[[Any], None], server_args: Any) -> None:
    """Hook around SGLang's adjustment of the arguments to the model (listed in radix_bridge/hooks.py).

    Raises:
        AssertionError: SGLang does not serve the model with the other backend that was chosen beside `pat`.
        UnsupportedError: `SGLANG_PAT_KV` is set, and this server on a GPU cannot have it; the model has latents that PAT does not read; or a hook
            that guards memory is not in place.
    """
    if os.environ.get("SGLANG_PAT_KV"):
        # Imported when it is needed, as it imports torch.
        from sglang_pat.backend.start import low_bit

        low_bit.prepare(server_args)
    if not compat.arguments.chooses_pat(server_args):
        step(server_args)
        return
    # Imported here, as few servers choose it.
    from sglang_pat.backend.start import support

    support.check_guards(server_args)
    support.check_latents(server_args)
    if compat.arguments.is_deterministic(server_args):
        # In a graph a stock backend would run prefill.
        compat.arguments.disable_graphs(server_args, "prefill")
    if compat.arguments.lists_backends(server_args):
        chosen = compat.arguments.backends_chosen(server_args)
        try:
            with compat.arguments.shown_as(server_args, "pat", compat.arguments.LISTED):
                step(server_args)
        except AssertionError as error:
            # SGLang's message names backends that nobody chose.
            raise AssertionError(f"with {chosen[0]} for prefill and {chosen[1]} for decode: {error}") from error
    else:
        step(server_args)


def load_model(load: Callable[..., Any], runner: Any) -> Any:
    """Hook around the loading of weights, which may take minutes: what arguments say is refused is refused before.

    Raises:
        UnsupportedError: A flag or an environment variable asks for what PAT does not do.
    """
    if compat.arguments.chooses_pat(runner.server_args):
        # Imported here, as few servers choose it.
        from sglang_pat.backend.create import explained
        from sglang_pat.backend.start import support

        with explained():
            support.check_arguments(runner.server_args)
    return load(runner)


def allow_branches(step: Callable[[Any], None], server_args: Any) -> None:
    """Hook around SGLang's decisions about speculative decoding: branching drafts in pages are for backends of a list there."""
    if compat.arguments.chooses_pat(server_args) and compat.arguments.branches_in_pages(server_args):
        with compat.arguments.shown_as(server_args, "pat", compat.arguments.TREES_IN_PAGES):
            step(server_args)
    else:
        step(server_args)


def of_low_bit(name: str) -> Callable[..., Any]:
    """A function of `low_bit`, which is imported when it is called, as that imports torch."""

    def call(*arguments: Any, **options: Any) -> Any:
        from sglang_pat.backend.start import low_bit

        return getattr(low_bit, name)(*arguments, **options)

    return call


def widened(headroom: int, *given: Any) -> int:
    """Tokens that a row of `req_to_token` holds beyond the context, where SGLang says `headroom` for a server with these arguments, or for this one.

    With drafts and pages of one token SGLang writes more than that for a request that ends at the context length; the rest would overwrite the
    slots of another request.
    """
    served = given[0] if given else compat.arguments.of_this_process()
    drafts = compat.arguments.chooses_pat(served) and compat.arguments.draft_tokens(served)
    return max(headroom, compat.pool.row_headroom(*given)) if drafts else headroom


def draft_backend(create: Callable[..., Any], factory: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around the step that makes a draft's attention backend: a stock backend replaces `pat`.

    If the user named none, SGLang takes that of the server; so servers with other backends must not be changed.

    Raises:
        UnsupportedError: The draft has latents, and the user named another stock backend than the one that prefills.
    """
    named, runner = factory.draft_attn_backend, factory.draft_model_runner
    if named == "pat" or compat.arguments.chooses_pat(compat.arguments.of_this_process()):
        from sglang_pat.backend.create import stock_name
        from sglang_pat.backend.start import layers, support

        specs = layers.count(runner)
        stock = stock_name(runner, specs)
        if named and named != "pat":
            support.check_draft(specs, named, stock)
        else:
            factory.draft_attn_backend = stock
    return create(factory, *args, **kwargs)
