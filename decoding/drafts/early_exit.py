"""Draft with the first blocks of the target, then a trained head or the target's own.

Our formulation, after the abstract of EESD (arXiv 2406.03853).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from decoding.drafts.contract import DraftDocument, Need
from decoding.drafts.head_file import DraftVocabularySize, HeadFile, HeadHash
from decoding.drafts.layer_skip import LayerSkip
from decoding.drafts.lookup import FirstLookup, LookupBefore, describe_after, lookup_columns
from decoding.drafts.precision import Bits, BitWidth, bits_columns, describe_quantised, label_quantised
from decoding.drafts.trees import CandidateTree, Tree, describe_with, tree_columns


class EarlyExit(DraftDocument):
    """Draft with the first `exit_layer` blocks, then an exit head, or the final norm and LM head without one."""

    kind: Literal["early_exit"] = "early_exit"
    exit_layer: int = Field(ge=1, description="number of the target's blocks that the draft runs (N)")
    head: HeadFile | None = Field(None, description="file of the exit head, beside the profile")
    head_sha256: HeadHash | None = None
    draft_vocabulary: DraftVocabularySize = None
    bits: Bits = None
    lookup: LookupBefore = None
    tree: Tree = None
    takes_lookup: ClassVar[bool] = True
    takes_bits: ClassVar[bool] = True
    takes_tree: ClassVar[bool] = True

    @model_validator(mode="after")
    def _head_is_identified(self) -> EarlyExit:
        if (self.head is None) != (self.head_sha256 is None):
            raise ValueError("a head is given by head and head_sha256, both or neither")
        if self.draft_vocabulary is not None and self.head is None:
            raise ValueError("draft_vocabulary belongs to a head: an exit without one drafts from all tokens")
        return self

    @property
    def label(self) -> str:
        """Name of the kind in tables."""
        return label_quantised(self.bits, "exit with head" if self.head else "exit")

    def describe(self) -> str:
        """Return one short phrase for tables."""
        head = "trained head" if self.head else "no head"
        tokens = f" for {self.draft_vocabulary:,} tokens" if self.draft_vocabulary else ""
        own = f"exit at {self.exit_layer}, {head}{tokens}"
        return describe_after(self.lookup, describe_with(self.tree, describe_quantised(self.bits, own)))

    @property
    def weight_bits(self) -> BitWidth | None:
        """Bits of the weights of blocks and head; None for the model's own weights."""
        return self.bits

    @property
    def needs(self) -> frozenset[Need]:
        """Passes over the first blocks, and the exit head if there is one."""
        return frozenset({Need.MODEL_PASS, Need.EXIT_HEAD} if self.head else {Need.MODEL_PASS})

    @property
    def rereads_rounds(self) -> bool:
        """True for a quantised exit with a head: its states are not the target's."""
        return self.has_head and self.bits is not None

    @property
    def num_draft_tokens(self) -> int | None:
        """Number of tokens that the head drafts from; None for all."""
        return self.draft_vocabulary

    @property
    def files(self) -> Mapping[str, str]:
        """SHA-256 of the exit head's file, by its name."""
        return {self.head: self.head_sha256} if self.head and self.head_sha256 else {}

    def with_file_names(self, names: Mapping[str, str]) -> Self:
        """Return the draft with its head renamed."""
        return self.model_copy(update={"head": names[self.head]}) if self.head else self

    def check(self, num_layers: int) -> None:
        """Raise ValueError unless the exit is before the last of `num_layers` blocks."""
        if self.exit_layer >= num_layers:
            raise ValueError(f"draft exits at layer {self.exit_layer}, but it must be 1 to {num_layers - 1}")

    def columns(self) -> dict[str, Any]:
        """Return the exit layer, the type of its head, the bits of the weights, lookup and tree."""
        head = {"exit_layer": self.exit_layer, "exit_head": "block" if self.head else "none"}
        return {**head, **bits_columns(self.bits), **lookup_columns(self.lookup), **tree_columns(self.tree)}

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
        """Return the skip of every block after the exit, in the same precision, without head, lookup and tree."""
        return LayerSkip.blocks(tuple(range(self.exit_layer, num_layers)), bits=self.bits)

    @property
    def num_shared_blocks(self) -> int:
        """Number of blocks before the exit; 0 if they are quantised."""
        return 0 if self.bits else self.exit_layer
