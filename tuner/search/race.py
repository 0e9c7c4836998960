"""The finalists of all studies race on tuning prompts they were not chosen by; who falls clearly behind drops out.

The race's own samples decide: those that made a candidate a finalist flatter it. It goes over the prompts again, a few times at
most, as long as finalists are left that may differ by more than matters: another pass takes the clock's noise out of a prompt's
samples, not what is particular to the prompts. Where prompts are decoded in batches, what is said of prompts holds for these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy import stats

from studies.contract import Candidate, TrialRecord
from studies.measurement import Measurement, PromptSample, pooled

LAP = 4
"""Prompts between two looks at who is behind."""
FEWEST_TO_JUDGE = 8
"""Prompts before the first look."""
DROP_AT_P = 0.05
"""A finalist drops out when a paired t-test of the log ratios against the leader is below this."""
MOST_PASSES = 3
"""Times that the prompts are gone over while the finalists cannot be told apart."""
ALIKE = 0.01
"""Finalists whose speed-ups differ by less than this share, by a paired 95 % interval, need not be told apart."""


class Measuring(Protocol):
    """Measures candidates, as `tuner.measuring.paired.Bench` does."""

    @property
    def indices(self) -> Sequence[int]:
        """Indices of the measurable prompts, or of the batches of them."""

    def measure(
        self, candidate: Candidate, indices: Sequence[int], on_sample: Callable[[PromptSample], None] = ...
    ) -> Measurement:
        """A candidate on the prompts at these indices; `on_sample` sees each sample."""

    def warm_up_rule(self, candidate: Candidate, indices: Sequence[int]) -> Candidate:
        """The candidate with what its rule learns from the prompts at these indices."""


@dataclass(frozen=True)
class Finalist:
    """A candidate in the race: the trial that brought it here, and what the race has measured of it."""

    trial: TrialRecord
    measurement: Measurement

    @property
    def speedup(self) -> float:
        """The race's speed-up, on tuning prompts."""
        return self.measurement.speedup


def race(
    trials: Sequence[TrialRecord],
    bench: Measuring,
    indices: Sequence[int],
    on_lap: Callable[[int], None] = lambda done: None,
) -> list[Finalist]:
    """Race the candidates of `trials` over `indices`, in laps, all on the same prompts; fastest first, dropouts behind them.

    Those left are gone over `indices` with again until one is ahead, or none by more than matters. A finalist whose text is not
    that of plain decoding is disqualified and comes last. `on_lap` is told how many (candidate, prompt) pairs a lap has measured.
    """
    running = {trial.candidate.key: Finalist(trial, Measurement(samples=())) for trial in trials}
    out: list[Finalist] = []
    for turn in range(MOST_PASSES):
        for start in range(0, len(indices), LAP):
            if not running or (turn and len(running) == 1):
                break
            lap = indices[start : start + LAP]
            for key, finalist in running.items():
                measured = bench.measure(finalist.trial.candidate, lap)
                running[key] = Finalist(finalist.trial, pooled([finalist.measurement, measured]))
                on_lap(len(lap))
            dropped = _disqualified(running.values()) or _clearly_behind(list(running.values()))
            out = [*dropped, *out]
            running = {key: finalist for key, finalist in running.items() if finalist not in dropped}
        if _are_alike(list(running.values())):
            break
    exact = [finalist for finalist in out if finalist.measurement.is_lossless]
    return [*_fastest_first(running.values()), *_fastest_first(exact), *_fastest_first(_disqualified(out))]


def _disqualified(finalists: Iterable[Finalist]) -> list[Finalist]:
    """Those that wrote another text than plain decoding: out, whatever their speed."""
    return [finalist for finalist in finalists if not finalist.measurement.is_lossless]


def _clearly_behind(finalists: list[Finalist]) -> list[Finalist]:
    leader = _fastest_first(finalists)[0]
    ahead = _log_ratios(leader)
    if len(ahead) < FEWEST_TO_JUDGE:
        return []
    return [
        finalist
        for finalist in finalists
        if finalist is not leader and stats.ttest_rel(ahead, _log_ratios(finalist)).pvalue < DROP_AT_P
    ]


def _are_alike(finalists: list[Finalist]) -> bool:
    """Whether nobody is left who may be ahead or behind by more than matters; also if one or none is left."""
    if len(finalists) < 2:
        return True
    leader, *others = _fastest_first(finalists)
    ahead = _log_ratios(leader)
    if len(ahead) < FEWEST_TO_JUDGE:
        return False
    intervals = [stats.ttest_rel(ahead, _log_ratios(each)).confidence_interval(0.95) for each in others]
    return all(interval.low > -ALIKE and interval.high < ALIKE for interval in intervals)


def _log_ratios(finalist: Finalist) -> np.ndarray:
    """Of each prompt, the mean over the passes: times of one prompt are no independent samples of texts."""
    of_prompts: dict[int, list[float]] = {}
    for sample in finalist.measurement.samples:
        of_prompts.setdefault(sample.prompt, []).append(np.log(sample.ratio))
    return np.array([np.mean(of_prompt) for of_prompt in of_prompts.values()])


def _fastest_first(finalists: Iterable[Finalist]) -> list[Finalist]:
    return sorted(finalists, key=lambda finalist: -finalist.speedup)
