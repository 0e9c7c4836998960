"""Draft with sublayers of the target left out (Draft & Verify, arXiv 2309.08168; SWIFT, arXiv 2410.06916), or quantised."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from decoding.drafts.contract import DraftDocument, Need
from decoding.drafts.layers import Layers, compact_indices
from decoding.drafts.lookup import FirstLookup, LookupBefore, describe_after, lookup_columns
from decoding.drafts.precision import Bits, BitWidth, bits_columns, describe_quantised, label_quantised
from decoding.drafts.trees import CandidateTree, Tree, describe_with, tree_columns


class LayerSkip(DraftDocument):
    """Draft with these attention and MLP sublayers left out (0-based block indices), the others quantised if `bits` are given.

    With bits, nothing need be left out: the whole model with quantised weights is a draft.
    """

    kind: Literal["layer_skip"] = "layer_skip"
    skip_attention: Layers = ()
    skip_mlp: Layers = ()
    bits: Bits = None
    lookup: LookupBefore = None
    tree: Tree = None
    takes_lookup: ClassVar[bool] = True
    takes_bits: ClassVar[bool] = True
    takes_tree: ClassVar[bool] = True

    @classmethod
    def blocks(cls, indices: list[int] | tuple[int, ...], *, bits: BitWidth | None = None) -> LayerSkip:
        """Return the draft that skips whole blocks."""
        return cls(skip_attention=tuple(indices), skip_mlp=tuple(indices), bits=bits)

    @property
    def first_skipped(self) -> int | None:
        """Index of the first block with a skipped sublayer, or None if nothing is skipped."""
        return min((*self.skip_attention, *self.skip_mlp), default=None)

    @property
    def label(self) -> str:
        """Name of the kind in tables."""
        return label_quantised(self.bits, "skip set" if self.skips_any or not self.bits else "model")

    def describe(self) -> str:
        """Return one short phrase for tables."""
        skipped = self._describe_skips() if self.skips_any or not self.bits else ""
        return describe_after(self.lookup, describe_with(self.tree, describe_quantised(self.bits, skipped)))

    def _describe_skips(self) -> str:
        if self.skip_attention == self.skip_mlp:
            return f"skip {compact_indices(self.skip_attention)}"
        return f"skip attention {compact_indices(self.skip_attention)}, MLP {compact_indices(self.skip_mlp)}"

    @property
    def skips_any(self) -> bool:
        """True if any sublayer is left out."""
        return self.first_skipped is not None

    @property
    def weight_bits(self) -> BitWidth | None:
        """Bits of the draft's weights; None for the model's own weights."""
        return self.bits

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
        """Return the skipped sublayers, their number, the bits of the weights, lookup and tree."""
        return {
            "skip_attention": compact_indices(self.skip_attention),
            "skip_mlp": compact_indices(self.skip_mlp),
            "num_skipped_sublayers": len(self.skip_attention) + len(self.skip_mlp),
            **bits_columns(self.bits),
            **lookup_columns(self.lookup),
            **tree_columns(self.tree),
        }

    @property
    def lookup_first(self) -> FirstLookup | None:
        """Prompt lookup or suffix automaton that is tried before the draft, or None."""
        return self.lookup

    def without_lookup(self) -> Self:
        """Return the draft without the lookup before it."""
        return self.model_copy(update={"lookup": None}) if self.lookup else self

    def with_lookup(self, lookup: FirstLookup) -> Self:
        """Return the draft with `lookup` before it."""
        return self.model_copy(update={"lookup": lookup})

    def with_bits(self, bits: BitWidth | None) -> Self:
        """Return the draft with weights of `bits`, or with the model's own."""
        return self.model_copy(update={"bits": bits})

    @property
    def candidate_tree(self) -> CandidateTree | None:
        """Side leaves that are verified beside the drafted chain, or None."""
        return self.tree

    def with_tree(self, tree: CandidateTree | None) -> Self:
        """Return the draft with the side leaves of `tree`, or as a chain."""
        return self if tree == self.tree else self.model_copy(update={"tree": tree})

    def skipped(self, num_layers: int) -> LayerSkip:
        """Return the same sublayers without lookup and tree."""
        return self.without_lookup().with_tree(None)

    @property
    def num_shared_blocks(self) -> int:
        """Number of blocks before the first skip; 0 if nothing is skipped, or if all blocks are quantised."""
        return 0 if self.bits else self.first_skipped or 0
