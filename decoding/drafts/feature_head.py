"""Draft with a feature head, which reads the target's last hidden state and the last token, and then its own output.

After EAGLE (arXiv 2401.15077); `decoding.target.heads` says what differs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from decoding.documents.strict_yaml import Line
from decoding.drafts.contract import DraftDocument, DraftHead
from decoding.drafts.layer_skip import LayerSkip
from decoding.drafts.lookup import LookupBefore
from decoding.drafts.trees import Tree

HEAD_SUFFIX = ".safetensors"


def _lies_beside(head: str) -> str:
    if Path(head).name != head or "\\" in head or not head.removesuffix(HEAD_SUFFIX) or not head.endswith(HEAD_SUFFIX):
        raise ValueError(f"must be the name of a {HEAD_SUFFIX} file beside the profile, without folders")
    return head


HeadFile = Annotated[Line, AfterValidator(_lies_beside)]
HeadHash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the head's file")]
DraftVocabularySize = Annotated[
    int | None,
    Field(
        ge=1,
        exclude_if=lambda size: size is None,
        description="number of tokens that the head drafts from; all without it",
    ),
]


class FeatureHeadDraft(DraftDocument):
    """Draft with a feature head; none of the target's blocks run, but its LM head."""

    kind: Literal["feature_head"] = "feature_head"
    head: HeadFile = Field(description="file of the feature head, beside the profile")
    head_sha256: HeadHash
    draft_vocabulary: DraftVocabularySize = None
    lookup: LookupBefore = None
    tree: Tree = None
    runs_model: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "feature head"

    @property
    def phrase(self) -> str:
        tokens = f" for {self.draft_vocabulary:,} tokens" if self.draft_vocabulary else ""
        return f"feature head{tokens}"

    @property
    def own_columns(self) -> dict[str, Any]:
        return {"exit_head": "feature"}

    @property
    def trained_head(self) -> DraftHead:
        """The feature head. It rereads: after each round it reads the target's states where it has read its own."""
        return DraftHead(self.head, self.head_sha256, self.draft_vocabulary, is_autoregressive=True, rereads=True)

    def skipped(self, num_layers: int) -> LayerSkip:
        return LayerSkip.blocks(tuple(range(num_layers)))
