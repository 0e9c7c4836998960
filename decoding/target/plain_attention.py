"""Finds the layers whose attention a kernel may take over, from the calls of torch's attention in a short pass.

Judged is what a layer does, not what it is called: one call of `scaled_dot_product_attention`, by which every position
sees itself and the positions before it, without dropout or a bias of the scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

REPLACED = "sdpa"
"""transformers' implementation of attention whose place kernels take."""

Call = tuple[tuple[Any, ...], dict[str, Any]]


class AttentionCalls(TorchFunctionMode):
    """Notes the calls of torch's attention made under it."""

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[Call] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is scaled_dot_product_attention:
            self._noted.append((tuple(args), dict(kwargs or {})))
        return function(*args, **(kwargs or {}))

    def take(self) -> list[Call]:
        """Return the calls noted since the last time."""
        noted, self._noted = self._noted, []
        return noted


def is_plain(attention: nn.Module, calls: Sequence[Call]) -> bool:
    """Return True if a kernel that knows scale, window and shared heads may compute this layer's `calls`."""
    implementation = getattr(getattr(attention, "config", None), "_attn_implementation", None)
    if implementation != REPLACED or len(calls) != 1:
        return False
    given, named = calls[0]
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    call: dict[str, Any] = {**dict(zip(names, given, strict=False)), **named}
    sizes = {call[name].shape[-1] for name in ("query", "key", "value")}
    lengths = {call[name].shape[-2] for name in ("query", "key", "value")}
    return len(sizes) == len(lengths) == 1 and not call.get("dropout_p") and _is_causal(call, lengths.pop())


def _is_causal(call: Mapping[str, Any], length: int) -> bool:
    mask: Tensor | None = call.get("attn_mask")
    if mask is None:
        return bool(call.get("is_causal"))
    seen = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    if mask.dtype is not torch.bool:
        hidden = torch.full_like(mask, torch.finfo(mask.dtype).min)
        return bool((mask == torch.where(seen, 0, hidden)).all())
    return bool((mask == seen).all())
