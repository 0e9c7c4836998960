"""Evaluations until the best: joint against general-purpose searches in the same space."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip, PlainDecoding
from decoding.target import Target
from studies.contract import Candidate, TrialRecord, TrialState
from tests.support.records import record
from tuner.evaluation.planted.model import plant
from tuner.evaluation.planted.problem import PlantedProblem
from tuner.evaluation.planted.rivals import RIVALS, Course, Match, match_rivals, matches_table
from tuner.evaluation.planted.searching import run_search
from tuner.progress import Progress, Unwatched


def trial(speedup: float, *blocks: int, **changes: Any) -> TrialRecord:
    return record(speedup, blocks=blocks).model_copy(update=changes)


def test_only_decoded_candidates_count() -> None:
    plain = Candidate(draft=PlainDecoding(), draft_length=Fixed())
    records = [
        trial(1.2, 1),
        trial(9.0, 1, repeat_of=0),
        trial(9.0, 2, state=TrialState.PRUNED),
        trial(1.0, 3, candidate=plain),
        trial(1.4, 4),
    ]
    course = Course.of(0, "joint", records)
    assert course.speedups == pytest.approx((1.2, 0.0, 1.4))
    assert course.drafts == tuple(LayerSkip.blocks((block,)).describe() for block in (1, 2, 4))
    assert course.best == pytest.approx(1.4)
    assert [course.reached(speedup) for speedup in (0.9, 1.1, 1.3, 1.5)] == [0, 1, 3, None]


def test_share_is_of_the_evaluations_that_the_rival_made() -> None:
    ours = Course(0, "joint", (1.1, 1.5))
    found = [Match(ours, Course(0, name, (1.0,) * 18 + (best, 1.0)), 30) for name, best in (("a", 1.4), ("b", 1.6))]
    assert [each.share for each in found] == [2 / 20, None]
    assert [each.is_enough for each in found] == [True, False]
    console = Console(record=True, width=140)
    console.print(matches_table(found))
    shown = console.export_text()
    assert "10.0%" in shown
    assert "never" in shown
    assert "1 of 2 within 10%" in shown
    assert found[1].facts()["share"] is None


def test_rivals_search_the_problem_of_each_seed_with_their_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the searches, one of which the next test runs."""
    asked = []

    def run(name: str, problem: int, progress: Progress, **settings: Any) -> tuple[None, list[TrialRecord]]:
        asked.append((name, problem, settings))
        return None, [trial(1.1), trial(1.3)] if name == "joint" else [trial(1.0)] * 19 + [trial(1.2)]

    monkeypatch.setattr("tuner.evaluation.planted.rivals.precision_problem", lambda seed: seed)
    monkeypatch.setattr("tuner.evaluation.planted.rivals.run_search", run)
    found = match_rivals([5], 20, Unwatched())
    assert asked == [("joint", 5, {}), *((name, 5, {"max_trials": 20}) for name in RIVALS)]
    assert [(each.rival.search, each.share) for each in found] == [(name, 0.1) for name in RIVALS]


def test_a_rival_is_offered_the_precisions_with_a_price() -> None:
    """A model of three blocks, the middle one redundant."""
    problem = PlantedProblem.of(Target(plant(3, [1], [1], seed=0)), 0, {8: 0.7})
    best, records = run_search("whole_space_random", problem, Unwatched(), max_trials=3, rules=("fixed",))
    assert Course.of(0, "random", records).drafts == ("skip 1", "int8", "exit at 1, no head")
    assert best is not None
    assert best.candidate.draft == LayerSkip.blocks((1,))
