"""Keeps the rows of `req_to_token` as they are while a decode step reads them."""

from __future__ import annotations

import torch


class TableFence:
    """Lets whoever is given rows write them only after the step that runs.

    Stock backends copy what they need of `req_to_token` before a step's kernels run; ours read it meanwhile. What SGLang
    writes there during a decode step does no harm: the next token's slot lies behind what is read, and a row that a cache
    takes over gets slots of the same KV. But a request may end while a step still has it, and its row be given to another
    one: whoever is packed with it would read the other's slots. Waiting there, before a prefill, leaves SGLang free to
    prepare the next decode step beside this one, which waiting for every step does not.
    """

    def __init__(self) -> None:
        self._reading: torch.cuda.Stream | None = None

    def on_step(self) -> None:
        """A decode step is about to be started on the current stream."""
        self._reading = torch.cuda.current_stream()

    def on_rows(self) -> None:
        """Rows have been given to requests: what the current stream does next waits for the steps started so far."""
        if self._reading is not None:
            torch.cuda.current_stream().wait_stream(self._reading)
