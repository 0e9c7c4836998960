"""The sublayers that a draft may skip, as items that a search adds, removes and swaps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from decoding.drafts import LayerSkip
from decoding.target import Target

SkipSet = frozenset[int]
"""Indices of the skipped items in `SkipSpace.items`."""


@dataclass(frozen=True)
class SkipSpace:
    """The items of a model: single sublayers where a block has both as modules, else whole blocks."""

    items: tuple[LayerSkip, ...]

    @classmethod
    def of(cls, target: Target, *, whole_blocks: bool = False) -> SkipSpace:
        """Return all items of a model, from the first block to the last; with `whole_blocks`, blocks only."""
        items: list[LayerSkip] = []
        for index, parts in enumerate(zip(target.anatomy.attention, target.anatomy.mlp, strict=True)):
            if whole_blocks or None in parts:
                items.append(LayerSkip.blocks((index,)))
            else:
                items += [LayerSkip(skip_attention=(index,)), LayerSkip(skip_mlp=(index,))]
        return cls(tuple(items))

    @property
    def names(self) -> list[str]:
        """Name of each item, as a switch."""
        return [
            f"block.{item.first_skipped}"
            if item.skip_attention == item.skip_mlp
            else f"{'attention' if item.skip_attention else 'mlp'}.{item.first_skipped}"
            for item in self.items
        ]

    def draft(self, chosen: Iterable[int]) -> LayerSkip:
        """Return the draft that skips the items at these indices."""
        items = [self.items[index] for index in sorted(chosen)]
        return LayerSkip(
            skip_attention=tuple(index for item in items for index in item.skip_attention),
            skip_mlp=tuple(index for item in items for index in item.skip_mlp),
        )

    def neighbours(self, one: int, other: int) -> bool:
        """Return whether two items skip the same kind of sublayer in adjacent blocks."""
        parts = [(item.skip_attention, item.skip_mlp) for item in (self.items[one], self.items[other])]
        return any(
            abs(index - beside) == 1 for kind in zip(*parts, strict=True) for index in kind[0] for beside in kind[1]
        )

    def chosen(self, draft: LayerSkip) -> SkipSet:
        """Return the indices of the skipped items. Raises ValueError for a draft that skips a part of an item."""
        chosen = frozenset(
            index
            for index, item in enumerate(self.items)
            if set(item.skip_attention) <= set(draft.skip_attention) and set(item.skip_mlp) <= set(draft.skip_mlp)
        )
        if self.draft(chosen) != LayerSkip(
            skip_attention=tuple(sorted(draft.skip_attention)), skip_mlp=tuple(sorted(draft.skip_mlp))
        ):
            raise ValueError(f"{draft.describe()} skips only parts of the items of this model")
        return chosen
