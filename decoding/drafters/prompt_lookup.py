"""Draft by copying from the text: prompt lookup (Saxena 2023), or a suffix automaton (`decoding.drafts.lookup`).

No model drafts: a copied token has probability 1. Nothing here waits for the device, because the token ids are on the host. The
index of what was read is kept with the sequence.
"""

from __future__ import annotations

from torch import Tensor

from decoding.acceptance import Acceptance
from decoding.cache.kv_cache import KVCache
from decoding.draft_length import Controller, Decision, DraftDistribution
from decoding.drafters.contract import Proposal
from decoding.drafts.lookup import CopySettings
from decoding.head_folder import HeadFolder
from decoding.profile import Decoding
from decoding.runners.contract import Outputs
from decoding.target import Target
from decoding.text import Shaping, TokenSequence


class CopyDrafter:
    """Copies as many tokens as the draft-length rule allows; drafts nothing where nothing is found."""

    def __init__(self, target: Target, source: CopySettings) -> None:
        self._target = target
        self._source = source

    def prefill(self, sequence: TokenSequence, cache: KVCache) -> Tensor:
        logits = self._target.forward(sequence.span(cache.length, sequence.length), cache, cache.length, last_only=True)
        sequence.index(self._source).update()
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
        tokens = look_up(sequence, min(limit, controller.max_tokens), self._source)
        if tokens is None:
            return Proposal(0, None, steered=False)
        num_tokens = length_allowed(controller, len(tokens))
        sequence.write_drafts(tokens[:num_tokens])
        return Proposal(num_tokens, None, looked_up=True)

    def verify(self, sequence: TokenSequence, cache: KVCache, draft: Proposal) -> Outputs:
        token_ids = sequence.span(cache.length, sequence.length + draft.num_tokens)
        return self._target.run(self._target.whole, token_ids, cache, cache.length)


def look_up(sequence: TokenSequence, num_tokens: int, source: CopySettings) -> list[int] | None:
    """Return one to `num_tokens` tokens to copy after the sequence, or None if there are none or nothing is found."""
    return sequence.index(source).copy(num_tokens) if num_tokens > 0 else None


def length_allowed(controller: Controller, limit: int) -> int:
    """Return the number of tokens, at most `limit`, that the controller allows if each has probability 1."""
    certain = DraftDistribution.of(top_probability=1.0, entropy=0.0)
    limit = min(limit, controller.limit())
    for num_drafted in range(limit):
        decision = controller.decide(num_drafted, certain)
        if decision is not Decision.CONTINUE:
            return num_drafted + (decision is Decision.LAST)
    return limit


def new_drafter(target: Target, draft: CopySettings, decoding: Decoding, *, heads: HeadFolder | None) -> CopyDrafter:
    return CopyDrafter(target, draft)
