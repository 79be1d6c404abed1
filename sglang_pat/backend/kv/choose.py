"""Which KV pools are read, and by which `Store`. What SGLang has of pools is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sglang_pat import compat
from sglang_pat.backend.kv import Store
from sglang_pat.backend.kv.latent import LatentStore
from sglang_pat.backend.kv.plain import PlainStore

if TYPE_CHECKING:
    from sglang_pat.backend.groups import LayerGroup


def unread(pool: Any) -> list[Any]:
    """Those parts of a KV pool (`compat.pool.kv_pools`) that no `Store` reads."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    parts = compat.pool.kv_pools(pool) if compat.pool.latent_dims(pool) is None else []
    return [part for part in parts if not isinstance(part, MHATokenToKVPool)]


def store_of(runner: Any, groups: Iterable[LayerGroup]) -> Store:
    """The `Store` of a runner's KV pool, which these groups read."""
    from sglang_pat.backend.kv.pages import LowBitKVPool, PagesStore

    pool = runner.token_to_kv_pool
    if isinstance(pool, LowBitKVPool):
        rows = len(runner.req_to_token_pool.req_to_token)
        pool.make_tails(rows, runner.dtype, {group.spec.kv.name: group.executor.store for group in groups})
        return PagesStore(pool, rows)
    return PlainStore(pool) if compat.pool.latent_dims(pool) is None else LatentStore(pool)
