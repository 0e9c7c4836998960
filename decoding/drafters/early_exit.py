"""Draft with the first N blocks and an exit head, verify from block N + 1 on (EESD, arXiv 2406.03853).

Only the abstract of the paper was used; the structure is our formulation. The head is one block of the model's own class with
its own keys and values. An exit without a head is the skip set of all blocks after N, and drafts as one.

The head processes the state of a position one pass later than the blocks: the last draft of a round, or the token of a round that
drafted nothing, is pending in the branch of the cache until the head's next pass.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from decoding.acceptance import Acceptance
from decoding.cache.kv_cache import KVCache
from decoding.draft_length import Controller
from decoding.drafters.contract import Drafter, Proposal
from decoding.drafters.layer_skip import LayerSkipDrafter
from decoding.drafters.propose import propose
from decoding.drafts import EarlyExit
from decoding.errors import ExitHeadError
from decoding.head_folder import HeadFolder
from decoding.profile import Decoding
from decoding.runners.contract import Outputs
from decoding.target import Target
from decoding.text import Shaping, TokenSequence


class EarlyExitDrafter:
    """The first `exit_layer` blocks, `head`, and the target's own final norm and LM head."""

    def __init__(self, target: Target, exit_layer: int, head: nn.Module, *, prefix_reuse: bool = True) -> None:
        self._exit = target.exit_view(exit_layer, head)
        self._whole = target.tapped_view(exit_layer)
        self._resume = target.resume_view(exit_layer, keep_states=True) if prefix_reuse else None

    def prefill(self, sequence: TokenSequence, cache: KVCache) -> Tensor:
        """Run the target over the prompt, and the head over the states at the exit."""
        prompt = sequence.span(0, sequence.length)
        logits, states = self._whole.forward(prompt, cache, 0, last_only=True)
        self._exit.fill(prompt, cache, 0, states)
        cache.branch.catch_up(sequence.length)
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
        """Draft token by token until the controller or `limit` stops; the first pass includes the pending tokens."""
        branch, states = cache.branch, list[Tensor]()

        def step(num_drafted: int, looks: bool) -> Outputs:
            start, end = branch.length, cache.length + num_drafted + 1
            outputs = self._exit.run(sequence.span(start, end), cache, start, branch.pending, looks=looks)
            branch.catch_up(end)
            assert outputs.states is not None, "the exit is tapped"
            states.append(outputs.states)
            return outputs

        def write(num_tokens: int) -> Tensor:
            first = step(0, False).choices  # by itself: it includes the pending tokens
            if num_tokens == 1:
                return first
            start = cache.length + 1
            written = self._exit.write(first[None], cache, start, num_tokens - 1)
            branch.catch_up(cache.length + num_tokens)
            assert written.states is not None, "the exit is tapped"
            states.append(written.states)
            return torch.cat([first, written.token_ids])

        num_drafted, probabilities = propose(step, write, sequence, controller, shaping, acceptance, limit)
        return Proposal(num_drafted, probabilities, torch.cat(states, dim=-2) if states else None)

    def verify(self, sequence: TokenSequence, cache: KVCache, draft: Proposal) -> Outputs:
        """Run the target over the last token and the drafts, from the exit on if the states there are known."""
        token_ids = sequence.span(cache.length, sequence.length + draft.num_tokens)
        if self._resume is None or draft.states is None:
            outputs = self._whole.run(token_ids, cache, cache.length)
            states = outputs.states
        else:
            outputs = self._resume.run(token_ids, cache, cache.length, draft.states)
            states = self._resume.take_states()
        assert states is not None, "the exit is tapped"
        branch = cache.branch
        branch.extend(states[..., branch.num_known - cache.length :, :])
        return outputs


def new_drafter(target: Target, draft: EarlyExit, decoding: Decoding, *, heads: HeadFolder | None) -> Drafter:
    """Return the drafter of an exit; without a head it is the skip set of all blocks after the exit.

    Raises ValueError for an exit that `target` does not have, and `ExitHeadError` for a head that `heads` does not hold.
    """
    target.check_exit_layer(draft.exit_layer)
    if draft.head is None:
        return LayerSkipDrafter(target, draft.skipped(target.num_layers), prefix_reuse=decoding.prefix_reuse)
    if heads is None:
        raise ExitHeadError(f"the draft needs the exit head {draft.head}: give the folder that holds it")
    return EarlyExitDrafter(target, draft.exit_layer, heads.get(draft), prefix_reuse=decoding.prefix_reuse)
