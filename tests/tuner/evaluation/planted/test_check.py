"""Searches on planted problems: decoding that costs the same each time, the exhaustive best, and what is found of it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from decoding.draft_length import Fixed
from decoding.drafts import BitWidth, LayerSkip
from decoding.target import Target
from studies.contract import Candidate
from studies.measurement import Measurement
from studies.searches.joint import JointSettings
from tuner.errors import SearchError
from tuner.evaluation.planted.check import (
    PRECISIONS,
    Found,
    Optimum,
    Recovered,
    all_drafts,
    all_skip_sets,
    exhaustive,
    find_best_of_all,
    known_optima,
    recover,
    results_table,
    write_results,
)
from tuner.evaluation.planted.model import plant
from tuner.evaluation.planted.problem import ENDS, PRICES, WIDENING, PlantedProblem, precision_problem
from tuner.progress import Unwatched


@pytest.fixture(scope="module")
def problem() -> PlantedProblem:
    return PlantedProblem.of(Target(plant(12, [3, 5], [3, 5], seed=0)), 0)


def test_price_of_decoding_is_the_price_of_its_rounds(problem: PlantedProblem) -> None:
    skip = LayerSkip.blocks((3, 5))
    measured = problem.bench.measure(Candidate(draft=skip, draft_length=Fixed(max_tokens=3)), range(3))
    whole = ENDS + 24
    for sample in measured.samples:
        verified = sample.rounds + WIDENING * sample.drafted
        drafted = sample.drafted * (1 - 4 / whole)
        assert sample.draft_seconds == pytest.approx(verified + drafted, rel=1e-3)
        assert sample.plain_seconds == sample.plain_tokens
        assert sample.identical
    assert measured.draft_acceptance_rate > 0.8


def test_same_setting_costs_the_same_each_time(problem: PlantedProblem) -> None:
    candidate = Candidate(draft=LayerSkip.blocks((3,)), draft_length=Fixed(max_tokens=2))
    one, other = (problem.bench.measure(candidate, range(3)).samples for _ in range(2))
    assert [s.model_dump() for s in one] == [s.model_dump() for s in other]


def test_searches_are_compared_with_the_best_of_all_sets() -> None:
    sets = [LayerSkip.blocks(blocks) for blocks in [(1,), (3, 5), (2, 4)]]
    optima: list[Optimum] = []
    (found,) = find_best_of_all(
        [0],
        Unwatched(),
        ["predicted"],
        on_optimum=optima.append,
        find_optimum=lambda problem, progress: exhaustive(problem, progress, sets, num_refined=1),
    )
    assert optima == [Optimum(0, found.best, 6)]
    assert found.num_candidates == 3 + 3
    assert found.share > 0.98
    assert 0 < found.evaluations <= 24


def test_exhaustive_search_is_over_all_sets_of_inner_blocks(problem: PlantedProblem) -> None:
    assert len(all_skip_sets(12)) == len(set(all_skip_sets(12))) == 2**10 - 1
    assert {LayerSkip.blocks((1,)), LayerSkip.blocks(tuple(range(1, 11)))} <= set(all_skip_sets(12))


def test_known_best_is_not_searched_for_again(
    tmp_path: Path, problem: PlantedProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a search, which the test above runs."""
    monkeypatch.setattr("tuner.evaluation.planted.check.small_problem", lambda seed: problem)
    monkeypatch.setattr("tuner.evaluation.planted.check._search", lambda *_: (1.2, 12))
    path = tmp_path / "planted.json"
    assert known_optima(path) == []
    write_results([], [], path, [Optimum(0, 1.25, 1083)])
    (found,) = find_best_of_all(
        [0],
        Unwatched(),
        ["predicted"],
        optima=known_optima(path),
        find_optimum=lambda problem, progress: pytest.fail("the optimum is known"),
    )
    assert (found.speedup, found.best, found.num_candidates) == (1.2, 1.25, 1083)
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "problem": {**document["problem"], "max_tokens": 5}}))
    assert known_optima(path) == [], "of another problem"
    path.write_text("[]")
    with pytest.raises(SearchError, match="does not hold the results"):
        known_optima(path)


@pytest.fixture(scope="module")
def precise() -> dict[int, PlantedProblem]:
    """Two problems with precisions: of weights as they are, and of weights on a grid of 4 bits."""
    return {seed: precision_problem(seed) for seed in (0, 1)}


def test_prices_and_agreement_are_planted_for_each_precision(precise: dict[int, PlantedProblem]) -> None:
    def measured(seed: int, bits: BitWidth) -> Measurement:
        candidate = Candidate(draft=LayerSkip(bits=bits), draft_length=Fixed(max_tokens=2))
        return precise[seed].in_lockstep().measure(candidate, range(1))

    for seed in precise:
        table = precise[seed].table
        own, eight, four = (table.draft_seconds(LayerSkip(bits=bits), context=20) for bits in (None, 8, 4))
        assert own == pytest.approx(1.0)
        for seconds, bits in ((eight, 8), (four, 4)):
            assert PRICES[bits][0] - 1e-3 <= seconds <= PRICES[bits][1] + 1e-3
    assert measured(0, 8).draft_acceptance_rate > measured(0, 4).draft_acceptance_rate + 0.2
    assert measured(1, 4).draft_acceptance_rate > 0.9


def test_prices_in_lockstep_are_those_of_each_sequence(precise: dict[int, PlantedProblem]) -> None:
    candidate = Candidate(draft=LayerSkip.blocks((3,), bits=8), draft_length=Fixed(max_tokens=2))
    alone = precise[0].bench.measure(candidate, range(3))
    assert precise[0].in_lockstep().measure(candidate, range(1)).speedup == pytest.approx(alone.speedup)


def test_joint_is_compared_with_the_best_in_every_precision(
    precise: dict[int, PlantedProblem], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the search, whose settings are looked at."""
    every = all_drafts(precise[0])
    assert len(every) == 3 * 255 + 2
    assert Counter(draft.bits for draft in every) == {None: 255, 8: 256, 4: 256}
    seen = []

    def create(name: str, problem: object, settings: JointSettings) -> None:
        seen.append((name, settings.bits))
        raise LookupError("seen")

    monkeypatch.setattr("tuner.evaluation.planted.check.precision_problem", precise.__getitem__)
    monkeypatch.setattr("tuner.evaluation.planted.searching.create_study", create)
    optima: list[Optimum] = []
    some = [LayerSkip(bits=8), LayerSkip.blocks((3,))]
    with pytest.raises(LookupError, match="seen"):
        find_best_of_all(
            [0],
            Unwatched(),
            kind=PRECISIONS,
            optima=[Optimum(0, 9.0, 9)],
            on_optimum=optima.append,
            find_optimum=lambda problem, progress: exhaustive(problem, progress, some, num_refined=0),
        )
    assert [(each.problem, each.num_candidates) for each in optima] == [(PRECISIONS, 2)], "that of blocks is another"
    assert seen == [("joint", (4, 8))]


def test_planted_sublayers_are_recovered() -> None:
    (found,) = recover([12], [0], Unwatched())
    assert found.recovered == found.planted == 11
    assert found.others == 0


def test_results_are_shown_and_written(tmp_path: Path) -> None:
    found = [
        Found(0, "joint", 1.30, 1.31, 12, 1000),
        Found(1, "joint", 1.20, 1.31, 12, 1000),
        Found(2, "joint", 1.31, 1.31, 90, 1000),
    ]
    recovered = [Recovered(32, 0, 29, 28, 1, 195)]
    console = Console(record=True, width=120)
    console.print(results_table(found, recovered))
    shown = console.export_text()
    assert "1 of 3" in shown
    assert "91.6%" in shown
    assert "9.0% of all" in shown
    write_results(found, recovered, tmp_path / "planted.json")
    written = json.loads((tmp_path / "planted.json").read_text())
    assert [each["share"] for each in written["small"]] == pytest.approx([1.30 / 1.31, 1.20 / 1.31, 1.0])
    assert written["large"] == [
        {"num_layers": 32, "seed": 0, "planted": 29, "recovered": 28, "others": 1, "drafts_rated": 195}
    ]
    assert "not a speed-up" in written["note"]
