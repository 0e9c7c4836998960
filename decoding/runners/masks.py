"""Attention masks of fixed-shape passes, computed from the positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MaskKinds:
    """The attention windows of a model's layers, and the form of mask that its attention needs."""

    windows: tuple[int | None, ...]
    """Per layer, the number of positions it attends to, including the current one; None for all."""
    additive: torch.dtype | None
    """Data type of additive masks; None for boolean masks."""
    attends_plainly: bool = False
    """True if each layer's attention is one that a kernel may take over."""
    reads_all = False
    """True if passes are given all slots: how many they read is data, not a shape."""

    @property
    def kinds(self) -> tuple[int | None, ...]:
        """The distinct windows."""
        return tuple(dict.fromkeys(self.windows))

    def kind_of(self, layer: int) -> int:
        """Return the index of a layer's window in `kinds`."""
        return self.kinds.index(self.windows[layer])

    def masks(self, slots: Tensor, num_slots: int) -> tuple[Tensor, ...]:
        """Return one mask [batch, 1, width, num_slots] per kind; `slots` are those of the pass, [width] or [batch, width]."""
        keys, own = torch.arange(num_slots, device=slots.device), slots[..., None]
        causal = keys <= own
        return tuple(self.formed(causal if window is None else causal & (keys > own - window)) for window in self.kinds)

    def formed(self, allowed: Tensor) -> Tensor:
        """Return the mask [batch, 1, width, num_slots] of what is `allowed`, [width, num_slots] or with a batch before."""
        if self.additive is not None:
            hidden = torch.full_like(allowed, torch.finfo(self.additive).min, dtype=self.additive)
            allowed = hidden.masked_fill(allowed, 0.0)
        return allowed[None, None] if allowed.ndim == 2 else allowed[:, None]


class Positions(MaskKinds):
    """What passes get in place of masks where a kernel attends: the positions, the same for all kinds."""

    reads_all = True

    def masks(self, slots: Tensor, num_slots: int) -> tuple[Tensor, ...]:
        """Return the positions [batch, 1, 1, width] once per kind."""
        return (slots[None, None, None] if slots.ndim == 1 else slots[:, None, None],) * len(self.kinds)
