"""Results of a bench in an engine, and the schedule of draft lengths that follows from them. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tuner.export.schedule import MeasuredSchedule, ScheduledLoad, join_ranges

if TYPE_CHECKING:
    from decoding.profile import DraftProfile, Interval
    from studies.measurement import Measurement
    from tuner.export.prediction import PredictedSpeedup

SCHEDULE = "schedule"
"""Name of the draft that follows the whole schedule."""


@dataclass(frozen=True)
class EngineFigures:
    """A draft in turns with plain decoding, at one number of requests side by side."""

    sequences: int
    measurement: Measurement
    """A sample per prompt by the engine's clock, or per group of prompts by the wall clock of its rounds, prompts included."""
    texts: Measurement
    """All texts, also those that are too short to be timed."""
    num_plain_different: int = 0
    """Texts that plain decoding itself continues otherwise at this number of sequences than alone."""

    @property
    def num_different(self) -> int:
        """Number of texts that differ from plain decoding's, ties apart."""
        return self.texts.num_prompts - self.texts.num_identical - self.texts.num_ties


@dataclass(frozen=True)
class EngineDraft:
    """One server with a draft, measured in turns with plain decoding."""

    name: str
    num_tokens: int | None
    """Tokens to draft; None for a draft as it is, and for the whole schedule."""
    flags: tuple[str, ...]
    loads: tuple[EngineFigures, ...]
    """By number of sequences; one request at a time is the only one without a schedule."""
    seconds: float
    """Seconds that its measurement took, from the start of the server to its end."""

    def at(self, sequences: int) -> EngineFigures:
        """Return the figures at a measured number of sequences."""
        return next(each for each in self.loads if each.sequences == sequences)


@dataclass(frozen=True)
class EngineResult:
    """All drafts of a bench in an engine; one request at a time, the profile's own is the first."""

    title: str
    version: str
    drafts: tuple[EngineDraft, ...]
    failed: dict[str, str]
    """Drafts that the engine did not run, with its reasons."""
    facts: dict[str, Any]
    remarks: tuple[str, ...] = ()
    predicted: PredictedSpeedup | None = None
    """Prediction for the profile's draft, by the engine's rules; one request at a time only."""
    schedule: MeasuredSchedule | None = None
    """Draft lengths by number of sequences, if several were measured."""

    @property
    def num_different(self) -> int:
        """Number of texts that differ from the engine's plain decoding, ties apart."""
        return sum(each.num_different for draft in self.drafts for each in draft.loads)


def best_length(figures: Mapping[int, EngineFigures]) -> tuple[int, Interval | None]:
    """Return the draft length with the best speed-up of those that are proved to be faster than plain decoding, or 0.

    A length is proved if its 95 % interval lies above 1 and none of its texts differs, ties apart.
    """
    faster = [
        (interval.value, num_tokens, interval)
        for num_tokens, each in figures.items()
        if (interval := each.measurement.speedup_interval()).ci95[0] > 1 and not each.num_different
    ]
    if not faster:
        return 0, None
    _, num_tokens, interval = max(faster, key=lambda each: each[:2])
    return num_tokens, interval


def schedule_of(drafts: Sequence[EngineDraft], profile: DraftProfile, engine: str, version: str) -> MeasuredSchedule:
    """Return the best draft length at each measured number of sequences."""
    loads = []
    for number in (each.sequences for each in drafts[0].loads):
        at_load = {each.num_tokens: each.at(number) for each in drafts if each.num_tokens is not None}
        num_tokens, speedup = best_length(at_load)
        loads.append(ScheduledLoad(sequences=number, num_tokens=num_tokens, speedup=speedup))
    return MeasuredSchedule(
        engine=engine,
        engine_version=version,
        date=datetime.now(UTC).date().isoformat(),
        target_weights_sha256=profile.target.weights_sha256,
        draft=profile.draft.model_dump(mode="json"),
        entries=join_ranges({each.sequences: each.num_tokens for each in loads}),
        loads=tuple(loads),
    )


def with_its_own(schedule: MeasuredSchedule, last: EngineDraft) -> MeasuredSchedule:
    """Return the schedule with the speed-ups of a server that runs it, if that was measured."""
    if last.name != SCHEDULE:
        return schedule
    loads = [
        each.model_copy(update={"scheduled": last.at(each.sequences).measurement.speedup_interval()})
        for each in schedule.loads
    ]
    return schedule.model_copy(update={"loads": tuple(loads)})
