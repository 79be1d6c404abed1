"""Speculative decoding on a CPU: replaces what SGLang takes from `sgl_kernel`, which cannot be imported without a GPU's driver.

SGLang's workers have a path for Intel's GPUs that needs no `sgl_kernel`: Triton kernels, which a CPU can interpret. As on SGLang's own CPU engine,
drafts are compared with the most probable tokens, whatever the temperature.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from sglang_pat import compat

MODULES = (
    "sglang.kernels.ops.speculative.cache_locs",
    "sglang.kernels.ops.speculative.spec_tree",
    "sglang.kernels.ops.speculative.reconstruct_tree",
    "sglang.srt.speculative.eagle_utils",
)
"""The modules that check the device; not every release has all of them."""


def install() -> None:
    """Set up SGLang's draft workers, in a process on the CPU platform."""
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
    factory = "sglang.srt.speculative.draft_utils:DraftBackendFactory"
    compat.registry.hook(f"{factory}.create_decode_backend", _draft_steps, around=True)
    compat.registry.hook(f"{factory}.create_draft_extend_backend", _draft_extend, around=True)


def _draft_steps(create: Callable[[Any], Any], factory: Any) -> Any:
    if not _is_ours(factory):
        return create(factory)
    from sglang_pat.backend.drafts import DraftSteps

    # SGLang compiles sums over a few candidates; the C++ compiler would take half a minute for that.
    torch._dynamo.config.disable = True
    steps = factory.speculative_num_steps
    return DraftSteps(factory.draft_model_runner, factory.topk, steps) if steps > 1 else None


def _draft_extend(create: Callable[[Any], Any], factory: Any) -> Any:
    if not _is_ours(factory):
        return create(factory)
    from sglang_pat.backend.drafts import DraftExtend

    return DraftExtend(factory.draft_model_runner)


def _is_ours(factory: Any) -> bool:
    """Whether the user chose no other backend for drafts."""
    return factory.draft_attn_backend in (None, "pat", "torch_native")


def reconstruct(
    tree_mask: torch.Tensor, lengths: torch.Tensor, positions: torch.Tensor, index: torch.Tensor, next_token: torch.Tensor,
    next_sibling: torch.Tensor, batch: int, tokens: int,
) -> None:  # fmt: skip
    """The structure of drafts from their tree masks (the contract is in SGLang's kernels/ops/speculative/reconstruct_tree.py).

    Args:
        tree_mask: [batch * tokens * tokens] flags: which tokens each token sees, itself included.
        lengths: [batch]: tokens before the drafts.
        positions: [batch * tokens], output: each token's position in its request.
        index: [batch, tokens], output: each token's number in the batch.
        next_token, next_sibling: [batch, tokens], outputs: each token's first child, and the next child of its parent; -1 for none.
        batch, tokens: How many drafts, and tokens of each.
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
