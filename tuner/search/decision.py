"""From trials to a verdict: who races, who is confirmed on held-out prompts, and whether what was measured there is a speed-up.

A search decides here, and `sdtune check-integrity` puts the very same decision to the test.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from decoding.drafts import PlainDecoding
from studies.contract import Candidate, TrialRecord, TrialState, best_trials
from studies.measurement import Measurement
from tuner.config import SearchConfig
from tuner.progress import Progress
from tuner.search.race import Finalist, Measuring, race

REFERENCE_RULES = ("ada_edl",)
"""Published rules that stand in the final table whether they came far or not."""


@dataclass(frozen=True)
class Confirmed:
    """A candidate on the held-out prompts, and its line in the final table."""

    label: str
    trial: TrialRecord
    measurement: Measurement


def claims_speedup(candidate: Candidate, raced: Measurement, confirmed: Measurement) -> bool:
    """Whether a winner is said to beat plain decoding: it drafts, its text was right throughout, and on the held-out prompts
    (`confirmed`) its 95 % interval lies above 1."""
    drafts = not isinstance(candidate.draft, PlainDecoding)
    is_lossless = confirmed.is_lossless and raced.is_lossless
    return drafts and is_lossless and confirmed.speedup_interval().ci95[0] > 1.0


def race_best(
    records: Sequence[TrialRecord],
    studies: Iterable[str],
    bench: Measuring,
    config: SearchConfig,
    progress: Progress,
    expected: Mapping[str, float] = MappingProxyType({}),
) -> list[Finalist]:
    """The best trials of all studies together, and the best of each, on the tuning prompts no trial has seen; none if no trial is
    complete. The best are those of which most is `expected` (`Study.expected`).

    A rule that learns goes in with what it learns from the prompts of the trials.
    """
    of_studies = [[record for record in records if record.study == name] for name in studies]
    best_of_each = [best for of_study in of_studies for best in best_trials(of_study, 1, expected=expected)]
    best_of_all = best_trials(records, config.finalists, expected=expected)
    finalists = {record.candidate.key: record for record in [*best_of_all, *best_of_each]}
    of_trials, unseen = bench.indices[: config.samples_per_trial], bench.indices[config.samples_per_trial :]
    indices = unseen if len(unseen) >= 2 else bench.indices
    progress.stage("race of the finalists", len(indices) * len(finalists))
    taught = [
        r.model_copy(update={"candidate": bench.warm_up_rule(r.candidate, of_trials)}) for r in finalists.values()
    ]
    return race(taught, bench, indices, on_lap=progress.advance)


def confirm(
    finalists: Sequence[Finalist], records: Sequence[TrialRecord], bench: Measuring, progress: Progress
) -> list[Confirmed]:
    """The winner of the race, the best finalist of each study, and the best trial with each reference rule, on held-out prompts."""
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
    """The first finalist of each study, the winner first; what several of a study have in common is its name."""
    best: dict[str, TrialRecord] = {}
    for finalist in finalists:
        best.setdefault(finalist.trial.study, finalist.trial)
    return list(best.items())


def _references(records: Sequence[TrialRecord]) -> list[tuple[str, TrialRecord]]:
    """The best trial with each reference rule, also one that was given up early: not to win, but to be seen."""
    references = []
    for rule in REFERENCE_RULES:
        tried = [
            (record.measurement.speedup, record)
            for record in records
            if record.candidate.draft_length.rule == rule
            and not isinstance(record.candidate.draft, PlainDecoding)
            and record.state is not TrialState.FAIL
            and record.measurement is not None
        ]
        if tried:
            references.append((f"best {rule}", max(tried, key=lambda pair: pair[0])[1]))
    return references
