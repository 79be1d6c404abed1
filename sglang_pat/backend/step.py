"""The requests of a decode or verify step: where their KV is, and how much of it they see."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from sglang_pat import compat
from sglang_pat.backend import verify
from sglang_pat.backend.errors import UnsupportedError
from sglang_pat.backend.groups import LayerGroups
from sglang_pat.backend.kv import NewTokens, windows
from sglang_pat.kernels.arguments import Tables
from sglang_pat.radix_bridge import hooks

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class Step:
    """The present step of a backend. A captured graph reads its tensors at the addresses that they had, in every replay.

    Attributes:
        draft_tokens: Of each request in a verify step; 0 without speculation.
        verify_mask: Where SGLang writes the masks of drafts; None without speculation.
        rows, seq_lens: [requests], int64, on the device: each request's row of `req_to_token`, and its length, a draft included.
    """

    def __init__(self, runner: ModelRunner, groups: LayerGroups) -> None:
        size = runner.req_to_token_pool.size
        self.draft_tokens = groups.draft_tokens
        self.verify_mask: Any = compat.batch.verify_mask(size, self.draft_tokens, runner.device)
        self.rows = self.seq_lens = self._cached = torch.empty(0, dtype=torch.int64)  # the last without drafts
        self._requests, self._kv = runner.req_to_token_pool, runner.token_to_kv_pool
        self._rows_of_batch: torch.Tensor | None = None
        self._numbers = torch.empty(0, dtype=torch.int64)  # of the batch's requests
        self._window_slots: torch.Tensor | None = None  # of the new tokens, in the pool for windows
        # Those of drafts without branches never change.
        self._masks = verify.without_branches(size, self.draft_tokens, runner.device)
        own_pool = compat.pool.has_window_pool(self._kv)
        lengths = {group.spec.planned_window for group in groups.everyone if own_pool and group.spec.window}
        self._windows = {window: windows.WindowTable(runner, window) for window in lengths}

    def introduce(self, prefill_step: int) -> None:
        """Log the tables of windows; `prefill_step`: tokens that are prefilled in one step, at most."""
        for window, table in self._windows.items():
            logger.info("sglang-pat: a table of windows of %d, %.0f MiB", window, table.bytes / 2**20)
            found = windows.advice(compat.pool.window_pool_tokens(self._kv), window, prefill_step)
            if found is not None:
                logger.warning("sglang-pat: %s", found)

    def reserve(self, batch: int) -> None:
        """Make room for a batch of this size, before a graph is captured: it may have padding beyond the pool's requests. SGLang's own flags
        (`verify_mask`) have none: it writes and we read those of requests."""
        for table in self._windows.values():
            table.reserve(batch)
        if self.draft_tokens and batch > len(self._masks):
            self._masks = verify.without_branches(batch, self.draft_tokens, self._masks.device)

    def verifies(self, forward_batch: ForwardBatch) -> bool:
        """Whether a batch's step verifies drafts."""
        return bool(self.draft_tokens) and forward_batch.forward_mode.is_target_verify()

    def begin(self, forward_batch: ForwardBatch) -> None:
        """Take a batch's rows and lengths."""
        self.rows, self.seq_lens = forward_batch.req_pool_indices.long(), forward_batch.seq_lens.long()
        self._cached = self.seq_lens

    def requests(self, forward_batch: ForwardBatch, size: int) -> torch.Tensor:
        """The numbers of a batch's requests, without padding; the same object as long as the batch is the same."""
        rows = hooks.rows_of(forward_batch)
        if rows is None:
            # SGLang's dry runs have no known requests.
            return torch.full((size - compat.batch.padding(forward_batch),), -1)
        if rows is not self._rows_of_batch:
            self._rows_of_batch, self._numbers = rows, compat.requests.numbers(self._requests, rows)
        return self._numbers

    def drop_padding(self, forward_batch: ForwardBatch, requests: int) -> None:
        """Leave out padding behind so many requests, unless a graph reads it."""
        if not compat.batch.is_graph_view(forward_batch):
            self.rows, self.seq_lens = self.rows[:requests], self.seq_lens[:requests]
            self._cached = self.seq_lens

    def take_masks(self, forward_batch: ForwardBatch, requests: int) -> None:
        """Take the masks of so many drafts.

        Raises:
            UnsupportedError: They have another length than at start.
        """
        tokens, found = self.draft_tokens, compat.batch.tokens_of_drafts(forward_batch)
        if found != tokens:
            raise UnsupportedError(f"a draft has {found} tokens, but at start it was {tokens}")
        if verify.branches(forward_batch):
            self._masks[:requests] = verify.masks(forward_batch, tokens, requests, self.verify_mask)

    def fill(self, forward_batch: ForwardBatch) -> None:
        """The part of the step that is in a graph: count drafts in, and look up windows."""
        if self.verifies(forward_batch):
            # SGLang's lengths do not include the drafts. Warm-up calls this several times, so do not add to `seq_lens` itself.
            self.seq_lens = self._cached + self.draft_tokens
        if self._windows:
            mapping = compat.pool.window_mapping(self._kv)
            self._window_slots = mapping[forward_batch.out_cache_loc]
            for table in self._windows.values():
                table.fill(self.rows, self.seq_lens, mapping)

    def new_tokens(self, forward_batch: ForwardBatch, k_rope: torch.Tensor | None = None) -> NewTokens:
        return NewTokens(forward_batch.out_cache_loc, self.rows, self.seq_lens, self._window_slots, k_rope)

    def tables(self, window: int, drafts: int | None = None) -> Tables:
        """For layers with this window in plans (`AttentionSpec.planned_window`); with the masks of so many drafts, if it verifies some."""
        masks = None if drafts is None else self._masks[:drafts]
        table = self._windows.get(window)
        slots, rows = (self._requests.req_to_token, self.rows) if table is None else table.of_batch(len(self.rows))
        return Tables(slots, rows, self.seq_lens, masks)
