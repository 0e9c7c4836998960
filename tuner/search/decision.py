"""From trials to a verdict: the finalists, their confirmation on held-out prompts, and the claim of a speed-up.

A search decides here, and `sdtune evaluate integrity` tests the same decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from studies.contract import Candidate, TrialRecord, TrialState, best_trials
from studies.measurement import Measurement
from tuner.config import SearchConfig
from tuner.measuring.contract import Measuring
from tuner.progress import Progress
from tuner.search.race import Finalist, race

REFERENCE_RULES = ("ada_edl", "ada_edl_published")
"""Rules that are in the final table whenever a trial measured them."""


@dataclass(frozen=True)
class Confirmed:
    """A candidate measured on the held-out prompts, and its label in the final table."""

    label: str
    trial: TrialRecord
    measurement: Measurement


def claims_speedup(candidate: Candidate, raced: Measurement, confirmed: Measurement) -> bool:
    """Return True if a speed-up is claimed for a candidate, which is if `objection` has none."""
    return objection(candidate, raced, confirmed) is None


def objection(candidate: Candidate, raced: Measurement, confirmed: Measurement) -> str | None:
    """Return why no speed-up is claimed for a candidate, or None if one is.

    It must draft, be lossless in race and confirmation, and have its 95 % interval on the held-out prompts (`confirmed`) above 1.
    That is of the decode phase; end to end, prefill included, the interval must not lie below 1.
    """
    if not candidate.draft.drafts:
        return "the best candidate decodes plainly"
    if not (confirmed.is_lossless and raced.is_lossless):
        return "its texts differ from plain decoding's"
    if confirmed.speedup_interval().ci95[0] <= 1.0:
        return "its 95 % interval does not lie above 1"
    if confirmed.is_slower_end_to_end:
        return "it decodes faster, but its prefill costs more than that saves: end to end it is slower"
    return None


def race_best(
    records: Sequence[TrialRecord],
    studies: Iterable[str],
    bench: Measuring,
    config: SearchConfig,
    progress: Progress,
    expected: Mapping[str, float] = MappingProxyType({}),
) -> list[Finalist]:
    """Race the best trials of all studies and the best of each, on tuning prompts that no trial decoded; the fastest first.

    Best is by `expected` speed-up (`Study.expected`), else measured. Adaptive rules are warmed up on the prompts of the trials.
    Returns an empty list if no trial is complete.
    """
    of_studies = [[record for record in records if record.study == name] for name in studies]
    best_of_each = [best for of_study in of_studies for best in best_trials(of_study, 1, expected=expected)]
    best_of_all = best_trials(records, config.finalists, expected=expected)
    finalists = {record.candidate.key: record for record in [*best_of_all, *best_of_each]}
    of_trials, unseen = bench.indices[: config.samples_per_trial], bench.indices[config.samples_per_trial :]
    indices = unseen if len(unseen) >= 2 else bench.indices
    progress.stage("race of the finalists", len(indices) * len(finalists))
    warmed_up = [
        r.model_copy(update={"candidate": bench.warm_up_rule(r.candidate, of_trials)}) for r in finalists.values()
    ]
    return race(warmed_up, bench, indices, on_lap=progress.advance)


def confirm(
    finalists: Sequence[Finalist], records: Sequence[TrialRecord], bench: Measuring, progress: Progress
) -> list[Confirmed]:
    """Measure the best finalist of each study and the best trial of each reference rule on held-out prompts, the winner first."""
    chosen: dict[str, tuple[str, TrialRecord]] = {}
    for label, trial in [*_best_of_studies(finalists), *_references(records)]:
        chosen.setdefault(trial.candidate.key, (label, trial))
    indices = bench.indices
    progress.stage("confirmation on held-out prompts", len(indices) * len(chosen))
    return [
        Confirmed(label, trial, bench.measure(trial.candidate, indices, on_sample=lambda _: progress.advance()))
        for label, trial in chosen.values()
    ]


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
