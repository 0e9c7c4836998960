"""Simulated servers: no false alarm from noise, load or lengths, and an alarm after real drift."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from decoding.arms.chooser import Promise
from tests.support.drifting import PROFILE, SimulatedServer, Traffic, quiet
from tuner.drift.contract import DriftState, DriftVerdict, Kept, Promised
from tuner.drift.judgement import judge
from tuner.drift.posterior import BLOCK_WINDOWS, FEWEST_BLOCKS

PROMISED = Promised(name=PROFILE, speedup=1.5, low=1.42, high=1.58, contexts=(150, 1200))
LOOK = 1024
"""Windows from one look at all of them to the next: each could raise a false alarm."""


def _states(traffic: Sequence[Traffic], *, seed: int = 0, promised: Promised = PROMISED) -> list[DriftState]:
    """Return the verdict after every thousand windows."""
    promise = Promise(promised.speedup, promised.low, promised.high, promised.batch_size)
    server, windows, found = SimulatedServer(promise, seed=seed), [], []
    for part in traffic:
        for window in server.serve(part):
            windows.append(window)
            if len(windows) % LOOK == 0:
                found.append(judge(promised, Kept(windows)))
    return found


def _verdicts(traffic: Sequence[Traffic], *, seed: int = 0, promised: Promised = PROMISED) -> list[DriftVerdict]:
    return [state.verdict for state in _states(traffic, seed=seed, promised=promised)]


@pytest.mark.parametrize(
    "traffic",
    [Traffic(4096), Traffic(4096, machine_sd=0.3, window_sd=0.15), Traffic(4096, speedup=1.42, text_sd=0.05)],
    ids=["usual noise", "much noise", "at the end of the interval"],
)
def test_noise_that_lasts_raises_no_alarm(traffic: Traffic) -> None:
    for seed in range(3):
        found = _verdicts([traffic], seed=seed)
        assert found[-1] is DriftVerdict.HOLDS
        assert DriftVerdict.BELOW not in found


def test_a_profile_that_is_hardly_faster_than_plain_rounds_raises_no_alarm() -> None:
    """Arms then change by chance, just after a window that was slow."""
    promised = PROMISED.model_copy(update={"speedup": 1.06, "low": 1.03, "high": 1.09})
    for seed in range(2):
        assert DriftVerdict.BELOW not in _verdicts([Traffic(4096, speedup=1.06)], seed=seed, promised=promised)


@pytest.mark.parametrize("speedup", [1.2, 0.9])
def test_drift_is_found_and_its_size_told(speedup: float) -> None:
    for seed in range(2):
        found = _states([Traffic(2048), Traffic(4096, speedup=speedup)], seed=seed)
        assert [state.verdict for state in found[:2]] == [DriftVerdict.HOLDS] * 2
        assert found[-1].verdict is DriftVerdict.BELOW
        assert found[-1].posterior is not None
        assert found[-1].posterior.speedup == pytest.approx(speedup, rel=0.08)
        assert found[-1].posterior.probability_below > 0.99


def test_after_drift_the_profile_may_hold_again() -> None:
    assert _verdicts([Traffic(2048), Traffic(3072, speedup=1.1), Traffic(5120)])[-1] is DriftVerdict.HOLDS


@pytest.mark.parametrize(
    "other",
    [
        Traffic(3072, sequences=8, speedup=0.8),
        Traffic(3072, prompt=6000, answer=2000, speedup=0.8),
        Traffic(3072, prompt=500, answer=700),
    ],
    ids=["a load that it was not tuned for", "lengths that it was not tuned for", "longer texts"],
)
def test_a_change_of_load_or_lengths_is_no_drift(other: Traffic) -> None:
    found = _verdicts([Traffic(2048), other, Traffic(1024)], seed=1)
    assert found[1] is DriftVerdict.HOLDS
    assert DriftVerdict.BELOW not in found


def test_windows_elsewhere_are_counted_and_are_no_evidence() -> None:
    (*_, state) = _states([Traffic(2048, sequences=8, speedup=0.8)])
    assert state.verdict is DriftVerdict.TOO_LITTLE
    assert state.elsewhere == state.windows > 0
    assert state.pairs == 0


def test_a_few_minutes_of_traffic_are_too_little_whatever_they_show() -> None:
    windows = list(SimulatedServer(None, seed=0).serve(quiet(Traffic(FEWEST_BLOCKS * BLOCK_WINDOWS + 1, speedup=1.0))))
    state = judge(PROMISED, Kept(windows[: (FEWEST_BLOCKS - 1) * BLOCK_WINDOWS - 1]))
    assert (state.verdict, state.posterior, state.blocks) == (DriftVerdict.TOO_LITTLE, None, FEWEST_BLOCKS - 1)
    assert judge(PROMISED, Kept(windows)).verdict is DriftVerdict.BELOW


def test_windows_that_agree_exactly_have_a_verdict_too() -> None:
    for speedup, verdict in ((1.6, DriftVerdict.HOLDS), (1.3, DriftVerdict.BELOW)):
        last = _states([quiet(Traffic(2048, speedup=speedup))])[-1]
        assert last.verdict is verdict
        assert last.posterior is not None
        assert math.isfinite(last.posterior.low)


def test_acceptance_by_position_is_of_the_profile_only() -> None:
    (_, window), *_ = SimulatedServer(Promise(1.5, 1.4, 1.6), seed=0).serve(quiet(Traffic(1)))
    counted = window.model_copy(update={"accepted_lengths": (4, 2, 2)})
    plain = counted.model_copy(update={"arm": "plain", "accepted_lengths": (8,), "number": 2})
    state = judge(PROMISED, Kept([("a" * 32, counted), ("a" * 32, plain)]))
    assert state.acceptance_by_position == (0.5, 0.25)
    assert (state.windows, state.plain_windows) == (1, 1)


def test_nothing_is_promised_by_plain_decoding() -> None:
    assert judge(None, Kept()).verdict is DriftVerdict.NOTHING_PROMISED
