"""The race: the best trials decode tuning prompts that did not select them; clearly slower candidates drop out.

Only the race's own samples count, as the samples that selected a candidate flatter it. The prompts are repeated, a few times at
most, while candidates are left that may differ by more than matters: another pass reduces the noise of the clock, not the
differences between prompts. With batches, read batch for prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from scipy import stats

from studies.contract import TrialRecord, best_trials
from studies.measurement import pooled
from tuner.measuring.turns import Measuring
from tuner.progress import Progress
from tuner.review.document import MeasuredCandidate

LAP = 4
"""Prompts between two checks for dropouts."""
FEWEST_TO_JUDGE = 8
"""Prompts before the first check."""
DROP_AT_P = 0.05
"""p-value of a paired t-test of log ratios against the leader, below which a finalist drops out."""
MOST_PASSES = 3
"""Passes over the prompts, at most, while the finalists cannot be told apart."""
ALIKE = 0.01
"""Relative difference of speed-ups, by a paired 95 % interval, below which finalists need not be told apart."""


def shortlist(
    records: Sequence[TrialRecord],
    studies: Iterable[str],
    count: int,
    expected: Mapping[str, float] = MappingProxyType({}),
) -> list[TrialRecord]:
    """Return the best `count` trials of all studies, and the best of each.

    Best is by `expected` speed-up (`Study.expected`), else measured.
    """
    of_studies = [[record for record in records if record.study == name] for name in studies]
    best_of_each = [best for of_study in of_studies for best in best_trials(of_study, 1, expected=expected)]
    best_of_all = best_trials(records, count, expected=expected)
    return list({record.candidate.key: record for record in [*best_of_all, *best_of_each]}.values())


def unseen_by_trials(indices: Sequence[int], samples_per_trial: int) -> Sequence[int]:
    """Return the indices of the prompts to race on: those that no trial decoded, or all if too few are left."""
    unseen = indices[samples_per_trial:]
    return unseen if len(unseen) >= 2 else indices


def race(
    trials: Sequence[TrialRecord],
    bench: Measuring,
    indices: Sequence[int],
    progress: Progress,
    may_go_on: Callable[[], bool] = lambda: True,
    may_repeat: Callable[[], bool] = lambda: True,
) -> list[MeasuredCandidate]:
    """Race the candidates of `trials` over the prompts at `indices`, in laps; return them fastest first, then the dropouts.

    Passes are repeated until one candidate is left, or none leads by more than matters. A candidate whose output differs from plain
    decoding is disqualified and comes last. `may_go_on` is asked before each lap, `may_repeat` before each further pass, and
    either ends the race: all candidates that are left have then run the same prompts. The first lap is always run.
    """
    running = {trial.candidate.key: MeasuredCandidate.of(trial) for trial in trials}
    out: list[MeasuredCandidate] = []
    num_laps, in_time = 0, True
    for turn in range(MOST_PASSES):
        if turn and not may_repeat():
            break
        name = "race of the finalists" + (f", pass {turn + 1}" if turn else "")
        progress.stage(name, len(indices) * len(running))
        for start in range(0, len(indices), LAP):
            in_time = may_go_on() or not num_laps
            if not in_time or not running or (num_laps and len(running) == 1):
                break
            num_laps += 1
            lap = indices[start : start + LAP]
            candidates = [each.candidate for each in running.values()]
            measured = bench.side_by_side(candidates, lap, lambda sample: progress.advance())
            for (key, each), own in zip(list(running.items()), measured, strict=True):
                running[key] = each.model_copy(update={"measurement": pooled([each.measurement, own])})
            dropped = _disqualified(running.values()) or _clearly_slower(list(running.values()))
            out = [*dropped, *out]
            running = {key: each for key, each in running.items() if each not in dropped}
        if not in_time or _are_alike(list(running.values())):
            break
    exact = [each for each in out if each.measurement.is_lossless]
    return [*_fastest_first(running.values()), *_fastest_first(exact), *_fastest_first(_disqualified(out))]


def _disqualified(candidates: Iterable[MeasuredCandidate]) -> list[MeasuredCandidate]:
    """Return the candidates whose output differs from plain decoding, whatever their speed."""
    return [each for each in candidates if not each.measurement.is_lossless]


def _clearly_slower(candidates: list[MeasuredCandidate]) -> list[MeasuredCandidate]:
    leader = _fastest_first(candidates)[0]
    ahead = _log_ratios(leader)
    if len(ahead) < FEWEST_TO_JUDGE:
        return []
    return [
        each
        for each in candidates
        if each is not leader and stats.ttest_rel(ahead, _log_ratios(each)).pvalue < DROP_AT_P
    ]


def _are_alike(candidates: list[MeasuredCandidate]) -> bool:
    """Return True if no candidate may be faster or slower by more than matters, or at most one is left."""
    if len(candidates) < 2:
        return True
    leader, *others = _fastest_first(candidates)
    ahead = _log_ratios(leader)
    if len(ahead) < FEWEST_TO_JUDGE:
        return False
    intervals = [stats.ttest_rel(ahead, _log_ratios(each)).confidence_interval(0.95) for each in others]
    return all(interval.low > -ALIKE and interval.high < ALIKE for interval in intervals)


def _log_ratios(each: MeasuredCandidate) -> np.ndarray:
    """Return the mean log ratio of each prompt over the passes: repeated times of a prompt are not independent samples."""
    of_prompts: dict[int, list[float]] = {}
    for sample in each.measurement.samples:
        of_prompts.setdefault(sample.prompt, []).append(np.log(sample.ratio))
    return np.array([np.mean(of_prompt) for of_prompt in of_prompts.values()])


def _fastest_first(candidates: Iterable[MeasuredCandidate]) -> list[MeasuredCandidate]:
    return sorted(candidates, key=lambda each: -each.measurement.speedup)
