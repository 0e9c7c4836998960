"""Draft with a feature head, which reads the target's last hidden state and the last token, and then its own output.

After EAGLE (arXiv 2401.15077); `decoding.target.feature_head` says what differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from decoding.drafts.contract import DraftDocument, Need
from decoding.drafts.head_file import DraftVocabularySize, HeadFile, HeadHash
from decoding.drafts.layer_skip import LayerSkip
from decoding.drafts.lookup import FirstLookup, LookupBefore, describe_after, lookup_columns
from decoding.drafts.trees import CandidateTree, Tree, describe_with, tree_columns


class FeatureHeadDraft(DraftDocument):
    """Draft with a feature head; none of the target's blocks run."""

    kind: Literal["feature_head"] = "feature_head"
    head: HeadFile = Field(description="file of the feature head, beside the profile")
    head_sha256: HeadHash
    draft_vocabulary: DraftVocabularySize = None
    lookup: LookupBefore = None
    tree: Tree = None
    takes_lookup: ClassVar[bool] = True
    takes_tree: ClassVar[bool] = True

    @property
    def label(self) -> str:
        """Name of the kind in tables."""
        return "feature head"

    def describe(self) -> str:
        """Return one short phrase for tables."""
        tokens = f" for {self.draft_vocabulary:,} tokens" if self.draft_vocabulary else ""
        return describe_after(self.lookup, describe_with(self.tree, f"feature head{tokens}"))

    @property
    def needs(self) -> frozenset[Need]:
        """Passes over the LM head, and the trained head."""
        return frozenset({Need.MODEL_PASS, Need.EXIT_HEAD})

    @property
    def drafts_on(self) -> bool:
        """True: it reads the target's states in its first step only."""
        return True

    @property
    def rereads_rounds(self) -> bool:
        """True: after each round the head reads the target's states where it has read its own."""
        return True

    @property
    def num_draft_tokens(self) -> int | None:
        """Number of tokens that the head drafts from; None for all."""
        return self.draft_vocabulary

    @property
    def files(self) -> Mapping[str, str]:
        """SHA-256 of the head's file, by its name."""
        return {self.head: self.head_sha256}

    def with_file_names(self, names: Mapping[str, str]) -> Self:
        """Return the draft with its head renamed."""
        return self.model_copy(update={"head": names[self.head]})

    def columns(self) -> dict[str, Any]:
        """Return the type of the head, the lookup and the tree."""
        return {"exit_head": "feature", **lookup_columns(self.lookup), **tree_columns(self.tree)}

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

    @property
    def candidate_tree(self) -> CandidateTree | None:
        """Shape of the side leaves, or None for a chain."""
        return self.tree

    def with_tree(self, tree: CandidateTree | None) -> Self:
        """Return the draft with the side leaves of `tree`, or as a chain."""
        return self if tree == self.tree else self.model_copy(update={"tree": tree})

    def skipped(self, num_layers: int) -> LayerSkip:
        """Return the skip of every block, without head, lookup and tree."""
        return LayerSkip.blocks(tuple(range(num_layers)))
