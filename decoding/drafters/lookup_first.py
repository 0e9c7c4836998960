"""Prompt lookup in front of another drafter: a copy costs no pass of the draft, so it is tried first (our formulation).

Rounds that the lookup drafts are as long as its own `max_tokens` says and are no business of the draft-length rule, whose
threshold or posterior is about the drafter behind it. They are verified by the whole target, as no states of theirs are known.
"""

from __future__ import annotations

from torch import Tensor

from decoding.acceptance import Acceptance
from decoding.cache.kv_cache import KVCache
from decoding.draft_length import Controller
from decoding.drafters.contract import Drafter, Proposal
from decoding.drafters.prompt_lookup import find_copy, read_ngrams, write_copy
from decoding.drafts import Lookup
from decoding.text import Shaping, TokenSequence


class LookupFirst:
    """Drafts by `lookup` where the text repeats itself, and by the drafter `behind` it where it does not."""

    def __init__(self, behind: Drafter, lookup: Lookup) -> None:
        self.behind = behind
        self._lookup = lookup

    def prefill(self, text: TokenSequence, cache: KVCache) -> Tensor:
        """What the drafter behind does, while the prompt's n-grams are indexed."""
        logits = self.behind.prefill(text, cache)
        read_ngrams(text, self._lookup)
        return logits

    def draft(
        self,
        text: TokenSequence,
        cache: KVCache,
        controller: Controller,
        shaping: Shaping,
        acceptance: Acceptance,
        limit: int,
    ) -> Proposal:
        """A copy if there is one, else a draft of the drafter behind; the controller is asked about the latter only."""
        place = find_copy(text, self._lookup) if limit > 0 else None
        if place is None:
            return self.behind.draft(text, cache, controller, shaping, acceptance, limit)
        return write_copy(text, place, min(limit, self._lookup.max_tokens), steered=False)

    def verify(self, text: TokenSequence, cache: KVCache, draft: Proposal) -> Tensor:
        """By the drafter behind, which takes of the pass what it needs to draft later."""
        return self.behind.verify(text, cache, draft)


def steered_part(drafter: Drafter) -> Drafter:
    """The drafter whose rounds the draft-length rule steers: the one behind a lookup, if there is a lookup."""
    return drafter.behind if isinstance(drafter, LookupFirst) else drafter
