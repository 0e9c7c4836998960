"""The race: finalists of all studies decode tuning prompts that did not select them; clearly slower ones drop out.

Only the race's own samples count, as the samples that selected a finalist flatter it. The prompts are repeated, a few times at
most, while finalists are left that may differ by more than matters: another pass reduces the noise of the clock, not the
differences between prompts. With batches, read batch for prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from studies.contract import TrialRecord
from studies.measurement import Measurement, pooled
from tuner.measuring.turns import Measuring

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


@dataclass(frozen=True)
class Finalist:
    """A candidate in the race: its trial, and its measurement by the race."""

    trial: TrialRecord
    measurement: Measurement

    @property
    def speedup(self) -> float:
        """Speed-up in the race, on tuning prompts."""
        return self.measurement.speedup


def race(
    trials: Sequence[TrialRecord],
    bench: Measuring,
    indices: Sequence[int],
    on_pass: Callable[[int, int], None] = lambda number, total: None,
    on_lap: Callable[[int], None] = lambda done: None,
    may_go_on: Callable[[], bool] = lambda: True,
) -> list[Finalist]:
    """Race the candidates of `trials` over the prompts at `indices`, in laps; return them fastest first, then the dropouts.

    Passes are repeated until one finalist leads, or none by more than matters. A finalist whose output differs from plain
    decoding is disqualified and comes last. `on_pass` gets the number of a pass, from 1, and how many (candidate, prompt) pairs it
    measures at most; `on_lap` gets how many a lap measured.

    `may_go_on` is asked before each lap, and ends the race: all finalists that are left have then run the same prompts. The
    first lap is always run.
    """
    running = {trial.candidate.key: Finalist(trial, Measurement(samples=())) for trial in trials}
    out: list[Finalist] = []
    num_laps, in_time = 0, True
    for turn in range(MOST_PASSES):
        on_pass(turn + 1, len(indices) * len(running))
        for start in range(0, len(indices), LAP):
            in_time = may_go_on() or not num_laps
            if not in_time or not running or (turn and len(running) == 1):
                break
            num_laps += 1
            lap = indices[start : start + LAP]
            for key, finalist in running.items():
                measured = bench.measure(finalist.trial.candidate, lap)
                running[key] = Finalist(finalist.trial, pooled([finalist.measurement, measured]))
                on_lap(len(lap))
            dropped = _disqualified(running.values()) or _clearly_slower(list(running.values()))
            out = [*dropped, *out]
            running = {key: finalist for key, finalist in running.items() if finalist not in dropped}
        if not in_time or _are_alike(list(running.values())):
            break
    exact = [finalist for finalist in out if finalist.measurement.is_lossless]
    return [*_fastest_first(running.values()), *_fastest_first(exact), *_fastest_first(_disqualified(out))]


def _disqualified(finalists: Iterable[Finalist]) -> list[Finalist]:
    """Return the finalists whose output differs from plain decoding, whatever their speed."""
    return [finalist for finalist in finalists if not finalist.measurement.is_lossless]


def _clearly_slower(finalists: list[Finalist]) -> list[Finalist]:
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
    """Return True if no finalist may be faster or slower by more than matters, or at most one is left."""
    if len(finalists) < 2:
        return True
    leader, *others = _fastest_first(finalists)
    ahead = _log_ratios(leader)
    if len(ahead) < FEWEST_TO_JUDGE:
        return False
    intervals = [stats.ttest_rel(ahead, _log_ratios(each)).confidence_interval(0.95) for each in others]
    return all(interval.low > -ALIKE and interval.high < ALIKE for interval in intervals)


def _log_ratios(finalist: Finalist) -> np.ndarray:
    """Return the mean log ratio of each prompt over the passes: repeated times of a prompt are not independent samples."""
    of_prompts: dict[int, list[float]] = {}
    for sample in finalist.measurement.samples:
        of_prompts.setdefault(sample.prompt, []).append(np.log(sample.ratio))
    return np.array([np.mean(of_prompt) for of_prompt in of_prompts.values()])


def _fastest_first(finalists: Iterable[Finalist]) -> list[Finalist]:
    return sorted(finalists, key=lambda finalist: -finalist.speedup)
