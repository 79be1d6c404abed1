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
    """Replaces `req_to_token` and the batch's rows for layers whose pool has slot numbers of its own.

    It has the slots of each request's window, one request behind the other, and a row of it begins where the request's position 0 would be: rows
    overlap. So a position of a plan is a column, as in `req_to_token`; whoever reads in front of a window reads another request's slots.

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
        self._firsts = torch.empty(0)
        self.reserve(len(self._req_to_token))
        # Compiles the kernel, before any graph is captured.
        row = torch.zeros(1, dtype=torch.int64, device=self._firsts.device)
        self.fill(row, row, row)

    def reserve(self, batch: int) -> None:
        """Make room for a batch of this size: graphs may pad to more rows than there are requests. Call it only before a graph reads the table."""
        if batch <= len(self._firsts):
            return
        device, context = self._req_to_token.device, self._req_to_token.shape[1]
        size = context + batch * self._window
        # Where the first request's row begins, and where the last one's ends, there are no slots.
        everything = torch.zeros(size + context, dtype=torch.int32, device=device)
        self._slots = everything[context:size].view(batch, self._window)
        self._table = everything.as_strided((size, context), (1, 1))
        self._firsts = torch.zeros(batch, dtype=torch.int64, device=device)

    @property
    def bytes(self) -> int:
        """Bytes of memory that the table takes."""
        return self._slots.untyped_storage().nbytes() + self._firsts.nbytes

    def fill(self, rows: torch.Tensor, seq_lens: torch.Tensor, mapping: torch.Tensor) -> None:
        """Look up what a batch sees in this step; arguments as for `translate`."""
        translate(self._req_to_token, rows, seq_lens, mapping, self._slots, self._firsts)

    def of_batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`req_to_token` and rows for an executor."""
        return self._table, self._firsts[:size]
