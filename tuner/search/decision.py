"""From trials to a verdict: the finalists, their confirmation on held-out prompts, and the claim of a speed-up.

A search decides here, and `benchmarks.integrity` tests the same decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from studies.contract import Candidate, TrialRecord, TrialState, best_trials
from studies.measurement import Measurement, PromptSample
from tuner.config import FEWEST_SAMPLES, SearchConfig
from tuner.measuring.turns import Measuring
from tuner.progress import Progress
from tuner.search.race import Finalist, race

REFERENCE_RULES = ("ada_edl", "ada_edl_published")
"""Rules that are in the final table whenever a trial measured them."""


Enter = Callable[[Sequence[TrialRecord], Sequence[int]], list[TrialRecord]]
"""Takes the best trials and the prompts of the race, and returns the trials that race."""


@dataclass(frozen=True)
class Confirmed:
    """A candidate measured on the held-out prompts, and its label in the final table."""

    label: str
    trial: TrialRecord
    measurement: Measurement


def claims_speedup(candidate: Candidate, raced: Measurement, confirmed: Measurement, *, busy: bool = False) -> bool:
    """Return True if a speed-up is claimed for a candidate, which is if `objection` has none."""
    return objection(candidate, raced, confirmed, busy=busy) is None


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


def blocks(records: Iterable[TrialRecord], race: Iterable[Finalist]) -> Iterator[Measurement]:
    """Yield the measurements on tuning prompts, whose plain decoding shows how quiet the machine was."""
    yield from (each.measurement for each in records if each.measurement is not None and each.repeat_of is None)
    yield from (each.measurement for each in race if each.measurement.samples)


def race_best(
    records: Sequence[TrialRecord],
    studies: Iterable[str],
    bench: Measuring,
    config: SearchConfig,
    progress: Progress,
    expected: Mapping[str, float] = MappingProxyType({}),
    may_go_on: Callable[[], bool] = lambda: True,
    enter: Enter = lambda best, indices: list(best),
) -> list[Finalist]:
    """Race the best trials of all studies and the best of each, on tuning prompts that no trial decoded; the fastest first.

    Best is by `expected` speed-up (`Study.expected`), else measured. Adaptive rules are warmed up on the prompts of the trials.
    `may_go_on` is asked before each lap; see `race`. `enter` may change who races. Returns an empty list if nobody does.
    """
    of_studies = [[record for record in records if record.study == name] for name in studies]
    best_of_each = [best for of_study in of_studies for best in best_trials(of_study, 1, expected=expected)]
    best_of_all = best_trials(records, config.finalists, expected=expected)
    finalists = {record.candidate.key: record for record in [*best_of_all, *best_of_each]}
    of_trials, unseen = bench.indices[: config.samples_per_trial], bench.indices[config.samples_per_trial :]
    indices = unseen if len(unseen) >= 2 else bench.indices
    entrants = enter(list(finalists.values()), indices)
    warmed_up = [r.model_copy(update={"candidate": bench.warm_up_rule(r.candidate, of_trials)}) for r in entrants]

    def show_pass(number: int, total: int) -> None:
        progress.stage("race of the finalists" + (f", pass {number}" if number > 1 else ""), total)

    return race(warmed_up, bench, indices, show_pass, progress.advance, may_go_on)


Pacer = Callable[[int], Callable[[], bool] | None]
"""Takes the number of candidates left, this one included, and gives the question asked before each further sample of the
candidate, or None if no time is left for it at all."""


def to_confirm(finalists: Sequence[Finalist], records: Sequence[TrialRecord]) -> list[tuple[str, TrialRecord]]:
    """Return the best finalist of each study and the best trial of each reference rule with their labels, the winner first."""
    chosen: dict[str, tuple[str, TrialRecord]] = {}
    for label, trial in [*_best_of_studies(finalists), *_references(records)]:
        chosen.setdefault(trial.candidate.key, (label, trial))
    return list(chosen.values())


def confirm(
    finalists: Sequence[Finalist],
    records: Sequence[TrialRecord],
    bench: Measuring,
    progress: Progress,
    pacer: Pacer = lambda num_left: lambda: True,
    *,
    least: int = FEWEST_SAMPLES,
    known: Mapping[str, Measurement] = MappingProxyType({}),
    keep: Callable[[Confirmed], None] = lambda confirmed: None,
) -> list[Confirmed]:
    """Measure the candidates of `to_confirm` on held-out prompts, in order; rivals count on the prompts that the winner has too.

    `pacer` may end a candidate's measurement, on `least` prompts at the earliest, or leave out a candidate other than the winner.
    It knows the time and nothing of the samples, so a shorter measurement is as honest as a whole one, and its interval wider.
    `known` has what earlier runs measured, by candidate: no candidate is measured twice on a prompt. `keep` gets each whole one.
    """
    chosen = to_confirm(finalists, records)
    before = [known.get(trial.candidate.key, Measurement(samples=())) for _, trial in chosen]
    left = [_not_in(each, bench.indices) for each in before]
    progress.stage("confirmation on held-out prompts", sum(map(len, left)))
    confirmed: list[Confirmed] = []
    for number, (label, trial) in enumerate(chosen):
        samples = before[number].samples
        may_go_on = pacer(len(chosen) - number) if left[number] else None
        if may_go_on is None and confirmed and not samples:
            progress.say(f"{label} is not measured on held-out prompts: no time is left")
            continue
        if may_go_on is not None or not samples:
            fewest = least - len(samples)
            sampled = _Samples(may_go_on or (lambda: False), fewest, len(left[number]), progress)
            samples = (*samples, *sampled.measure(bench, trial.candidate, left[number]).samples)
        in_order = Measurement(samples=tuple(sorted(samples, key=lambda sample: sample.prompt)))
        confirmed.append(Confirmed(label, trial, in_order))
        keep(confirmed[-1])
    return _on_common_prompts(confirmed)


def _not_in(measurement: Measurement, indices: Sequence[int]) -> list[int]:
    measured = {sample.prompt for sample in measurement.samples}
    return [index for index in indices if index not in measured]


def _on_common_prompts(confirmed: Sequence[Confirmed]) -> list[Confirmed]:
    """Return the winner, and its rivals on the prompts that it was measured on; without those that share too few."""
    winner, *rivals = confirmed
    prompts = {sample.prompt for sample in winner.measurement.samples}
    shared = [
        replace(
            each, measurement=Measurement(samples=tuple(s for s in each.measurement.samples if s.prompt in prompts))
        )
        for each in rivals
    ]
    return [winner, *(each for each in shared if len(each.measurement.samples) >= FEWEST_SAMPLES)]


class _OutOfTimeError(Exception):
    """No time is left for another sample."""


class _Samples:
    """Samples of one candidate, as many as time allows."""

    def __init__(self, may_go_on: Callable[[], bool], least: int, most: int, progress: Progress) -> None:
        self._may_go_on, self._least, self._most, self._progress = may_go_on, least, most, progress
        self._samples: list[PromptSample] = []

    def measure(self, bench: Measuring, candidate: Candidate, indices: Sequence[int]) -> Measurement:
        """Measure the candidate until its time is spent."""
        self._may_go_on()  # begins the first step
        try:
            return bench.measure(candidate, indices, on_sample=self._keep)
        except _OutOfTimeError:
            return Measurement(samples=tuple(self._samples))

    def _keep(self, sample: PromptSample) -> None:
        self._samples.append(sample)
        self._progress.advance()
        in_time = self._may_go_on()  # always asked, as it times the steps
        if not in_time and self._least <= len(self._samples) < self._most:
            raise _OutOfTimeError


def _best_of_studies(finalists: Sequence[Finalist]) -> list[tuple[str, TrialRecord]]:
    """Return the first finalist of each study with the study's name, the winner first."""
    best: dict[str, TrialRecord] = {}
    for finalist in finalists:
        best.setdefault(finalist.trial.study, finalist.trial)
    return list(best.items())


def _references(records: Sequence[TrialRecord]) -> list[tuple[str, TrialRecord]]:
    """Return the best trial with each reference rule, pruned ones included: they cannot win, but are reported."""
    references = []
    for rule in REFERENCE_RULES:
        tried = [
            (record.measurement.speedup, record)
            for record in records
            if record.candidate.draft_length.rule == rule
            and record.candidate.draft.drafts
            and record.state is not TrialState.FAIL
            and record.measurement is not None
        ]
        if tried:
            references.append((f"best {rule}", max(tried, key=lambda pair: pair[0])[1]))
    return references
