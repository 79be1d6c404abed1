"""Prefix caches: which ones sglang-pat follows, and a request's path in the tree."""

from __future__ import annotations

from typing import Any

FOLLOWED = ("RadixCache", "UnifiedRadixCache", "HiRadixCache", "LMCacheUnifiedRadixCache")
"""Prefix caches whose paths tests have compared with `req_to_token`. With any other cache, requests are decoded unpacked."""


def _followed(cache: Any) -> bool:
    # Nobody has tried `--hicache-host-memory-mode buffer_only` (0.5.23), which loads KV in its own way.
    return type(cache).__name__ in FOLLOWED and getattr(cache, "buffer_pipeline", None) is None


def caching_method() -> str:
    """The name of the cache's method that hands a running request over to the tree."""
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache

    return "cache_unfinished_req" if hasattr(BasePrefixCache, "cache_unfinished_req") else "checkpoint"


def radix_cache_serves() -> bool:
    """Whether a server may run on `RadixCache`. From 0.5.22 the class is there, but only `UnifiedRadixCache` serves."""
    return caching_method() == "cache_unfinished_req"


def finds_prefixes(cache: Any) -> bool:
    """Whether requests find a prefix in this cache as soon as it is computed. Hybrid models do not: their states are saved at
    checkpoints only. Nor does anybody with `SGLANG_RADIX_FORCE_MISS`, which empties every match."""
    from sglang.srt.environ import envs

    # 0.5.17 wraps the cache to serve streaming sessions.
    cache = getattr(cache, "inner", cache)
    return (
        _followed(cache) and not cache.disable and not cache.supports_mamba() and not envs.SGLANG_RADIX_FORCE_MISS.get()
    )


def head_tokens(cache: Any) -> int:
    """How many tokens tell a node from its siblings: a page, and one more where the tree's keys are pairs of tokens (EAGLE, whose draft
    layer also reads the next token)."""
    return cache.page_size + bool(getattr(getattr(cache, "tree_core", cache), "is_eagle", False))


def path(cache: Any, req: Any) -> list[tuple[int, int]] | None:
    """The request's path as (node id, length in tokens), from the first level down; None if it is unknown."""
    last = last_node(cache, req)
    if last is None:
        return None
    core = getattr(cache, "tree_core", None)
    if core is None:
        node, root = last, cache.root_node
    elif hasattr(core, "collect_path_info"):
        (nodes,) = core.collect_path_info([last])
        return [(node.node_id, node.path_end - node.path_start) for node in nodes]
    elif hasattr(core, "validate_buffer_backup"):
        return _path_by_ids(core, last)
    else:
        node, root = core.node_by_id(last), core.root_node
    result = []
    while node is not root:
        result.append((node.id, len(node.key)))
        node = node.parent
    return result[::-1]


def _path_by_ids(core: Any, node: int) -> list[tuple[int, int]]:
    """The path of a node in 0.5.19 to 0.5.21, whose Rust core tells of no path: but of each node it tells its slots and, asked with how many
    these are, its parent."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    result = []
    while not core.is_root(node):
        length = len(core.get_component_device_value(node, ComponentType.FULL))
        result.append((node, length))
        node = core.validate_buffer_backup(node, length).parent_node_id
    return result[::-1]


def last_node(cache: Any, req: Any) -> Any:
    """The last node of the request's path, or its id; None where `path` is. Requests with the same one have the same path. A streaming session gives
    its turns a placeholder; the session has the node."""
    if not _followed(cache):
        return None
    sessions = getattr(cache, "session", None)
    if sessions is None or req.session is None:
        return req.last_node
    if hasattr(sessions, "borrowed_slot"):
        slot = sessions.borrowed_slot(req)
        if slot is None:
            return req.last_node
        return slot.lock.node if slot.lock is not None else None
    slot = sessions.slots.get(req.session.session_id)
    if slot is None or req.last_node is not slot.virtual_node:
        return req.last_node
    return slot.last_node
