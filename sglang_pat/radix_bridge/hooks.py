"""Every place where SGLang is hooked, through its own HookRegistry.

In a process that runs another attention backend only four things are hooked: the resolution of arguments (it
decides which backend runs), the loading of weights, the width of rows, and what makes the backends of draft models. The last three are left as they are there.

Another plugin may hook the same (compat/registry.py). What a release lacks costs what it is for: the targets of `install` packing, metrics or plans made
ahead, and the server says so once; without those that size memory it refuses to start what needs them (`support.check_guards`). What fails in a hook of
`install` is counted as a fault and never reaches SGLang (`contained`).

| target | releases | why no extension point suffices |
|---|---|---|
| `RadixCache.cache_unfinished_req` | up to 0.5.21 | the moment when a request's row gets the tree's slots |
| `UnifiedRadixCache.cache_unfinished_req` | up to 0.5.21 | the same |
| `UnifiedRadixCache.checkpoint` | from 0.5.22 | the same, renamed there |
| `release_kv_cache` | all | where a request gives its row back |
| `DecodeKVCacheOffloadManager._release_finished_req` | all | gives the row of a request back whose KV a decode server has copied to the host |
| `Scheduler.process_batch_result` | all | many requests of a batch may end, or be cached, at once: the next plan is started after all of them |
| `Scheduler._reqs_finishing_inflight` | from 0.5.22 | requests that leave the batch a step before they give their row back |
| `RadixCache._delete_leaf` | up to 0.5.21 | eviction |
| `UnifiedRadixCache._evict_device_leaf` | all | eviction |
| `RadixCache.reset` | up to 0.5.21 | `flush_cache` |
| `UnifiedRadixCache.reset` | all | the same |
| `PrefillAdder.add_one_req` | all | keeps a request in the queue while another one computes its prefix (siblings.py) |
| `PrefillAdder.add_chunked_req` | all | the next chunk of a request that others may wait for |
| `Scheduler.get_internal_state` | all | puts the counters into `/server_info` |
| `SchedulerMetricsReporter.report_decode_stats` | all | the moment when SGLang logs and exports its own counters |
| `SchedulerMetricsReporter._maybe_log_idle_metrics` | all | the moment when SGLang puts right the metrics of a server that has nothing to do |
| `ForwardBatch.init_new` | all | adds the rows on the host: a batch has them on the GPU only, and its ids are chosen by clients; puts lengths of mixed steps right |
| `build_replay_fb_view` | all | the same for the batch that a CUDA graph is replayed for |
| `ServerArgs._handle_model_specific_adjustments` | up to 0.5.18 | its lists of backends for some models (gpt-oss, Exaone); plugin.py |
| `handle_model_specific_adjustments` | from 0.5.19 | the same; from 0.5.20 through SGLang's `register_resolution_hook` |
| `handle_speculative_decoding` | all | its lists of backends for branching drafts in pages; from 0.5.20 likewise; plugin.py |
| `ModelRunner.load_model` | all | what arguments say is refused is refused before weights are loaded; plugin.py |
| `get_req_to_token_extra_context_len` | all | rows are too narrow for drafts at the end of the context (allocation_sizing.py); plugin.py |
| `DefaultPoolConfigurator._compute_cell_size`, `DefaultPoolConfigurator.calculate_pool_sizes` | all | with `SGLANG_PAT_KV`: how many tokens of 4 or 2 bits there is memory for; plugin.py |
| `KVCacheConfigurator._build_mha_kv_pool` | all | with `SGLANG_PAT_KV` on a GPU: the class of the pool is fixed, unless a platform chooses it; plugin.py |
| `DraftBackendFactory.create_decode_backend`, `DraftBackendFactory.create_draft_extend_backend` | all | on a CPU: the list of backends for draft models is fixed; platform/speculation.py |
| `DraftBackendFactory._create_backend` | all | the same on a GPU: a stock backend replaces `pat`; plugin.py |

MLA models ask lists of SGLang's what a backend is given. `pat` is put into them by its name, with no hook:

| list | releases | for |
|---|---|---|
| `AttentionBackendRegistry` | all | latents in every step (on a CPU), or as for the stock backend that prefills; compat/model.py |
| `FORWARD_ABSORB_CORE_ATTENTION_BACKENDS` | all | Q and K of latents in two tensors, where that backend is in it; on a GPU; compat/model.py |
| `add_chunked_prefix_cache_attention_backend` | all | that backend's prefill behind a long cached prefix; plugin.py |

On a CPU `platform/speculation.py` also replaces `sgl_kernel.speculative`, which cannot be imported there, and makes SGLang's draft workers use their
Triton kernels (`_is_xpu` of the modules in its `MODULES`).
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from sglang_pat import compat
from sglang_pat.radix_bridge.observer import Observer
from sglang_pat.radix_bridge.siblings import Siblings

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_RADIX = "sglang.srt.mem_cache.radix_cache:RadixCache"
_UNIFIED = "sglang.srt.mem_cache.unified_radix_cache:UnifiedRadixCache"
_RELEASE = "sglang.srt.mem_cache.common:.release_kv_cache"
_OFFLOADED = (
    "sglang.srt.disaggregation.decode_kvcache_offload_manager:DecodeKVCacheOffloadManager._release_finished_req"
)
_STATE = "sglang.srt.managers.scheduler:Scheduler.get_internal_state"
_RESULT = "sglang.srt.managers.scheduler:Scheduler.process_batch_result"
_FINISHING = "sglang.srt.managers.scheduler:Scheduler._reqs_finishing_inflight"
_GRAPH_VIEW = "sglang.srt.model_executor.runner.decode_cuda_graph_runner:.build_replay_fb_view"
_BATCH = "sglang.srt.model_executor.forward_batch_info:ForwardBatch.init_new"
_ADD = "sglang.srt.managers.schedule_policy:PrefillAdder.add_one_req"
_ADD_CHUNK = "sglang.srt.managers.schedule_policy:PrefillAdder.add_chunked_req"
_REPORTER = "sglang.srt.managers.scheduler_components.metrics_reporter:SchedulerMetricsReporter"
_REPORT = f"{_REPORTER}.report_decode_stats"
_REST = f"{_REPORTER}._maybe_log_idle_metrics"


class Reporter(Protocol):
    """Says what happened. Only the process's first follower's is asked."""

    def counters(self) -> dict[str, Any]:
        """What `/server_info` shows as `internal_states[i]["pat"]`."""

    def publish(self, labels: dict[str, str] | None) -> None:
        """SGLang has logged decode batches, and exported its metrics with these labels if they are on."""

    def rest(self, labels: dict[str, str]) -> None:
        """Nothing runs, and SGLang's metrics, which have these labels, are right. It is told in each turn of SGLang's idle loop: it has to be quick."""


class Follower(Protocol):
    """An attention backend that follows a prefix cache.

    A process may have several.

    Attributes:
        req_to_token_pool: The pool of the requests that it follows.
        packs_extends: Whether it needs to know requests before they are prefilled.
        observer: Is told what happens to them.
        reporter: Says what happened.
    """

    req_to_token_pool: Any
    packs_extends: bool
    observer: Observer
    reporter: Reporter


_followers: list[weakref.ref[Follower]] = []
_hooked = False
_unpacked_because = ""
_publishing = True
_siblings: Siblings | None = None


def install(follower: Follower, graphs: bool = False, defer: bool = False) -> None:
    """Tell `follower` what happens in the prefix cache of its pool, for as long as it lives.

    Args:
        follower: Held weakly.
        graphs: Whether steps are decoded in CUDA graphs.
        defer: Whether requests wait for prefixes that others compute; the process's first follower decides, and every rank must want it.
    """
    global _hooked, _siblings, _unpacked_because
    _followers.append(weakref.ref(follower, _followers.remove))
    if not _hooked:
        _hooked = True
        cached = compat.cache.caching_method()
        following: dict[str, Callable[..., Any]] = {
            _RELEASE: _on_release,
            _BATCH: _on_batch,
            f"{_UNIFIED}._evict_device_leaf": _on_evict_id,
            f"{_UNIFIED}.reset": _on_reset,
            f"{_UNIFIED}.{cached}": _on_cached,
        }
        if compat.cache.radix_cache_serves():
            following |= {
                f"{_RADIX}._delete_leaf": _on_evict_node,
                f"{_RADIX}.reset": _on_reset,
                f"{_RADIX}.{cached}": _on_cached,
            }
        if graphs:
            following[_GRAPH_VIEW] = _on_graph_view
        adding: dict[str, Callable[..., Any]] = {_ADD: _on_add, _ADD_CHUNK: _on_add_chunk}
        others: dict[str, Callable[..., Any]] = {
            _RESULT: _on_result,
            _OFFLOADED: _on_offloaded,
            _STATE: _on_state,
            _REPORT: _on_report,
            _REST: _on_rest,
        }
        if compat.requests.skips_finishing():
            others[_FINISHING] = _on_finishing
        lacking = [target for target in following if not compat.registry.exists(target)]
        absent = [target for target in {**others, **(adding if defer else {})} if not compat.registry.exists(target)]
        defer = compat.model.wanted_by_all(defer and not lacking and not set(adding) & set(absent))
        hooks = (following if not lacking else {}) | (adding if defer else {}) | others
        for target, hook in hooks.items():
            around = target in (_RELEASE, _OFFLOADED, _RESULT, _ADD)
            compat.registry.hook(target, contained(hook, around), around)
        compat.registry.apply()
        _unpacked_because = _problems(lacking or following)
        rest = _problems({*absent, *hooks} - {*following})
        if rest:
            logger.warning(
                "sglang-pat serves with fewer counters, later plans, or prefixes that are computed twice: %s", rest
            )
        _siblings = Siblings() if defer else None
    if _unpacked_because:
        follower.observer.give_up(_unpacked_because)


def _problems(targets: Iterable[str]) -> str:
    return "; ".join(filter(None, map(compat.registry.problem, sorted(targets))))


def defers(cache: Any) -> bool:
    """Whether requests of this process wait for what others compute, if this is their cache."""
    return _siblings is not None and compat.cache.finds_prefixes(cache)


def deferred() -> int:
    """How often a request of this process was deferred by a step because another one was computing its prefix."""
    return _siblings.deferred if _siblings else 0


class Rids(list):  # type: ignore[type-arg]
    """A batch's `rids` with its rows attached. SGLang passes `rids` on wherever it copies a batch.

    Attributes:
        rows: [requests], int64 on the host: rows of `req_to_token`. Beam search has more rows than ids.
        unfinished: The row of the request whose prompt continues in a later batch; None if there is none.
        mixed: Whether the batch is a mixed step. 0.5.23 calls it an extend before it reaches an attention backend.
    """

    def __init__(
        self, rids: Iterable[str], rows: torch.Tensor, unfinished: int | None = None, mixed: bool = False
    ) -> None:
        super().__init__(rids)
        self.rows, self.unfinished, self.mixed = rows, unfinished, mixed

    def part(self, requests: slice) -> Rids:
        """The part for some of the requests."""
        return Rids(self[requests], self.rows[requests], self.unfinished, self.mixed)

    def completed(self) -> list[int]:
        """Indices of the requests whose prompt is complete after this batch."""
        return [i for i, row in enumerate(self.rows.tolist()) if row != self.unfinished]


def rows_of(forward_batch: Any) -> torch.Tensor | None:
    """The rows of a batch's requests, without padding; None for batches that SGLang made up, as in dry runs."""
    rids = getattr(forward_batch, "rids", None)
    return rids.rows if isinstance(rids, Rids) else None


def is_mixed(forward_batch: Any) -> bool:
    """Whether a batch is a mixed step: some requests decode, others are extended."""
    rids = getattr(forward_batch, "rids", None)
    return rids.mixed if isinstance(rids, Rids) else bool(forward_batch.forward_mode.is_mixed())


def followers() -> list[Follower]:
    """The followers of this process, oldest first."""
    return [follower for reference in list(_followers) if (follower := reference()) is not None]


def tell(observer: Observer, report: Callable[[Observer], None]) -> None:
    """Tell the observer. Whatever fails there must not reach SGLang."""
    try:
        report(observer)
    except Exception:
        try:
            observer.on_fault()
        except Exception:
            logger.exception("sglang-pat can no longer follow the prefix cache")


def contained(hook: Callable[..., Any], around: bool = False) -> Callable[..., Any]:
    """A hook of which nothing that fails reaches SGLang: followers forget what they know, and count it. What SGLang's own function raises passes, and it
    is called once in any case.

    Args:
        hook: `hook(result, …)`, or with `around` `hook(original, …)`.

    Raises:
        MemoryError: See `_tell_siblings`.
    """

    @functools.wraps(hook)
    def after(result: Any, *args: Any, **kwargs: Any) -> None:
        try:
            hook(result, *args, **kwargs)
        except MemoryError:
            raise
        except Exception:
            _count_fault()

    @functools.wraps(hook)
    def instead(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        results: list[Any] = []
        raised: list[BaseException] = []

        def once(*args: Any, **kwargs: Any) -> Any:
            try:
                results.append(original(*args, **kwargs))
            except BaseException as error:
                raised.append(error)
                raise
            return results[0]

        try:
            return hook(once, *args, **kwargs)
        except MemoryError:
            raise
        except Exception:
            if raised:
                raise raised[0] from None
            _count_fault()
            return results[0] if results else original(*args, **kwargs)

    return instead if around else after


def _count_fault() -> None:
    for follower in followers():
        tell(follower.observer, Observer.on_fault)


def _tell_all(owner: Any, report: Callable[[Observer], None]) -> None:
    """Tell every follower of this cache's or scheduler's pool. Caches without a pool are simulations (`--schedule-policy lpm`)."""
    pool = getattr(owner, "req_to_token_pool", None)
    for follower in followers():
        if follower.req_to_token_pool is pool:
            tell(follower.observer, report)


def _tell_siblings(report: Callable[[Siblings], Any]) -> Any:
    """Tell `Siblings`, and return its answer. Whatever fails there must not reach SGLang; from then on no request waits.

    Other ranks are told the same of the same requests, so what fails here fails there too, and all go on alike.

    Raises:
        MemoryError: What other ranks need not have: without `Siblings` this rank would form other batches than they. It ends the server.
    """
    global _siblings
    if _siblings is None:
        return None
    try:
        return report(_siblings)
    except MemoryError:
        raise
    except Exception:
        _siblings = None
        logger.warning("sglang-pat: requests no longer wait for each other's prefixes", exc_info=True)
        return None


def _on_add(add: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    deferred = _tell_siblings(lambda siblings: siblings.defer(adder, req))
    if deferred is not None:
        return deferred
    result = add(adder, req, *args, **kwargs)
    _computes(adder, req)
    return result


def _on_add_chunk(result: Any, adder: Any, req: Any) -> None:
    _computes(adder, req)


def _computes(adder: Any, req: Any) -> None:
    def report(siblings: Siblings) -> None:
        if adder.can_run_list and adder.can_run_list[-1] is req:
            siblings.computes(adder, req)

    _tell_siblings(report)


def _on_cached(result: Any, cache: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    _tell_siblings(lambda siblings: siblings.ended(req))
    chunk = compat.requests.is_chunk(req, kwargs)
    _tell_all(cache, lambda observer: observer.on_cached(cache, req, chunk))


def _on_release(release: Callable[..., Any], req: Any, tree_cache: Any, *args: Any, **kwargs: Any) -> Any:
    # First, because the request has no row afterwards.
    request = compat.requests.number(tree_cache.req_to_token_pool, req)
    result = release(req, tree_cache, *args, **kwargs)
    _tell_siblings(lambda siblings: siblings.ended(req))
    if request is not None:
        _tell_all(tree_cache, lambda observer: observer.on_released(request))
    return result


def _on_offloaded(release: Callable[..., Any], manager: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    request = compat.requests.number(manager.req_to_token_pool, req)  # None if it was released before
    result = release(manager, req, *args, **kwargs)
    if request is not None:
        _tell_all(manager, lambda observer: observer.on_released(request))
    return result


def _on_result(process: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    _tell_all(scheduler, Observer.hold)
    try:
        return process(scheduler, *args, **kwargs)
    finally:
        _tell_all(scheduler, Observer.resume)


def _on_finishing(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    requests = compat.requests.numbers_of(scheduler.req_to_token_pool, result)
    known = [request for request in requests if request is not None]
    _tell_all(scheduler, lambda observer: observer.on_finishing(known))


def _on_evict_node(result: Any, cache: Any, node: Any) -> None:
    _tell_all(cache, lambda observer: observer.on_evicted(node.id))


def _on_evict_id(result: Any, cache: Any, node_id: int, *args: Any, **kwargs: Any) -> None:
    _tell_all(cache, lambda observer: observer.on_evicted(node_id))


def _on_reset(result: Any, cache: Any) -> None:
    _tell_all(cache, lambda observer: observer.on_reset())


def _on_report(result: Any, reporter: Any, *args: Any, **kwargs: Any) -> None:
    def publish(follower: Follower) -> None:
        exports = reporter.current_scheduler_metrics_enabled
        if reporter.forward_ct_decode % reporter.decode_log_interval == 0 and (
            reporter.is_stats_logging_rank or exports
        ):
            follower.reporter.publish(reporter.metrics_collector.labels if exports else None)

    _publish(publish)


def _on_rest(result: Any, reporter: Any, *args: Any, **kwargs: Any) -> None:
    def publish(follower: Follower) -> None:
        if reporter.current_scheduler_metrics_enabled:
            follower.reporter.rest(reporter.metrics_collector.labels)

    _publish(publish)


def _publish(publish: Callable[[Follower], None]) -> None:
    global _publishing
    try:
        for follower in followers()[:1] if _publishing else ():
            publish(follower)
    except Exception:
        _publishing = False
        logger.warning("sglang-pat can no longer publish its metrics", exc_info=True)


def _on_batch(result: Any, forward_batch_class: type, batch: Any, *args: Any, **kwargs: Any) -> None:
    mixed = batch.forward_mode.is_mixed()
    if batch.req_pool_indices_cpu is not None:
        result.rids = Rids(result.rids, batch.req_pool_indices_cpu, compat.requests.unfinished(batch), mixed)
    if mixed:
        compat.batch.right_mixed_lengths(result)
    if compat.batch.is_extend(batch.forward_mode):
        extended = compat.batch.extended_requests(batch)
        for follower in followers():
            if follower.packs_extends and follower.req_to_token_pool is batch.req_to_token_pool:
                tell(follower.observer, lambda observer: observer.on_extending(batch.tree_cache, extended))


def _on_graph_view(result: Any, *args: Any, **kwargs: Any) -> None:
    result.rids = (kwargs["forward_batch"] if "forward_batch" in kwargs else args[0]).rids


def _on_state(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    try:
        for follower in followers()[:1]:
            result.internal_state["pat"] = {**follower.reporter.counters(), "defers": defers(scheduler.tree_cache)}
    except Exception:
        logger.warning("sglang-pat: /server_info is without its counters", exc_info=True)
