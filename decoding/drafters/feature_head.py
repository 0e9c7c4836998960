"""Draft with a feature head from the target's last hidden states; verify with the whole target.

After EAGLE (arXiv 2401.15077). The head runs at the position of a token, on the target's state of the position before it. Its first
pass of a round reads the states of all positions that were verified since its last one: they replace what it has read of its own
outputs, and the pass is its first step too. Every other step reads the output of the step before.

In the cache's branch, `length` counts the states that the head has read, which is one less than the positions that it has
processed, and `pending` holds the states that it has not. At least one is pending when a round begins: that of the position before
the last token.
"""

from __future__ import annotations

from torch import Tensor

from decoding.cache.kv_cache import KVCache
from decoding.draft_length import Controller
from decoding.drafters.contract import Drafter, Proposal, check_head_has_read
from decoding.drafters.propose import propose
from decoding.drafts import CandidateTree, FeatureHeadDraft
from decoding.errors import ExitHeadError
from decoding.head_folder import HeadFolder
from decoding.profile import Decoding
from decoding.runners.contract import Outputs, Written, one_token, write_by
from decoding.target import FeatureHead, FeatureView, TappedView, Target
from decoding.target.heads import states_before
from decoding.text import Request, TokenSequence


class FeatureHeadDrafter(Drafter):
    """A feature head with the target's own embeddings, final norm and LM head."""

    def __init__(self, target: Target, head: FeatureHead, *, tree: CandidateTree | None = None) -> None:
        self.tree, self.has_head = tree, True
        if tree is not None:
            target.checks.trees()
        self._head = FeatureView(target, head)
        self._whole = TappedView(target, target.num_layers)

    def prefill(self, sequence: TokenSequence, cache: KVCache) -> Tensor:
        """Run the target over the prompt, and the head over its last states; that of the last position stays pending."""
        check_head_has_read(cache)
        branch, start, end = cache.branch, cache.length, sequence.length
        outputs = self._whole.run(sequence.span(start, end), cache, start, last_only=True)
        states = outputs.states
        assert states is not None, "the last block is tapped"
        if start == 0:
            self._head.run(sequence.span(0, end), cache, 0, states_before(states))
        else:
            branch.extend(states)  # after those of earlier turns that the head has not read, one at least
            first = branch.length + 1
            assert branch.pending is not None, "extended"
            self._head.run(sequence.span(first, end), cache, first, branch.pending[..., :-1, :])
        branch.catch_up(end - 1)
        branch.extend(states[..., -1:, :])
        return outputs.logits

    def draft(
        self, sequence: TokenSequence, cache: KVCache, controller: Controller, request: Request, limit: int
    ) -> Proposal:
        """Draft token by token until the controller or `limit` stops; the first pass includes the pending states."""
        branch, latest = cache.branch, list[Tensor]()

        def run(num_drafted: int, token_ids: Tensor, looks: bool) -> Outputs:
            position = cache.length + num_drafted
            if num_drafted:
                outputs = self._head.run(token_ids, cache, position, latest.pop(), looks=looks)
            else:
                first = branch.length + 1
                assert branch.pending is not None, "the state before the last token is pending"
                span = sequence.span(first, position + 1)
                outputs = self._head.run(span, cache, first, branch.pending, looks=looks)
                branch.catch_up(cache.length, branch.pending[..., -1:, :])
            assert outputs.states is not None, "the head records its states"
            latest.append(outputs.states[..., -1:, :])
            return outputs

        def step(num_drafted: int, looks: bool) -> Outputs:
            position = cache.length + num_drafted
            return run(num_drafted, sequence.span(position, position + 1), looks)

        def write(num_tokens: int) -> Written:
            last = sequence.span(cache.length, cache.length + 1)
            return write_by(lambda ids, index: one_token(run(index, ids, False)), last, num_tokens)

        return propose(step, write, sequence, cache, controller, request, limit, (), self.tree)

    def verify(self, sequence: TokenSequence, cache: KVCache, draft: Proposal) -> Outputs:
        """Run the target over the last token, the drafts and leaves, and keep its last states for the head."""
        token_ids = sequence.span(cache.length, sequence.length + draft.num_positions)
        positions = None if draft.leaves is None else draft.leaves.positions(cache.length)
        outputs = self._whole.run(token_ids, cache, cache.length, positions=positions)
        assert outputs.states is not None, "the last block is tapped"
        branch, num_chain = cache.branch, 1 + draft.num_tokens
        branch.extend(outputs.states[..., :num_chain, :])
        branch.leaves = None if draft.leaves is None else outputs.states[..., num_chain:, :]
        return outputs


def new_drafter(
    target: Target, draft: FeatureHeadDraft, decoding: Decoding, *, heads: HeadFolder | None
) -> FeatureHeadDrafter:
    if heads is None:
        raise ExitHeadError(f"the draft needs the feature head {draft.head}: give the folder that holds it")
    return FeatureHeadDrafter(target, heads.feature_head(draft), tree=draft.tree)
