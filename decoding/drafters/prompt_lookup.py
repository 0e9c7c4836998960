"""Draft by copying from the text, alone or before another drafter: prompt lookup (Saxena 2023), or a suffix automaton.

No model drafts: a copied token has probability 1. Nothing here waits for the device, because the token ids are on the host. The
index of what was read is kept with the sequence.
"""

from __future__ import annotations

from torch import Tensor

from decoding.cache.kv_cache import KVCache
from decoding.draft_length import Controller
from decoding.drafters.contract import Copy, Drafter, Proposal, read_prompt
from decoding.drafts import FirstLookup
from decoding.drafts.copies import NgramCopies
from decoding.drafts.lookup import CopySettings
from decoding.head_folder import HeadFolder
from decoding.profile import Decoding
from decoding.runners.contract import Outputs
from decoding.target import Target
from decoding.text import Request, TokenSequence


class CopyDrafter(Drafter):
    """Copies as many tokens as the draft-length rule allows; drafts nothing where nothing is found."""

    def __init__(self, target: Target, source: CopySettings) -> None:
        self._target = target
        self._source = source

    def prefill(self, sequence: TokenSequence, cache: KVCache) -> Tensor:
        logits = read_prompt(self._target, sequence, cache)
        sequence.index(self._source).update()
        return logits

    def draft(
        self, sequence: TokenSequence, cache: KVCache, controller: Controller, request: Request, limit: int
    ) -> Proposal:
        """Copy as many tokens as the controller and `limit` allow; without a copy, the controller is not asked."""
        tokens = look_up(sequence, min(limit, controller.max_tokens), self._source)
        if tokens is None:
            return Proposal(0, None, steered=False)
        num_tokens = controller.length_of_copy(len(tokens))
        sequence.write_drafts(tokens[:num_tokens])
        return Proposal(num_tokens, None, looked_up=True)

    def verify(self, sequence: TokenSequence, cache: KVCache, draft: Proposal) -> Outputs:
        token_ids = sequence.span(cache.length, sequence.length + draft.num_tokens)
        return self._target.run(self._target.whole, token_ids, cache, cache.length)


def look_up(sequence: TokenSequence, num_tokens: int, source: CopySettings) -> list[int] | None:
    """Return one to `num_tokens` tokens to copy after the sequence, or None if there are none or nothing is found."""
    return sequence.index(source).copy(num_tokens) if num_tokens > 0 else None


def new_drafter(target: Target, draft: CopySettings, decoding: Decoding, *, heads: HeadFolder | None) -> CopyDrafter:
    return CopyDrafter(target, draft)


class LookupFirst(Drafter):
    """Copies where `lookup` finds something; elsewhere `fallback` drafts: a copy costs no draft pass (our formulation).

    Rounds drafted by the lookup have up to its own `max_tokens` tokens. The draft-length rule is not asked: its
    threshold or posterior describes the other drafter. The other drafter verifies these rounds too, because a trained head must see
    every verified position; as copies leave no boundary states, the whole target runs. See `Lookup.direct_from` for copies that the
    other drafter checks.
    """

    def __init__(self, fallback: Drafter, lookup: FirstLookup) -> None:
        self.fallback, self.lookup = fallback, lookup
        self.has_head = fallback.has_head

    def prefill(self, sequence: TokenSequence, cache: KVCache) -> Tensor:
        logits = self.fallback.prefill(sequence, cache)
        sequence.index(self.lookup).update()
        return logits

    def prefill_target(self, sequence: TokenSequence, cache: KVCache) -> Tensor:
        """Prefill without work for drafts: the prompt is indexed when a copy is first looked for."""
        return self.fallback.prefill_target(sequence, cache)

    def draft(
        self, sequence: TokenSequence, cache: KVCache, controller: Controller, request: Request, limit: int
    ) -> Proposal:
        """Copy, or let the other drafter draft; the controller is asked about its rounds only."""
        tokens = look_up(sequence, min(limit, self.lookup.max_tokens), self.lookup)
        if tokens is None:
            checked = None
            if self.lookup.checks_copies and request.takes_most_likely:
                checked = self.fallback.draft_checking(sequence, cache, controller, limit, self._to_check(sequence))
            return checked or self.fallback.draft(sequence, cache, controller, request, limit)
        sequence.write_drafts(tokens)
        return Proposal(len(tokens), None, looked_up=True, steered=False)

    def _to_check(self, sequence: TokenSequence) -> Copy:
        index, most = sequence.index(self.lookup), self.lookup.max_tokens
        assert isinstance(index, NgramCopies), "of a prompt lookup"
        return lambda drafts, num_tokens: index.copy_after(drafts, min(num_tokens, most)) if num_tokens else None

    def verify(self, sequence: TokenSequence, cache: KVCache, draft: Proposal) -> Outputs:
        return self.fallback.verify(sequence, cache, draft)


def steered_part(drafter: Drafter) -> Drafter:
    """Return the drafter that the draft-length rule steers: the one after a lookup, else the drafter itself."""
    return drafter.fallback if isinstance(drafter, LookupFirst) else drafter
