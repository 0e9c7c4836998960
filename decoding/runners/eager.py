"""Runs each pass as it is, in the shapes that it happens to have; a long prompt in pieces, so that memory does not grow with it."""

from __future__ import annotations

import torch
from torch import Tensor

from decoding.cache import KVCache
from decoding.runners.contract import Inputs, Outputs, Part

LONGEST_PASS = 1024
"""Positions of a prompt that are read at once: enough for any device to be busy, few beside what their activations take."""


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
        """See `Runner.run`. Where logits of the last position alone are wanted, a wide pass is made in pieces."""
        width = token_ids.shape[1]
        if not last_only or width <= LONGEST_PASS:
            return self._run(part, token_ids, cache, start, last_only=last_only, states=states)
        tapped, logits = [], None
        for first in range(0, width, LONGEST_PASS):
            piece = slice(first, first + LONGEST_PASS)
            known = None if states is None else states[..., piece, :]
            outputs = self._run(part, token_ids[:, piece], cache, start + first, last_only=True, states=known)
            logits = outputs.logits
            if outputs.states is not None:
                tapped.append(outputs.states)
        assert logits is not None, "there is at least one piece"
        return Outputs(logits, torch.cat(tapped, dim=-2) if tapped else None)

    def _run(
        self, part: Part, token_ids: Tensor, cache: KVCache, start: int, *, last_only: bool, states: Tensor | None
    ) -> Outputs:
        width = token_ids.shape[1]
        cache.cover(start, width)
        positions = torch.arange(start, start + width, device=token_ids.device)[None]
        return part.compute(Inputs(token_ids, positions, cache, int(last_only), states))
