"""A lookup before another drafter: a copy costs no draft pass, so it is tried first (our formulation).

Rounds drafted by the lookup have up to its own `max_tokens` tokens. The draft-length rule is not asked: its threshold or posterior
describes the other drafter. The other drafter verifies these rounds too, because a trained head must see every verified position;
as copies leave no boundary states, the whole target runs.
"""

from __future__ import annotations

from torch import Tensor

from decoding.acceptance import Acceptance
from decoding.cache.kv_cache import KVCache
from decoding.draft_length import Controller
from decoding.drafters.contract import Drafter, Proposal, max_leaves_of, prefill_target
from decoding.drafters.prompt_lookup import look_up
from decoding.drafts import FirstLookup
from decoding.runners.contract import Outputs
from decoding.text import Shaping, TokenSequence


class LookupFirst:
    """Copies where `lookup` finds something; elsewhere `fallback` drafts."""

    def __init__(self, fallback: Drafter, lookup: FirstLookup) -> None:
        self.fallback, self._lookup = fallback, lookup

    @property
    def max_leaves(self) -> int:
        """Most side leaves of a round; copied tokens have none, as no distribution gives them."""
        return max_leaves_of(self.fallback)

    def prefill(self, sequence: TokenSequence, cache: KVCache) -> Tensor:
        logits = self.fallback.prefill(sequence, cache)
        sequence.index(self._lookup).update()
        return logits

    def prefill_target(self, sequence: TokenSequence, cache: KVCache) -> Tensor:
        """Prefill without work for drafts: the prompt is indexed when a copy is first looked for."""
        return prefill_target(self.fallback, sequence, cache)

    def draft(
        self,
        sequence: TokenSequence,
        cache: KVCache,
        controller: Controller,
        shaping: Shaping,
        acceptance: Acceptance,
        limit: int,
    ) -> Proposal:
        """Copy, or let the other drafter draft; the controller is asked about its rounds only."""
        tokens = look_up(sequence, min(limit, self._lookup.max_tokens), self._lookup)
        if tokens is None:
            return self.fallback.draft(sequence, cache, controller, shaping, acceptance, limit)
        sequence.write_drafts(tokens)
        return Proposal(len(tokens), None, looked_up=True, steered=False)

    def verify(self, sequence: TokenSequence, cache: KVCache, draft: Proposal) -> Outputs:
        return self.fallback.verify(sequence, cache, draft)


def steered_part(drafter: Drafter) -> Drafter:
    """Return the drafter that the draft-length rule steers: the one after a lookup, else the drafter itself."""
    return drafter.fallback if isinstance(drafter, LookupFirst) else drafter
