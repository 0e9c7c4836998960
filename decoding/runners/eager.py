"""Runs each pass as it is, in the shapes that it happens to have."""

from __future__ import annotations

import torch
from torch import Tensor

from decoding.cache import KVCache
from decoding.runners.contract import Inputs, Outputs, Part


class EagerRunner:
    """The plain way: no preparation, no padding, any shape."""

    name = "eager"
    block_call = None
    exact_width = None

    def new_cache(self, num_layers: int, capacity: int) -> KVCache:
        """A cache of just this capacity."""
        return KVCache(num_layers, capacity)

    def run(
        self,
        part: Part,
        token_ids: Tensor,
        cache: KVCache,
        start: int,
        *,
        last_only: bool = False,
        states: Tensor | None = None,
    ) -> Outputs:
        """See `Runner.run`."""
        width = token_ids.shape[1]
        cache.cover(start, width)
        positions = torch.arange(start, start + width, device=token_ids.device)[None]
        return part.compute(Inputs(token_ids, positions, cache, int(last_only), states))
