"""Layers with windows whose KV is in a separate pool (SGLang's `SWAKVPool`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_pat.kernels.translate import translate

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


def advice(tokens: int, window: int, step: int) -> str | None:
    """A warning for a pool in which SGLang may let a request wait for ever; None for a larger one.

    A request locks its cached prefix as far as its window reaches, in whole nodes of the tree. The first one may be as long as what was
    prefilled in a step, and SGLang (seen with 0.5.23) never takes a request that would need more than the rest of the pool.

    Args:
        tokens: That the pool has room for.
        window: Tokens that a query sees.
        step: Tokens that are prefilled in one step, at most.
    """
    if tokens >= 2 * window + step:
        return None
    return (
        f"the KV pool for windows has room for {tokens} tokens, less than for two windows of {window} and a prefill step of {step}: SGLang may "
        "let a request whose cached prefix fills it wait for ever, and all requests behind it; raise --swa-full-tokens-ratio or "
        "--max-total-tokens, or lower --chunked-prefill-size"
    )


class WindowTable:
    """Replaces `req_to_token`, the batch's rows and its lengths for layers whose pool has slot numbers of its own.

    A kernel in each step's CUDA graph fills the table once, for all layers with this window. It has to be filled in every step: between steps
    SGLang frees the slots that a window has left behind, and another request may get them.
    """

    def __init__(self, runner: ModelRunner, window: int) -> None:
        """
        Args:
            window: How many tokens a query sees.
        """
        self._req_to_token: torch.Tensor = runner.req_to_token_pool.req_to_token
        self._window = min(window, self._req_to_token.shape[1])
        self._rows = torch.empty(0)
        self.reserve(len(self._req_to_token))
        # Compiles the kernel, before any graph is captured.
        self.fill(self._rows[:1], self._seen[:1], self._rows)

    def reserve(self, batch: int) -> None:
        """Make room for a batch of this size: graphs may pad to more rows than there are requests. Call it only before a graph reads the table."""
        if batch <= len(self._rows):
            return
        device = self._req_to_token.device
        self._slots = torch.zeros(batch, self._window, dtype=torch.int32, device=device)
        self._seen = torch.zeros(batch, dtype=torch.int64, device=device)
        self._rows = torch.arange(batch, device=device)

    @property
    def bytes(self) -> int:
        """Bytes of memory that the table takes."""
        return self._slots.nbytes + self._seen.nbytes + self._rows.nbytes

    def fill(self, rows: torch.Tensor, seq_lens: torch.Tensor, mapping: torch.Tensor) -> None:
        """Look up what a batch sees in this step; arguments as for `translate`."""
        translate(self._req_to_token, rows, seq_lens, mapping, self._slots, self._seen)

    def of_batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`req_to_token`, rows and lengths for an executor."""
        return self._slots, self._rows[:size], self._seen[:size]
