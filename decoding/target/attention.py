"""Attention of a target's passes in place of transformers' `sdpa`, and torch's kernels among which it may choose (our formulation).

The model's own modules keep their attention. Copies of them, which share the weights, get a configuration that names
another implementation.

Given a mask, `sdpa` first repeats the keys and values of the whole context for every query head that shares them. In
grouped attention the queries that share a head are stacked as additional positions of one head: the products are the same,
and the cache is read once. By the CPU kernel of `decoding.kernels.attention`, the layers of a fixed-shape pass get each
position's index in place of a mask: the reach of the pass is data, and the whole cache is handed over without being read.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from decoding.kernels.attention import ALL, attend
from decoding.target.anatomy import REPLACED, Sublayer
from decoding.target.stand_ins import shallow_copy

GROUPED, BY_KERNEL = "sdtune_grouped", "sdtune_kernel"

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""In order of preference. cuDNN plans anew for each shape, so it is for passes of few shapes only."""
FIXED_SHAPES = [SDPBackend.CUDNN_ATTENTION, *BACKENDS]
"""Flash attention takes no mask. With one, cuDNN takes 0.5 to 0.6 of the efficient kernel's time (benchmarks/gpu/README.md)."""
_IN_ORDER = {"set_priority": True} if "set_priority" in inspect.signature(sdpa_kernel).parameters else {}


_RESTRICTED = threading.RLock()
"""Held while the restriction lasts, which is that of the whole process: the last thread to end would keep another's."""


def attention_backends(device: torch.device, *, fixed_shape: bool = False) -> AbstractContextManager[None]:
    """Restrict attention to `BACKENDS` or `FIXED_SHAPES` for passes on a CUDA device; torch's own settings return afterwards."""
    return _restricted(FIXED_SHAPES if fixed_shape else BACKENDS) if device.type == "cuda" else nullcontext()


@contextmanager
def _restricted(backends: list[SDPBackend]) -> Iterator[None]:
    with _RESTRICTED, sdpa_kernel(backends, **_IN_ORDER):
        yield


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
    """Return the mask [batch, 1, width, num_slots] for `positions` [batch, 1, 1, width], as `attend` takes them."""
    slots, own = torch.arange(num_slots, device=positions.device), positions[:, :, 0, :, None]
    seen = slots <= own
    return seen if window == ALL else seen & (slots > own - window)


AttentionInterface.register(GROUPED, grouped_attention)
AttentionInterface.register(BY_KERNEL, kernel_attention)


def repeats_of(block: nn.Module, sublayer: Sublayer | None) -> int:
    """Return how often the attention of a prepared block needs the rows of its mask: once per head that shares keys."""
    attention = getattr(block, sublayer.name) if sublayer is not None else None
    if getattr(getattr(attention, "config", None), "_attn_implementation", None) != GROUPED:
        return 1
    return getattr(attention, "num_key_value_groups", 1)


def with_grouped_attention(block: nn.Module, sublayer: Sublayer | None) -> nn.Module:
    """Return a weight-sharing copy of `block` with grouped attention, or `block` if nothing changes."""
    attention = getattr(block, sublayer.name) if sublayer is not None else None
    replaces = getattr(getattr(attention, "config", None), "_attn_implementation", None) == REPLACED
    if sublayer is None or not replaces or getattr(attention, "num_key_value_groups", 1) == 1:
        return block
    return attending(block, sublayer, GROUPED)


def with_kernel_attention(block: nn.Module, sublayer: Sublayer | None, window: int | None) -> nn.Module:
    """Return a weight-sharing copy of `block` that attends by the kernel to `window` positions, or to all if None.

    Its attention must be one that `Anatomy.attends_plainly` names.
    """
    if sublayer is None:
        return block
    return attending(block, sublayer, BY_KERNEL, sdtune_window=ALL if window is None else window)


def attending(block: nn.Module, sublayer: Sublayer, implementation: str, **facts: Any) -> nn.Module:
    """Return a weight-sharing copy of `block` whose attention is computed by `implementation`, which reads `facts` from it."""
    attention = getattr(block, sublayer.name)
    own: Any = copy.copy(attention.config)
    # The public setter would also change nested configurations that both share.
    own._attn_implementation_internal = implementation
    twin = shallow_copy(attention)
    twin.__dict__.update(facts, config=own)
    block = shallow_copy(block)
    setattr(block, sublayer.name, twin)
    return block
