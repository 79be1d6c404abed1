"""Every feature of SGLang that touches attention or the prefix cache, and how `--attention-backend pat` treats it.

The checks at start (support.py) and docs/support.md come from this table. A feature that works names the tests that show it. One that is
refused names the arguments that ask for it, and what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from sglang_pat import compat

ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH")
"""Algorithms of speculative decoding that are supported; their verify steps are all alike."""

Status = Literal["works", "unpacked", "refused"]
"""`unpacked`: the answers are right, but nothing is shared."""

Asked = Callable[[Any, Mapping[str, str]], bool]
"""Whether server arguments, as SGLang resolved them, and environment variables ask for a feature."""


class Feature(msgspec.Struct, frozen=True):
    """A row of the table.

    Attributes:
        name: Its name in SGLang's documentation.
        how: The flags, request field or environment variable that turn it on; empty if it is always on.
        status: How it is treated.
        shown: The tests that show it, as `file::function` below tests/.
        asked: For a refused one: whether it is asked for; None if that depends on the model (support.py), or if SGLang refuses it before a backend is asked.
        instead: For a refused one: what to do.
        note: What else a user should know.
    """

    name: str
    how: str
    status: Status
    shown: tuple[str, ...] = ()
    asked: Asked | None = None
    instead: str = ""
    note: str = ""


def _beside(arguments: Any, environment: Mapping[str, str]) -> bool:
    """Another attention backend runs one of the phases."""
    return set(compat.arguments.backends_chosen(arguments)) != {"pat"}


def _set(name: str) -> Asked:
    """The argument `name` is set; not every release has every argument."""
    return lambda arguments, environment: bool(getattr(arguments, name, None))


def _variable(name: str) -> Asked:
    """The environment variable `name` is set, as SGLang reads it."""
    return lambda arguments, environment: environment.get(name, "").lower() in ("1", "true", "t", "yes", "y", "on")


def _any(*several: Asked) -> Asked:
    return lambda arguments, environment: any(asked(arguments, environment) for asked in several)


def _all(*several: Asked) -> Asked:
    return lambda arguments, environment: all(asked(arguments, environment) for asked in several)


def _low_bit(*several: Asked) -> Asked:
    """KV of less than 8 bits is asked for, and one of these."""
    return _all(lambda arguments, environment: bool(environment.get("SGLANG_PAT_KV")), _any(*several))


def _on_cpu(asked: Asked) -> Asked:
    """The server runs on a CPU, and this is asked for."""
    return _all(_one_of("device", "cpu"), asked)


def _graph_backends(arguments: Any, phase: str) -> set[str | None]:
    """How a phase's steps are captured in graphs: as resolved, and as the user said."""
    resolved = getattr(getattr(arguments, "cuda_graph_config", None), phase, None)
    return {getattr(resolved, "backend", None), getattr(arguments, f"cuda_graph_backend_{phase}", None)}


def _full_prefill_graph(arguments: Any, environment: Mapping[str, str]) -> bool:
    return "full" in _graph_backends(arguments, "prefill")


def _other_decode_graph(arguments: Any, environment: Mapping[str, str]) -> bool:
    """Decode steps are captured in pieces."""
    return not _graph_backends(arguments, "decode") <= {None, "full", "disabled"}


def _given(name: str, *harmless: str | int | None) -> Asked:
    """The argument `name` is set, to none of these."""
    return lambda arguments, environment: getattr(arguments, name, None) not in (None, *harmless)


def _no_multiple(name: str, step: int) -> Asked:
    """The argument `name` is a number above 0, and no multiple of `step`."""
    return lambda arguments, environment: max(0, getattr(arguments, name, None) or 0) % step != 0


def _one_of(name: str, *values: str) -> Asked:
    """The argument `name` is one of these."""
    return lambda arguments, environment: getattr(arguments, name, None) in values


def _more(name: str, most: int) -> Asked:
    """The argument `name` is more than `most`."""
    return lambda arguments, environment: (getattr(arguments, name, None) or 0) > most


def _other_algorithm(arguments: Any, environment: Mapping[str, str]) -> bool:
    return (getattr(arguments, "speculative_algorithm", None) or ALGORITHMS[0]).upper() not in ALGORITHMS


def _works(name: str, how: str, *shown: str, note: str = "") -> Feature:
    return Feature(name, how, "works", shown, note=note)


def _unpacked(name: str, how: str, *shown: str, note: str = "") -> Feature:
    return Feature(name, how, "unpacked", shown, note=note)


def _refused(name: str, how: str, asked: Asked | None, instead: str, note: str = "") -> Feature:
    return Feature(name, how, "refused", asked=asked, instead=instead, note=note)


_FAMILIES = "test_families.py::test_answers_are_those_of_a_stock_backend"
_CHAOS = "test_chaos.py::test_a_minute_of_chaos"
_MIRROR = "test_scheduler.py::test_the_mirror_is_what_req_to_token_says"
_NESTED = "test_server.py::test_nested_prefixes_of_mixed_lengths"
_FLAGS = "test_server.py::test_small_mixed_chunks_pages_lpm_no_overlap_no_reuse"
_POOL = "test_server.py::test_two_hundred_requests_through_a_small_pool"
_SPECULATION = "test_speculation.py::test_answers_are_those_without_it"
_LOW_BIT_SERVER = "test_low_bit_server.py::test_answers_do_not_depend_on_what_was_cached"
_PD = "test_disaggregation.py::test_answers_are_those_of_one_server"
_LEAVE_OUT = "leave it out, or use another --attention-backend"

FEATURES: dict[str, tuple[Feature, ...]] = {
    "Scheduling": (
        _works("overlap scheduling, on and off", "`--disable-overlap-schedule`", _NESTED, _FLAGS),
        _works("chunked prefill", "`--chunked-prefill-size`", _MIRROR, _FLAGS),
        _works("mixed chunks", "`--enable-mixed-chunk`", _FLAGS, "test_attention_kit.py::test_decoding_requests_of_a_mixed_step_are_packed",
               "test_server.py::test_mixed_chunks_beside_prompts_that_are_not_mixed", "test_gpu_server.py::test_mixed_chunks",
               note="the decoding requests of a mixed step are packed; if they are those of the previous decode step, its plan is reused; with "
               "`--prefill-attention-backend` that backend computes the whole step; with overlap 0.5.17 gives decoding requests wrong positions behind "
               "prompts with log-probabilities, which is put right here but for models with three positions a token (Qwen-VL)"),
        _works("short extends on a cached document", "", "test_server.py::test_short_turns_on_one_document_read_it_together",
               "test_attention_kit.py::test_short_extends_are_planned_where_they_share",
               note="they read it together; on a GPU not with latents (MLA), and only if they come last in their batch, and if by its table of tiles that takes less than "
               "reading it for each; other extends run on the prefill backend there"),
        _works("waiting for a prefix that another request computes", "`SGLANG_PAT_DEFER`, on",
               "test_siblings.py::test_a_prefix_is_computed_once", "test_siblings.py::test_aborts_of_leaders_keep_nobody_waiting", _MIRROR,
               note="a feature of sglang-pat; for 128 or more common tokens, and 16 steps at most; not in hybrid models, nor in caches that are not followed"),
        _works("retraction", "", _POOL),
        _works("priorities and preemption", "`--enable-priority-scheduling`", _MIRROR, _CHAOS),
        _works("disconnects, aborts, time limits", "`/abort_request`, `SGLANG_REQ_WAITING_TIMEOUT`, `SGLANG_REQ_RUNNING_TIMEOUT`", _CHAOS, "test_kits.py::TestTimeouts"),
        _works("pausing and continuing", "`/pause_generation`", _CHAOS, "test_kits.py::TestPauseResumeInPlace"),
        _refused("PD multiplexing", "`--enable-pdmux`", _set("enable_pdmux"), _LEAVE_OUT),
        _refused("two-batch overlap", "`--enable-two-batch-overlap`", _set("enable_two_batch_overlap"), "leave it out"),
    ),
    "Requests": (
        _works("several answers to a prompt", "`n`", _CHAOS),
        _works("input logprobs", "`logprob_start_len`", _CHAOS),
        _works("LoRA adapters, each a namespace of its own", "`--enable-lora`", _CHAOS),
        _works("salts", "`cache_salt`, `extra_key`", _CHAOS, _MIRROR),
        _works("sessions, streaming sessions", "`--enable-streaming-session`", _CHAOS, "test_kits.py::TestStreamingSessions",
               note="without `UnifiedRadixCache` a streaming session is packed in its first turn only"),
        _unpacked("beam search (0.5.23)", "`beam_width`", _CHAOS),
    ),
    "Prefix cache": (
        _works("`RadixCache`", "the default of 0.5.17", _NESTED, _MIRROR),
        _works("`UnifiedRadixCache`, Python and Rust core", "the default of 0.5.23", _NESTED, _MIRROR),
        _works("`flush_cache`, eviction", "", "test_server.py::test_after_flush_cache", _MIRROR),
        _works("hierarchical cache, with any write policy and with files", "`--enable-hierarchical-cache`, `--hicache-storage-backend file`",
               "test_gpu_server.py::test_a_cache_with_tiers", "test_gpu_drafts.py::test_the_recipe_for_agents", _MIRROR, "test_chaos.py::test_chaos_behind_a_full_host",
               "test_gpu_models.py::test_a_tier_on_the_host_behind_a_pool_for_windows",
               note="run on an H200 with both releases, for models with windows and hybrids with drafts too; storage other than files was not run; "
               "tests on a CPU make SGLang's copies between the tiers by torch"),
        _unpacked("host memory as a buffer only (0.5.23)", "`--hicache-host-memory-mode buffer_only`",
                  "test_features.py::test_a_cache_that_nobody_tested_is_not_followed", note="not run; it is not followed"),
        _refused("hierarchical cache on a CPU", "`--enable-hierarchical-cache`", _on_cpu(_set("enable_hierarchical_cache")),
                 "leave it out, as SGLang needs a GPU for it"),
        _works("a prefix cache that knows sessions", "`--enable-session-radix-cache`", _MIRROR,
               note="on 0.5.17 SGLang needs `SGLANG_ENABLE_UNIFIED_RADIX_TREE=1` for it"),
        _refused("linkers of other caches (0.5.23)", "`--enable-unified-cache-external-linker`",
                 _set("enable_unified_cache_external_linker"), _LEAVE_OUT),
        _refused("KV canaries", "`--kv-canary`", _given("kv_canary", "none"), "leave it out; `SGLANG_PAT_VERIFY=1` checks plans"),
        _unpacked("no prefix cache", "`--disable-radix-cache`", _MIRROR),
        _works("LMCache (from 0.5.21)", "`--enable-lmcache`", "test_lmcache.py::test_what_was_evicted_comes_back",
               note="run on a CPU with 0.5.23 and LMCache 0.5.6, whose server takes `--supported-transfer-mode auto` for it; not on a GPU"),
        _unpacked("any other: FlexKV, C++ radix tree, `--radix-cache-backend`, LMCache up to 0.5.20", "",
                  "test_features.py::test_a_cache_that_nobody_tested_is_not_followed",
                  note="not run; they are not followed"),
    ),
    "Parallelism": (
        _works("tensor parallelism", "`--tp-size`", "test_server.py::test_parallelism", note="every rank makes the same plans by itself"),
        _works("pipeline parallelism", "`--pp-size`", "test_server.py::test_parallelism",
               note="microbatches take turns, so every step's plan is made on the spot"),
        _works("replicas", "`--dp-size`, `sglang-router`", "test_server.py::test_parallelism", "test_server.py::test_replicas_behind_a_router"),
        _works("DP attention", "`--enable-dp-attention`, `--attn-dp-size`", "test_gpu_server.py::test_parallelism"),
        _refused("DP attention on a CPU", "`--enable-dp-attention`, `--attn-dp-size`", _on_cpu(_any(_set("enable_dp_attention"), _more("attn_dp_size", 1))),
                 "leave it out, as SGLang needs GPUs for it"),
        _refused("decode context parallelism", "`--dcp-size`", _more("dcp_size", 1), _LEAVE_OUT),
        _refused("prefill context parallelism", "`--attn-cp-size`, `--enable-prefill-cp`",
                 _any(_more("attn_cp_size", 1), _set("enable_prefill_cp"), _set("enable_prefill_context_parallel")), _LEAVE_OUT),
    ),
    "Disaggregation": (
        _works("prefill server", "`--disaggregation-mode prefill`", _PD, "test_disaggregation.py::test_a_prefill_server_that_dies",
               "test_disaggregation.py::test_one_request_computes_a_prefix_for_those_that_come_with_it",
               "test_disaggregation.py::test_prefixes_come_back_from_the_host_of_the_prefill_server",
               note="siblings wait, and short extends are packed, with a tier on the host too; run on a CPU with Mooncake over TCP, not on GPUs"),
        _works("decode server with a prefix cache", "`--disaggregation-decode-enable-radix-cache`", _PD,
               "test_disaggregation.py::test_retracted_requests_get_their_kv_back",
               note="packed from a request's first step; without this flag SGLang turns the prefix cache off; on 0.5.17 not beside drafts, and when requests are retracted SGLang finds a leak there and ends; run likewise"),
        _unpacked("decode server without one", "`--disaggregation-mode decode`", "test_server.py::test_a_decode_server"),
        _refused("a server that changes its role (0.5.23)", "`--enable-pd-role-switch`", _set("enable_pd_role_switch"), _LEAVE_OUT),
        _unpacked("KV offload of a decode server", "`--disaggregation-decode-enable-offload-kvcache`",
                  "test_observer.py::test_a_request_whose_kv_was_offloaded_gives_its_row_back",
                  note="packed with a prefix cache; not run, as it needs a GPU"),
    ),
    "CUDA graphs": (
        _works("decode, every captured size, and none", "`--disable-cuda-graph`", "test_gpu_server.py::test_every_batch_size_has_its_graph",
               "test_gpu_server.py::test_answers_are_those_of_triton"),
        _works("prefill, breakable (the default)", "", "test_gpu_server.py::test_features"),
        _refused("prefill as one graph", "`--cuda-graph-backend-prefill full`", _full_prefill_graph,
                 "leave it out, or take --cuda-graph-backend-prefill breakable"),
        _refused("decode in anything but full graphs", "`--cuda-graph-backend-decode`, `--cuda-graph-config`, `--debug-cuda-graph`",
                 _any(_other_decode_graph, _set("debug_cuda_graph")), "leave it out"),
        _refused("torch.compile", "`--enable-torch-compile`", _set("enable_torch_compile"), "leave it out"),
        _refused("megakernels (0.5.23)", "`--enable-nvidia-megakernel`, `--enable-amd-monokernel`",
                 _any(_set("enable_nvidia_megakernel"), _set("enable_amd_monokernel")), _LEAVE_OUT),
    ),
    "Weights and memory": (
        _works("new weights while it serves", "`/update_weights_from_disk`, `update_weights_from_tensor`, `update_weights_from_distributed`", _CHAOS,
               "test_weights.py::test_updates_while_nothing_runs", "test_weights.py::test_updates_while_requests_run",
               "test_weights.py::test_a_cache_that_is_not_flushed", "test_weights.py::test_an_engine_takes_tensors_and_broadcasts",
               "test_fp8_kv.py::test_scales_of_new_weights",
               note="[what is left to the trainer](rollouts.md#weights-that-change); scales of an FP8 cache that change need `recapture_cuda_graph` on a GPU"),
        _works("partial rollouts: new weights while requests are paused", "`/pause_generation`", "test_weights.py::test_updates_amid_answers", note="0.5.17 ends, with any backend"),
        _works("memory release and resume", "`--enable-memory-saver`", "test_gpu_server.py::test_features"),
        _refused("memory release and resume on a CPU", "`--enable-memory-saver`", _on_cpu(_set("enable_memory_saver")),
                 "leave it out, as SGLang needs a GPU for it"),
        _works("any page size", "`--page-size`", _MIRROR, _FLAGS),
        _works("FP8 KV caches, with or without scales", "`--kv-cache-dtype fp8_e4m3`, `fp8_e5m2`, or what a checkpoint says",
               "test_fp8_kv.py::test_packed_answers_are_those_of_a_stock_backend", "test_fp8_kv.py::test_scales_of_a_checkpoint",
               "test_gpu_models.py::test_fp8_kv",
               note="`test_gpu_models.py::test_fp8_kv` passes on an H200"),
        _refused("FP4 and MXFP8 KV caches", "`--kv-cache-dtype`", _one_of("kv_cache_dtype", "nvfp4", "fp4_mx_block16", "fp4_e2m1", "mxfp8"),
                 "take fp8_e4m3, or use another --attention-backend"),
        _works("KV of 4 and 2 bits", "`SGLANG_PAT_KV=int4`, `int2`, `SGLANG_PAT_INT4_LAYERS`", _LOW_BIT_SERVER, "test_low_bit.py::test_decode",
               "test_low_bit.py::test_extends_see_what_decode_steps_would", "test_gpu_models.py::test_kv_of_few_bits",
               "test_low_bit_server.py::test_answers_of_2_bits_do_not_depend_on_what_was_cached",
               note="full pages of 64 tokens are quantised, K by channel and V by token; tokens behind a request's last full page keep the model's dtype; "
               "head dimensions are multiples of 32, on a GPU 64 and 128; run on an H200 with both releases, but 2 bits not since their scales are fitted and heads rotated, and layers of two formats on CPUs only; 2 bits cost accuracy"),
        _refused("KV of 4 and 2 bits with windows, for MLA models, for encoders, for hybrid models on a GPU, or on a GPU with 99 KB of shared memory per CTA", "`SGLANG_PAT_KV`",
                 None, "unset it"),
        _refused("KV of 4 and 2 bits with chunks that are no whole pages of 64 tokens", "`SGLANG_PAT_KV` and `--chunked-prefill-size`",
                 _low_bit(_no_multiple("chunked_prefill_size", 64)), "make it a multiple of 64"),
        _refused("KV of 4 and 2 bits with a page size other than 64", "`SGLANG_PAT_KV` and `--page-size`",
                 _low_bit(_given("page_size", 64)), "leave out --page-size"),
        _refused("KV of 4 and 2 bits with another format of the KV cache", "`SGLANG_PAT_KV` and `--kv-cache-dtype`",
                 _low_bit(_given("kv_cache_dtype", "auto")), "unset SGLANG_PAT_KV or leave out --kv-cache-dtype"),
        _refused("KV of 4 and 2 bits with features that copy KV out of the pool",
                 "`SGLANG_PAT_KV` and `--enable-hierarchical-cache`, `--enable-lmcache` or `--disaggregation-mode`",
                 _low_bit(_set("enable_hierarchical_cache"), _set("enable_lmcache"), _given("disaggregation_mode", "null")), "unset SGLANG_PAT_KV"),
        _refused("KV of 4 and 2 bits with another backend", "`SGLANG_PAT_KV` and `--prefill-attention-backend` or `--decode-attention-backend`",
                 _low_bit(_beside), "let pat do both, by --attention-backend pat alone"),
        _refused("KV of 4 and 2 bits with speculative decoding, mixed chunks or streaming sessions",
                 "`SGLANG_PAT_KV` and `--speculative-algorithm`, `--enable-mixed-chunk` or `--enable-streaming-session`",
                 _low_bit(_set("speculative_algorithm"), _set("enable_mixed_chunk"), _set("enable_streaming_session")), "unset SGLANG_PAT_KV"),
        _refused("KV of 4 and 2 bits with memory that is taken away or sized later",
                 "`SGLANG_PAT_KV` and `--enable-memory-saver` or `SGLANG_ENABLE_POST_CAPTURE_KV_SIZING`",
                 _low_bit(_set("enable_memory_saver"), _variable("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING")), "unset SGLANG_PAT_KV"),
        _refused("the KV layout HND", "`SGLANG_USE_HND_KVCACHE`", _variable("SGLANG_USE_HND_KVCACHE"), "unset it"),
        _refused("page-major KV layout and unified memory", "`--enable-page-major-kv-layout`, `--enable-unified-memory`",
                 _any(_set("enable_page_major_kv_layout"), _set("enable_unified_memory")), _LEAVE_OUT),
    ),
    "Decoding": (
        _works("speculative decoding on a CPU", "`--speculative-algorithm EAGLE`, `EAGLE3`, `NEXTN`, `STANDALONE`, `NGRAM`", _SPECULATION,
               "test_speculation.py::test_a_model_that_brings_its_draft", "test_speculation.py::test_windows",
               "test_chaos.py::test_chaos_with_drafts", "test_verify.py::test_random_trees_of_drafts", "test_scheduler.py::test_the_mirror_is_what_req_to_token_says",
               note="verify steps are packed; as on SGLang's own CPU engine, drafts are compared with the likeliest tokens only; "
               "of models that bring their draft (NEXTN) one of MiMo's shape was run; `presence_penalty` and `frequency_penalty` give other answers with drafts, as SGLang applies them once a step"),
        _refused("streaming sessions beside speculative decoding", "`--enable-streaming-session` and `--speculative-algorithm`", _all(_set("speculative_algorithm"), _set("enable_streaming_session")),
                 "leave out one of them", note="a bug of SGLang with any backend: it assumes that a turn's last token has KV, but only the next verify step writes it, so later turns read stale KV"),
        _works("speculative decoding on a GPU", "likewise", "test_gpu_drafts.py::test_drafts",
               "test_gpu_drafts.py::test_drafts_of_a_model_that_brings_them", "test_gpu_drafts.py::test_drafts_with_windows",
               note="draft models run on the stock backend that prefills, or on `--speculative-draft-attention-backend`; run with all of these on both releases; with FP8 KV NEXTN, EAGLE and n-grams, behind windows n-grams and EAGLE3; [how fast they are](measured-drafts.md#verify-steps) depends on rows (query heads / KV heads x tokens of a draft)"),
        _works("DFLASH on a GPU", "`--speculative-algorithm DFLASH`", "test_verify_kits.py::test_eager", "test_verify_kits.py::test_lengths_of_dflash",
               note="its verify steps are tested, a server was not run; drafts of 16 tokens make 64 rows or more of a KV head (query heads / KV heads x 16); on a CPU SGLang refuses it"),
        _works("branching drafts with pages", "`--page-size` and `--speculative-eagle-topk` above 1, or n-grams", _SPECULATION,
               "test_gpu_drafts.py::test_drafts", note="SGLang allows it for some of its own backends only"),
        _refused("other algorithms of speculative decoding", "`--speculative-algorithm DSPARK` and others", _other_algorithm, _LEAVE_OUT),
        _refused("speculation with drafts of changing length", "`--speculative-adaptive`", _set("speculative_adaptive"), "leave it out"),
        _refused("drafts of more than 64 tokens", "`--speculative-num-draft-tokens`",
                 _more("speculative_num_draft_tokens", 64), "take 64 or less"),
        _refused("speculative decoding with a second backend", "`--prefill-attention-backend`, `--decode-attention-backend`",
                 _all(_set("speculative_algorithm"), _beside), "let pat do both, by --attention-backend pat alone"),
        _refused("diffusion models", "`--dllm-algorithm`", _set("dllm_algorithm"), _LEAVE_OUT),
        _works("deterministic inference on a GPU", "`--enable-deterministic-inference`", "test_pieces.py::test_kernels_decode_alone_and_in_any_batch",
               "test_pieces.py::test_kernels_of_drafts_and_extends_compute_what_those_of_decode_steps_do",
               "test_deterministic.py::test_an_extend_in_rounds_has_the_bits_of_decode_steps", "test_pieces.py::test_windows_in_a_pool_of_their_own",
               "test_deterministic.py::test_answers_do_not_depend_on_the_batch",
               note="packed; prefill is planned too, without CUDA graphs, so that recomputed tokens have the bits of decoded ones; [what was "
               "run on a GPU](rollouts.md); of hybrid models attention only"),
        _refused("deterministic inference on a CPU", "`--enable-deterministic-inference`", _on_cpu(_set("enable_deterministic_inference")),
                 "leave it out, as SGLang's operators there depend on the batch"),
        _refused("deterministic inference with a second backend",
                 "`--enable-deterministic-inference` and `--prefill-attention-backend` or `--decode-attention-backend`",
                 _all(_set("enable_deterministic_inference"), _beside), "let pat do both, by --attention-backend pat alone"),
        _refused("deterministic inference with DP attention", "`--enable-deterministic-inference` and `--enable-dp-attention` or `--attn-dp-size`",
                 _all(_set("enable_deterministic_inference"), _any(_set("enable_dp_attention"), _more("attn_dp_size", 1))), "leave out one of them",
                 note="not tried"),
        _refused("deterministic inference with drafts that branch", "`--enable-deterministic-inference` and `--speculative-eagle-topk` above 1, or n-grams",
                 _all(_set("enable_deterministic_inference"), _any(_more("speculative_eagle_topk", 1), _one_of("speculative_algorithm", "NGRAM"))),
                 "take --speculative-eagle-topk 1", note="a branch's tokens are added up otherwise than in a decode step, and n-grams are those of all requests"),
        _refused("deterministic inference with KV of 4 and 2 bits", "`--enable-deterministic-inference` and `SGLANG_PAT_KV`",
                 _low_bit(_set("enable_deterministic_inference")), "unset SGLANG_PAT_KV"),
        _refused("deterministic inference for MLA models and encoders", "`--enable-deterministic-inference`", None, _LEAVE_OUT),
        _refused("the bits of a trainer", "`--rl-on-policy-target`", _set("rl_on_policy_target"), _LEAVE_OUT,
                 note="a trainer's attention adds up in another order"),
    ),
    "Models": (
        _works("MHA, GQA and MQA of any ratio, logit soft cap", "", "test_cuda_kernel.py::test_random_trees",
               "test_cuda_kernel.py::test_logit_cap", "test_cuda_kernel.py::test_more_query_heads_than_a_tile_has_rows"),
        _works("embedding models, decoders and encoders (such as BERT)", "`--is-embedding`",
               "test_embedding.py::test_embeddings_are_those_of_a_stock_backend",
               note="nothing is decoded; encoders run on a stock backend alone: `/server_info` has no `pat`, and 0.5.17 needs "
               "`--disable-radix-cache --chunked-prefill-size -1` with any backend"),
        _works("hybrid models on a GPU: full attention between gated delta nets or Mamba 2", "Qwen3-Next, Qwen 3.5, Nemotron-H, Granite 4, LFM2",
               _MIRROR, "test_gpu_models.py::test_hybrid_models", "test_gpu_drafts.py::test_the_recipe_for_agents",
               note="full attention is packed; attention of [Qwen3.5-35B-A3B's shape](coding_agents.md) was measured, servers were not compared; others (Falcon-H1) are accepted but were not run"),
        _refused("hybrid models on a CPU", "", None, "serve them on a GPU"),
        _refused("gated delta nets on a Blackwell GPU", "", None, "use --attention-backend triton",
                 note="SGLang accepts only its own backends there"),
        _works("multimodal models", "Qwen-VL and others", "test_multimodal.py::test_answers_are_those_of_a_stock_backend",
               note="questions about one image share it"),
        _refused("attention in both directions within an image", "Gemma 3 with `--enable-multimodal`, Gemma 4", None,
                 "use --attention-backend triton"),
        _works("MLA on a CPU (DeepSeek V2, V3, and others whose attention has their code)", "", "test_latents.py::test_answers_are_those_of_transformers",
               "test_latents.py::test_kit", "test_latents.py::test_drafts_and_experts",
               note="prompts read latents too, and so they do here on `torch_native`; an FP8 cache has no scales; drafts that V3 brings (NEXTN) work too, but SGLang itself starts them only where there is a GPU"),
        _works("MLA on a GPU (DeepSeek V2, V3, R1, Kimi K2, GLM-4.7-Flash, and others whose attention has DeepSeek's code)", "",
               "test_latent_kernel.py::test_random_trees", "test_latent_kernel.py::test_queries_straddle_work_items", "test_latents.py::test_kit_in_two_tensors", "test_gpu_models.py::test_latents",
               "test_gpu_models.py::test_latents_behind_a_long_prefix", "test_gpu_drafts.py::test_drafts_of_a_model_with_latents",
               note="up to 42 heads a GPU are packed, times the tokens of a draft; [which models, what prefills, what was measured](mla.md). On a GPU servers of DeepSeek V2's shape with 16 heads were run, on 0.5.23 and an H200, tiny ones with drafts and with FP8 too, not on several GPUs"),
        _refused("MLA in hybrid models (Kimi-Linear), with attention sinks, with windows, and on a GPU with scaling by position (Mistral Large 3) and of other dimensions; sparse attention over latents (DSA: DeepSeek V3.2, GLM-5; DeepSeek V4)",
                 "", None, "use another --attention-backend"),
        _works("sliding windows", "", "test_windows.py::test_answers_are_those_of_a_stock_backend", "test_cuda_kernel.py::test_windows",
               "test_attention_kit.py::test_windows", note="a request shares until it is longer than the window"),
        _works("a KV pool of its own for windows (gpt-oss, Mellum, MiMo V2)", "", "test_windows.py::test_a_pool_for_windows",
               "test_gpu_models.py::test_a_pool_for_windows", note="on CPUs releases up to 0.5.21 keep all KV in one pool; nothing is packed if every layer has a window"),
        _refused("windows that do not apply to prompts (UnlimitedOCR)", "", None, "use another --attention-backend"),
        _works("attention sinks (gpt-oss on a GPU, MiMo V2)", "", "test_cuda_kernel.py::test_sinks",
               "test_gpu_models.py::test_sinks", "test_sinks.py::test_answers_do_not_depend_on_packing",
               note="on a GPU prefill runs on FA3 or Triton; on a CPU SGLang cannot run the experts of gpt-oss"),
        _works("models for which SGLang has a list of backends: Exaone 4, gpt-oss", "", _FAMILIES),
        _works("models whose code is their own: GLM-4.5, Hunyuan V3, Step 3.5, Granite, MiniMax M2", "", _FAMILIES, "test_gpu_models.py::test_norms_of_all_heads",
               note="run with dense layers on a CPU, MiniMax M2, whose norms SGLang computes on a GPU only, on an H200"),
        _refused("encoder-decoder models", "", None, "use another --attention-backend"),
        _refused("attention in both directions by a decoder (EmbeddingGemma, HRM)", "", None, "use --attention-backend triton"),
        _refused("encoders with windows (EmbeddingGemma 2)", "", None, "use --attention-backend triton"),
        _works("K of 192 dimensions and V of 128 on a GPU", "", "test_cuda_kernel.py::test_random_trees",
               "test_cuda_kernel.py::test_v_narrower_than_k_in_one_pool", "test_gpu_models.py::test_unequal_dimensions",
               note="as in MiMo V2; prefill runs on FA3 or Triton"),
        _refused("other pairs of unequal dimensions on a GPU", "", None, "use another --attention-backend"),
        _refused("other head dimensions than those above", "", None, "use another --attention-backend"),
        _refused("float32 on a GPU", "`--dtype float32`", None, "take --dtype bfloat16 or float16"),
        _refused("temperature that grows with the context (Grok)", "", None, "use another --attention-backend"),
    ),
}  # fmt: skip
"""Features by the headings of docs/support.md."""

REFUSED = tuple(feature for group in FEATURES.values() for feature in group if feature.status == "refused")
