"""Prompt lookup before another drafter: a copy costs no draft pass, so it is tried first (our formulation).

Rounds drafted by the lookup have up to its own `max_tokens` tokens. The draft-length rule is not asked: its threshold or posterior
describes the other drafter. The whole target verifies these rounds, because they leave no boundary states.
"""

from __future__ import annotations

from torch import Tensor

from decoding.acceptance import Acceptance
from decoding.cache.kv_cache import KVCache
from decoding.draft_length import Controller
from decoding.drafters.contract import Drafter, Proposal
from decoding.drafters.prompt_lookup import find_copy, read_ngrams, write_copy
from decoding.drafts import Lookup
from decoding.runners.contract import Outputs
from decoding.text import Shaping, TokenSequence


class LookupFirst:
    """Drafts by `lookup` where the sequence repeats itself, else by the drafter `fallback`."""

    def __init__(self, fallback: Drafter, lookup: Lookup) -> None:
        self.fallback = fallback
        self._lookup = lookup

    def prefill(self, sequence: TokenSequence, cache: KVCache) -> Tensor:
        """Prefill with the fallback, and index the n-grams of the prompt."""
        logits = self.fallback.prefill(sequence, cache)
        read_ngrams(sequence, self._lookup)
        return logits

    def draft(
        self,
        sequence: TokenSequence,
        cache: KVCache,
        controller: Controller,
        shaping: Shaping,
        acceptance: Acceptance,
        limit: int,
    ) -> Proposal:
        """Copy if the lookup finds something, else draft with the fallback; only then the controller is asked."""
        start = find_copy(sequence, self._lookup) if limit > 0 else None
        if start is None:
            return self.fallback.draft(sequence, cache, controller, shaping, acceptance, limit)
        return write_copy(sequence, start, min(limit, self._lookup.max_tokens), steered=False)

    def verify(self, sequence: TokenSequence, cache: KVCache, draft: Proposal) -> Outputs:
        """Verify with the fallback, which may need states of the pass for its next draft."""
        return self.fallback.verify(sequence, cache, draft)


def steered_part(drafter: Drafter) -> Drafter:
    """Return the drafter that the draft-length rule steers: the fallback of a lookup, else the drafter itself."""
    return drafter.fallback if isinstance(drafter, LookupFirst) else drafter
