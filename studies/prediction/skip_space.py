"""The sublayers that a draft may leave out, as items of a set: what searches over skip sets add, take away and swap."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from decoding.drafts import LayerSkip
from decoding.target import Target

SkipSet = frozenset[int]
"""Places of the skipped items in `SkipSpace.items`."""


@dataclass(frozen=True)
class SkipSpace:
    """Items are single sublayers where a block shows both, and whole blocks where it does not."""

    items: tuple[LayerSkip, ...]

    @classmethod
    def of(cls, target: Target, *, whole_blocks: bool = False) -> SkipSpace:
        """All items of a model, from the first block to the last; `whole_blocks` leaves out blocks as wholes only."""
        items: list[LayerSkip] = []
        for index, parts in enumerate(zip(target.anatomy.attention, target.anatomy.mlp, strict=True)):
            if whole_blocks or None in parts:
                items.append(LayerSkip.blocks((index,)))
            else:
                items += [LayerSkip(skip_attention=(index,)), LayerSkip(skip_mlp=(index,))]
        return cls(tuple(items))

    def draft(self, chosen: Iterable[int]) -> LayerSkip:
        """The draft that leaves out the items at these places."""
        items = [self.items[place] for place in sorted(chosen)]
        return LayerSkip(
            skip_attention=tuple(index for item in items for index in item.skip_attention),
            skip_mlp=tuple(index for item in items for index in item.skip_mlp),
        )

    def places(self, draft: LayerSkip) -> SkipSet:
        """The items that a draft leaves out; ValueError if it leaves out a part of one."""
        chosen = frozenset(
            place
            for place, item in enumerate(self.items)
            if set(item.skip_attention) <= set(draft.skip_attention) and set(item.skip_mlp) <= set(draft.skip_mlp)
        )
        if self.draft(chosen) != LayerSkip(
            skip_attention=tuple(sorted(draft.skip_attention)), skip_mlp=tuple(sorted(draft.skip_mlp))
        ):
            raise ValueError(f"{draft.describe()} is not made of whole items of this model")
        return chosen
