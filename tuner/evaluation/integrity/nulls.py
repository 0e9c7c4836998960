"""`sdtune check-integrity`, first half: how often is a speed-up claimed where none can be?

Each run is a search in small: candidates that cannot win are measured as trials, the best race, the winner is confirmed on
held-out prompts, and `tuner.search.decision` says whether that is a speed-up. Only the studies are left out, as there is nothing to
propose, and the pruning of trials, which saves time and chooses nothing.

Forty real searches would take hours. Unless asked to decode anew for every run, each prompt is decoded several times once and
for all, and the runs draw prompts and repetitions from that bank. Its samples are real, with real noise, but all runs share
them: they are not as many as independent runs, and that the machine may be slow for a while shows only in runs decoded anew.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from pydantic import Field
from scipy import stats

from decoding.documents.strict_yaml import Document
from decoding.profile import Interval
from studies.contract import Candidate, TrialRecord, TrialState
from studies.measurement import Measurement
from tuner.config import SearchConfig
from tuner.evaluation.integrity.null_benches import Bank, Family, FreshBench, ResampledBench
from tuner.measuring.paired import Bench
from tuner.progress import Progress, Unwatched
from tuner.search.decision import claims_speedup, confirm, race_best
from tuner.search.race import Measuring
from tuner.search.task import Task

STUDY = "null"
MOST_CLAIMS = 0.05
"""Share of the runs that may claim a speed-up: what 95 % intervals promise, and twice what they promise of one side."""


class NullRun(Document):
    """What one search in small came to."""

    best_trial: float = Field(description="speed-up of the best trial, which choosing flatters")
    confirmed: Interval
    claims: bool


class NullCheck(Document):
    """One family of candidates that cannot win, and the verdicts on it."""

    family: str
    truth: str
    num_candidates: int
    in_bank: tuple[Measurement, ...] = Field(
        description="what was decoded of the held-out prompts, all repetitions; none if decoded anew", repr=False
    )
    runs: tuple[NullRun, ...] = Field(min_length=1)

    @property
    def num_claims(self) -> int:
        """Runs that claimed a speed-up."""
        return sum(run.claims for run in self.runs)

    @property
    def share(self) -> Interval:
        """Share of the runs that claimed one, with the exact interval of independent runs (Clopper and Pearson)."""
        found = stats.binomtest(self.num_claims, len(self.runs)).proportion_ci(confidence_level=0.95)
        return Interval(value=self.num_claims / len(self.runs), ci95=(float(found.low), float(found.high)))


def check_nulls(
    task: Task,
    tuning: Bench,
    held_out: Bench,
    family: Family,
    *,
    num_runs: int,
    repetitions: int,
    fresh: bool,
    progress: Progress,
) -> NullCheck:
    """Let the decision choose among the family's candidates `num_runs` times, each on prompts drawn anew."""
    if fresh:
        open_benches, in_bank = _decoding(tuning, held_out, family), []
    else:
        banks = [
            _fill(bench, family, repetitions, part, progress)
            for bench, part in ((tuning, "tuning"), (held_out, "held-out"))
        ]
        open_benches = _drawing(banks[0], banks[1], family)
        in_bank = [banks[1].all_of(each) for each in family.decoded]
    progress.stage(f"{family.name}: searches among candidates that cannot win", num_runs)
    stream = np.random.default_rng(task.config.seed)
    runs = []
    for _ in range(num_runs):
        runs.append(search_among(family, *open_benches(stream), task.config))
        progress.advance()
    return NullCheck(
        family=family.name,
        truth=family.truth,
        num_candidates=len(family.candidates),
        in_bank=tuple(in_bank),
        runs=tuple(runs),
    )


OpenBenches = Callable[[np.random.Generator], tuple[Measuring, Measuring]]
"""Gives the benches of a run, for tuning and held out, with prompts drawn anew."""


def _drawing(tuning: Bank, held_out: Bank, family: Family) -> OpenBenches:
    return lambda stream: (
        ResampledBench(tuning, family, tuning.num_prompts, stream),
        ResampledBench(held_out, family, held_out.num_prompts, stream),
    )


def _decoding(tuning: Bench, held_out: Bench, family: Family) -> OpenBenches:
    return lambda stream: (
        FreshBench(tuning, family, len(tuning.prompts), stream),
        FreshBench(held_out, family, len(held_out.prompts), stream),
    )


def _fill(bench: Bench, family: Family, repetitions: int, part: str, progress: Progress) -> Bank:
    progress.stage(
        f"{family.name}: filling the bank of {part} prompts", len(family.decoded) * repetitions * len(bench.prompts)
    )
    return Bank.fill(bench, family.decoded, repetitions, on_sample=lambda _: progress.advance())


def search_among(family: Family, tuning: Measuring, held_out: Measuring, config: SearchConfig) -> NullRun:
    """Trials, race, confirmation and verdict, as a search goes."""
    indices = tuning.indices[: config.samples_per_trial]
    records = [
        _trial(number, candidate, tuning.measure(candidate, indices))
        for number, candidate in enumerate(family.candidates)
    ]
    finalists = race_best(records, [STUDY], tuning, config, Unwatched())
    winner, *_ = confirm(finalists, records, held_out, Unwatched())
    return NullRun(
        best_trial=max(record.speedup or 0.0 for record in records),
        confirmed=winner.measurement.speedup_interval(),
        claims=claims_speedup(winner.trial.candidate, finalists[0].measurement, winner.measurement),
    )


def _trial(number: int, candidate: Candidate, measurement: Measurement) -> TrialRecord:
    return TrialRecord(
        study=STUDY, number=number, state=TrialState.COMPLETE, candidate=candidate, measurement=measurement
    )
