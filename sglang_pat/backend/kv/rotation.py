"""Rotations of heads in front of KV of 2 bits: outlying channels, which stretch a scale of four codes, are spread over all channels.

Attention stays the same: Q K^T = (Q H) (K H)^T / n and P V = (P (V H)) H / n, with H a Hadamard matrix of n channels, H H = n (QuaRot, Ashkboos et al.).
"""

from __future__ import annotations

import torch
from scipy.linalg import hadamard


class Rotation:
    """Of each head's channels, in blocks of the largest power of two that divides them. Only operations that a CUDA graph may capture."""

    def __init__(self, head_dim: int, dtype: torch.dtype, device: torch.device | str) -> None:
        """
        Args:
            head_dim: Of K and V.
            dtype, device: Of Q, K and V.
        """
        self._block = head_dim & -head_dim
        # 1 / n, divided among what is stored and what is not in powers of two, which 16 bits have exactly. The larger share goes to
        # what is stored, so that float16 holds it.
        exponent = self._block.bit_length() - 1
        stored = (exponent + 1) // 2
        matrix = torch.from_numpy(hadamard(self._block)).float()
        self._stored = (matrix * 2.0**-stored).to(device, dtype)
        self._other = (matrix * 2.0 ** -(exponent - stored)).to(device, dtype)

    def stored(self, x: torch.Tensor) -> torch.Tensor:
        """K or V, [tokens, kv_heads * head_dim] or with heads apart."""
        return self._turned(x, self._stored)

    def query(self, q: torch.Tensor) -> torch.Tensor:
        """Q, likewise."""
        return self._turned(q, self._other)

    def output(self, out: torch.Tensor) -> torch.Tensor:
        """The output of attention over rotated V, turned back; likewise."""
        return self._turned(out, self._other)

    def _turned(self, x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        return (x.reshape(-1, self._block).to(matrix.dtype) @ matrix).view(x.shape)
