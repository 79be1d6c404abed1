"""KV of 4 and 2 bits, in a pool of our own (kernels/low_bit.py describes what it stores)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_pat.backend.errors import UnsupportedError, unsupported
from sglang_pat.backend.kv import NewTokens
from sglang_pat.kernels import capabilities, low_bit
from sglang_pat.kernels.arguments import KvView, Tables
from sglang_pat.packing import FORMATS
from sglang_pat.packing.spec import KVFormat

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention


class LowBitKVPool(MHATokenToKVPool):
    """A KV pool that stores pages of 4 or 2 bits. It has no buffers of K and V: whatever asks for one gets an error.

    Attributes:
        form: The format of full pages.
        int4_layers: Ids of layers that have 4 bits, whatever that is.
        records: For each layer [pages, kv_heads, record_bytes], uint8.
    """

    form: KVFormat
    int4_layers: Collection[int] = ()

    def form_of(self, layer_id: int) -> KVFormat:
        """The format of a layer's full pages."""
        return FORMATS["int4"] if layer_id in self.int4_layers else self.form

    def _create_buffers(self) -> None:
        problem = capabilities.low_bit_problem(self.head_dim, self.v_head_dim)
        if problem is not None:
            raise unsupported(f"{problem} in a KV cache of {self.form.name} (SGLANG_PAT_KV)", "unset it")
        pages = (self.size + self.page_size) // low_bit.PAGE_TOKENS
        layers = range(self.start_layer, self.start_layer + self.layer_num)
        sizes = (low_bit.record_bytes(self.form_of(layer).bits, self.head_dim) for layer in layers)
        self.records = [
            torch.zeros(pages, self.head_num, size, dtype=torch.uint8, device=self.device) for size in sizes
        ]
        # Not the dtype of K and V: SGLang has fused kernels that write to a pool of bfloat16 directly.
        self.dtype = self.store_dtype = torch.uint8
        self.k_buffer: list[torch.Tensor] = []
        self.v_buffer: list[torch.Tensor] = []
        self._tails = torch.empty(0)

    def make_tails(self, rows: int, dtype: torch.dtype, stores: Mapping[str, Callable[..., None]]) -> None:
        """Allocate an unfinished page for each row of `req_to_token`, in the model's dtype.

        Args:
            stores: Executors', which write new tokens, by their format's name.
        """
        self._stores = stores
        shape = (2, self.layer_num, rows, low_bit.PAGE_TOKENS, self.head_num, self.head_dim)
        self._tails = torch.empty(shape, dtype=dtype, device=self.device)

    def get_kv_size_bytes(self) -> int:
        return sum(records.nbytes for records in self.records)

    def _no_buffers(self, *_: Any, **__: Any) -> Any:
        raise UnsupportedError(
            f"SGLang asks for the buffers of K and V, which a KV cache of {self.form.name} (SGLANG_PAT_KV) does not have: unset it"
        )

    get_key_buffer = get_value_buffer = get_kv_buffer = set_kv_buffer = move_kv_cache = _no_buffers
    get_cpu_copy = load_cpu_copy = get_contiguous_buf_infos = _no_buffers

    def tails(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer's unfinished pages, [rows, 64, kv_heads, head_dim]."""
        k, v = self._tails[:, layer_id - self.start_layer]
        return k, v

    def full_pages(self, layer_id: int) -> torch.Tensor:
        """The layer's records."""
        return self.records[layer_id - self.start_layer]

    def store(
        self, layer_id: int, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, slots: torch.Tensor
    ) -> None:  # fmt: skip
        """Write new tokens; arguments as for `kernels.low_bit.store`. `k`, `v` and `slots` may have padding behind the tokens."""
        k, v = (self.of_heads(x)[: len(rows)] for x in (k, v))
        store = self._stores[self.form_of(layer_id).name]
        store(k, v, self.full_pages(layer_id), *self.tails(layer_id), rows, seq_lens, slots[: len(rows)].long())

    def decoding(self, layer_id: int, rows: torch.Tensor, seq_lens: torch.Tensor) -> KvView:
        """KV for `Executor.decode` in a decode step whose new tokens are stored."""
        k, v = self.tails(layer_id)
        tails = rows * low_bit.PAGE_TOKENS - low_bit.in_pages(seq_lens) if rows.device.type == "cpu" else None
        return self._view(layer_id, k.flatten(0, 1), v.flatten(0, 1), tails)

    def extending(self, layer_id: int, k: torch.Tensor, v: torch.Tensor, behind: Behind) -> KvView:
        """The same for an extend. Call it before the new tokens, K and V [tokens, ...], are stored."""
        k, v = (self.of_heads(x)[: len(behind.tails)] for x in (k, v))
        if behind.indices is not None:
            before = self.tails(layer_id)
            k, v = (torch.cat([tail.flatten(0, 1), x])[behind.indices] for tail, x in zip(before, (k, v), strict=True))
        return self._view(layer_id, k, v, behind.tails)

    def of_heads(self, x: torch.Tensor) -> torch.Tensor:
        """K or V of new tokens as [tokens, kv_heads, head_dim], in the dtype of tails."""
        return x.reshape(-1, self.head_num, self.head_dim).to(self._tails.dtype)

    def _view(self, layer_id: int, k: torch.Tensor, v: torch.Tensor, tails: torch.Tensor | None) -> KvView:
        return KvView(k, v, pages=low_bit.Pages(self.full_pages(layer_id), self.form_of(layer_id).bits, tails))


def pool_class(form: KVFormat, int4_layers: Collection[int] = ()) -> type[LowBitKVPool]:
    """The pool for a format, and layers that have 4 bits: SGLang asks for a class."""
    return type(f"{form.name.capitalize()}KVPool", (LowBitKVPool,), {"form": form, "int4_layers": int4_layers})


class PagesStore:
    """A `Store`. Extends are run with it on a CPU only; on a GPU `extends.low_bit_prefill.LowBitPrefill` runs them."""

    def __init__(self, pool: LowBitKVPool, rows: int) -> None:
        """
        Args:
            pool: Its tails made.
            rows: How many it has tails for.
        """
        self._pool, self._rows = pool, rows
        self._behind = Behind(torch.empty(0, dtype=torch.int64), None)

    def write(self, layer: RadixAttention, k: torch.Tensor, v: torch.Tensor, new: NewTokens) -> None:
        self._pool.store(layer.layer_id, k, v, new.rows, new.seq_lens, new.slots)

    def read(self, layer: RadixAttention, tables: Tables) -> KvView:
        return self._pool.decoding(layer.layer_id, tables.rows, tables.seq_lens)

    def begin_extend(self, rows: Sequence[int], cached: Sequence[int], added: Sequence[int]) -> None:
        self._behind = Behind.of(rows, cached, added, self._rows)

    def extend(
        self, layer: RadixAttention, k: torch.Tensor | None, v: torch.Tensor | None, new: NewTokens, tables: Tables
    ) -> KvView:
        if k is None or v is None:
            raise shared_kv(layer)
        # The tails of before.
        found = self._pool.extending(layer.layer_id, k, v, self._behind)
        self.write(layer, k, v, new)
        return found


def shared_kv(layer: RadixAttention) -> UnsupportedError:
    """The error for a layer that has no KV of its own, where KV has few bits."""
    return UnsupportedError(
        f"layer {layer.layer_id} reads KV that another layer wrote, which a KV cache of 4 or 2 bits does not support: unset SGLANG_PAT_KV"
    )


class Behind(msgspec.Struct, frozen=True):
    """Where an extend's queries find the tokens behind their last full page: among the new tokens, and in the tail of their row, if the extend
    begins inside a page.

    Attributes:
        tails: [new tokens], int64, as in `kernels.low_bit.Pages`.
        indices: Indices of all these tokens in an array of all tails followed by the new tokens; None if they are just the new tokens.
    """

    tails: torch.Tensor
    indices: torch.Tensor | None

    @classmethod
    def of(cls, rows: Sequence[int], cached: Sequence[int], added: Sequence[int], num_rows: int) -> Behind:
        """
        Args:
            rows, cached, added: For each request its row, its tokens before the extend, and its new tokens.
            num_rows: Rows that have a tail.
        """
        page = low_bit.PAGE_TOKENS
        indices, tails = [], [torch.empty(0, dtype=torch.int64)]
        new, count = num_rows * page, 0
        for row, before, more in zip(rows, cached, added, strict=True):
            unfinished = before % page
            indices += [torch.arange(row * page, row * page + unfinished), torch.arange(new, new + more)]
            tails.append(torch.full((more,), count - (before - unfinished)))
            new, count = new + more, count + unfinished + more
        return cls(torch.cat(tails), torch.cat(indices) if count > sum(added) else None)
