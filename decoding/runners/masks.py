"""What the positions of a pass may look at, computed from where they stand: the masks of passes of fixed shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MaskKinds:
    """The attention windows of a model's layers, and the form in which its attention wants masks."""

    windows: tuple[int | None, ...]
    """A layer each: how many positions it sees back, its own among them, or None if it sees all."""
    additive: torch.dtype | None
    """None for masks that say where to look; else the type of those that are added to the scores."""

    @property
    def kinds(self) -> tuple[int | None, ...]:
        """The windows that there are, each once."""
        return tuple(dict.fromkeys(self.windows))

    def kind_of(self, layer: int) -> int:
        """Which of `kinds` a layer is of."""
        return self.kinds.index(self.windows[layer])

    def masks(self, slots: Tensor, places: int) -> tuple[Tensor, ...]:
        """One of [texts, 1, width, places] for each of `kinds`, for positions that stand at `slots` [width] or [texts, width]."""
        keys = torch.arange(places, device=slots.device)
        own = slots[..., None]
        causal = keys <= own
        return tuple(self._form(causal if window is None else causal & (keys > own - window)) for window in self.kinds)

    def _form(self, allowed: Tensor) -> Tensor:
        if self.additive is not None:
            hidden = torch.full_like(allowed, torch.finfo(self.additive).min, dtype=self.additive)
            allowed = hidden.masked_fill(allowed, 0.0)
        return allowed[None, None] if allowed.ndim == 2 else allowed[:, None]
