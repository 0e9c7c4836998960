"""Draft by prompt lookup alone (prompt lookup decoding, Saxena 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import model_validator

from decoding.copying.contract import CopyIndex
from decoding.copying.history import RequestHistory
from decoding.copying.ngrams import NgramCopies
from decoding.drafts.contract import DraftDocument
from decoding.drafts.lookup import MaxNgram, MinNgram, check_ngrams, lookup_columns


class PromptLookup(DraftDocument):
    """Draft by prompt lookup alone: no model drafts, and the draft-length rule sets the number of copied tokens."""

    kind: Literal["prompt_lookup"] = "prompt_lookup"
    max_ngram: MaxNgram = 3
    min_ngram: MinNgram = 1

    @model_validator(mode="after")
    def _ngrams_are_ordered(self) -> PromptLookup:
        check_ngrams(self.max_ngram, self.min_ngram)
        return self

    @property
    def label(self) -> str:
        """Name of the kind in tables."""
        return "lookup alone"

    def describe(self) -> str:
        """Return one short phrase for tables."""
        return f"prompt lookup ({self.max_ngram}-{self.min_ngram})"

    @property
    def ngram_lengths(self) -> tuple[int, int] | None:
        """Longest and shortest n-gram."""
        return self.max_ngram, self.min_ngram

    def columns(self) -> dict[str, Any]:
        """Return the n-gram lengths."""
        return lookup_columns(self)

    def new_index(self, token_ids: Sequence[int], history: RequestHistory | None = None) -> CopyIndex:
        """Return an index of n-grams; it reads no earlier answers."""
        return NgramCopies(token_ids, max_ngram=self.max_ngram, min_ngram=self.min_ngram)
