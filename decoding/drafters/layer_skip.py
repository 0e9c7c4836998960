"""Draft with some sublayers of the target left out, verify with all of them (Draft & Verify, SWIFT, ConfLayers).

With prefix reuse (our formulation, generalising LayerSkip, arXiv 2404.16710), draft and verification share the blocks before the
first skip: the draft pass leaves their keys, values and output states, and the verification resumes there.
"""

from __future__ import annotations

from torch import Tensor

from decoding.cache.kv_cache import KVCache
from decoding.draft_length import Controller
from decoding.drafters.contract import Drafter, Proposal, read_prompt
from decoding.drafters.propose import propose
from decoding.drafts import LayerSkip
from decoding.head_folder import HeadFolder
from decoding.profile import Decoding
from decoding.runners.contract import Outputs, Written
from decoding.target import DraftView, DraftVocabulary, ResumeView, Target
from decoding.text import Request, TokenSequence


class LayerSkipDrafter(Drafter):
    """A view of the target without the skipped sublayers, choosing from `vocabulary` if there is one.

    A quantised draft shares no prefix with the verification, which computes every block again and overwrites its keys and values.
    Raises `UnsupportedModelError` for a tree if the target cannot verify one.
    """

    def __init__(
        self,
        target: Target,
        skip: LayerSkip,
        *,
        prefix_reuse: bool = True,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        self._target = target
        self._view = DraftView(
            target,
            skip.skip_attention,
            skip.skip_mlp,
            keep_boundary=prefix_reuse,
            vocabulary=vocabulary,
            bits=skip.bits,
        )
        boundary = self._view.boundary
        if skip.skip_attention or skip.skip_mlp:
            target.checks.skips(skip.skip_attention, skip.skip_mlp)
        resumes = boundary and self._view.keeps_boundary and target.checks.resumes_at(boundary)
        self._resume = ResumeView(target, boundary) if boundary and resumes else None
        self.tree = skip.tree
        if self.tree is not None:
            target.checks.trees()

    def prefill(self, sequence: TokenSequence, cache: KVCache) -> Tensor:
        """Run the target over the prompt; the draft reads the same keys and values."""
        return read_prompt(self._target, sequence, cache)

    def draft(
        self, sequence: TokenSequence, cache: KVCache, controller: Controller, request: Request, limit: int
    ) -> Proposal:
        """Draft token by token until the controller or `limit` stops; each token costs one pass of the view."""
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

        return propose(step, write, sequence, cache, controller, request, limit, states, self.tree)

    def verify(self, sequence: TokenSequence, cache: KVCache, draft: Proposal) -> Outputs:
        """Run the target over the last token, the drafts and leaves, from the boundary on if its states are known.

        With leaves, whose states are not known, it runs from the first block on.
        """
        token_ids = sequence.span(cache.length, sequence.length + draft.num_positions)
        if draft.leaves is not None:
            target, positions = self._target, draft.leaves.positions(cache.length)
            return target.run(target.whole, token_ids, cache, cache.length, positions=positions)
        if self._resume is None or draft.states is None:
            return self._target.run(self._target.whole, token_ids, cache, cache.length)
        return self._resume.run(token_ids, cache, cache.length, draft.states)


def new_drafter(target: Target, draft: LayerSkip, decoding: Decoding, *, heads: HeadFolder | None) -> LayerSkipDrafter:
    return LayerSkipDrafter(target, draft, prefix_reuse=decoding.prefix_reuse)
