"""Skip sets as switches: a point with one coordinate per sublayer that a search may skip."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from decoding.drafts import LayerSkip

SkipPoint = NDArray[np.float64]
"""Point [switches]; each coordinate is between 0 (run the sublayer) and 1 (skip it)."""


@dataclass(frozen=True)
class Switches:
    """The attention sublayers of `blocks` in order, then their MLPs."""

    blocks: range

    @classmethod
    def of_all_blocks(cls, num_layers: int) -> Switches:
        """Return switches for every sublayer, including the first and the last block."""
        return cls(range(num_layers))

    @classmethod
    def of_middle_blocks(cls, num_layers: int) -> Switches:
        """Return switches for the sublayers of blocks 1 to `num_layers - 2`."""
        return cls(range(1, num_layers - 1))

    def __len__(self) -> int:
        return 2 * len(self.blocks)

    @property
    def names(self) -> list[str]:
        """Names of the switches, as Optuna parameters."""
        return [f"{kind}.{block}" for kind in ("attention", "mlp") for block in self.blocks]

    def num_skipped(self, ratio: float) -> int:
        """Return K_s, the number of sublayers that SWIFT skips: int(2(L-2) * ratio)."""
        return int(len(self) * ratio)

    def point(self, draft: LayerSkip) -> SkipPoint:
        """Return the corner of the cube for a draft. Raises ValueError if it skips a sublayer that has no switch."""
        skipped = [(draft.skip_attention, block) for block in self.blocks] + [
            (draft.skip_mlp, block) for block in self.blocks
        ]
        point = np.array([float(block in layers) for layers, block in skipped])
        if self.draft(point) != draft:
            raise ValueError(
                f"there are switches for blocks {self.blocks[0]} to {self.blocks[-1]}, got {draft.describe()}"
            )
        return point

    def draft(self, point: SkipPoint) -> LayerSkip:
        """Return the draft that skips coordinates above one half (Draft & Verify)."""
        return self._without(point > 0.5)

    def largest(self, point: SkipPoint, count: int) -> LayerSkip:
        """Return the draft that skips the `count` largest coordinates (SWIFT), the first of equal ones."""
        chosen = np.zeros(len(self), dtype=bool)
        chosen[np.argsort(-point, kind="stable")[:count]] = True
        return self._without(chosen)

    def random(self, rng: np.random.Generator, count: int) -> SkipPoint:
        """Return a corner with `count` switches on, all sets equally likely."""
        point = np.zeros(len(self))
        point[rng.choice(len(self), size=count, replace=False)] = 1.0
        return point

    def _without(self, chosen: NDArray[np.bool_]) -> LayerSkip:
        attention, mlp = np.split(chosen, 2)
        return LayerSkip(
            skip_attention=tuple(block for block, off in zip(self.blocks, attention, strict=True) if off),
            skip_mlp=tuple(block for block, off in zip(self.blocks, mlp, strict=True) if off),
        )


def odd_blocks(num_layers: int) -> LayerSkip:
    """Return blocks 1, 3, 5 ... without the last: the start in the released code of SWIFT and ConfLayers."""
    return LayerSkip.blocks(tuple(range(1, num_layers - 1, 2)))
