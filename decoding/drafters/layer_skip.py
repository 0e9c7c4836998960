"""Draft with some sublayers of the target left out, verify with all of them (Draft & Verify, SWIFT, ConfLayers).

With prefix reuse (our formulation, generalising LayerSkip, arXiv 2404.16710), draft and verification share the blocks before the
first skip: the draft pass leaves their keys, values and output states, and the verification resumes there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decoding.acceptance import accept_greedy
from decoding.cache.kv_cache import KVCache
from decoding.draft_length import Controller
from decoding.drafters.contract import Copy, Drafter, Proposal, read_prompt
from decoding.drafters.propose import propose
from decoding.drafts import LayerSkip
from decoding.head_folder import HeadFolder
from decoding.profile import Decoding
from decoding.runners.contract import Outputs, Written
from decoding.target import DraftView, DraftVocabulary, ResumeView, Target
from decoding.text import Request, TokenSequence


class LayerSkipDrafter(Drafter):
    """A view of the target without the skipped sublayers.

    A quantised draft shares no prefix with the verification, which computes every block again and overwrites its keys and values.
    """

    def __init__(self, target: Target, skip: LayerSkip, *, prefix_reuse: bool = True) -> None:
        self._target = target
        below = skip.ids_below
        self._view = DraftView(
            target,
            skip.skip_attention,
            skip.skip_mlp,
            keep_boundary=prefix_reuse,
            vocabulary=None if below is None else DraftVocabulary.below(below, target.lm_heads.num_rows),
            bits=skip.bits,
        )
        boundary = self._view.boundary
        if skip.skip_attention or skip.skip_mlp:
            target.checks.skips(skip.skip_attention, skip.skip_mlp)
        resumes = boundary and self._view.keeps_boundary and target.checks.resumes_at(boundary)
        self._resume = ResumeView(target, boundary) if boundary and resumes else None

    def prefill(self, sequence: TokenSequence, cache: KVCache) -> Tensor:
        """Run the target over the prompt; the draft reads the same keys and values."""
        return read_prompt(self._target, sequence, cache)

    def draft(
        self, sequence: TokenSequence, cache: KVCache, controller: Controller, request: Request, limit: int
    ) -> Proposal:
        """Draft token by token until the controller or `limit` stops; each token costs one pass of the view."""
        self._view.follow(sequence, sequence.batch, sequence.token_ids)
        states = list[Tensor]()

        def step(num_drafted: int, looks: bool) -> Outputs:
            position = cache.length + num_drafted
            outputs = self._view.run(sequence.span(position, position + 1), cache, position, looks=looks)
            if outputs.states is not None:
                states.append(outputs.states)
            return outputs

        def write(num_tokens: int) -> Written:
            last = sequence.span(cache.length, cache.length + 1)
            written = self._view.write(last, cache, cache.length, num_tokens)
            if written.states is not None:
                states.append(written.states)
            return written

        return propose(step, write, sequence, cache, controller, request, limit, states)

    def draft_checking(
        self, sequence: TokenSequence, cache: KVCache, controller: Controller, limit: int, copy: Copy
    ) -> Proposal | None:
        """See `Drafter.draft_checking`: a pass yields the copied tokens that the draft would have written, and one more."""
        if controller.looks_at_drafts or cache.company is not None:
            return None
        self._view.follow(sequence, sequence.batch, sequence.token_ids)
        limit, states, drafts = min(limit, controller.limit()), list[Tensor](), list[int]()
        while len(drafts) < limit:
            position, num_drafted = cache.length + len(drafts), len(drafts)
            copied = copy(drafts, limit - num_drafted - 1) or []
            sequence.write_drafts(copied, num_drafted)
            token_ids = sequence.span(position, position + 1 + len(copied))
            outputs = self._view.check(token_ids, cache, position)
            num_right, token, *_ = sequence.read(accept_greedy(token_ids[0, 1:], outputs.choices))
            drafts += [*copied[:num_right], token]
            sequence.write_drafts([token], len(drafts) - 1)
            if outputs.states is not None:
                states.append(outputs.states[..., : num_right + 1, :])
        return Proposal(len(drafts), None, torch.cat(states, dim=-2) if states else None)

    def verify(self, sequence: TokenSequence, cache: KVCache, draft: Proposal) -> Outputs:
        """Run the target over the last token and the drafts, from the boundary on if its states are known."""
        token_ids = sequence.span(cache.length, sequence.length + draft.num_tokens)
        if self._resume is None or draft.states is None:
            return self._target.run(self._target.whole, token_ids, cache, cache.length)
        return self._resume.run(token_ids, cache, cache.length, draft.states)


def new_drafter(target: Target, draft: LayerSkip, decoding: Decoding, *, heads: HeadFolder | None) -> LayerSkipDrafter:
    return LayerSkipDrafter(target, draft, prefix_reuse=decoding.prefix_reuse)
