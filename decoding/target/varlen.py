"""Attention over the used part of a preallocated cache, without a mask: `torch.nn.attention.varlen`.

Each sequence has a length, which is data and not a shape: one recording of a pass serves every context. Needs CUDA, half
precision, and a torch whose kernel takes part of each sequence's keys; torch is asked by the kernel's signature.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from decoding.errors import UnsupportedRunnerError
from decoding.target.anatomy import REPLACED, Sublayer
from decoding.target.attention import attending, grouped_attention

NAME = "sdtune_varlen"
NEEDED = {"seqused_k", "enable_gqa", "window_size", "scale"}
"""Parameters of `varlen_attn` that not every version of torch has."""
PRECISIONS = (torch.bfloat16, torch.float16)
LEFT_TO_OTHERS = ("softcap", "position_bias", "cache", "s_aux")
"""Settings of attention that the kernel does not have."""

Kernel = Callable[..., Tensor]
"""`torch.nn.attention.varlen.varlen_attn`: queries [tokens, heads, size] to outputs of the same shape."""


def find_kernel(device: torch.device, dtype: torch.dtype) -> Kernel:
    """Return torch's kernel; raise `UnsupportedRunnerError` where it does not run."""
    if device.type != "cuda":
        raise UnsupportedRunnerError(f"variable-length attention runs on CUDA only, and the model is on {device.type}")
    if dtype not in PRECISIONS:
        name = str(dtype).removeprefix("torch.")
        raise UnsupportedRunnerError(f"variable-length attention computes in bfloat16 or float16, not in {name}")
    module = "torch.nn.attention.varlen"
    if importlib.util.find_spec(module) is None:
        raise UnsupportedRunnerError(f"torch {torch.__version__} has no variable-length attention")
    kernel: Kernel = importlib.import_module(module).varlen_attn
    if missing := sorted(NEEDED - inspect.signature(kernel).parameters.keys()):
        raise UnsupportedRunnerError(f"variable-length attention of torch {torch.__version__} has no {missing[0]!r}")
    return kernel


def varlen_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """Compute attention with the signature of transformers' `sdpa`.

    In a fixed-shape pass `attention_mask` is what `decoding.cache.last_position` returns; other passes have a mask, and
    are left to `grouped_attention`. `query` is [batch, heads, width, size]; `key` and `value` are [batch, key-value
    heads, num_slots, size]. Return the output [batch, width, heads, size] and None. Raises `UnsupportedRunnerError` for
    settings that the kernel does not have.
    """
    if attention_mask is None or attention_mask.dtype != torch.int32:
        return grouped_attention(module, query, key, value, attention_mask, **settings)
    if settings.get("dropout") or any(settings.get(name) is not None for name in LEFT_TO_OTHERS):
        raise UnsupportedRunnerError(f"variable-length attention has no setting that {type(module).__name__} needs")
    batch, heads, width, size = query.shape
    query_ends, key_ends, used = attention_mask[0, 0]
    own: Any = module
    output = own.sdtune_kernel(
        *(_by_position(states) for states in (query, key, value)),
        query_ends,
        key_ends,
        width,
        key.shape[2],
        scale=settings.get("scaling"),
        window_size=own.sdtune_reach,
        enable_gqa=heads != key.shape[1],
        seqused_k=used[:batch],
    )
    return output.reshape(batch, width, heads, size), None


def _by_position(states: Tensor) -> Tensor:
    """Return [batch, heads, positions, size] as [batch * positions, heads, size]: a view of a cache that is laid out so."""
    return states.transpose(1, 2).flatten(0, 1)


AttentionInterface.register(NAME, varlen_attention)


def with_varlen_attention(block: nn.Module, sublayer: Sublayer | None, window: int | None, kernel: Kernel) -> nn.Module:
    """Return a weight-sharing copy of `block` that attends by `kernel` to `window` positions, or to all if None.

    Raises `UnsupportedRunnerError` for attention other than transformers' `sdpa`.
    """
    attention = getattr(block, sublayer.name) if sublayer is not None else None
    implementation = getattr(getattr(attention, "config", None), "_attn_implementation", None)
    if sublayer is None or implementation != REPLACED:
        raise UnsupportedRunnerError(
            f"variable-length attention replaces {REPLACED!r}, but {type(block).__name__} has {implementation!r}"
        )
    # Positions before the current one, and after it; -1 is without limit.
    reach = (-1 if window is None else window - 1, 0)
    return attending(block, sublayer, NAME, sdtune_kernel=kernel, sdtune_reach=reach)
