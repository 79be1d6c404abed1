"""What the host computes for a batch, and how it gets to the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

ALIGNMENT = 128
"""Bytes: a line of a GPU's L2 cache, which kernels prefetch."""


def lengths(cached: Sequence[int], added: Sequence[int]) -> torch.Tensor:
    """How many tokens each new token of an extend sees, itself included: [tokens] int64."""
    counts = np.array(added, dtype=np.int64)
    before = np.array(cached, dtype=np.int64) - (counts.cumsum() - counts)
    return torch.from_numpy(before.repeat(counts) + np.arange(1, counts.sum() + 1))


def by_token(values: Sequence[int], added: Sequence[int]) -> torch.Tensor:
    """The value of each new token's request: [tokens] int64."""
    return torch.from_numpy(np.array(values, dtype=np.int64).repeat(added))


def to_device(device: torch.device, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copy tensors of the host, asynchronously, and in one piece: each copy costs the host the same, however small it is."""
    if device.type == "cpu":
        return list(tensors)
    return unpack(pack(tensors, pinned=True).to(device, non_blocking=True), tensors)


def pack(tensors: Sequence[torch.Tensor], pinned: bool = False) -> torch.Tensor:
    """All tensors in one of bytes, each aligned."""
    packed = torch.empty(sum(map(_room, tensors)), dtype=torch.uint8, pin_memory=pinned)
    for place, tensor in zip(unpack(packed, tensors), tensors, strict=True):
        place.copy_(tensor)
    return packed


def unpack(packed: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of what was packed, with the types and shapes of `tensors`."""
    found, begin = [], 0
    for tensor in tensors:
        found.append(packed[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        begin += _room(tensor)
    return found


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
