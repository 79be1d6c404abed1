"""`ForwardBatch`: extends and parts of them, verify steps, CUDA graphs."""

from __future__ import annotations

import copy
from itertools import accumulate
from typing import Any


def is_extend(mode: Any) -> bool:
    """Whether this forward mode computes new tokens behind cached ones, and nothing else."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return mode in (ForwardMode.EXTEND, ForwardMode.MIXED)


def extended_requests(batch: Any) -> list[Any]:
    """Those requests of a `ScheduleBatch` that are extended: in a mixed step SGLang puts the others, which decode, behind them."""
    decoding = len(batch.decoding_reqs or ()) if batch.forward_mode.is_mixed() else 0
    return list(batch.reqs[: len(batch.reqs) - decoding])


def right_mixed_lengths(forward_batch: Any) -> None:
    """Put right what 0.5.17 tells of the decoding requests of a mixed step, in which they have one new token each.

    With overlap scheduling it assumes that their last token is not known yet (schedule_batch.py, `mix_with_running`). After a step that it does not
    mix, such as one with log-probabilities, it is, and they count as one token longer: their K would have wrong positions. Right in 0.5.23.
    """
    cached, added, lengths = (
        forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu, forward_batch.seq_lens_cpu,
    )  # fmt: skip
    if cached is None or lengths is None or len(cached) != len(lengths):
        return
    wrong = [i for i, length in enumerate(lengths.tolist()) if added[i] == 1 and cached[i] != length - 1]
    if not wrong:
        return
    import torch

    cached = list(cached)
    for request in wrong:
        cached[request] = int(lengths[request]) - 1
    ends = list(accumulate(added))
    device = forward_batch.positions.device
    requests, tokens = (torch.tensor(one, device=device) for one in (wrong, [ends[request] - 1 for request in wrong]))
    forward_batch.extend_prefix_lens_cpu = cached
    right = forward_batch.seq_lens[requests] - 1
    forward_batch.extend_prefix_lens[requests] = right.to(forward_batch.extend_prefix_lens.dtype)
    forward_batch.positions[tokens] = right.to(forward_batch.positions.dtype)


def as_decode(forward_batch: Any) -> None:
    """Turn an extend of one token per request into the decode step that it is."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    forward_batch.forward_mode = ForwardMode.DECODE


def new_tokens(forward_batch: Any, requests: int) -> list[int] | None:
    """New tokens of each request of an extend.

    None if the batch cannot be divided: it does not consist of `requests` requests (dry runs, idle ranks, padding), its lengths are on
    the GPU only, or it has more than plain text tokens (encoders, multi-item scoring, context parallelism).
    """
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
"""Fields of a `ForwardBatch` that attention backends may read and that have one element per request."""

OF_TOKENS = ("input_ids", "positions", "out_cache_loc", "out_cache_loc_virtual")
"""The same with one element per new token."""


def part(forward_batch: Any, requests: slice, tokens: slice) -> Any:
    """Consecutive requests of an extend as a batch of their own, for an attention backend."""
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
        # 0.5.23: which of the step's new slots belong to this batch.
        found.kv_loc_cols = found.kv_loc_plan.cols_slice(found.kv_loc_cols, tokens)
    return found


def tokens_of_drafts(forward_batch: Any) -> int:
    """Tokens of each draft in a batch to be verified."""
    return forward_batch.spec_info.draft_token_num


def verify_mask(requests: int, tokens: int, device: Any) -> Any:
    """Where SGLang writes which tokens of its draft each token sees, for so many drafts of so many tokens; None if drafts have no tokens.

    Without this it would write a flag for each token of the context, as it does not know lengths on the host.
    """
    if not tokens:
        return None
    import torch
    from sglang.srt.layers.attention.verify_mask import TreeMaskMode, VerifyMask

    flags = torch.zeros(requests * tokens * tokens, dtype=torch.bool, device=device)
    return VerifyMask(buffer=flags, mode=TreeMaskMode.QLEN_ONLY, max_bs=requests)


def cached_lengths(forward_batch: Any) -> Any:
    """How many tokens each request has, without a draft that is verified: [requests], on the host if SGLang has them there.

    DFLASH's numbers on the host are bounds, with the draft or with all that is allocated (dflash_worker_v2.py, `verify_host_seq_lens`).
    """
    bounds = type(getattr(forward_batch, "spec_info", None)).__name__ == "DFlashVerifyInput"
    return forward_batch.seq_lens if bounds or forward_batch.seq_lens_cpu is None else forward_batch.seq_lens_cpu


def padding(forward_batch: Any) -> int:
    """How many rows a graph added to fill the batch."""
    return getattr(forward_batch, "num_padding", 0) or 0


def is_graph_view(forward_batch: Any) -> bool:
    """Whether this is a view of the buffers that a CUDA graph reads."""
    return hasattr(forward_batch, "actual_forward_mode")


def fence_table_reads() -> None:
    """Let the scheduler write `req_to_token` only after a step's kernels have read it.

    0.5.17 assumes that a graph has finished reading before its replay; 0.5.23 asks the backend (`shared_read_ends`).
    """
    from sglang.srt.environ import envs
    from sglang.srt.layers.attention import base_attn_backend

    if not hasattr(base_attn_backend, "SharedReadEnds"):
        envs.SGLANG_FORCE_COARSE_WAR_BARRIER.set(True)
    if hasattr(envs, "SGLANG_ENABLE_METADATA_GLUE_GRAPH"):
        # It would capture the planning of one step and replay that for every other step.
        envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.set(False)
