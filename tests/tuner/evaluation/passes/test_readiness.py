"""Readiness of new candidates."""

from __future__ import annotations

import pytest

from decoding.runners.static import StaticRunner
from decoding.target import Target
from tests.support.tiny import tiny_llama
from tuner.evaluation.passes.readiness import measure_readiness


def test_candidates_differ_and_switching_cost_is_a_difference() -> None:
    target = Target(tiny_llama(6), lambda kinds, device: StaticRunner(kinds, device, compiled=False))
    measured = measure_readiness(target, num_candidates=3)
    assert len({each["draft"] for each in measured}) == 3
    for each in measured:
        assert each["switch_seconds"] == pytest.approx(each["first_seconds"] - each["second_seconds"])
        assert each["second_seconds"] > 0
