"""A cache for the steps of all rounds of known sequences: each step adds keys and values of every position.

Our formulation of EAGLE-3's training-time test (arXiv 2503.01840, section 3.2). Step n at position p belongs to the round that
began at position p - n + 1. Such a round has read the positions up to its beginning by its first step, and each later position by
one more step.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class _UnrolledLayer(CacheLayerMixin):
    """Keys and values [batch, heads, steps * length, size] of one layer: all positions of a step, step after step."""

    is_croppable = False
    is_sliding = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        # Not in place: gradients flow through the keys of earlier steps.
        self.keys = torch.cat([self.keys, key_states], dim=-2)
        self.values = torch.cat([self.values, value_states], dim=-2)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (self.keys.shape[-2] if self.is_initialized else 0) + query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class UnrolledCache(Cache):
    """Keys and values of the steps so far; each pass is the next step of all rounds, under `unrolled_mask`."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[_UnrolledLayer() for _ in range(num_layers)])


def unrolled_mask(step: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """Return the mask [length, step * length] of step `step`, counted from 1: True where a position attends to a key.

    `window` is the number of positions that the layer attends to, or None for all.
    """
    position = torch.arange(length, device=device)[:, None]
    key = torch.arange(length, device=device)[None]
    begun = position - step + 1
    near = torch.ones_like(key <= position) if window is None else key > position - window
    own = [key == begun + number for number in range(1, step)]
    return torch.cat([(key <= begun) & near, *(each & near for each in own)], dim=-1)
