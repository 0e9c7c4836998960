"""Draft with sublayers of the target left out (Draft & Verify, arXiv 2309.08168; SWIFT, arXiv 2410.06916)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from decoding.drafts.contract import DraftDocument, Need
from decoding.drafts.layers import Layers, compact_indices
from decoding.drafts.lookup import Lookup, LookupBefore, describe_after, lookup_columns


class LayerSkip(DraftDocument):
    """Draft with these attention and MLP sublayers left out (0-based block indices)."""

    kind: Literal["layer_skip"] = "layer_skip"
    skip_attention: Layers = ()
    skip_mlp: Layers = ()
    lookup: LookupBefore = None
    takes_lookup: ClassVar[bool] = True

    @classmethod
    def blocks(cls, indices: list[int] | tuple[int, ...]) -> LayerSkip:
        """Return the draft that skips whole blocks."""
        return cls(skip_attention=tuple(indices), skip_mlp=tuple(indices))

    @property
    def first_skipped(self) -> int | None:
        """Index of the first block with a skipped sublayer, or None if nothing is skipped."""
        return min((*self.skip_attention, *self.skip_mlp), default=None)

    @property
    def label(self) -> str:
        """Name of the kind in tables."""
        return "skip set"

    def describe(self) -> str:
        """Return one short phrase for tables."""
        if self.skip_attention == self.skip_mlp:
            return describe_after(self.lookup, f"skip {compact_indices(self.skip_attention)}")
        skipped = f"skip attention {compact_indices(self.skip_attention)}, MLP {compact_indices(self.skip_mlp)}"
        return describe_after(self.lookup, skipped)

    @property
    def needs(self) -> frozenset[Need]:
        """Passes over the sublayers that are left."""
        return frozenset({Need.MODEL_PASS})

    def check(self, num_layers: int) -> None:
        """Raise ValueError for a sublayer that a target with `num_layers` blocks does not have."""
        highest = max((*self.skip_attention, *self.skip_mlp), default=0)
        if highest >= num_layers:
            raise ValueError(f"draft skips layer {highest}, but the target has layers 0 to {num_layers - 1}")

    def columns(self) -> dict[str, Any]:
        """Return the skipped sublayers, their number, and the lookup."""
        return {
            "skip_attention": compact_indices(self.skip_attention),
            "skip_mlp": compact_indices(self.skip_mlp),
            "num_skipped_sublayers": len(self.skip_attention) + len(self.skip_mlp),
            **lookup_columns(self.lookup),
        }

    @property
    def lookup_first(self) -> Lookup | None:
        """Prompt lookup that is tried before the draft, or None."""
        return self.lookup

    def without_lookup(self) -> Self:
        """Return the draft without the lookup before it."""
        return self.model_copy(update={"lookup": None}) if self.lookup else self

    def with_lookup(self, lookup: Lookup) -> Self:
        """Return the draft with `lookup` before it."""
        return self.model_copy(update={"lookup": lookup})

    def skipped(self, num_layers: int) -> LayerSkip:
        """Return the same sublayers without the lookup."""
        return self.without_lookup()

    @property
    def num_shared_blocks(self) -> int:
        """Number of blocks before the first skip; 0 if nothing is skipped."""
        return self.first_skipped or 0
