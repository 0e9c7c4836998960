"""The cache of earlier turns of a conversation: transformers' `DynamicCache`, read before decoding and extended after it.

The keys and values of an exit head travel with it, as an attribute, so that copies of the cache have them too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer, EncoderDecoderCache

from decoding.cache.kv_cache import BranchCache, KVCache, Storage

READABLE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""Kinds of layer whose keys and values are those of the last positions, in order."""

_BRANCH = "_sdtune_branch"


@dataclass(frozen=True)
class _BranchContents:
    """What the head of a draft has processed, and the states that it has not."""

    layers: Mapping[int, tuple[Tensor, Tensor]]
    """Keys and values [1, heads, length, head size] by layer."""
    length: int
    pending: Tensor | None
    """States [.., positions, hidden] from `length` on, or None."""


@dataclass(frozen=True, eq=False)
class EarlierTurns:
    """A cache of one sequence, which decoding continues and extends in place, as `generate` does.

    `past` must have no `unreadable_reason`.
    """

    past: Cache

    @property
    def length(self) -> int:
        return int(self.past.get_seq_length())

    def load(self, cache: KVCache) -> None:
        """Copy the keys and values into an empty cache, and those of a head if it has read them.

        Positions that a sliding window has dropped stay empty: masks hide them from every later position.
        """
        length = self.length
        if not length:
            return
        for index, layer in enumerate(self.past.layers):
            if layer.is_initialized:
                _write(cache.storage, index, layer.keys, layer.values, end=length)
        cache.length = length
        contents: _BranchContents | None = getattr(self.past, _BRANCH, None)
        if contents is not None:
            _load_branch(cache.branch, contents, length)

    def store(self, cache: KVCache) -> None:
        """Append the verified positions of `cache` that are new, and what the head of the draft has of all."""
        first = self.length
        with torch.inference_mode(False), torch.no_grad():  # usable in any mode afterwards
            for index, layer in enumerate(cache.storage.layers):
                if layer.is_initialized:
                    new = slice(first, cache.length)
                    self.past.update(layer.keys[:, :, new], layer.values[:, :, new], index)
            setattr(self.past, _BRANCH, _contents_of(cache.branch) if cache.has_branch else None)


def unreadable_reason(past: Cache) -> str | None:
    """Return why a cache cannot be continued, or None."""
    if isinstance(past, EncoderDecoderCache):  # two caches, without layers of its own
        return "it is an EncoderDecoderCache: pass a DynamicCache"
    for layer in past.layers:
        if type(layer) not in READABLE_LAYERS:
            return f"it has a {type(layer).__name__}: pass a DynamicCache"
        if layer.is_initialized and layer.keys.shape[0] != 1:
            return f"it holds {layer.keys.shape[0]} sequences"
    return None


def _write(storage: Storage, index: int, keys: Tensor, values: Tensor, *, end: int) -> None:
    """Write keys and values [1, heads, n, head size] of a layer at the last `n` positions before `end`."""
    layer = storage.layers[index]
    if not layer.is_initialized:
        layer.lazy_initialization(keys, values)
    start = end - keys.shape[-2]
    layer.keys[:, :, start:end] = keys
    layer.values[:, :, start:end] = values


def _contents_of(branch: BranchCache) -> _BranchContents:
    length, layers = branch.length, enumerate(branch.storage.layers)
    return _BranchContents(
        {
            index: (layer.keys[:, :, :length].clone(), layer.values[:, :, :length].clone())
            for index, layer in layers
            if layer.is_initialized
        },
        length,
        None if branch.pending is None else branch.pending.clone(),
    )


def _load_branch(branch: BranchCache, contents: _BranchContents, length: int) -> None:
    """Restore what a head knows of the first `length` positions; it may know more of a cache that was cropped since."""
    known = min(contents.length, length)
    for index, (keys, values) in contents.layers.items():
        _write(branch.storage, index, keys[:, :, :known], values[:, :, :known], end=known)
    branch.catch_up(known)
    if contents.pending is not None:
        branch.extend(contents.pending[..., : length - known, :])
