"""Grouped-query attention over several positions without copying the cache (our formulation).

Given a mask, transformers' `sdpa` first repeats the keys and values of the whole context for every query head that
shares them. Here the queries that share a head are stacked as additional positions of one head: the products are the
same, and the cache is read once. The model's own modules keep their attention. Copies of them, which share the
weights, get a configuration that names this implementation.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from decoding.target.anatomy import Sublayer
from decoding.target.parts import shallow_copy
from decoding.target.plain_attention import REPLACED

NAME = "sdtune_grouped"


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """Compute attention with the signature of transformers' `sdpa`.

    `query` is [batch, heads, width, size]; `key` and `value` are [batch, key-value heads, num_slots, size]. The mask is
    [batch, 1, width, num_slots], the same with its rows repeated once per head that shares keys, or None. Return the
    output [batch, width, heads, size] and None.
    """
    batch, heads, width, size = query.shape
    shared = heads // key.shape[1]
    if shared == 1 or attention_mask is None or attention_mask.shape[1] != 1 or _is_special(settings):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    if attention_mask.shape[2] != shared * width:
        attention_mask = attention_mask.repeat(1, 1, shared, 1)
    output = scaled_dot_product_attention(
        query.reshape(batch, -1, shared * width, size),
        key,
        value,
        attn_mask=attention_mask,
        scale=settings.get("scaling"),
    )
    return output.reshape(batch, heads, width, value.shape[-1]).transpose(1, 2).contiguous(), None


def _is_special(settings: dict[str, Any]) -> bool:
    """Return True if the call uses features that are left to transformers."""
    return bool(settings.get("dropout")) or any(
        settings.get(name) is not None for name in ("softcap", "position_bias", "cache")
    )


AttentionInterface.register(NAME, grouped_attention)


def repeats_of(block: nn.Module, sublayer: Sublayer | None) -> int:
    """Return how often the attention of a prepared block needs the rows of its mask: once per head that shares keys."""
    attention = getattr(block, sublayer.name) if sublayer is not None else None
    if getattr(getattr(attention, "config", None), "_attn_implementation", None) != NAME:
        return 1
    return getattr(attention, "num_key_value_groups", 1)


def with_grouped_attention(block: nn.Module, sublayer: Sublayer | None) -> nn.Module:
    """Return a weight-sharing copy of `block` with grouped attention, or `block` if nothing changes."""
    attention = getattr(block, sublayer.name) if sublayer is not None else None
    config = getattr(attention, "config", None)
    if sublayer is None or attention is None or getattr(config, "_attn_implementation", None) != REPLACED:
        return block
    if getattr(attention, "num_key_value_groups", 1) == 1:
        return block
    own: Any = copy.copy(config)
    # The public setter would also change nested configurations that both share.
    own._attn_implementation_internal = NAME
    twin = shallow_copy(attention)
    twin.config = own
    block = shallow_copy(block)
    setattr(block, sublayer.name, twin)
    return block
