"""Everything that differs between the supported SGLang releases, 0.5.17 and 0.5.23."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import torch


TESTED = ("0.5.17", "0.5.23")
"""Releases that the tests run with."""


def release() -> str:
    """The SGLang that is installed."""
    return version("sglang")


def disable_graphs(server_args: Any) -> None:
    """Turn device graphs off: there is nothing to capture on a CPU.

    0.5.17 decides about graphs before it asks the platform for defaults, so its decision is revised here.
    """
    config = getattr(server_args, "cuda_graph_config", None)
    if config is not None:
        from sglang.srt.model_executor.cuda_graph_config import Backend

        config.decode.backend = config.prefill.backend = Backend.DISABLED


def use_one_pool(server_args: Any) -> None:
    """Keep the KV of layers with windows beside that of the others, where a platform of a plugin's has no pool for windows: 0.5.17 makes
    one on its own platforms only (kv_cache_configurator.py, `_build_oot_mha_kv_pool`)."""
    if release() == "0.5.17":
        server_args.disable_hybrid_swa_memory = True


def caching_method() -> str:
    """The cache's method that hands a running request over to the tree."""
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache

    return "cache_unfinished_req" if hasattr(BasePrefixCache, "cache_unfinished_req") else "checkpoint"


def radix_cache_serves() -> bool:
    """Whether a server may run on `RadixCache`; 0.5.23 keeps the class but serves with `UnifiedRadixCache` only."""
    return caching_method() == "cache_unfinished_req"


def skips_finishing() -> bool:
    """Whether a request leaves the batch while its last token is being computed; 0.5.17 decodes it once more."""
    from sglang.srt.managers.scheduler import Scheduler

    return hasattr(Scheduler, "_reqs_finishing_inflight")


def requests(pool: Any, rows: torch.Tensor) -> torch.Tensor:
    """What sglang-pat calls the requests in these rows (radix_bridge/events.py), [rows] int64 on the host.

    Args:
        pool: SGLang's `ReqToTokenPool`.
        rows: int64, on the host.
    """
    return pool.req_generation[rows] << 32 | rows


def request_of(pool: Any, req: Any) -> int | None:
    """The same of one request, None for one that has no row."""
    index = row(req)
    return None if index is None else int(pool.req_generation[index]) << 32 | index


def row(req: Any) -> int | None:
    """The request's row of `req_to_token`, None if it has none."""
    return req.req_pool_idx if hasattr(req, "req_pool_idx") else req.kv.req_pool_idx


def protected_len(req: Any) -> int:
    """Tokens of the request whose slots belong to the tree."""
    return req.cache_protected_len if hasattr(req, "cache_protected_len") else req.kv.cache_protected_len


def tokens(req: Any, start: int, stop: int) -> tuple[int, ...]:
    """Token ids [start, stop) of prompt and output together."""
    prompt = req.origin_input_ids
    if stop <= len(prompt):
        return tuple(prompt[start:stop])
    output = req.output_ids
    return (*prompt[start:stop], *output[max(0, start - len(prompt)) : stop - len(prompt)])


def decode_len(req: Any) -> int:
    """Tokens with which the request decodes next; 0 while more of its prompt is to come."""
    return len(req.origin_input_ids) + len(req.output_ids) if req.output_ids else 0


def namespace(req: Any) -> Hashable:
    """What keeps equal tokens apart in the cache: LoRA adapter, salt."""
    return (req.extra_key, getattr(req, "cache_salt", None))


def no_more_requests() -> Any:
    """What `PrefillAdder.add_one_req` returns where a step can take no more."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    return AddReqResult.OTHER


def cached_tokens(req: Any) -> int:
    """Tokens that a request which is about to be computed was found to have in the cache."""
    return (req.prefix_len if hasattr(req, "prefix_len") else len(req.prefix_indices)) + req.host_hit_length


def reusable_tokens(req: Any) -> int:
    """Tokens that it would take from the cache at most: it computes the last one, and those whose log-probabilities it wants."""
    return req._compute_max_prefix_len(len(req.full_untruncated_fill_ids))


def is_named_by_tokens(req: Any) -> bool:
    """Whether requests with the same tokens find this one's KV in the tree: not where embeddings stand for tokens, nor of a streaming
    session, which has its KV for itself, nor where SGLang keeps a request out of the tree."""
    if req.input_embeds is not None or req.positional_embed_overrides is not None:
        return False
    return not (req.skip_radix_cache_insert or (req.session is not None and req.session.streaming))


def finds_prefixes(cache: Any) -> bool:
    """Whether a prefix is found in this cache as soon as it is computed: not a hybrid model's, as its states are kept at checkpoints."""
    # With streaming sessions 0.5.17 has them around the cache.
    cache = getattr(cache, "inner", cache)
    return _followed(cache) and not cache.disable and not cache.supports_mamba()


FOLLOWED = ("RadixCache", "UnifiedRadixCache", "HiRadixCache")
"""Prefix caches whose paths tests have compared with `req_to_token`. With any other, requests are decoded unpacked."""


def _followed(cache: Any) -> bool:
    # A UnifiedRadixCache with a tier on the host has a controller of it; 0.5.17 has HiRadixCache for that.
    tiered = type(cache).__name__ == "UnifiedRadixCache" and getattr(cache, "cache_controller", None) is not None
    return type(cache).__name__ in FOLLOWED and not tiered


def path(cache: Any, req: Any) -> list[tuple[int, int]] | None:
    """(node id, length in tokens) from the first level down to the request's last node; None if nothing is known of it."""
    last = _last_node(cache, req) if _followed(cache) else None
    if last is None:
        return None
    core = getattr(cache, "tree_core", None)
    if core is None:
        node, root = last, cache.root_node
    elif hasattr(core, "collect_path_info"):
        (nodes,) = core.collect_path_info([last])
        return [(node.node_id, node.path_end - node.path_start) for node in nodes]
    else:
        node, root = core.node_by_id(last), core.root_node
    result = []
    while node is not root:
        result.append((node.id, len(node.key)))
        node = node.parent
    return result[::-1]


def head_tokens(cache: Any) -> int:
    """Tokens by which the tree tells a node from its siblings: a page, and one more where its keys are pairs of tokens (EAGLE, whose draft
    layer computes a token's KV from the next one too)."""
    return cache.page_size + bool(getattr(getattr(cache, "tree_core", cache), "is_eagle", False))


def _last_node(cache: Any, req: Any) -> Any:
    """Where the request hangs in the tree. A turn of a streaming session has a stand-in for a node, and hangs where its session does."""
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


PREFILL_ATTRIBUTES = (
    "use_captured_forward_metadata_for_breakable_cuda_graph",
    "supports_full_cuda_graph_chunked_prefix",
    "extend_dummy_seqs_capped_by_req_pool",
    "extend_attention_block_m",
    "prefill_cuda_graph_default_max_seq_len",
    "prefill_cuda_graph_max_batch_size",
    "skips_prefill_metadata_on_idle_dp_rank",
    "supports_prefill_cuda_graph_max_context_size",
)
"""Attributes by which a backend says how it can prefill, in graphs and in dry runs; each release has some of them."""


def prefill_backend(
    windows: bool, kv_cache: torch.dtype, scaled: bool, sinks: bool = False, unequal: bool = False
) -> str:
    """The stock attention backend for prefill on this GPU: what SGLang would choose, as far as it is installed and right.

    Where layers have windows SGLang takes FA3 or Triton (arg_groups/overrides.py, `_olmo2_overrides`; server_args.py accepts no other
    for Exaone). FA3 reads e4m3 and not e5m2 (overrides.py, `_attention_backend_fa3_fp8_fallback`). Triton's is the last choice: where the cache is FP8 it casts Q and
    the weights of V to FP8 for a cached prefix (extend_attention.py), and FlashInfer's does not.

    Args:
        windows: Whether some layers see a window only.
        kv_cache: What K and V are kept in.
        scaled: Whether they are divided by scales.
        sinks: Whether heads have logits without values, which FlashInfer's backend takes no notice of (flashinfer_backend.py).
        unequal: Whether V is narrower than K, which FlashInfer's backend takes for one dimension (flashinfer_backend.py, `v.view`).
    """
    import importlib.util

    import torch
    from sglang.srt.utils import is_flashinfer_available

    on_hopper = torch.cuda.get_device_capability()[0] == 9 and importlib.util.find_spec("sgl_kernel.flash_ops")
    if on_hopper and kv_cache != torch.float8_e5m2:
        return "fa3"
    wrong = windows or sinks or unequal or (scaled and ignores_scales("flashinfer", prefill=True))
    return "flashinfer" if is_flashinfer_available() and not wrong else "triton"


def is_extend(mode: Any) -> bool:
    """Whether this forward mode computes new tokens behind cached ones, and nothing else."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return mode in (ForwardMode.EXTEND, ForwardMode.MIXED)


def added(forward_batch: Any, requests: int) -> list[int] | None:
    """New tokens of each request of an extend; None where that cannot be divided: where not so many requests are its batch (a dry run, an
    idle rank's, one that was padded), where lengths are on the GPU only, or where it has more than tokens behind tokens."""
    lists = (forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu, forward_batch.seq_lens_cpu)
    more = ("spec_info", "encoder_lens", "multi_item_delimiter_indices", "attn_cp_metadata", "tbo_children")
    if (
        requests == 0
        or forward_batch.batch_size != requests
        or any(getattr(forward_batch, name, None) is not None for name in more)
    ):
        return None
    if any(each is None or len(each) != requests for each in lists):
        return None
    return list(forward_batch.extend_seq_lens_cpu)


OF_REQUESTS = ("req_pool_indices", "seq_lens", "seq_lens_cpu", "orig_seq_lens", "extend_seq_lens", "extend_seq_lens_cpu",
               "extend_prefix_lens", "extend_prefix_lens_cpu", "extend_logprob_start_lens_cpu", "lora_ids")  # fmt: skip
"""Fields of a `ForwardBatch` that attention backends may read and that have an element for each request."""

OF_TOKENS = ("input_ids", "positions", "out_cache_loc", "out_cache_loc_virtual")
"""The same for each new token."""


def part(forward_batch: Any, requests: slice, tokens: slice) -> Any:
    """Some requests of an extend, one behind the other, as a batch of their own for an attention backend.

    Args:
        forward_batch: SGLang's; it stays as it is.
        requests: From its first to behind its last.
        tokens: Likewise.
    """
    found = copy.copy(forward_batch)
    for names, where in ((OF_REQUESTS, requests), (OF_TOKENS, tokens)):
        for name in names:
            value = getattr(forward_batch, name, None)
            if value is not None:
                setattr(found, name, value[where])
    found.batch_size, found.extend_num_tokens = requests.stop - requests.start, tokens.stop - tokens.start
    found.seq_lens_sum = int(found.seq_lens_cpu.sum())
    if found.extend_start_loc is not None:
        found.extend_start_loc = found.extend_start_loc[requests] - tokens.start
    if getattr(found, "kv_loc_plan", None) is not None:
        # 0.5.23: which of the slots that a step writes are this batch's.
        found.kv_loc_cols = found.kv_loc_plan.cols_slice(found.kv_loc_cols, tokens)
    return found


def as_decode(forward_batch: Any) -> Any:
    """An extend of one token for each request as the decode step that it is; its argument, changed."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    forward_batch.forward_mode = ForwardMode.DECODE
    return forward_batch


def unfinished(batch: Any) -> int | None:
    """The row of the request of a `ScheduleBatch` whose prompt goes on in a later one; None where there is none."""
    chunked = getattr(batch, "chunked_req", None)
    return None if chunked is None else row(chunked)


def draft_tokens(server_args: Any) -> int:
    """Tokens of each request that a step verifies; 0 without speculation."""
    given = arguments(server_args)
    return (given.speculative_num_draft_tokens or 1) if getattr(given, "speculative_algorithm", None) else 0


def tokens_of_drafts(forward_batch: Any) -> int:
    """The same by what a batch to be verified says."""
    return forward_batch.spec_info.draft_token_num


def decodes(layer: Any) -> bool:
    """Whether a layer is a decoder's: encoder-only ones have all tokens of a request see each other."""
    from sglang.srt.layers.radix_attention import AttentionType

    return layer.attn_type != AttentionType.ENCODER_ONLY


def padding(forward_batch: Any) -> int:
    """Rows with which a graph padded the batch."""
    return getattr(forward_batch, "num_padding", 0) or 0


def is_graph_view(forward_batch: Any) -> bool:
    """Whether this is a view of the buffers that a CUDA graph reads."""
    return hasattr(forward_batch, "actual_forward_mode")


def fence_table_reads() -> None:
    """Let the scheduler write `req_to_token` only after a step's kernels have read it.

    0.5.17 takes a graph's reads to be over before its replay; 0.5.23 asks the backend (`shared_read_ends`).
    """
    from sglang.srt.environ import envs
    from sglang.srt.layers.attention import base_attn_backend

    if not hasattr(base_attn_backend, "SharedReadEnds"):
        envs.SGLANG_FORCE_COARSE_WAR_BARRIER.set(True)
    if hasattr(envs, "SGLANG_ENABLE_METADATA_GLUE_GRAPH"):
        # It would replay what planned one step before every other one.
        envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.set(False)


def is_fp8(kv_cache: torch.dtype) -> bool:
    """Whether K and V are kept in one byte an element, divided by their layer's scales."""
    return kv_cache.itemsize == 1


def has_window_pool(pool: Any) -> bool:
    """Whether layers with windows keep their KV in a pool of their own, in which slots have other numbers."""
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    return isinstance(pool, SWAKVPool) and pool.swa_layer_nums > 0


def in_window_pool(pool: Any, layer: Any) -> bool:
    """Whether this layer is one of those."""
    return has_window_pool(pool) and pool.layers_mapping[layer.layer_id][1]


def window_mapping(pool: Any) -> torch.Tensor:
    """What each slot is called there: [slots], int64."""
    return pool.full_to_swa_index_mapping


def kv_pools(pool: Any) -> list[Any]:
    """The pools of K and V that a KV pool consists of, or it alone. A hybrid model's is one that knows which layers have any, around that
    of those layers.

    Classes derived from these may have slots of other kinds (unified memory), or belong to a backend of SGLang's own (qsa_kv_pool.py).
    """
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    if type(pool) is HybridLinearKVPool:
        return [pool.full_kv_pool]
    return [pool.full_kv_pool, pool.swa_kv_pool] if type(pool) is SWAKVPool else [pool]


def save_kv(pool: Any, layer: Any, slots: Any, k: Any, v: Any, window_slots: Any = None) -> None:
    """Write the new tokens' K and V to the pool; `window_slots` is what `slots` are called in a pool for windows.

    An FP8 pool divides `k` and `v` by the layer's scales, in place: nobody may read them afterwards. Another one gets no scales, as
    it divides by them wherever its dtype is not K's, and not elsewhere.
    """
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    scales = (layer.k_scale, layer.v_scale) if is_fp8(pool.dtype) else (None, None)
    pool.set_kv_buffer(layer, KVWriteLoc(slots, window_slots), k, v, *scales)


def kv_scales(layer: Any) -> tuple[float, float]:
    """What K and V of a layer are divided by in an FP8 pool; 1 where its checkpoint says nothing."""
    return _number(layer.k_scale_float, layer.k_scale), _number(layer.v_scale_float, layer.v_scale)


def has_scales(runner: Any) -> bool:
    """Whether the KV cache is FP8, and some of its layers have scales."""
    return is_fp8(runner.kv_cache_dtype) and any(kv_scales(layer) != (1.0, 1.0) for layer in attention_layers(runner))


def _number(number: float | None, scale: Any) -> float:
    # `--quantization-param-path` sets `scale` to a number, and its twin not at all.
    return number if number is not None else 1.0 if scale is None else float(scale)


def replica(runner: Any) -> int | None:
    """Which of the replicas that have requests of their own this process serves; None if another one plans the same batches."""
    if hasattr(runner, "ps"):
        ranks = runner.ps
    else:
        from sglang.srt.runtime_context import get_parallel

        ranks = get_parallel()
    if ranks.attn_tp_rank or ranks.pp_rank:
        return None
    return (getattr(ranks, "dp_rank", None) or 0) or ranks.attn_dp_rank


def modules(runner: Any) -> list[Any]:
    """All modules of the runner's model; none where there is no model, as in some of SGLang's tests."""
    model = getattr(runner, "model", None)
    return [] if model is None else list(model.modules())


def attention_layers(runner: Any) -> list[Any]:
    """Attention layers with KV that this process computes: one stage of a pipeline has only some of the model's.

    Linear layers of a hybrid model are mostly something else, and in some models (Bailing) of the same class.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    found = {id(module): module for module in modules(runner) if isinstance(module, RadixAttention)}
    # Models that run on transformers' code keep theirs in a dict, of which torch knows nothing.
    for instances in (getattr(module, "attention_instances", None) for module in modules(runner)):
        if isinstance(instances, dict):
            found |= {id(layer): layer for layer in instances.values() if isinstance(layer, RadixAttention)}
    kept = layers_with_kv(getattr(runner, "token_to_kv_pool", None))
    return [layer for layer in found.values() if kept is None or layer.layer_id in kept]


def layers_with_kv(pool: Any) -> Collection[int] | None:
    """The ids of a hybrid model's layers that have any; None where all do."""
    return getattr(pool, "full_attention_layer_id_mapping", None)


def arguments(server_args: Any) -> Any:
    """`ServerArgs` as SGLang resolved them: 0.5.23 keeps what was given and what it decided apart."""
    from sglang.srt.server_args import ServerArgs

    try:
        from sglang.srt.arg_groups.model_override_base import resolving_view
    except ImportError:
        return server_args
    return resolving_view(server_args) if isinstance(server_args, ServerArgs) else server_args


def backends_chosen(server_args: Any) -> tuple[str | None, str | None]:
    """The attention backends that prefill and decode, as far as they were chosen."""
    chosen = arguments(server_args)
    both = chosen.attention_backend
    return chosen.prefill_attention_backend or both, chosen.decode_attention_backend or both


LISTED = "fa3"
"""An attention backend that every one of SGLang's lists of backends for a model has."""

LISTING = ("GptOssForCausalLM", "Exaone4ForCausalLM", "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM")
"""Models for which SGLang accepts the backends of such a list only, that no plugin can extend (server_args.py,
`_handle_model_specific_adjustments`, in 0.5.23 arg_groups/model_hook.py), though `pat` serves them."""


def lists_backends(server_args: Any) -> bool:
    """Whether the model is one of LISTING."""
    if server_args.model_path.startswith("instance://"):  # of which SGLang reads no configuration here either
        return False
    if hasattr(server_args, "get_model_config"):
        config = server_args.get_model_config()
    else:
        from sglang.srt.arg_groups.model_override_base import model_config_of

        config = model_config_of(server_args)
    return config.hf_config.architectures[0] in LISTING


@contextmanager
def shown_as(server_args: Any, backend: str, shown: str) -> Iterator[None]:
    """Show another name where an attention backend was chosen."""
    write = msgspec.Struct.__setattr__ if isinstance(server_args, msgspec.Struct) else object.__setattr__
    names = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    changed = [name for name in names if getattr(server_args, name) == backend]
    for name in changed:
        write(server_args, name, shown)
    try:
        yield
    finally:
        for name in changed:
            write(server_args, name, backend)


def around_model_adjustments(hook: Callable[[Callable[[Any], None], Any], None]) -> None:
    """Call `hook(step, server_args)` in place of the step that adjusts arguments to the model; `step` is what it was."""
    try:
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    except ImportError:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        target = "sglang.srt.server_args.ServerArgs._handle_model_specific_adjustments"
        HookRegistry.register(target, hook, HookType.AROUND)
    else:
        register_resolution_hook("handle_model_specific_adjustments")(lambda args, step: hook(step, args))


def around_draft_backends(hook: Callable[..., Any]) -> None:
    """Have `hook` called around the step that makes an attention backend for drafts."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"
    HookRegistry.register(target, hook, HookType.AROUND)


def after_row_headroom(hook: Callable[[int], int]) -> None:
    """Have `hook` called with how many tokens more than its context a row of `req_to_token` shall hold; it answers likewise."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len"
    HookRegistry.register(target, lambda headroom, *_: hook(headroom), HookType.AFTER)


def row_headroom() -> int:
    """What rows need there for the slots that SGLang gives a request before each step: with drafts those of two steps, in whole pages."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    return int(get_alloc_reserve_per_decode()) + serving_arguments().page_size - 1


def serving_arguments() -> Any:
    """`ServerArgs` of this process, as SGLang resolved them."""
    from sglang.srt.runtime_context import get_server_args

    return arguments(get_server_args())


def ignores_sinks(backend: str | None) -> bool:
    """Whether a stock backend that was chosen computes no attention sinks."""
    return backend is not None and backend not in ("pat", "fa3", "fa4", "triton", "trtllm_mha", "intel_amx")


def assumes_equal_dims(backend: str | None) -> bool:
    """Whether a stock backend that was chosen takes V to be as wide as K: FlashInfer's (flashinfer_backend.py, `v.view`) and TRT-LLM's
    (server_args.py, where SGLang chooses a backend for `has_asymmetric_kv`)."""
    return backend in ("flashinfer", "trtllm_mha")


def ignores_window_pools(backend: str | None) -> bool:
    """Whether a stock backend that was chosen reads a pool for windows by the other pool's slots."""
    return backend in ("torch_native", "flex_attention")


def ignores_scales(backend: str | None, prefill: bool) -> bool:
    """Whether a stock backend writes or reads FP8 caches without the scales of a checkpoint, in prefill or in decode.

    FA4's prefill does (flashattention_backend.py, `fa_impl_ver`); so does FlashInfer's of 0.5.17 for a cached prefix
    (flashinfer_backend.py, `o2`).
    """
    scaleless = {"torch_native", "flex_attention"}
    if prefill:
        scaleless |= {"fa4", "flashinfer"} if release() == "0.5.17" else {"fa4"}
    return backend in scaleless


def is_hybrid(runner: Any) -> bool:
    """Whether some of the model's layers have states in place of KV."""
    return hasattr(runner.req_to_token_pool, "mamba_pool")


def lists_gdn_backends(runner: Any) -> bool:
    """Whether SGLang accepts only backends of a list of its own beside gated delta nets on this GPU (attention_registry.py)."""
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config
    from sglang.srt.utils import is_blackwell

    return is_blackwell() and hybrid_gdn_config(runner.model_config) is not None


def needs_first_layer(backend: str, runner: Any) -> bool:
    """Whether the stock backend asks the first layer for its V, and that layer has none: 0.5.17's Triton does (triton_backend.py,
    `get_value_buffer(0)`)."""
    if backend != "triton" or release() != "0.5.17":
        return False
    from sglang.srt.configs.hybrid_arch import mamba2_config

    kept = layers_with_kv(runner.token_to_kv_pool)
    return mamba2_config(runner.model_config) is not None and kept is not None and 0 not in kept


def kv_layout(runner: Any) -> str:
    """How the KV pool is laid out: `nhd` is [slots, heads, dim]."""
    pool = runner.token_to_kv_pool
    return getattr(getattr(pool, "full_kv_pool", pool), "kv_cache_layout", "nhd")


def attention_shape(runner: Any) -> tuple[int, int, int, int]:
    """(heads, kv_heads, head_dim, v_head_dim) of this rank's attention layers."""
    from sglang.srt.runtime_context import get_parallel

    pool = kv_pools(runner.token_to_kv_pool)[0]
    # As `ModelConfig.get_num_attention_heads` has it, which SGLang's tests lack: models without attention have None.
    heads = max(1, (runner.model_config.num_attention_heads or 0) // get_parallel().attn_tp_size)
    return heads, pool.head_num, pool.head_dim, pool.v_head_dim
