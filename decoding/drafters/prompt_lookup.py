"""Draft by copying what followed the same words before (prompt lookup decoding, Saxena 2023; also in transformers).

The longest n-gram at the end of the text that stands in it earlier is looked up, and what followed it is proposed. Where it
stands several times, our choice is the latest (transformers takes the first); and a copy that reaches the end of the text goes
on into what it has itself proposed, so that a loop is continued to the full length.

No model drafts: a looked-up token is certain, its distribution one point. Nothing here waits for the device, as the text's
tokens are known on the host; the index of its n-grams is kept with the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.acceptance import Acceptance
from decoding.cache.kv_cache import KVCache
from decoding.draft_length import Controller, Decision, DraftDistribution
from decoding.drafters.contract import Proposal
from decoding.drafts import Lookup, PromptLookup
from decoding.exit_heads import ExitHeads
from decoding.target import Target
from decoding.text import Shaping, TokenSequence


class PromptLookupDrafter:
    """Looks up as many tokens as the draft-length rule wants, or none if the end of the text stands there only."""

    def __init__(self, target: Target, lookup: PromptLookup) -> None:
        self._target = target
        self._lookup = lookup

    def prefill(self, text: TokenSequence, cache: KVCache) -> Tensor:
        """The target's pass over the prompt, while its n-grams are indexed."""
        logits = self._target.forward(text.span(0, text.length), cache, 0, last_only=True)
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
        """Copy as far as the controller and `limit` say. With nothing to copy it is no round of the controller's."""
        place = find_copy(text, self._lookup) if limit > 0 else None
        if place is None:
            return Proposal(0, None, steered=False)
        return write_copy(text, place, length_allowed(controller, limit))

    def verify(self, text: TokenSequence, cache: KVCache, draft: Proposal) -> Tensor:
        """One pass of the target over the last token and the drafts."""
        return self._target.forward(text.span(cache.length, text.length + draft.num_tokens), cache, cache.length)


def read_ngrams(text: TokenSequence, lookup: PromptLookup | Lookup) -> None:
    """Index what there is of the text, so that the first lookup need not."""
    for length in range(lookup.min_ngram, lookup.max_ngram + 1):
        text.ngrams(length).update()


def find_copy(text: TokenSequence, lookup: PromptLookup | Lookup) -> int | None:
    """The place in the text to copy from: behind the longest n-gram that also ends it. None if there is none."""
    for length in range(lookup.max_ngram, lookup.min_ngram - 1, -1):
        if (place := text.ngrams(length).find_last()) is not None:
            return place
    return None


def look_up(text: TokenSequence, num_tokens: int, lookup: PromptLookup | Lookup) -> list[int] | None:
    """Return the `num_tokens` tokens that a lookup copies after `text`, or None if it finds nothing."""
    index = find_copy(text, lookup)
    return None if index is None else copied(text.token_ids, index, num_tokens)


def copied(token_ids: Sequence[int], place: int, num_tokens: int) -> list[int]:
    """The `num_tokens` tokens that continue `token_ids` as they went on from `place`.

    At the end of `token_ids` the copy reads on in itself, and so goes round in the tokens from `place` on.
    """
    period = len(token_ids) - place
    return [token_ids[place + index % period] for index in range(num_tokens)]


def write_copy(text: TokenSequence, place: int, num_tokens: int, *, steered: bool = True) -> Proposal:
    """Write what follows `place` behind the text, as a draft."""
    text.write_drafts(copied(text.token_ids, place, num_tokens))
    return Proposal(num_tokens, None, looked_up=True, steered=steered)


def length_allowed(controller: Controller, limit: int) -> int:
    """How many tokens the controller drafts of those that are certain."""
    certain = DraftDistribution(torch.zeros(1))  # one token to choose from: top probability 1, entropy 0
    limit = min(limit, controller.limit())
    for num_drafted in range(limit):
        decision = controller.decide(num_drafted, certain)
        if decision is not Decision.CONTINUE:
            return num_drafted + (decision is Decision.LAST)
    return limit


def new_drafter(
    target: Target, draft: PromptLookup, *, prefix_reuse: bool, heads: ExitHeads | None
) -> PromptLookupDrafter:
    """Return the drafter of a prompt lookup."""
    return PromptLookupDrafter(target, draft)
