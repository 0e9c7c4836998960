"""Draft with the first N blocks and an exit head behind them, verify from block N + 1 on (EESD, arXiv 2406.03853).

The paper is known to us by its abstract; the structure is our formulation. The head is one block of the model's own class with
keys and values of its own. An exit without a head is a layer skip of all blocks behind N, and drafts as one.

The head sees the state of a position one pass later than the blocks do: the last draft of a round, or a token of a round
that drafted nothing, is left to it as pending in the branch of the cache, and its next pass takes those along.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from decoding.acceptance import Acceptance, most_likely
from decoding.cache.kv_cache import KVCache
from decoding.draft_length import Controller
from decoding.drafters.contract import Drafter, Proposal
from decoding.drafters.layer_skip import LayerSkipDrafter
from decoding.drafters.propose import propose
from decoding.drafts import EarlyExit
from decoding.errors import ExitHeadError
from decoding.exit_heads import ExitHeads
from decoding.target import Target
from decoding.text import Shaping, TokenSequence


class EarlyExitDrafter:
    """The first `exit_layer` blocks, `head`, and the target's own final norm and LM head."""

    def __init__(self, target: Target, exit_layer: int, head: nn.Module, *, prefix_reuse: bool = True) -> None:
        self._exit = target.exit_view(exit_layer, head)
        self._whole = target.tapped_view(exit_layer)
        self._resume = target.resume_view(exit_layer, keep_states=True) if prefix_reuse else None

    def prefill(self, text: TokenSequence, cache: KVCache) -> Tensor:
        """The target's pass over the prompt, and the head's over the states that it leaves at the exit."""
        prompt = text.span(0, text.length)
        logits, states = self._whole.forward(prompt, cache, 0, last_only=True)
        self._exit.fill(prompt, cache, 0, states)
        cache.branch.catch_up(text.length)
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
        """Draft token by token until the controller or `limit` says stop; the first pass takes along what is pending."""
        branch, states = cache.branch, list[Tensor]()

        def step(num_drafted: int) -> Tensor:
            start, end = branch.length, cache.length + num_drafted + 1
            logits, state = self._exit.forward(text.span(start, end), cache, start, branch.pending)
            branch.catch_up(end)
            states.append(state)
            return logits

        def write(num_tokens: int) -> Tensor:
            first = most_likely(step(0))  # by itself: it takes along what is pending
            if num_tokens == 1:
                return first
            start = cache.length + 1
            written = self._exit.write(first[None], cache, start, num_tokens - 1)
            branch.catch_up(cache.length + num_tokens)
            assert written.states is not None, "the exit is tapped"
            states.append(written.states)
            return torch.cat([first, written.token_ids])

        num_drafted, probabilities = propose(step, write, text, controller, shaping, acceptance, limit)
        return Proposal(num_drafted, probabilities, torch.cat(states, dim=-2) if states else None)

    def verify(self, text: TokenSequence, cache: KVCache, draft: Proposal) -> Tensor:
        """One pass of the target over the last token and the drafts, from the exit on if its states there are known."""
        token_ids = text.span(cache.length, text.length + draft.num_tokens)
        if self._resume is None or draft.states is None:
            logits, states = self._whole.forward(token_ids, cache, cache.length)
        else:
            logits = self._resume.forward(token_ids, cache, cache.length, draft.states)
            states = self._resume.take_states()
        branch = cache.branch
        branch.extend(states[..., branch.num_known - cache.length :, :])
        return logits


def new_drafter(target: Target, draft: EarlyExit, *, prefix_reuse: bool, heads: ExitHeads | None) -> Drafter:
    """Return the drafter of an exit; without a head it is the skip set of all blocks after the exit.

    Raises ValueError for an exit that `target` does not have, and `ExitHeadError` for a head that `heads` does not hold.
    """
    target.check_exit_layer(draft.exit_layer)
    if draft.head is None:
        return LayerSkipDrafter(target, draft.skipped(target.num_layers), prefix_reuse=prefix_reuse)
    if heads is None:
        raise ExitHeadError(f"the draft needs the exit head {draft.head}: give the folder that holds it")
    return EarlyExitDrafter(target, draft.exit_layer, heads.get(draft), prefix_reuse=prefix_reuse)
