"""A read-only cache for running many rounds of a sequence in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from decoding.cache.kv_cache import KVCache


class _RoundsLayer(CacheLayerMixin):
    """Keys and values of one layer, [rounds, heads, context + depth, size] each.

    Every pass writes the last `depth` positions.
    """

    is_croppable = False
    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor, context: int) -> None:
        super().__init__()
        self.keys, self.values, self._context = keys, values, context
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("the layer is constructed with its contents")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.keys[:, :, self._context :] = key_states
        self.values[:, :, self._context :] = value_states
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._context + query_length, 0

    def get_seq_length(self) -> int:
        return self._context

    def get_max_length(self) -> int:
        return self.keys.shape[-2]


class RoundsCache(Cache):
    """The caches of many rounds, one row each, for drafting known tokens at once.

    Row r holds the target's keys and values of positions `[0, start_r)` of a sequence, right-aligned in a context as
    long as the longest row, followed by `depth` positions that each pass writes. Passes do not see the writes of
    earlier passes, so one cache serves any number of drafts.
    """

    def __init__(self, rounds: Sequence[tuple[KVCache, int]], depth: int) -> None:
        if not rounds or depth < 1:
            raise ValueError(f"at least one round of at least one token is needed, got {len(rounds)} of {depth}")
        self.starts = tuple(start for _, start in rounds)
        self.depth = depth
        self.context = max(self.starts)
        layers = [self._layer(rounds, index) for index in range(len(rounds[0][0].layers))]
        super().__init__(layers=layers)

    def _layer(self, rounds: Sequence[tuple[KVCache, int]], index: int) -> _RoundsLayer:
        keys, values = (self._rows(rounds, index, kind) for kind in ("keys", "values"))
        return _RoundsLayer(keys, values, self.context)

    def _rows(self, rounds: Sequence[tuple[KVCache, int]], index: int, kind: str) -> Tensor:
        """Return the keys or values [rounds, heads, context + depth, size] of one layer."""
        sources = [(getattr(cache.layers[index], kind), start) for cache, start in rounds]
        _, heads, _, size = sources[0][0].shape
        rows = sources[0][0].new_zeros((len(rounds), heads, self.context + self.depth, size))
        for row, (source, start) in zip(rows, sources, strict=True):
            row[:, self.context - start : self.context] = source[0, :, :start]
        return rows

    def attention_mask(self, device: torch.device) -> Tensor:
        """Return the mask [rounds, context + depth]: 0 at the left padding of shorter contexts."""
        indices = torch.arange(self.context + self.depth, device=device)
        first = torch.tensor([self.context - start for start in self.starts], device=device)
        return (indices >= first[:, None]).long()

    def positions(self, device: torch.device) -> Tensor:
        """Return the sequence positions [rounds, depth] of the drafted tokens."""
        return torch.tensor(self.starts, device=device)[:, None] + torch.arange(self.depth, device=device)
