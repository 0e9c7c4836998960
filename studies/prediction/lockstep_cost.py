"""Predicted cost of sequences in lockstep: shared passes, by the schedule of `decoding.lockstep`.

Our formulation. A replay knows the passes that each sequence asks for; here they are shared as in decoding. Sequences draft until
all wait for their verification. Sequences that need different parts of the model (one copies, another resumes after the prefix)
cannot share a pass. A shared pass costs as much as its most expensive request, for some of the sequences as for all.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from decoding.draft_length import RoundCosts
from decoding.drafts import Draft
from decoding.profile import Decoding


class ReplayedRound(NamedTuple):
    """One round of a replay: tokens drafted, draft passes run (one more if the last was not drawn from), tokens accepted."""

    num_drafted: int
    num_passes: int
    num_accepted: int
    looked_up: bool = False
    num_leaves: int = 0
    """Side leaves, verified with the drafts by the whole target; none in lockstep, where rounds are chains."""


class Asked(NamedTuple):
    """A pass that a sequence asks for."""

    part: Hashable
    """Part of the model; only passes over the same part are shared."""
    verifies: bool
    cost: float
    """In plain passes, if all sequences of the batch ask for the same."""


@dataclass(frozen=True)
class LockstepBatches:
    """Batches of sequences in lockstep, and the facts of the draft that decide which passes are shared."""

    batches: tuple[tuple[int, ...], ...]
    resumes: bool = False
    """True if drafts are verified from the end of the shared prefix on; rounds without a draft run the whole model."""
    has_head: bool = False
    """True if an exit head drafts whose first pass of a round may, but need not, also process a pending token."""

    def of_draft(self, draft: Draft, decoding: Decoding) -> LockstepBatches:
        """Return the same batches with this draft, decoded as `decoding` says."""
        resumes = decoding.prefix_reuse and draft.num_shared_blocks > 0
        head = draft.trained_head
        has_head = head is not None and not head.rereads
        return LockstepBatches(self.batches, resumes=resumes, has_head=has_head)

    def asked(self, rounds: Iterable[ReplayedRound], costs: RoundCosts, copied: RoundCosts | None) -> Iterator[Asked]:
        """Yield the passes of a sequence's rounds; for `copied` see `cost_unbatched`."""
        is_pending = False
        for step in rounds:
            for number in range(step.num_passes):
                takes_along = self.has_head and is_pending and number == 0
                yield Asked(("draft", takes_along), False, costs.draft_step)
            is_pending = step.looked_up or step.num_accepted == step.num_drafted
            if step.looked_up:
                yield Asked("whole", True, _cost_of_copy(step, costs, copied))
                continue
            knows_last = step.num_passes > step.num_drafted
            part = ("resumed", knows_last) if self.resumes and step.num_passes else "whole"
            yield Asked(part, True, costs.verify_cost(step.num_drafted))


def cost_unbatched(step: ReplayedRound, costs: RoundCosts, copied: RoundCosts | None) -> float:
    """Return the cost of a round of a single sequence, in plain passes.

    `copied` holds the costs of rounds that the whole target verifies: those copied by the lookup before the draft, and those with
    side leaves. None if the lookup is the draft.
    """
    if step.looked_up:
        return _cost_of_copy(step, costs, copied)
    if step.num_leaves:
        assert copied is not None, "given with a tree"
        return copied.verify_cost(step.num_drafted + step.num_leaves) + step.num_passes * costs.draft_step
    return costs.of(step.num_drafted) + (step.num_passes - step.num_drafted) * costs.draft_step


def _cost_of_copy(step: ReplayedRound, costs: RoundCosts, copied: RoundCosts | None) -> float:
    return costs.of(step.num_drafted) if copied is None else copied.verify_cost(step.num_drafted)


def passes_in_lockstep(texts: Iterable[Iterator[Asked]]) -> Iterator[tuple[Asked, ...]]:
    """Yield the shared passes in the order of `decoding.lockstep`: the requests of the sequences in each."""
    writing = dict(enumerate(texts))
    asked: dict[int, Asked] = {}

    def ask(row: int) -> None:
        wanted = next(writing[row], None)
        if wanted is not None:
            asked[row] = wanted

    for row in writing:
        ask(row)
    while asked:
        drafting = [each.part for each in asked.values() if not each.verifies]
        part = (drafting or [each.part for each in asked.values()])[0]
        shared = {row: each for row, each in sorted(asked.items()) if each.part == part}
        yield tuple(shared.values())
        for row in shared:
            del asked[row]
        for row in shared:
            ask(row)


def cost_in_lockstep(texts: Iterable[Iterator[Asked]]) -> float:
    """Return the cost of all shared passes, in plain passes."""
    return sum(max(each.cost for each in shared) for shared in passes_in_lockstep(texts))


def batches_of(indices: Sequence[int], batch_size: int) -> dict[int, tuple[int, ...]]:
    """Return the batches of the sequences at `indices`: positions within `indices`, by the batch's number."""
    batches: dict[int, tuple[int, ...]] = {}
    for number, index in enumerate(indices):
        batch = index // batch_size
        batches[batch] = (*batches.get(batch, ()), number)
    return batches
