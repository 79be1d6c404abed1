"""Reference attention: float64, one query at a time."""

from __future__ import annotations

import torch


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    logit_cap: float = 0.0,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode attention without a plan. Arguments as in `kernels.arguments`; `scale` is the only one of K and V; the result is float64."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64, device=q.device)
    for i in range(q.shape[0]):
        slots = req_to_token[rows[i], max(0, seq_lens[i] - window) if window else 0 : seq_lens[i]].long()
        keys = k[slots].double().repeat_interleave(group, dim=1)
        values = v[slots].double().repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,nhd->hn", q[i].double(), keys) * scale
        if logit_cap:
            scores = logit_cap * torch.tanh(scores / logit_cap)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
        weights = scores.softmax(-1)[:, : len(slots)]
        out[i] = torch.einsum("hn,nhd->hd", weights, values)
    return out
