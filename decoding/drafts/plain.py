"""Plain decoding as a document: the null object among the drafts."""

from __future__ import annotations

from typing import ClassVar, Literal

from decoding.drafts.contract import DraftDocument


class PlainDecoding(DraftDocument):
    """No draft: nothing that was tried is faster than plain decoding."""

    kind: Literal["none"] = "none"
    drafts: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """Name of the kind in tables."""
        return "plain decoding"

    def describe(self) -> str:
        """Return one short phrase for tables."""
        return "plain decoding"
