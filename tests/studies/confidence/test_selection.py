"""The adaptive threshold: on the authors' logged passes, on cases computed by hand, and the movement of lambda."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from studies.confidence.selection import LambdaSchedule, Selection, growth_cap, select_from_scores, standardise

LOGGED: list[dict[str, Any]] = json.loads((Path(__file__).parent / "logged_passes.json").read_text(encoding="utf-8"))[
    "passes"
]
"""Confidence passes of Llama-2-13B and Llama-2-70B from the run logs in the authors' repository (WA225/ConfLayers)."""


def select(confidences: Sequence[float], **options: Any) -> list[int]:
    return select_from_scores(standardise(confidences, "unrounded"), form="unrounded", **options)


@pytest.mark.parametrize("logged", LOGGED, ids=lambda logged: f"{logged['model']}-{logged['data']}")
def test_logged_sets_are_reproduced(logged: dict[str, Any]) -> None:
    found = select_from_scores(logged["z"], lam=logged["lam"], num_layers=logged["num_layers"])
    assert found == logged["skipped"]


def test_logged_sets_need_the_rounding() -> None:
    matches = [
        select_from_scores(logged["z"], lam=logged["lam"], num_layers=logged["num_layers"], form="unrounded")
        == logged["skipped"]
        for logged in LOGGED
    ]
    assert len(matches) == 49
    assert sum(matches) == 9


def test_standardising_rounds_every_step() -> None:
    scores = standardise([0.1, 0.2, 0.4])
    assert scores.dtype == np.float16
    values = np.array([0.1, 0.2, 0.4], dtype=np.float16)
    assert scores.tolist() == ((values - values.mean()) / np.float16(values.std() + np.float64(1e-6))).tolist()


@pytest.mark.parametrize("form", ["published", "unrounded"])
def test_equal_confidences_select_nothing_in_any_form(form: Any) -> None:
    scores = standardise([0.3] * 6, form)
    assert select_from_scores(scores, lam=-1.0, num_layers=8, form=form) == []


@pytest.mark.parametrize(("model_type", "cap"), [("qwen2", 9), ("qwen3_moe", 9), ("llama", None)])
def test_qwen_models_cap_the_growth(model_type: str, cap: int | None) -> None:
    assert growth_cap(model_type, 28) == cap


def test_a_dip_between_equals_is_skipped() -> None:
    # z = (0.707, -1.414, 0.707). Second gradient: 2.121 everywhere, so k = 3, A = 15 and g = 0.5 everywhere.
    # Windows 2 + int(15 * 0.5 * (1, 2, 3) / 5) = 3, 5, 6; halves 1, 2, 3. Only block 2 lies below its neighbours' mean.
    assert select([1.0, 0.0, 1.0], lam=0.0, num_layers=5) == [2]


@pytest.mark.parametrize(
    ("lam", "expected"),
    [
        (0.0, [2, 4]),  # means of the neighbours: -0.707, 0.354, -1.061, 0.707, -1.414
        (2.0, [2, 4]),  # thresholds of blocks 2 and 4: 0.354 - 2 * 0.354 and 0.707 - 2 * 0.707
        (4.0, []),  # -1.061 and -2.121: below both values
        (-4.0, [2, 3, 4]),  # block 3: -1.061 + 4 * 0.354 = 0.354 > 0
    ],
)
def test_thresholds_of_immediate_neighbours(lam: float, expected: list[int]) -> None:
    # Mean 2, deviation sqrt(2): z = (0.707, -0.707, 0, -1.414, 1.414). A is capped at 0, so each window is 2, its half 1.
    assert select([3.0, 1.0, 2.0, 0.0, 4.0], lam=lam, num_layers=7, window_growth_cap=0) == expected


def test_the_window_grows_with_depth_and_curvature() -> None:
    # z of (0, 0, 0, 0, 3, 0, 0, 0): 3 at block 5, the rest equal. Gradient twice is 0 at the first two indices (k = 2, A = 10).
    # Uncapped, blocks far after the peak see it in a window that has grown and fall below their neighbours' mean; with
    # immediate neighbours only blocks 4 and 6 do.
    values = [0.0, 0.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0]
    assert select(values, lam=0.0, num_layers=10, window_growth_cap=0) == [4, 6]
    wide = select(values, lam=0.0, num_layers=10)
    assert {4, 6} < set(wide)
    assert 5 not in wide


def test_the_first_and_last_block_are_never_selected() -> None:
    rng = np.random.default_rng(0)
    for num_layers in (3, 4, 12, 40):
        for _ in range(50):
            found = select(rng.random(num_layers - 2).tolist(), lam=float(rng.normal()), num_layers=num_layers)
            assert found == sorted(set(found))
            assert all(1 <= index <= num_layers - 2 for index in found)


def test_a_wrong_number_of_confidences_is_refused() -> None:
    with pytest.raises(ValueError, match="8 layers have 6 blocks between the first and the last, got 5"):
        select([0.1] * 5, lam=0.0, num_layers=8)


@pytest.mark.parametrize(
    ("num_skipped", "expected"),
    [(71, 0.05), (70, 0.0), (45, 0.0), (44, -0.05)],  # of 100 blocks; wanted 0.45, slack 0.25
)
def test_lambda_moves_towards_the_wanted_ratio(num_skipped: int, expected: float) -> None:
    schedule = LambdaSchedule(num_layers=102, skip_ratio=0.45)
    assert schedule.after(num_skipped, 0.0) == expected


def test_too_small_a_set_is_selected_again_with_a_lower_lambda() -> None:
    # z as in test_thresholds_of_immediate_neighbours: lambda 4 selects nothing, 2 of 5 blocks need lambda <= 3, block 3 needs
    # 0 < -1.061 - lambda * 0.354, so lambda < -3. The least number is int(5 * 0.5) + 1 = 3.
    scores = standardise([3.0, 1.0, 2.0, 0.0, 4.0], "unrounded")
    schedule = LambdaSchedule(num_layers=7, skip_ratio=0.5, step=0.5, window_growth_cap=0)
    assert schedule.least_skipped == 3
    assert schedule.select(scores, 4.0, "unrounded") == Selection((2, 3, 4), -3.5)


def test_selecting_again_ends_where_lambda_changes_nothing() -> None:
    assert LambdaSchedule(num_layers=8, skip_ratio=0.5).select(standardise([0.3] * 6), 0.0).skipped == ()


def test_settling_moves_lambda_up_after_far_too_many_blocks() -> None:
    # Lambda -4 selects 3 of 5 blocks, more than 0.2 + 0.25 of them; from -3 on, 2 of 5 remain. The least number is 2.
    scores = standardise([3.0, 1.0, 2.0, 0.0, 4.0], "unrounded")
    schedule = LambdaSchedule(num_layers=7, skip_ratio=0.2, step=0.5, window_growth_cap=0)
    assert schedule.settle(scores, -4.0, "unrounded") == Selection((2, 4), -3.0)
    assert schedule.settle(scores, 4.0, "unrounded").skipped == (2, 4)


def test_settling_keeps_too_many_blocks_rather_than_too_few() -> None:
    # One step leads from 3 blocks to none.
    scores = standardise([3.0, 1.0, 2.0, 0.0, 4.0], "unrounded")
    schedule = LambdaSchedule(num_layers=7, skip_ratio=0.2, step=9.0, window_growth_cap=0)
    assert schedule.settle(scores, -4.0, "unrounded") == Selection((2, 3, 4), -4.0)
