"""Signs of a disturbed machine."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from studies.measurement import Measurement
from tests.support.records import sample
from tuner.measuring.machine import MachineNoise, MachineWatch, plain_variation, wait_until_quiet


def _block(seconds: Sequence[float]) -> Measurement:
    """A block in which plain decoding took these seconds for the prompts 0, 1, 2 ..."""
    return Measurement(samples=tuple(sample(each, prompt) for prompt, each in enumerate(seconds)))


def test_prompts_of_different_lengths_are_no_noise() -> None:
    assert plain_variation([_block([1.0, 5.0, 2.0]), _block([1.0, 5.0, 2.0])]) == pytest.approx(0.0)


def test_a_slow_block_is_noise_and_a_slow_moment_is_not() -> None:
    usual = _block([1.0, 5.0, 2.0])
    assert plain_variation([usual, usual, _block([1.5, 7.5, 3.0])]) == pytest.approx(0.5)
    assert plain_variation([usual, usual, _block([1.0, 5.0, 9.0])]) == pytest.approx(0.0)


@pytest.mark.parametrize("blocks", [[], [_block([1.0])]])
def test_a_single_block_shows_no_variation(blocks: list[Measurement]) -> None:
    assert plain_variation(blocks) is None


def test_a_watch_keeps_the_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = iter([1.0, 9.0, 2.0])
    monkeypatch.setattr("os.getloadavg", lambda: (next(loads), 0.0, 0.0))
    watch = MachineWatch()
    for error in (0.02, 0.4, 0.1):
        watch.look()
        watch.note_cost_error(error)
    found = watch.noise([])
    assert (found.load, found.cost_error, found.plain_variation) == (9.0, 0.4, None)
    assert len(found.model_copy(update={"cores": 2}).signs) == 2
    assert MachineNoise(cores=2).signs == ()


def test_waiting_ends_when_it_is_quiet_or_the_time_is_over() -> None:
    seconds = iter(range(100))
    busy = iter([0.9, 0.5, 0.05])
    assert wait_until_quiet(60, busy=lambda: next(busy), clock=lambda: next(seconds))
    assert not wait_until_quiet(5, busy=lambda: 0.9, clock=lambda: next(seconds))
