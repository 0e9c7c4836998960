"""The draft of a method, whichever study of its search had the winner."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import optuna
import pytest

from studies.contract import Candidate, Study, StudySetup
from tests.support.records import candidate, record
from tuner.config import SearchConfig
from tuner.errors import SearchError
from tuner.evaluation.suite.search_cell import best_of_last_study
from tuner.search.outcome import SearchResult
from tuner.search.storage import StudyStore, sqlite_url


class DraftLengths(Study):
    """Stands for the last study of a method."""

    name = "draft_length"

    def __init__(self) -> None: ...

    def setup(self) -> StudySetup:
        return StudySetup({}, optuna.samplers.RandomSampler(seed=0))

    def propose(self, trial: optuna.Trial) -> tuple[Candidate, dict[str, Any]]:
        return candidate(), {}


def test_the_last_study_gives_the_draft_although_another_study_won(tmp_path: Path) -> None:
    config = SearchConfig(
        model="model",
        dataset="prompts.jsonl",
        study=("exit_layer", "draft_length"),
        storage=sqlite_url(tmp_path / "trials.db"),
        experiment="experiment",
    )
    stored = StudyStore(config.storage, "experiment").open(DraftLengths(), {})
    won = cast(
        SearchResult, SimpleNamespace(winner=record(1.5, study="exit_layer"), studies={"draft_length": "no time"})
    )
    with pytest.raises(SearchError, match="no trial of the study draft_length was completed: no time"):
        best_of_last_study(config, won)
    made = [
        record(speedup, number=number, study="draft_length", blocks=(number,))
        for number, speedup in enumerate((0.8, 0.9))
    ]
    for each in made:
        stored.finish(stored.ask(), each)
    assert best_of_last_study(config, won) == made[1]
