"""Which windows are compared."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.drifting import PROFILE, SERVER, SimulatedServer, Traffic, quiet
from tuner.drift.contract import ObservedWindow, Promised
from tuner.drift.pairs import pairs_of

PROMISED = Promised(name=PROFILE, speedup=1.5, low=1.4, high=1.6, contexts=(100, 400))


def _window(number: int, arm: str, **changes: Any) -> ObservedWindow:
    given = {"sequences": 1.0, "context": 200.0, "rounds": 8, "tokens": 8, "seconds": 0.5, "drafted": 0, **changes}
    return ObservedWindow(number=number, arm=arm, **{"ended": float(number), **given})


def _pairs(*windows: ObservedWindow, promised: Promised = PROMISED) -> int:
    return len(pairs_of([(SERVER, window) for window in windows], promised))


def test_neighbours_of_both_kinds_are_compared_and_nothing_else() -> None:
    both = _window(1, PROFILE), _window(2, "plain")
    assert _pairs(*both) == _pairs(*reversed(both)) == 1
    assert _pairs(*both, _window(3, PROFILE)) == 2
    assert _pairs(_window(1, PROFILE), _window(2, PROFILE)) == 0
    assert _pairs(_window(1, PROFILE), _window(2, "other"), _window(3, "plain")) == 1
    assert _pairs(_window(1, PROFILE), _window(4, "plain")) == 0, "windows between them were not reported"
    assert len(pairs_of([("a" * 32, both[0]), ("b" * 32, both[1])], PROMISED)) == 0, "of different servers"


@pytest.mark.parametrize(
    "changes",
    [
        {"sequences": 8.0},
        {"context": 390.0},
        {"ended": 100.0},
    ],
)
def test_windows_with_more_than_another_arm_between_them_are_not_compared(changes: dict[str, Any]) -> None:
    assert _pairs(_window(1, PROFILE), _window(2, "plain", **changes)) == 0


@pytest.mark.parametrize("elsewhere", [{"sequences": 8.0}, {"context": 1000.0}, {"context": 10.0}])
def test_other_loads_and_lengths_than_the_profile_was_tuned_for_do_not_count(elsewhere: dict[str, Any]) -> None:
    assert _pairs(_window(1, PROFILE, **elsewhere), _window(2, "plain", **elsewhere)) == 0


def test_load_and_lengths_count_where_the_profile_was_tuned_for_them() -> None:
    at_eight = PROMISED.model_copy(update={"batch_size": 8, "contexts": None})
    places: dict[str, Any] = {"sequences": 8.0, "context": 1000.0}
    assert _pairs(_window(1, PROFILE, **places), _window(2, "plain", **places), promised=at_eight) == 1


def test_pairs_stand_for_all_windows_however_often_the_server_compares() -> None:
    windows = list(SimulatedServer(None, seed=0).serve(quiet(Traffic(1000))))
    pairs = pairs_of(windows, PROMISED)
    of_window = dict(windows_by_number := {window.number: window for _, window in windows})
    stood_for = sum(pair.plain_tokens for pair in pairs) / of_window[1].rounds
    assert len(windows_by_number) == 1000
    assert 0.85 * 1000 < stood_for <= 1000
