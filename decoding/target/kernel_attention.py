"""Attention by the CPU kernel of `decoding.kernels.attention`, in place of transformers' `sdpa`.

In a fixed-shape pass the layers get each position's index in place of a mask: the reach of the pass is data, and the whole
cache is handed over without being read. Other passes have a mask, and are left to `grouped_attention`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from decoding.kernels.attention import ALL, attend
from decoding.target.anatomy import Sublayer
from decoding.target.attention import grouped_attention
from decoding.target.parts import shallow_copy

NAME = "sdtune_kernel"


def kernel_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """Compute attention with the signature of transformers' `sdpa`.

    In a fixed-shape pass `attention_mask` is what `decoding.runners.masks.Positions` returns. `query` is [batch, heads,
    width, size]; `key` and `value` are [batch, key-value heads, num_slots, size]. Return the output [batch, width, heads,
    size] and None. Under autograd, which the kernel does not know, torch computes the same.
    """
    if attention_mask is None or attention_mask.dtype != torch.int64:
        return grouped_attention(module, query, key, value, attention_mask, **settings)
    own: Any = module
    if torch.is_grad_enabled():
        mask = _mask_of(attention_mask, key.shape[2], own.sdtune_window)
        return grouped_attention(module, query, key, value, mask, **settings)
    scale = settings.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return attend(query, key, value, attention_mask, scale, own.sdtune_window), None


def _mask_of(positions: Tensor, num_slots: int, window: int) -> Tensor:
    """Return the mask [batch, 1, width, num_slots] for `positions` [batch, 1, 1 or 2, width], as `attend` takes them."""
    slots = torch.arange(num_slots, device=positions.device)
    last, own = positions[:, :, 0, :, None], positions[:, :, -1, :, None]
    seen = (slots < last) | (slots == own)
    return seen if window == ALL else seen & (slots > last - window)


AttentionInterface.register(NAME, kernel_attention)


def with_kernel_attention(block: nn.Module, sublayer: Sublayer | None, window: int | None) -> nn.Module:
    """Return a weight-sharing copy of `block` that attends by the kernel to `window` positions, or to all if None.

    Its attention must be one that `Anatomy.attends_plainly` names.
    """
    if sublayer is None:
        return block
    attention = getattr(block, sublayer.name)
    own: Any = copy.copy(attention.config)
    own._attn_implementation_internal = NAME
    twin: Any = shallow_copy(attention)
    twin.__dict__.update(config=own, sdtune_window=ALL if window is None else window)
    block = shallow_copy(block)
    setattr(block, sublayer.name, twin)
    return block
