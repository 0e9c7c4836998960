"""What texts in step cost, foretold: whose passes are run together, by the schedule of `decoding.lockstep`.

Our formulation. A replay knows the passes that each text asks for; here they meet as they would in decoding. Texts draft until all
wait for their verification, and texts that want different parts of the model (one copies, another resumes behind the prefix) want
different passes. A pass costs what the dearest of the texts in it asks for, and as much for some of the texts as for all.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from decoding.draft_length import RoundCosts
from decoding.drafts import Draft


class ReplayedRound(NamedTuple):
    """One round of a replay: tokens drafted, draft passes run (one more if the last was not drawn from), tokens accepted."""

    num_drafted: int
    num_passes: int
    num_accepted: int
    looked_up: bool = False


class Asked(NamedTuple):
    """A pass that a text asks for."""

    part: Hashable
    """Only passes of the same part of the model can be one."""
    verifies: bool
    cost: float
    """In plain passes, if all texts of the batch ask for the same."""


@dataclass(frozen=True)
class LockstepBatches:
    """Which texts are in step, and what decides whether they want the same part of the model."""

    batches: tuple[tuple[int, ...], ...]
    resumes: bool = False
    """Whether what was drafted is verified from behind the prefix, and only what was not drafted by the whole model."""
    has_head: bool = False
    """Whether an exit head drafts: its first pass of a round may have to take along what it has not seen yet."""

    def of_draft(self, draft: Draft, *, prefix_reuse: bool) -> LockstepBatches:
        """Return the same batches with this draft."""
        resumes = prefix_reuse and draft.num_shared_blocks > 0
        return LockstepBatches(self.batches, resumes=resumes, has_head=draft.has_head)

    def asked(self, rounds: Iterable[ReplayedRound], costs: RoundCosts, copied: RoundCosts | None) -> Iterator[Asked]:
        """The passes of a text's rounds, one by one; for `copied` see `cost_unbatched`."""
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
    """Cost of a round of a text by itself. `copied` are those of rounds that a lookup in front of the draft copies, or None of a
    lookup that is the draft."""
    if step.looked_up:
        return _cost_of_copy(step, costs, copied)
    return costs.of(step.num_drafted) + (step.num_passes - step.num_drafted) * costs.draft_step


def _cost_of_copy(step: ReplayedRound, costs: RoundCosts, copied: RoundCosts | None) -> float:
    return costs.of(step.num_drafted) if copied is None else copied.verify_cost(step.num_drafted)


def passes_in_lockstep(texts: Iterable[Iterator[Asked]]) -> Iterator[tuple[Asked, ...]]:
    """The passes in the order in which `decoding.lockstep` runs them: of each, what the texts that share it ask for."""
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
    """What all passes cost, in plain passes."""
    return sum(max(each.cost for each in shared) for shared in passes_in_lockstep(texts))


def batches_of(places: Sequence[int], batch_size: int) -> dict[int, tuple[int, ...]]:
    """Which of the texts at `places` (their numbers, from 0) are in each batch, by the batch's number."""
    batches: dict[int, tuple[int, ...]] = {}
    for number, place in enumerate(places):
        batch = place // batch_size
        batches[batch] = (*batches.get(batch, ()), number)
    return batches
