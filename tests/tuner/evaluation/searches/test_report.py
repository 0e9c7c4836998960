"""Made-up comparisons of searches: incumbents, budgets, intervals, times to reach a value, and the report."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from rich.console import Console

from studies.contract import TrialRecord, TrialState
from studies.measurement import Measurement
from tests.support.records import candidate, measurement, record, sample
from tuner.evaluation.searches.curves import (
    Finals,
    mean_curve,
    quotient_interval,
    reached_at,
    speedup_interval,
    value_at,
)
from tuner.evaluation.searches.report import CSV_COLUMNS, searches_csv, searches_json, searches_table, write_report
from tuner.evaluation.searches.result import Reach, SearchComparison
from tuner.evaluation.searches.runs import Limits, SearchRun, decoded_tokens

NO_LIMITS = Limits(trials=100)


def run(
    *speedups: float | None, search: str = "swift", seed: int = 0, seconds: float = 2.0, blocks: Sequence[int] = ()
) -> SearchRun:
    """Return a run prepared in 1 s, with a trial of 40 tokens per speed-up (None: failed).

    Trial n skips block n + 1 or `blocks[n]`.
    """
    skipped = blocks or range(1, len(speedups) + 1)
    records = tuple(
        record(speedup, study=search, number=number, blocks=(block,), seconds=seconds)
        for number, (speedup, block) in enumerate(zip(speedups, skipped, strict=True))
    )
    return SearchRun(search, seed, 1.0, records, "its 9 s are spent", False)


def found(
    runs: dict[str, list[SearchRun]],
    held_out: dict[int, Sequence[float]],
    limits: Limits = NO_LIMITS,
    num_prompts: int = 2,
) -> SearchComparison:
    """Return a comparison with held-out ratios by skipped block."""
    measured = {candidate((block,)).key: measurement(ratios) for block, ratios in held_out.items()}
    return SearchComparison(
        {name: tuple(of) for name, of in runs.items()}, limits, measured, num_prompts, {"device": "d"}
    )


def incumbents(of: SearchRun) -> list[int | None]:
    return [None if point.incumbent is None else point.incumbent.number for point in of.points()]


def test_the_incumbent_is_the_best_complete_trial_faster_than_plain() -> None:
    assert incumbents(run(0.9, 1.2, None, 1.1, 1.2, 1.3)) == [None, 1, 1, 1, 1, 5]
    assert incumbents(run(0.9, 1.0, 0.95)) == [None, None, None]
    given_up = record(1.5, state=TrialState.PRUNED, reason="slow")
    assert incumbents(SearchRun("tpe", 0, 1.0, (given_up,), "", False)) == [None]


def test_a_point_includes_preparation_and_all_trials_so_far() -> None:
    points = run(1.1, None, 1.2).points()
    assert [point.seconds for point in points] == [3.0, 5.0, 7.0]
    assert [point.tokens for point in points] == [40, 40, 80], "a trial that failed before decoding decoded nothing"


def test_a_repeat_decodes_no_tokens() -> None:
    assert decoded_tokens(record(1.2)) == 40
    assert decoded_tokens(record(1.2, repeat_of=0)) == 0


@pytest.mark.parametrize(
    ("limits", "num_counted", "spent"),
    [
        (Limits(seconds=7.0), 3, (7.0, 120)),
        (Limits(seconds=6.0), 2, (6.0, 80)),
        (Limits(seconds=100.0), 4, (9.0, 160)),
        (Limits(seconds=0.5), 0, (0.5, 0)),
        (Limits(tokens=100), 2, (5.0, 100)),
        (Limits(trials=1), 1, (3.0, 40)),
        (Limits(seconds=6.0, tokens=50), 1, (6.0, 50)),
    ],
)
def test_trials_that_end_beyond_the_budget_do_not_count(
    limits: Limits, num_counted: int, spent: tuple[float, int]
) -> None:
    made = run(1.1, 1.2, 1.3, 1.4)
    assert len(made.within(limits)) == num_counted
    assert made.spent(limits) == spent


def test_the_final_is_the_best_within_the_budget() -> None:
    held_out = {1: (1.0, 1.2), 2: (0.8, 0.9)}
    comparison = found({"swift": [run(1.1, 1.3, 1.5)]}, held_out, Limits(seconds=5.5))
    (only,) = comparison.runs["swift"]
    final = comparison.final(only)
    assert final is not None
    assert final.number == 1, "the third ended at 7 s"
    assert comparison.curve(only, "seconds") == ((3.0, pytest.approx(1.1)), (5.0, pytest.approx(0.85)))
    assert comparison.curve(only, "tokens") == ((40.0, pytest.approx(1.1)), (80.0, pytest.approx(0.85)))
    assert comparison.speedup("swift").value == pytest.approx(0.85), "slower than plain decoding, and reported so"


def test_a_lossy_final_counts_as_plain_decoding_and_is_reported() -> None:
    comparison = found({"swift": [run(1.3), run(1.3, seed=1, blocks=[2])]}, {2: (1.4, 1.4)})
    wrong = Measurement(samples=(sample(3.0, 0), sample(3.0, 1, identical=False)))
    comparison = replace(comparison, held_out={**comparison.held_out, candidate((1,)).key: wrong})
    assert comparison.speedup("swift").value == pytest.approx((1.0 + 1.4) / 2)
    assert comparison.identical("swift") == (3, 4)
    report = shown(comparison)
    assert "output differs from plain decoding on held-out prompts, so its speed-up counts as 1: seed 0" in report


def test_a_mean_curve_steps_wherever_a_curve_does() -> None:
    early, late = ((1.0, 1.2), (4.0, 1.6)), ((2.0, 1.4),)
    assert [value_at(early, at) for at in (0.0, 0.99, 1.0, 3.9, 4.0, 9.0)] == [1.0, 1.0, 1.2, 1.2, 1.6, 1.6]
    assert mean_curve([early, late]) == (
        (1.0, pytest.approx(1.1)),
        (2.0, pytest.approx(1.3)),
        (4.0, pytest.approx(1.5)),
    )
    assert mean_curve([early, ()]) == ((1.0, pytest.approx(1.1)), (4.0, pytest.approx(1.3)))
    assert mean_curve([]) == ()


def test_time_to_reach_a_value() -> None:
    curve = ((1.0, 1.2), (2.0, 1.1), (4.0, 1.6))
    assert [reached_at(curve, value) for value in (0.7, 1.0, 1.15, 1.2, 1.3, 1.7)] == [0.0, 0.0, 1.0, 1.0, 4.0, None]


def test_the_reference_reaches_a_rival_at_a_share_of_its_budget() -> None:
    runs = {"swift": [run(1.1, 1.1, 1.3)], "joint": [run(1.5, 1.6, blocks=[4, 5], search="joint", seconds=0.5)]}
    comparison = found(runs, {1: (1.1, 1.1), 3: (1.3, 1.3), 4: (1.2, 1.2), 5: (1.4, 1.4)})
    assert comparison.reference == "joint", "in any order"
    seconds, tokens = comparison.reach("swift", "seconds"), comparison.reach("swift", "tokens")
    assert (seconds, tokens) == (Reach(2.0, 7.0), Reach(80.0, 120.0))
    assert (seconds.share, tokens.share) == (pytest.approx(2 / 7), pytest.approx(2 / 3))
    assert "29% s, 67% tok" in shown(comparison)
    slower = found(runs, {1: (1.1, 1.1), 3: (1.9, 1.9), 4: (1.2, 1.2), 5: (1.4, 1.4)})
    assert slower.reach("swift", "seconds").share is None
    assert "not reached" in shown(slower)
    assert Reach(0.0, 0.0).share is None
    assert found({"tpe": [run(1.1)], "swift": [run(1.1)]}, {1: (1.1, 1.1)}).reference == "tpe"


def test_reach_uses_the_mean_curve_over_seeds() -> None:
    joint = [run(1.5, blocks=[4]), run(1.1, 1.5, seed=1, blocks=[1, 4])]
    comparison = found({"joint": joint, "swift": [run(1.3), run(1.3, seed=1)]}, {1: (1.2, 1.2), 4: (1.4, 1.4)})
    assert comparison.mean_curve("joint", "seconds") == ((3.0, pytest.approx(1.3)), (5.0, pytest.approx(1.4)))
    assert comparison.reach("swift", "seconds") == Reach(3.0, 3.0)


def test_the_speedup_of_a_seed_is_1_for_plain_decoding() -> None:
    finals = Finals.of([measurement((1.0, 2.0)), None, measurement((3.0, 3.0))], 2)
    assert finals.speedups() == pytest.approx([1.5, 1.0, 3.0])
    assert speedup_interval(finals).value == pytest.approx(5.5 / 3)
    with pytest.raises(ValueError, match="2 prompts, each once and in order"):
        Finals.of([measurement((1.0,))], 2)


def test_intervals_cover_all_resamples_of_two_seeds_and_two_prompts() -> None:
    # Every draft takes 1 s for 10 tokens, so a seed's speed-up is the mean ratio, and resamples are means of drawn ratios.
    one, two = measurement((1.0, 2.0)), measurement((3.0, 4.0))
    resampled = Finals.of([one, two], 2).resampled()
    means = {1.0, 1.5, 2.0, 3.0, 3.5, 4.0}
    mixed = {(a + a + 2.0) / 2 for a in (1.0, 1.5, 2.0)}  # one seed each, with the same prompts
    assert {round(float(each), 6) for each in resampled} == means | mixed
    assert float(np.mean(resampled)) == pytest.approx(2.5, abs=0.03)
    interval = speedup_interval(Finals.of([one, two], 2))
    # All resamples are between 1 and 4; t = 12.706 with one degree of freedom instead of 1.960, and twice the variance.
    wider = 12.7062 / 1.95996 * 2**0.5
    assert interval.value == pytest.approx(2.5)
    assert interval.ci95 == pytest.approx((2.5 * (1.0 / 2.5) ** wider, 2.5 * (4.0 / 2.5) ** wider), rel=1e-3)


def test_quotient_is_paired_on_seeds_and_prompts() -> None:
    slower = [measurement((1.0, 2.0, 5.0)), measurement((3.0, 4.0, 0.5))]
    faster = [measurement((1.5, 3.0, 7.5)), measurement((4.5, 6.0, 0.75))]
    interval = quotient_interval(Finals.of(faster, 3), Finals.of(slower, 3))
    assert interval.value == pytest.approx(1.5)
    assert interval.ci95 == (pytest.approx(1.5), pytest.approx(1.5)), "1.5 times in every seed and prompt"
    with pytest.raises(ValueError, match="cannot be paired"):
        quotient_interval(Finals.of(faster, 3), Finals.of(slower[:1], 3))


def shown(comparison: SearchComparison) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(searches_table(comparison))
    return console.export_text()


@pytest.fixture
def two() -> SearchComparison:
    """Return runs of `joint` and `random` with two seeds.

    `random` finished early with seed 1, and ended its only trial beyond the budget with seed 0.
    """
    late = run(1.2, search="random", seconds=20.0)
    early = SearchRun("random", 1, 1.0, run(0.9, search="random", seed=1).records, "1 trials done", True)
    joint = [run(1.1, None, 1.4, search="joint", seed=seed, blocks=[4, 5, 6]) for seed in (0, 1)]
    return found({"joint": joint, "random": [late, early]}, {4: (1.1, 1.3), 6: (1.2, 1.6)}, Limits(seconds=9.0))


def test_the_table_has_every_search_and_notes_early_and_empty_runs(two: SearchComparison) -> None:
    text = shown(two)
    lines = {line.split()[0]: line for line in text.splitlines()[:8] if line.strip()}
    assert "Held-out speed-up after 9 s, 2 seeds" in text
    assert "1.40 [0.34, 4.76]" in lines["joint"]
    assert "1.00 [1.00, 1.00]" in lines["random"]
    assert "0.71 [0.21, 2.94]" in text, "random over joint"
    assert "* random" in text
    assert "finished early and kept its best; seed 1: 1 trials done" in text
    assert "no trial ended within the budget with seed 0" in text
    assert "…" not in text


def test_the_csv_has_a_line_per_trial(two: SearchComparison) -> None:
    rows = list(csv.DictReader(io.StringIO(searches_csv(two))))
    assert tuple(rows[0]) == CSV_COLUMNS
    assert [(row["search"], row["seed"], row["trial"]) for row in rows] == [
        *(("joint", seed, trial) for seed in "01" for trial in "012"),
        ("random", "0", "0"),
        ("random", "1", "0"),
    ]
    joint = rows[:3]
    assert [row["seconds"] for row in joint] == ["3.0", "5.0", "7.0"]
    assert [row["tokens"] for row in joint] == ["40", "40", "80"]
    assert [row["tuning_speedup"] for row in joint] == ["1.1", "", "1.4"]
    assert [row["incumbent_trial"] for row in joint] == ["0", "0", "2"]
    assert [row["incumbent_held_out_speedup"] for row in joint] == ["1.2", "1.2", "1.4"]
    beyond = rows[6]
    assert (beyond["counts"], beyond["incumbent_held_out_speedup"], beyond["seconds"]) == ("0", "", "21.0")
    assert (rows[7]["counts"], rows[7]["incumbent_trial"], rows[7]["incumbent_held_out_speedup"]) == ("1", "", "1.0")


def test_the_json_has_all_data(two: SearchComparison) -> None:
    written = json.loads(json.dumps(searches_json(two)))
    assert written["device"] == "d"
    assert written["limits"] == {"seconds": 9.0, "tokens": None, "trials": None}
    joint, random = written["results"]["joint"], written["results"]["random"]
    assert joint["speedup"]["value"] == pytest.approx(1.4)
    assert joint["over_reference"] == {"value": 1.0, "ci95": [1.0, 1.0]}
    assert random["speedup_of_each_seed"] == [1.0, 1.0]
    assert random["reference_reached"]["seconds"] == {"at": 0.0, "share": 0.0}
    assert [
        (each["seed"], each["trials"], each["seconds"], each["finished_early"]) for each in written["runs"][2:]
    ] == [
        (0, 0, 9.0, False),
        (1, 1, 3.0, True),
    ]
    assert written["runs"][0]["final"] == candidate((6,)).model_dump(mode="json")
    assert [len(each["samples"]) for each in written["held_out"]] == [2, 2]


def test_the_report_is_three_files(two: SearchComparison, tmp_path: Path) -> None:
    write_report(two, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["searches.csv", "searches.json", "searches.png"]
    assert (tmp_path / "searches.csv").read_text() == searches_csv(two)
    picture = matplotlib.image.imread(tmp_path / "searches.png")
    assert picture.shape[0] > 400
    ink = picture[..., :3].reshape(-1, 3)
    assert np.isclose(ink, np.array([0xD5, 0x5E, 0x00]) / 255, atol=0.01).all(axis=1).sum() > 500, "the first line"


def test_searches_that_found_nothing_can_be_drawn(tmp_path: Path) -> None:
    nothing = SearchRun("tpe", 0, 1.0, (), "nothing to try", True)
    write_report(found({"tpe": [nothing], "swift": [run(None)]}, {}), tmp_path)
    assert (tmp_path / "searches.png").stat().st_size > 1000


def test_a_wide_span_of_seconds_can_be_drawn(tmp_path: Path) -> None:
    made: list[TrialRecord] = [
        record(1.2, number=0, blocks=(1,), seconds=0.1),
        record(1.3, number=1, blocks=(2,), seconds=99),
    ]
    wide = SearchRun("swift", 0, 0.1, tuple(made), "spent", False)
    write_report(found({"swift": [wide]}, {1: (1.2, 1.2), 2: (1.4, 1.4)}), tmp_path)
    assert (tmp_path / "searches.png").stat().st_size > 1000
