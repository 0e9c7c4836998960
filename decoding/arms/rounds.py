"""Rounds of one sequence, each drafted by the arm that is chosen at the time, or by none.

All arms share the target and its keys and values, so a sequence may change arms at any round. A trained head must see every
verified position, so the arm that has one verifies the rounds of all arms. Arms with different heads cannot share
a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from decoding.acceptance import Acceptance
from decoding.arms.belief import PLAIN
from decoding.cache.kv_cache import KVCache
from decoding.draft_length import Controller
from decoding.drafters.contract import Drafter, Proposal, max_leaves_of, prefill_target
from decoding.runners.contract import Outputs
from decoding.text import Shaping, TokenSequence


class ArmRounds:
    """The drafter of one sequence: drafts with the arm that `chosen` returns, by the controller of that arm.

    `drafters` are those of the arms from 1 on; `with_head` are the indices of those that keep the states of the one trained head.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        with_head: Sequence[int],
        controllers: Sequence[Controller],
        chosen: Callable[[], int],
    ) -> None:
        self._drafters, self._with_head, self._controllers, self._chosen = drafters, with_head, controllers, chosen
        self._drafted = PLAIN
        self.controller = _DraftedArm(self, max(each.max_tokens for each in controllers))
        """The controller of the sequence: it tells each round to the arm that drafted it."""

    @property
    def max_leaves(self) -> int:
        """Most side leaves of a round."""
        return max(map(max_leaves_of, self._drafters))

    @property
    def drafting_controller(self) -> Controller | None:
        """The controller of the arm that drafted the latest round."""
        return None if self._drafted == PLAIN else self._controllers[self._drafted - 1]

    def _keeper(self, arm: int) -> Drafter:
        """Return the drafter that reads the prompt and verifies: the arm's own, or the one that keeps the head's states."""
        index = arm - 1
        if self._with_head and index not in self._with_head:
            index = self._with_head[0]
        return self._drafters[max(index, 0)]

    def prefill(self, sequence: TokenSequence, cache: KVCache) -> Tensor:
        """See `Drafter.prefill`; a head that is not in use reads the prompt when it first drafts, if it can."""
        arm = self._chosen()
        keeper = self._keeper(arm)
        if arm != PLAIN and keeper is self._drafters[arm - 1]:
            return keeper.prefill(sequence, cache)
        return prefill_target(keeper, sequence, cache)

    def draft(
        self,
        sequence: TokenSequence,
        cache: KVCache,
        controller: Controller,
        shaping: Shaping,
        acceptance: Acceptance,
        limit: int,
    ) -> Proposal:
        """Let the chosen arm draft; see `Drafter.draft`."""
        self._drafted = arm = self._chosen()
        if arm == PLAIN:
            return Proposal(0, None, steered=False)
        drafter, own = self._drafters[arm - 1], self._controllers[arm - 1]
        proposal = drafter.draft(sequence, cache, own, shaping, acceptance, limit)
        # The drafter with the head cannot resume from another's states, and must see the positions of a verified round.
        return proposal if self._keeper(arm) is drafter else replace(proposal, states=None, verdict=None)

    def verify(self, sequence: TokenSequence, cache: KVCache, draft: Proposal) -> Outputs:
        """See `Drafter.verify`."""
        return self._keeper(self._drafted).verify(sequence, cache, draft)


class _DraftedArm(Controller):
    """Tells the controller of the arm that drafted a round what was accepted."""

    def __init__(self, rounds: ArmRounds, max_tokens: int) -> None:
        super().__init__(max_tokens)
        self._rounds = rounds

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """See `Controller.observe`."""
        own = self._rounds.drafting_controller
        if own is not None:
            own.observe(num_drafted, num_accepted)
