"""Signs of a disturbed machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from studies.measurement import Measurement
from tests.support.records import sample
from tuner.measuring.machine import MachineNoise, MachineWatch, plain_variation, seconds_waited


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
    found = watch.noise([], _block([1.0]))
    assert (found.load, found.cost_error, found.plain_variation) == (9.0, 0.4, None)
    assert len(found.model_copy(update={"cores": 2}).signs) == 2
    assert MachineNoise(cores=2).signs == ()


def test_the_load_average_is_asked_where_waiting_is_not_known() -> None:
    """It counts the threads of this process, and tells of the whole search."""
    assert "load average" in MachineNoise(load=7.0, cores=2).disturbances[0]
    assert MachineNoise(load=7.0, cores=2, waiting=0.01).disturbances == ()
    assert "waited for a processor for 40%" in MachineNoise(cores=2, waiting=0.4).disturbances[0]


def test_a_cost_table_that_fits_badly_puts_predictions_in_doubt_and_no_figures() -> None:
    noise = MachineNoise(cores=2, cost_error=0.3)
    assert (len(noise.signs), noise.disturbances) == (1, ())


def test_waiting_is_of_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.measuring.machine.TASKS", tmp_path)
    assert seconds_waited() is None
    for thread, waited in (("1", 2_000_000_000), ("2", 500_000_000)):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(f"123456 {waited} 7\n")
    (tmp_path / "3").mkdir()  # a thread that has ended meanwhile
    assert seconds_waited() == pytest.approx(2.5)
