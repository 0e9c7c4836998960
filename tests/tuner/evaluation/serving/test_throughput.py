"""Ratios of servers over rounds."""

from __future__ import annotations

import pytest

from tuner.evaluation.serving.throughput import compare


def test_ratio_is_of_all_tokens_over_all_seconds_and_wrong_answers_are_counted() -> None:
    samples = [
        {"round": number, "streams": 4, "server": name, "seconds": seconds * (1 + number), "tokens": 60, "wrong": wrong}
        for number in range(3)
        for name, seconds, wrong in (("sdtune", 1.0, 0), ("plain", 2.0, 1))
    ]
    (row,) = compare(samples, [4], ["sdtune", "plain"])
    assert row["tokens_per_second"] == {"sdtune": pytest.approx(30), "plain": pytest.approx(15)}
    assert row["ratio"]["plain"]["value"] == pytest.approx(2)
    assert row["ratio"]["plain"]["ci95"] == pytest.approx([2, 2])
    assert row["wrong"] == {"sdtune": 0, "plain": 3}
