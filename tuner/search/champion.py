"""The winner of a search in turns with the champion, the setting that is in use, on held-out prompts.

Both were chosen elsewhere: the champion by an earlier search, the winner by the race of this one. Held-out prompts chose neither,
unless the champion was tuned on other prompts of the same data, which can only flatter the champion.
"""

from __future__ import annotations

from decoding.documents.strict_yaml import Document
from decoding.profile import Interval
from studies.contract import Candidate
from studies.measurement import ratio_interval
from tuner.measuring.paired import Bench, FarTooSlowError
from tuner.progress import Progress


class ChampionOutcome(Document):
    """The comparison of a winner with the champion."""

    over_champion: Interval | None = None
    """Speed of the winner over the champion's, decode phase, paired over held-out prompts; None if they were not compared."""
    reason: str | None = None
    """Why the champion stays; None if the winner is faster."""

    @property
    def wins(self) -> bool:
        """True if the interval lies above 1."""
        return self.reason is None


def challenge(
    champion: Candidate, winner: Candidate, objection: str | None, held_out: Bench, progress: Progress
) -> ChampionOutcome:
    """Measure champion and winner in turns on all held-out prompts.

    `objection` is why the winner cannot be a profile, None if it can; it is not compared then.
    """
    if objection is not None:
        return ChampionOutcome(reason=objection)
    if winner.key == champion.key:
        return ChampionOutcome(reason="the search has found the champion again")
    progress.stage("winner and champion in turns on held-out prompts", 2 * len(held_out.indices))
    try:
        measured, known = held_out.side_by_side([winner, champion], held_out.indices, lambda sample: progress.advance())
    except FarTooSlowError as cause:  # the champion: the winner has just been confirmed
        return ChampionOutcome(reason=f"the champion was not measured ({cause}): promote the winner by hand")
    ratio = ratio_interval(measured, known)
    reason = None
    if not measured.is_lossless:
        reason = "the winner's texts differ from plain decoding's"
    elif ratio.ci95[0] <= 1.0:
        reason = f"the winner's speed over the champion's is {ratio}: the interval does not lie above 1"
    return ChampionOutcome(over_champion=ratio, reason=reason)
