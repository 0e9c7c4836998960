"""The contract of copying: an index of a growing sequence that finds what to copy after it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

from decoding.copying.history import RequestHistory


class CopyIndex(Protocol):
    """What was read of one growing sequence. The sequence may grow but not change otherwise."""

    def update(self) -> None:
        """Read the tokens appended since the last call."""

    def copy(self, num_tokens: int) -> list[int] | None:
        """Return one to `num_tokens` tokens to draft after the sequence, or None if nothing is found.

        A copy of fewer tokens is the beginning of a copy of more.
        """


class CopySource(Hashable, Protocol):
    """Settings that make an index; equal settings make equal indexes, so that a sequence keeps one for each."""

    def new_index(self, token_ids: Sequence[int], history: RequestHistory | None = None) -> CopyIndex:
        """Return an index of `token_ids`, and of the earlier requests in `history` if these settings read them."""
