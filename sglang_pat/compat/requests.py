"""`Req`, SGLang's request: its row, its tokens, and its number in sglang-pat."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def numbers(pool: Any, rows: torch.Tensor) -> torch.Tensor:
    """The numbers of the requests in these rows (radix_bridge/events.py), both [rows] int64 on the host."""
    return pool.req_generation[rows] << 32 | rows


def number(pool: Any, req: Any) -> int | None:
    """The number of one request; None if it has no row."""
    index = row(req)
    return None if index is None else int(pool.req_generation[index]) << 32 | index


def numbers_of(pool: Any, reqs: Sequence[Any]) -> list[int | None]:
    """The same of several requests, at once."""
    rows = [row(req) for req in reqs]
    known = [index for index in rows if index is not None]
    times = iter(pool.req_generation[known].tolist())
    return [None if index is None else next(times) << 32 | index for index in rows]


def row(req: Any) -> int | None:
    """The request's row of `req_to_token`; None if it has none."""
    return req.req_pool_idx if hasattr(req, "req_pool_idx") else req.kv.req_pool_idx


def protected_len(req: Any) -> int:
    """How many of the request's tokens have slots that belong to the tree."""
    return req.cache_protected_len if hasattr(req, "cache_protected_len") else req.kv.cache_protected_len


def tokens(req: Any, start: int, stop: int) -> tuple[int, ...]:
    """Token ids [start, stop) of prompt and output together."""
    prompt = req.origin_input_ids
    if stop <= len(prompt):
        return tuple(prompt[start:stop])
    output = req.output_ids
    return (*prompt[start:stop], *output[max(0, start - len(prompt)) : stop - len(prompt)])


def decode_len(req: Any) -> int:
    """The request's length in its next decode step; 0 while its prompt is incomplete. Not for a chunk: a request that was retracted has output then."""
    return len(req.origin_input_ids) + len(req.output_ids) if req.output_ids else 0


def namespace(req: Any) -> Hashable:
    """What keeps equal tokens apart in the cache: LoRA adapter and salt."""
    return (req.extra_key, getattr(req, "cache_salt", None))


def present_tokens(req: Any) -> int:
    """How many of the request's tokens have KV on the device."""
    return req.prefix_len if hasattr(req, "prefix_len") else len(req.prefix_indices)


def cached_tokens(req: Any) -> int:
    """How many tokens the cache had when SGLang matched this request, on the device and on the host. Afterwards what is loaded counts twice."""
    return present_tokens(req) + req.host_hit_length


def node(req: Any) -> Any:
    """The node of the tree, or its id, where those tokens end; None if some of them are on the host. When SGLang splits a node, it stays the one of
    its end. In later chunks of a prompt more tokens are computed than the node has: two requests with the same node have the same tokens up
    to there only if both have as many."""
    return None if req.host_hit_length else req.last_node


def reusable_tokens(req: Any) -> int:
    """How many tokens the request takes from the cache at most. It always computes the last one, and those whose log-probabilities it
    wants."""
    return req._compute_max_prefix_len(len(req.full_untruncated_fill_ids))


def is_named_by_tokens(req: Any) -> bool:
    """Whether other requests with the same tokens can find this one's KV in the tree.

    They cannot where embeddings replace tokens, in streaming sessions, which keep their KV to themselves, and where SGLang does not
    insert the request into the tree.
    """
    if req.input_embeds is not None or req.positional_embed_overrides is not None:
        return False
    return not (req.skip_radix_cache_insert or (req.session is not None and req.session.streaming))


def unfinished(batch: Any) -> int | None:
    """The row of the request in a `ScheduleBatch` whose prompt continues in a later batch; None if there is none."""
    chunked = getattr(batch, "chunked_req", None)
    return None if chunked is None else row(chunked)


def is_chunk(req: Any, arguments: dict[str, Any]) -> bool:
    """Whether a cache that was called with these keyword arguments to keep a request's KV was called for a chunk of its prompt.

    0.5.17 says so. 0.5.23 says how many tokens have KV; a prompt, with what a retracted request had answered, is all that it was to compute. On a
    decode server requests come with their KV and their first token, which is not computed yet; nothing is prefilled there.
    """
    if "up_to" in arguments:
        return arguments["up_to"] < len(req.full_untruncated_fill_ids) and not _comes_with_kv()
    return bool(arguments.get("chunked"))


def _comes_with_kv() -> bool:
    """Whether this process is a decode server of 0.5.23."""
    from sglang.srt.runtime_context import get_context, get_disagg

    published = get_context().is_config_namespace_published("disagg")  # not in some of SGLang's tests
    return bool(published and get_disagg().disaggregation_mode == "decode")


def no_more_requests() -> Any:
    """What `PrefillAdder.add_one_req` returns when a step can take no more requests."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    return AddReqResult.OTHER


def skips_finishing() -> bool:
    """Whether a request leaves the batch while its last token is being computed; 0.5.17 decodes it once more."""
    from sglang.srt.managers.scheduler import Scheduler

    return hasattr(Scheduler, "_reqs_finishing_inflight")
