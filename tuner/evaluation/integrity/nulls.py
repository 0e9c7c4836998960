"""Rate of speed-ups claimed for candidates that cannot win.

Each run is a small search: candidates that cannot win are measured as trials, the best ones race, the winner is confirmed on
held-out prompts, and `tuner.search.decision` decides whether to claim a speed-up. Studies are left out, as there is nothing to
propose. So is pruning, which saves time and does not affect the choice.

Forty real searches would take hours. By default each prompt is decoded several times into a bank, and the runs draw prompts and
repetitions from it. Its samples have real noise, but all runs share them, so the runs are not independent. Noise that is
correlated in time shows only in runs decoded afresh.
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
from tuner.measuring.contract import Measuring
from tuner.measuring.machine import MachineNoise, MachineWatch
from tuner.measuring.paired import Bench
from tuner.progress import Progress, Unwatched
from tuner.search.decision import blocks, claims_speedup, confirm, race_best
from tuner.search.task import Task

STUDY = "null"
MAX_CLAIMS = 0.05
"""Maximum share of runs that may claim a speed-up: the error rate of 95 % intervals. Half of it is on one side."""


class NullRun(Document):
    """Result of one small search."""

    best_trial: float = Field(description="speed-up of the best trial, biased upwards by selection")
    confirmed: Interval = Field(description="speed-up of the winner on held-out prompts")
    noise: MachineNoise
    claims: bool = Field(description="true if a speed-up was claimed")


class NullCheck(Document):
    """One family of candidates that cannot win, and its runs."""

    family: str
    truth: str
    num_candidates: int
    in_bank: tuple[Measurement, ...] = Field(
        description="all repetitions of the held-out prompts; empty if decoded afresh", repr=False
    )
    runs: tuple[NullRun, ...] = Field(min_length=1)

    @property
    def num_claims(self) -> int:
        """Number of runs that claimed a speed-up."""
        return sum(run.claims for run in self.runs)

    @property
    def share(self) -> Interval:
        """Share of the runs that claimed a speed-up, with its exact Clopper-Pearson interval."""
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
    """Run `num_runs` small searches among the family's candidates, each on newly drawn prompts."""
    if fresh:
        open_benches, in_bank = _decoding(tuning, held_out, family), []
    else:
        banks = [
            _fill(bench, family, repetitions, part, progress)
            for bench, part in ((tuning, "tuning"), (held_out, "held-out"))
        ]
        open_benches = _drawing(banks[0], banks[1], family)
        in_bank = [banks[1].all_of(each) for each in family.decoded]
    progress.stage(f"{family.name}: small searches", num_runs)
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
"""Function that returns the tuning and the held-out bench of a run, with newly drawn prompts."""


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
    """Run trials, race, confirmation and decision, as a search does."""
    indices = tuning.indices[: config.samples_per_trial]
    records = [
        _trial(number, candidate, tuning.measure(candidate, indices))
        for number, candidate in enumerate(family.candidates)
    ]
    finalists = race_best(records, [STUDY], tuning, config, Unwatched())
    winner, *_ = confirm(finalists, records, held_out, Unwatched())
    watch = MachineWatch()
    watch.look()
    noise = watch.noise(blocks(records, finalists), winner.measurement)
    return NullRun(
        best_trial=max(record.speedup or 0.0 for record in records),
        confirmed=winner.measurement.speedup_interval(),
        noise=noise,
        claims=claims_speedup(
            winner.trial.candidate, finalists[0].measurement, winner.measurement, busy=bool(noise.disturbances)
        ),
    )


def _trial(number: int, candidate: Candidate, measurement: Measurement) -> TrialRecord:
    return TrialRecord(
        study=STUDY, number=number, state=TrialState.COMPLETE, candidate=candidate, measurement=measurement
    )
