"""The file of a trained head in a draft document, and the tokens that the head drafts from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field


def _lies_beside(head: str) -> str:
    if not head or Path(head).name != head:
        raise ValueError("must be the name of a file beside the profile, without folders")
    return head


HeadFile = Annotated[str, AfterValidator(_lies_beside)]
DraftVocabularySize = Annotated[
    int | None,
    Field(
        ge=1,
        exclude_if=lambda size: size is None,
        description="number of tokens that the head drafts from; all without it",
    ),
]
