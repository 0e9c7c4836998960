"""Prompt lookup as a document: the n-gram lengths, and the lookup that comes before another draft."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from decoding.documents.strict_yaml import Document

# Longer n-grams hardly ever repeat, and each length costs an index of the sequence.
LONGEST_NGRAM = 32

MaxNgram = Annotated[
    int, Field(ge=1, le=LONGEST_NGRAM, description="longest n-gram at the end of the sequence to look up")
]
MinNgram = Annotated[int, Field(ge=1, le=LONGEST_NGRAM, description="shortest n-gram; the longest one found counts")]


class Lookup(Document):
    """Prompt lookup before another draft: what followed an earlier occurrence of the last n-gram is copied."""

    max_ngram: MaxNgram = 3
    min_ngram: MinNgram = 1
    max_tokens: int = Field(10, ge=1, le=64, description="tokens to copy; the draft-length rule is not asked")

    @model_validator(mode="after")
    def _ngrams_are_ordered(self) -> Lookup:
        check_ngrams(self.max_ngram, self.min_ngram)
        return self

    def describe(self) -> str:
        """Return one short phrase for tables."""
        return f"lookup ({self.max_ngram}-{self.min_ngram}, {self.max_tokens})"


# Left out of a document without a lookup: most drafts have none.
LookupBefore = Annotated[
    Lookup | None,
    Field(exclude_if=lambda lookup: lookup is None, description="prompt lookup, tried before the model drafts"),
]


def check_ngrams(max_ngram: int, min_ngram: int) -> None:
    """Raise ValueError unless `min_ngram` is at most `max_ngram`."""
    if min_ngram > max_ngram:
        raise ValueError(f"min_ngram must be at most max_ngram, got {min_ngram} and {max_ngram}")


def describe_after(lookup: Lookup | None, draft: str) -> str:
    """Return the phrase of a draft with the lookup before it, if there is one."""
    return f"{lookup.describe()}, then {draft}" if lookup else draft


def lookup_columns(lookup: Document | None) -> dict[str, Any]:
    """Return the columns of a lookup in the table of trials; none without a lookup."""
    settings = lookup.model_dump(exclude={"kind"}) if lookup else {}
    return {f"lookup.{key}": value for key, value in settings.items()}
