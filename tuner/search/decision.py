"""The decision: the best of the race measured on held-out prompts, and the claim of a speed-up.

A search decides here, and `benchmarks.integrity` tests the same decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from studies.contract import Candidate, TrialRecord
from studies.measurement import Measurement, PromptSample
from tuner.config import FEWEST_SAMPLES
from tuner.measuring.turns import Measuring
from tuner.progress import Progress
from tuner.review.document import MeasuredCandidate
from tuner.search.budget import Budget, OutOfTimeError
from tuner.search.storage import StudyStore

CONFIRMED, WINNERS = "confirmed", "confirmed_winners"
"""Notes of an experiment: measurements by candidate, and the winners so far in order."""


def objection(candidate: Candidate, raced: Measurement, confirmed: Measurement, *, busy: bool = False) -> str | None:
    """Return why no speed-up is claimed for a candidate, or None if one is.

    It must draft, be lossless in race and confirmation, and have its 95 % interval on the held-out prompts (`confirmed`) above 1.
    That is of the decode phase; end to end, prefill included, the interval must not lie below 1. If the machine was `busy`, or
    decoding had to wait for a processor, the 99.5 % interval must lie above 1.
    """
    if not candidate.draft.drafts:
        return "the best candidate decodes plainly"
    if not (confirmed.is_lossless and raced.is_lossless):
        return "its texts differ from plain decoding's"
    if confirmed.speedup_interval().ci95[0] <= 1.0:
        return "its 95 % interval does not lie above 1"
    if not confirmed.is_faster(busy=busy):
        level = confirmed.level(busy=busy)
        return f"the machine was busy, and then its {100 * level:g} % interval must lie above 1: measure again"
    if confirmed.is_slower_end_to_end:
        return "it decodes faster, but its prefill costs more than that saves: end to end it is slower"
    return None


def blocks(records: Iterable[TrialRecord], race: Iterable[MeasuredCandidate]) -> Iterator[Measurement]:
    """Yield the measurements on tuning prompts, whose plain decoding shows how quiet the machine was."""
    yield from (each.measurement for each in records if each.measurement is not None and each.repeat_of is None)
    yield from (each.measurement for each in race if each.measurement.samples)


class Confirmations:
    """Measurements on the held-out prompts by all runs of a search, on disk after each if there is a `store`."""

    def __init__(self, store: StudyStore | None = None) -> None:
        self._store = store
        kept = (None if store is None else store.noted(CONFIRMED)) or {}
        self._known = {key: Measurement.model_validate(each) for key, each in kept.items()}

    def of(self, candidate: Candidate) -> Measurement:
        """Return what is measured of a candidate; empty if nothing is."""
        return self._known.get(candidate.key, Measurement(samples=()))

    def keep(self, candidate: Candidate, measurement: Measurement) -> None:
        """Store the measurement of a candidate, in place of an earlier part of it."""
        self._known[candidate.key] = measurement
        if self._store is not None:
            self._store.keep(CONFIRMED, {key: each.model_dump(mode="json") for key, each in self._known.items()})

    def count(self, winner: Candidate) -> int:
        """Return how many winners have been confirmed on these prompts, this one included."""
        assert self._store is not None, "only a search has further runs"
        winners = self._store.noted(WINNERS) or []
        if winner.key not in winners:
            winners = [*winners, winner.key]
            self._store.keep(WINNERS, winners)
        return len(winners)


def to_confirm(race: Iterable[MeasuredCandidate]) -> list[MeasuredCandidate]:
    """Return the best finalist of each study, the winner first."""
    of_studies: dict[str, MeasuredCandidate] = {}
    for each in race:
        of_studies.setdefault(each.study, each)
    by_candidate: dict[str, MeasuredCandidate] = {}
    for each in of_studies.values():
        by_candidate.setdefault(each.candidate.key, each)
    return list(by_candidate.values())


def confirm(
    chosen: Sequence[MeasuredCandidate],
    bench: Measuring,
    budget: Budget,
    progress: Progress,
    confirmations: Confirmations,
    *,
    keep_seconds: float = 0.0,
) -> list[MeasuredCandidate]:
    """Measure candidates on held-out prompts, in order; the rivals of the first count on the prompts that it has too.

    Each has an equal share of the time that is left beside `keep_seconds`, which ends its measurement on a few prompts at the
    earliest, or leaves out one other than the first. Time knows nothing of the samples, so a shorter measurement is as honest as a
    whole one, and its interval wider. No candidate is measured twice on a prompt, by any run of a search.
    """
    left = [_not_in(confirmations.of(each.candidate), bench.indices) for each in chosen]
    progress.stage("confirmation on held-out prompts", sum(map(len, left)))
    confirmed: list[MeasuredCandidate] = []
    for number, each in enumerate(chosen):
        samples = confirmations.of(each.candidate).samples
        may_go_on = budget.share(len(chosen) - number, keep_seconds) if left[number] else None
        if may_go_on is None and confirmed and not samples:
            progress.say(f"{each.study} is not measured on held-out prompts: no time is left")
            continue
        if may_go_on is not None or not samples:
            fewest = budget.end.least.held_out - len(samples)
            samples += _measured(bench, each.candidate, left[number], fewest, may_go_on or (lambda: False), progress)
        measurement = Measurement(samples=tuple(sorted(samples, key=lambda sample: sample.prompt)))
        confirmations.keep(each.candidate, measurement)
        confirmed.append(each.model_copy(update={"measurement": measurement}))
    return _on_common_prompts(confirmed)


def _not_in(measurement: Measurement, indices: Sequence[int]) -> list[int]:
    measured = {sample.prompt for sample in measurement.samples}
    return [index for index in indices if index not in measured]


def _measured(
    bench: Measuring,
    candidate: Candidate,
    indices: Sequence[int],
    least: int,
    may_go_on: Callable[[], bool],
    progress: Progress,
) -> tuple[PromptSample, ...]:
    """Return samples of a candidate, as many as time allows."""
    samples: list[PromptSample] = []

    def keep(sample: PromptSample) -> None:
        samples.append(sample)
        progress.advance()
        in_time = may_go_on()  # always asked, as it times the steps
        if not in_time and least <= len(samples) < len(indices):
            raise OutOfTimeError

    may_go_on()  # begins the first step
    with suppress(OutOfTimeError):
        bench.measure(candidate, indices, on_sample=keep)
    return tuple(samples)


def _on_common_prompts(confirmed: Sequence[MeasuredCandidate]) -> list[MeasuredCandidate]:
    """Return the winner, and its rivals on the prompts that it was measured on; without those that share too few."""
    winner, *rivals = confirmed
    prompts = {sample.prompt for sample in winner.measurement.samples}
    found = [winner]
    for rival in rivals:
        shared = tuple(sample for sample in rival.measurement.samples if sample.prompt in prompts)
        if len(shared) >= FEWEST_SAMPLES:
            found.append(rival.model_copy(update={"measurement": Measurement(samples=shared)}))
    return found


def note_cuts(confirmed: Sequence[MeasuredCandidate], num_wanted: int, num_earlier: int, budget: Budget) -> None:
    """Note what was confirmed on fewer samples than wanted, and how many of the winner's an earlier run measured."""
    (_, count), *rivals = [(each.study, len(each.measurement.samples)) for each in confirmed]
    unit = f"held-out {budget.unit}"
    budget.cut("confirmed", count, num_wanted, unit)
    if fewer := [f"{label} on {of_rival}" for label, of_rival in rivals if of_rival < count]:
        budget.cuts.append(f"compared on fewer than the winner's {count} {unit}: {', '.join(fewer)}")
    if num_earlier:
        budget.cuts.append(
            f"earlier runs of this search measured the winner on {num_earlier} of its {count} {unit}: both are pooled"
        )
