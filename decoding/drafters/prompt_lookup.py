"""Draft by copying what followed an earlier occurrence of the last n-gram (prompt lookup decoding, Saxena 2023).

The longest n-gram at the end of the sequence that also occurs earlier is looked up, and the tokens after it are proposed. Among
several occurrences, the latest is used (transformers uses the first). A copy that reaches the end of the sequence continues with
its own tokens, so that a loop is drafted to the full length.

No model drafts: a copied token has probability 1. Nothing here waits for the device, because the token ids are on the host. The
index of n-grams is kept with the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from decoding.acceptance import Acceptance
from decoding.cache.kv_cache import KVCache
from decoding.draft_length import Controller, Decision, DraftDistribution
from decoding.drafters.contract import Proposal
from decoding.drafts import Lookup, PromptLookup
from decoding.head_folder import HeadFolder
from decoding.profile import Decoding
from decoding.runners.contract import Outputs
from decoding.target import Target
from decoding.text import Shaping, TokenSequence


class PromptLookupDrafter:
    """Copies as many tokens as the draft-length rule allows; drafts nothing without an earlier occurrence."""

    def __init__(self, target: Target, lookup: PromptLookup) -> None:
        self._target = target
        self._lookup = lookup

    def prefill(self, sequence: TokenSequence, cache: KVCache) -> Tensor:
        """Run the target over the prompt, and index the n-grams of the prompt."""
        logits = self._target.forward(sequence.span(0, sequence.length), cache, 0, last_only=True)
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
        """Copy as many tokens as the controller and `limit` allow; without a copy, the controller is not asked."""
        start = find_copy(sequence, self._lookup) if limit > 0 else None
        if start is None:
            return Proposal(0, None, steered=False)
        return write_copy(sequence, start, length_allowed(controller, limit))

    def verify(self, sequence: TokenSequence, cache: KVCache, draft: Proposal) -> Outputs:
        """Run the target over the last token and the drafts."""
        token_ids = sequence.span(cache.length, sequence.length + draft.num_tokens)
        return self._target.run(self._target.whole, token_ids, cache, cache.length)


def read_ngrams(sequence: TokenSequence, lookup: PromptLookup | Lookup) -> None:
    """Index the n-grams of the sequence so far, so that the first lookup is as fast as the others."""
    for length in range(lookup.min_ngram, lookup.max_ngram + 1):
        sequence.ngrams(length).update()


def find_copy(sequence: TokenSequence, lookup: PromptLookup | Lookup) -> int | None:
    """Return the position after the latest earlier occurrence of the longest last n-gram, or None."""
    for length in range(lookup.max_ngram, lookup.min_ngram - 1, -1):
        if (start := sequence.ngrams(length).find_last()) is not None:
            return start
    return None


def look_up(sequence: TokenSequence, num_tokens: int, lookup: PromptLookup | Lookup) -> list[int] | None:
    """Return the `num_tokens` tokens that a lookup copies after `text`, or None if it finds nothing."""
    start = find_copy(sequence, lookup)
    return None if start is None else copied(sequence.token_ids, start, num_tokens)


def copied(token_ids: Sequence[int], start: int, num_tokens: int) -> list[int]:
    """Return `num_tokens` tokens of `token_ids` from `start` on; at the end, the copy starts again at `start`."""
    period = len(token_ids) - start
    return [token_ids[start + index % period] for index in range(num_tokens)]


def write_copy(sequence: TokenSequence, start: int, num_tokens: int, *, steered: bool = True) -> Proposal:
    """Write the tokens from position `start` on after the sequence, as a draft."""
    sequence.write_drafts(copied(sequence.token_ids, start, num_tokens))
    return Proposal(num_tokens, None, looked_up=True, steered=steered)


def length_allowed(controller: Controller, limit: int) -> int:
    """Return the number of tokens, at most `limit`, that the controller allows if each has probability 1."""
    certain = DraftDistribution.of(top_probability=1.0, entropy=0.0)
    limit = min(limit, controller.limit())
    for num_drafted in range(limit):
        decision = controller.decide(num_drafted, certain)
        if decision is not Decision.CONTINUE:
            return num_drafted + (decision is Decision.LAST)
    return limit


def new_drafter(
    target: Target, draft: PromptLookup, decoding: Decoding, *, heads: HeadFolder | None
) -> PromptLookupDrafter:
    """Return the drafter of a prompt lookup."""
    return PromptLookupDrafter(target, draft)
