"""Draft by a suffix automaton alone (SAM-Decoding, arXiv 2411.10666; SuffixDecoding, arXiv 2411.04975)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from decoding.copying.contract import CopyIndex
from decoding.copying.history import RequestHistory
from decoding.drafts.contract import DraftDocument
from decoding.drafts.lookup import (
    MAX_SPEC_FACTOR,
    MIN_MATCH,
    MIN_TOKEN_PROB,
    MaxSpecFactor,
    MinMatch,
    MinTokenProb,
    describe_match,
    lookup_columns,
    suffix_index,
)


class SuffixDraft(DraftDocument):
    """Copy the most frequent continuation of the longest suffix that occurs earlier: no model drafts.

    A copy is as long as its match and its frequency allow, and the draft-length rule sets an upper limit.
    """

    kind: Literal["suffix_automaton"] = "suffix_automaton"
    min_match: MinMatch = MIN_MATCH
    max_spec_factor: MaxSpecFactor = MAX_SPEC_FACTOR
    min_token_prob: MinTokenProb = MIN_TOKEN_PROB

    @property
    def label(self) -> str:
        """Name of the kind in tables."""
        return "suffix automaton alone"

    def describe(self) -> str:
        """Return one short phrase for tables."""
        return f"suffix automaton ({describe_match(self)})"

    def columns(self) -> dict[str, Any]:
        """Return the settings of the match."""
        return lookup_columns(self)

    @property
    def reads_history(self) -> bool:
        """True: earlier answers may be copied from."""
        return True

    def new_index(self, token_ids: Sequence[int], history: RequestHistory | None = None) -> CopyIndex:
        """Return a suffix automaton."""
        return suffix_index(self, token_ids, history)
