"""The time of passes by width and runner."""

from __future__ import annotations

import pytest

from decoding.runners.contract import Inputs, Outputs
from decoding.target import Target
from decoding.target.parts import ModelPart
from tests.support.tiny import tiny_llama
from tuner.evaluation.passes.widths import summarise, time_widths


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.mark.usefixtures("uncompiled")
def test_passes_are_timed_in_turns_and_the_first_sweep_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, widths = Clock(), list[int]()
    model = tiny_llama()
    targets = {"eager": Target(model), "static": Target(model, "static")}
    compute = ModelPart.compute

    def timed(self: ModelPart, inputs: Inputs) -> Outputs:
        width = inputs.token_ids.shape[1]
        widths.append(width)
        slow = 2.0 if inputs.masks else 1.0  # passes of fixed shapes are given their masks
        clock.seconds += slow * (1.0 + 0.5 * width)
        return compute(self, inputs)

    monkeypatch.setattr(ModelPart, "compute", timed)
    taken = time_widths(targets, (1, 3), context=6, num_sweeps=4, clock=clock)
    assert widths == [6, 6, *([1] * 4 + [3] * 4) * 5]
    assert taken == {
        "eager": {1: [1.5] * 4, 3: [2.5] * 4},
        "static": {1: [3.0] * 4, 3: [5.0] * 4},
    }


def test_ratios_are_of_what_was_timed_beside_one_another() -> None:
    rows = summarise({"eager": {1: [1.0, 4.0, 2.0], 4: [2.0, 8.0, 4.0]}})
    assert rows[1]["over_one_position"] == pytest.approx((2.0, 2.0, 2.0)), "a machine that is slower slows both"
    _, low, high = summarise({"eager": {1: [1.0, 1.0], 4: [1.0, 4.0]}})[1]["over_one_position"]
    assert low < 1.0 < 4.0 < high


def test_rows_say_how_much_more_several_positions_take_than_one() -> None:
    taken = {"eager": {1: [2.0, 2.0], 4: [6.0, 6.0]}, "static": {1: [1.0, 1.0], 4: [1.5, 1.5]}}
    rows = {(row["runner"], row["width"]): row for row in summarise(taken)}
    assert rows["eager", 4]["over_one_position"][0] == pytest.approx(3.0)
    assert rows["static", 4]["over_one_position"][0] == pytest.approx(1.5)
    assert rows["static", 4]["over_eager"][0] == pytest.approx(0.25)
    assert rows["static", 4]["median_seconds"] == 1.5
