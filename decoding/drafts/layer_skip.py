"""Draft with sublayers of the target left out (Draft & Verify, arXiv 2309.08168; SWIFT, arXiv 2410.06916), or quantised."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from decoding.drafts.contract import DraftDocument
from decoding.drafts.layers import Layers, compact_indices
from decoding.drafts.lookup import LookupBefore
from decoding.drafts.precision import Bits, BitWidth
from decoding.drafts.trees import Tree


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
    runs_model: ClassVar[bool] = True

    @classmethod
    def blocks(cls, indices: list[int] | tuple[int, ...], *, bits: BitWidth | None = None) -> LayerSkip:
        return cls(skip_attention=tuple(indices), skip_mlp=tuple(indices), bits=bits)

    @property
    def first_skipped(self) -> int | None:
        """Index of the first block with a skipped sublayer, or None if nothing is skipped."""
        return min((*self.skip_attention, *self.skip_mlp), default=None)

    @property
    def skips_any(self) -> bool:
        return self.first_skipped is not None

    @property
    def name(self) -> str:
        return "skip set" if self.skips_any or not self.bits else "model"

    @property
    def phrase(self) -> str:
        """The skipped sublayers; nothing for the whole model with quantised weights."""
        if self.bits and not self.skips_any:
            return ""
        if self.skip_attention == self.skip_mlp:
            return f"skip {compact_indices(self.skip_attention)}"
        return f"skip attention {compact_indices(self.skip_attention)}, MLP {compact_indices(self.skip_mlp)}"

    @property
    def own_columns(self) -> dict[str, Any]:
        return {
            "skip_attention": compact_indices(self.skip_attention),
            "skip_mlp": compact_indices(self.skip_mlp),
            "num_skipped_sublayers": len(self.skip_attention) + len(self.skip_mlp),
        }

    def check(self, num_layers: int) -> None:
        highest = max((*self.skip_attention, *self.skip_mlp), default=0)
        if highest >= num_layers:
            raise ValueError(f"draft skips layer {highest}, but the target has layers 0 to {num_layers - 1}")

    def skipped(self, num_layers: int) -> LayerSkip:
        return self.having(lookup=None, tree=None)

    @property
    def num_shared_blocks(self) -> int:
        """Number of blocks before the first skip; 0 if nothing is skipped, or if all blocks are quantised."""
        return 0 if self.bits else self.first_skipped or 0
