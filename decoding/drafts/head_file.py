"""The file of a trained head in a draft document, and the tokens that the head drafts from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from decoding.documents.strict_yaml import Line

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
