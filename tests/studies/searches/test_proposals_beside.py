"""Several candidates at once: which studies propose them, and how a guided search takes running trials into account."""

from __future__ import annotations

from typing import Any

import optuna
import pytest

from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.text import Ending
from studies.contract import Candidate, Problem, Study, TrialRecord, TrialState
from studies.limits import Limited
from studies.searches.joint import Joint, JointSettings
from studies.searches.registry import STUDIES, create_study
from tests.support.costs import made_up_costs
from tests.support.records import measurement
from tests.support.tiny import tiny_target

SETTINGS = JointSettings(num_surveyed=40, max_tokens=6, bits=())


@pytest.fixture(scope="module")
def problem() -> Problem:
    target = tiny_target(6)
    prompts = tuple(tuple((seed * 11 + index * 5) % 60 + 2 for index in range(5 + seed)) for seed in range(4))
    texts = tuple(plain_decoder(target).generate(Request(prompt, Ending(16))).tokens for prompt in prompts)
    return Problem(target, prompts, texts, earlier={}, seed=0, costs=lambda most: made_up_costs(target, most))


class Running:
    """A study of which several candidates are measured at a time."""

    def __init__(self, study: Study) -> None:
        self.study = study
        self._stored = optuna.create_study(sampler=study.setup().sampler)
        self.pending: dict[int, tuple[Candidate, dict[str, Any]]] = {}

    def propose(self) -> Candidate:
        if self.pending:
            assert self.study.proposes_beside([candidate for candidate, _ in self.pending.values()])
        assert self.study.finished() is None
        trial = self._stored.ask()
        self.pending[trial.number] = self.study.propose(trial)
        return self.pending[trial.number][0]

    def end(self, number: int) -> TrialRecord:
        candidate, notes = self.pending.pop(number)
        record = TrialRecord(
            study=self.study.name,
            number=number,
            state=TrialState.COMPLETE,
            candidate=candidate,
            measurement=measurement([notes["predicted_speedup"]] * 4),
            notes=notes,
        )
        self.study.observe(record)
        return record


def test_a_guided_search_proposes_other_candidates_beside_the_running_ones(problem: Problem) -> None:
    running = Running(Joint.create(problem, SETTINGS))
    proposed = [running.propose() for _ in range(4)]
    assert len({each.key for each in proposed}) == 4
    running.end(2)
    assert running.propose().key not in {each.key for each in proposed}


def test_what_ended_is_no_longer_running(problem: Problem) -> None:
    """One after another, the trials are those of a search that never had several."""
    alone, beside = Running(Joint.create(problem, SETTINGS)), Running(Joint.create(problem, SETTINGS))
    first = alone.propose()
    assert beside.propose() == first
    assert beside.study.proposes_beside([first])
    alone.end(0)
    beside.end(0)
    assert alone.propose() == beside.propose()


def test_running_trials_count_towards_the_limit_of_trials(problem: Problem) -> None:
    limited = Limited(Joint.create(problem, SETTINGS), max_trials=2)
    running = Running(limited)
    first = running.propose()
    second = running.propose()
    assert not limited.proposes_beside([first, second])


@pytest.mark.parametrize(
    ("name", "settings", "beside"),
    [
        ("exit_layer", {}, True),
        ("draft_length", {}, True),
        ("conf_layers_tuned", {}, True),
        ("tpe", {}, True),
        ("conf_layers", {}, False),
    ],
)
def test_studies_whose_next_candidate_follows_from_the_last_trial_wait_for_it(
    problem: Problem, name: str, settings: dict[str, Any], beside: bool
) -> None:
    study = create_study(name, problem, STUDIES[name].load().Settings.model_validate(settings))
    assert study.proposes_beside([]) is beside
