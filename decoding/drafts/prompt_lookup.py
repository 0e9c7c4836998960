"""Drafts that copy alone: by prompt lookup, and by a suffix automaton. No model drafts."""

from __future__ import annotations

from typing import Literal

from decoding.drafts.contract import DraftDocument
from decoding.drafts.lookup import NgramMatch, SuffixMatch


class PromptLookup(NgramMatch, DraftDocument):
    """Prompt lookup decoding (Saxena 2023): the draft-length rule sets the number of copied tokens."""

    kind: Literal["prompt_lookup"] = "prompt_lookup"

    @property
    def name(self) -> str:
        return "lookup alone"

    @property
    def phrase(self) -> str:
        return f"prompt lookup ({self.match})"


class SuffixDraft(SuffixMatch, DraftDocument):
    """Copy the most frequent continuation of the longest suffix that occurs earlier.

    A copy is as long as its match and its frequency allow, and the draft-length rule sets an upper limit. After SAM-Decoding
    (arXiv 2411.10666) and SuffixDecoding (arXiv 2411.04975).
    """

    kind: Literal["suffix_automaton"] = "suffix_automaton"

    @property
    def name(self) -> str:
        return "suffix automaton alone"

    @property
    def phrase(self) -> str:
        return f"suffix automaton ({self.match})"
