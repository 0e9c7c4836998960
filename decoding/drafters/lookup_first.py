"""A lookup before another drafter: a copy costs no draft pass, so it is tried first (our formulation).

Rounds drafted by the lookup have up to its own `max_tokens` tokens. The draft-length rule is not asked: its threshold or posterior
describes the other drafter. The whole target verifies these rounds, because they leave no boundary states.

With a `choice`, a copy that was found opens the round only where copies have paid in this sequence (`decoding.drafters.chooser`).
"""

from __future__ import annotations

from torch import Tensor

from decoding.acceptance import Acceptance
from decoding.cache.kv_cache import KVCache
from decoding.draft_length import Controller
from decoding.drafters.chooser import ChosenRounds
from decoding.drafters.contract import Drafter, Proposal, max_leaves_of
from decoding.drafters.prompt_lookup import look_up
from decoding.drafts import FirstLookup
from decoding.runners.contract import Outputs
from decoding.text import Shaping, TokenSequence

COPY, DRAFT = range(2)
"""The stages, in their order."""


class LookupFirst:
    """Drafts by `lookup` where the sequence repeats itself, else by the drafter `fallback`."""

    def __init__(self, fallback: Drafter, lookup: FirstLookup) -> None:
        self.fallback = fallback
        self._choice = lookup.choice
        self._lookup = lookup.with_choice(None)

    @property
    def max_leaves(self) -> int:
        """Most side leaves of a round; copied tokens have none, as no distribution gives them."""
        return max_leaves_of(self.fallback)

    def prefill(self, sequence: TokenSequence, cache: KVCache) -> Tensor:
        """Prefill with the fallback, and let the lookup read the prompt."""
        logits = self.fallback.prefill(sequence, cache)
        sequence.index(self._lookup).update()
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
        """Copy if the lookup finds something that is worth it, else draft with the fallback; only then the controller is asked."""
        tokens = look_up(sequence, min(limit, self._lookup.max_tokens), self._lookup)
        able = (DRAFT,) if tokens is None else (COPY, DRAFT)
        rounds = None if self._choice is None else sequence.kept(self._choice, ChosenRounds.of)
        stage: int | None = able[0]
        if rounds is not None:
            stage = rounds.open(sequence.token_ids, {} if tokens is None else {COPY: tokens}, able)
        if stage == DRAFT:
            proposal = self.fallback.draft(sequence, cache, controller, shaping, acceptance, limit)
        elif stage is None or tokens is None:
            proposal = Proposal(0, None, steered=False)
        else:
            sequence.write_drafts(tokens)
            proposal = Proposal(len(tokens), None, looked_up=True, steered=False)
        if rounds is not None:
            rounds.chooser.drafted(proposal.num_tokens)
        return proposal

    def verify(self, sequence: TokenSequence, cache: KVCache, draft: Proposal) -> Outputs:
        """Verify with the fallback, which may need states of the pass for its next draft."""
        return self.fallback.verify(sequence, cache, draft)


def steered_part(drafter: Drafter) -> Drafter:
    """Return the drafter that the draft-length rule steers: the fallback of a lookup, else the drafter itself."""
    return drafter.fallback if isinstance(drafter, LookupFirst) else drafter
