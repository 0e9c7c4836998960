"""What `torch.nn.attention.varlen.varlen_attn` documents, on any device and without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


def varlen_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor,
) -> Tensor:
    """Attend from `query` [tokens, heads, size] to the used part of each sequence, aligned at its end.

    What lies after the used part, or between sequences, is never read: there may be anything.
    """
    own_q, at_q = _sequences(query.shape[0], cu_seq_q)
    own_k, at_k = _sequences(key.shape[0], cu_seq_k)
    lengths = cu_seq_q.diff()
    ends = (at_q + (seqused_k - lengths)[own_q])[:, None]  # the last key that a causal query sees
    used = at_k < seqused_k[own_k]
    left, right = window_size
    allowed = (own_q[:, None] == own_k) & used
    if left >= 0:
        allowed = allowed & (at_k >= ends - left)
    if right >= 0:
        allowed = allowed & (at_k <= ends + right)
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
    key, value = (each.where(used[:, None, None], 0.0) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.einsum("hqk,khd->qhd", weights, value)


def _sequences(num_tokens: int, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sequence of each token and the token's index in it."""
    tokens = torch.arange(num_tokens, device=ends.device, dtype=ends.dtype)
    own = torch.searchsorted(ends, tokens, right=True) - 1
    return own, tokens - ends[own]
