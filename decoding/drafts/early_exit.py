"""Draft with the first blocks of the target, then a trained head or the target's own.

Our formulation, after the abstract of EESD (arXiv 2406.03853).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from decoding.documents.strict_yaml import Line
from decoding.drafts.contract import Bits, DraftDocument, DraftHead
from decoding.drafts.layer_skip import LayerSkip
from decoding.drafts.lookup import LookupBefore

HEAD_SUFFIX = ".safetensors"


def _lies_beside(head: str) -> str:
    if Path(head).name != head or "\\" in head or not head.removesuffix(HEAD_SUFFIX) or not head.endswith(HEAD_SUFFIX):
        raise ValueError(f"must be the name of a {HEAD_SUFFIX} file beside the profile, without folders")
    return head


class EarlyExit(DraftDocument):
    """Draft with the first `exit_layer` blocks, then an exit head, or the final norm and LM head without one."""

    kind: Literal["early_exit"] = "early_exit"
    exit_layer: int = Field(ge=1, description="number of the target's blocks that the draft runs (N)")
    head: Annotated[Line, AfterValidator(_lies_beside)] | None = Field(
        None, description="file of the exit head, beside the profile"
    )
    head_sha256: str | None = Field(None, pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the head's file")
    bits: Bits = None
    lookup: LookupBefore = None
    runs_model: ClassVar[bool] = True

    @model_validator(mode="after")
    def _head_is_identified(self) -> EarlyExit:
        if (self.head is None) != (self.head_sha256 is None):
            raise ValueError("a head is given by head and head_sha256, both or neither")
        return self

    @property
    def name(self) -> str:
        return "exit with head" if self.head else "exit"

    @property
    def phrase(self) -> str:
        return f"early exit at layer {self.exit_layer} ({'trained head' if self.head else 'no head'})"

    @property
    def own_columns(self) -> dict[str, Any]:
        return {"exit_layer": self.exit_layer, "exit_head": "block" if self.head else "none"}

    @property
    def trained_head(self) -> DraftHead | None:
        """The exit head, if there is one. That of a quantised exit rereads: the states before it are not the target's."""
        if self.head is None or self.head_sha256 is None:
            return None
        return DraftHead(self.head, self.head_sha256, rereads=self.bits is not None)

    def check(self, num_layers: int) -> None:
        if self.exit_layer >= num_layers:
            raise ValueError(f"draft exits at layer {self.exit_layer}, but it must be 1 to {num_layers - 1}")

    def skipped(self, num_layers: int) -> LayerSkip:
        return LayerSkip.blocks(tuple(range(self.exit_layer, num_layers)), bits=self.bits)

    @property
    def num_shared_blocks(self) -> int:
        """Number of blocks before the exit; 0 if they are quantised."""
        return 0 if self.bits else self.exit_layer
