"""Speculative decoding on a CPU: what SGLang takes from `sgl_kernel`, which is not to be imported without a GPU's driver.

Its workers have a way for Intel's GPUs that goes without: kernels in Triton, which a CPU interprets. As on SGLang's own CPU engine a draft's
tokens are verified against the most probable ones, whatever the temperature.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

MODULES = (
    "sglang.kernels.ops.speculative.cache_locs",
    "sglang.kernels.ops.speculative.spec_tree",
    "sglang.kernels.ops.speculative.reconstruct_tree",
    "sglang.srt.speculative.eagle_utils",
)
"""Those that look at the device; not every release has all."""


def install() -> None:
    """Make SGLang's workers find what they need, in a process on the CPU platform."""
    trees = types.ModuleType("sgl_kernel.speculative")
    trees.reconstruct_indices_from_tree_mask = reconstruct  # type: ignore[attr-defined]
    sys.modules.setdefault(trees.__name__, trees)
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        if hasattr(module, "_is_xpu"):
            setattr(module, "_is_xpu", True)  # noqa: B010
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    factory = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
    HookRegistry.register(f"{factory}.create_decode_backend", _draft_steps, HookType.AROUND)
    HookRegistry.register(f"{factory}.create_draft_extend_backend", _draft_extend, HookType.AROUND)


def _draft_steps(create: Callable[[Any], Any], factory: Any) -> Any:
    if not _is_ours(factory):
        return create(factory)
    from sglang_pat.backend.drafts import DraftSteps

    # SGLang has sums over a handful of candidates compiled, for which a C++ compiler would run for half a minute.
    torch._dynamo.config.disable = True
    steps = factory.speculative_num_steps
    return DraftSteps(factory.draft_model_runner, factory.topk, steps) if steps > 1 else None


def _draft_extend(create: Callable[[Any], Any], factory: Any) -> Any:
    if not _is_ours(factory):
        return create(factory)
    from sglang_pat.backend.drafts import DraftExtend

    return DraftExtend(factory.draft_model_runner)


def _is_ours(factory: Any) -> bool:
    """Whether a draft's backend is not another one that the user chose."""
    return factory.draft_attn_backend in (None, "pat", "torch_native")


def reconstruct(
    tree_mask: torch.Tensor, lengths: torch.Tensor, positions: torch.Tensor, index: torch.Tensor, next_token: torch.Tensor,
    next_sibling: torch.Tensor, batch: int, tokens: int,
) -> None:  # fmt: skip
    """What a tree mask says of a draft (SGLang: kernels/ops/speculative/reconstruct_tree.py has the contract).

    Args:
        tree_mask: [batch * tokens * tokens] flags: what each token sees, itself included.
        lengths: [batch], tokens in front of the drafts.
        positions: [batch * tokens], written: each token's in its request.
        index: [batch, tokens], written: its number in the batch.
        next_token, next_sibling: Likewise: its first child, and the next child of its parent; -1 for none.
        batch, tokens: Sizes.
    """
    order = torch.arange(tokens)
    ancestors = tree_mask.view(batch, tokens, tokens).bool() & (order < order[:, None])
    positions.view(batch, tokens).copy_(lengths[:, None] + ancestors.sum(-1))
    index.copy_(torch.arange(batch * tokens).view(batch, tokens))
    parents = torch.where(ancestors.any(-1), (ancestors * order).amax(-1), -1)
    for row in range(batch):
        first: dict[int, int] = {}
        sibling = [-1] * tokens
        for token, parent in reversed(list(enumerate(parents[row].tolist()))):
            if parent >= 0:
                sibling[token], first[parent] = first.get(parent, -1), token
        next_token[row] = torch.tensor([first.get(token, -1) for token in range(tokens)])
        next_sibling[row] = torch.tensor(sibling)
