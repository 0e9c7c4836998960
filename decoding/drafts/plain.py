"""Plain decoding as a document: the null object among the drafts."""

from __future__ import annotations

from typing import ClassVar, Literal

from decoding.drafts.contract import DraftDocument


class PlainDecoding(DraftDocument):
    """No draft: nothing that was tried is faster than plain decoding."""

    kind: Literal["none"] = "none"
    drafts: ClassVar[bool] = False
    name: ClassVar[str] = "plain decoding"
    phrase: ClassVar[str] = "plain decoding"
