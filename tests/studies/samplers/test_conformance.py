"""Conformance of every registered study: parameters, candidates, resume, end, and no residue."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch

from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.drafters.build import build_drafter
from decoding.head_folder import HeadFolder
from decoding.text import Ending
from decoding.timing.round_costs import measure_round_costs
from studies.contract import Problem, StudySettings
from studies.samplers import SAMPLERS, load_sampler
from studies.samplers.contract import StudySampler
from tests.support.costs import made_up_costs
from tests.support.heads import write_heads
from tests.support.paths import ROOT
from tests.support.records import record
from tests.support.tiny import tiny_target
from tests.support.trying import Speed, Trying, copied

SMALL = {
    "max_tokens": 3,
    "num_surveyed": 20,
    "rules": ["fixed", "ada_edl"],
    "survey_tokens": 32,
    "pool_tokens": 64,
    "window": 8,
    "candidates": [record(1.0, blocks=(block,)).candidate for block in range(1, 5)],
}
"""Settings of small problems; a study takes those that it knows."""


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    """A problem with heads, costs and earlier trials."""
    target = tiny_target(6)
    prompts = tuple(tuple((seed * 11 + index * 5) % 60 + 2 for index in range(5 + seed)) for seed in range(4))
    plain = plain_decoder(target)
    continuations = tuple(plain.generate(Request(prompt, Ending(16))).tokens for prompt in prompts)
    folder: Path = tmp_path_factory.mktemp("heads")
    heads = write_heads(target, folder, [2, 4])
    return Problem(
        target,
        prompts,
        continuations,
        earlier={"earlier": [record(1.2, blocks=(3,)), record(1.1, blocks=(2, 4))]},
        seed=1,
        head_drafts=heads,
        heads=HeadFolder(target, folder),
        costs=lambda max_tokens: made_up_costs(target, max_tokens),
    )


@pytest.fixture(autouse=True)
def cheap_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    cheap = partial(measure_round_costs, budget_seconds=0.0)
    monkeypatch.setattr("decoding.timing.round_costs.measure_round_costs", cheap)


def new(name: str, problem: Problem, **given: Any) -> StudySampler:
    made = load_sampler(name)
    settings = {key: value for key, value in SMALL.items() if key in made.Settings.model_fields} | given
    return made(problem, made.Settings.model_validate(settings))


SPEEDUPS: tuple[float | None, ...] = (1.1, None, 1.3, 0.9)
"""Speed-ups of the trials; None fails."""


def in_turn(speedups: Sequence[float | None] = SPEEDUPS) -> Speed:
    left = iter(speedups)
    return lambda candidate, notes: next(left)


every_study = pytest.mark.parametrize("name", SAMPLERS)


@every_study
def test_name_settings_and_identity_are_plain_data(name: str, problem: Problem) -> None:
    made = load_sampler(name)
    assert made.name == name
    settings = made.Settings()
    assert isinstance(settings, StudySettings)
    assert made.Settings.model_validate(settings.model_dump(mode="json")) == settings
    assert all(field.description for field in made.Settings.model_fields.values()), "the help text of each setting"
    identity = new(name, problem).identity()
    assert json.loads(json.dumps(identity)) == identity
    assert new(name, problem, max_trials=7, patience=9).identity() == identity, "a search may go on for longer"


@every_study
def test_every_trial_has_parameters_with_importances_and_a_candidate_that_can_be_built(
    name: str, problem: Problem
) -> None:
    tried = Trying(new(name, problem))
    done = tried.run(len(SPEEDUPS), in_turn())
    assert len(done) == len(SPEEDUPS)
    ended = [trial for trial in tried.study.trials if trial.state.is_finished()]
    for trial, each in zip(ended, done, strict=True):
        assert tried.sampler.space.suggest(optuna.trial.FixedTrial(trial.params)) == each.candidate
        build_drafter(problem.target, each.candidate.draft, heads=problem.heads)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # few trials
        assert optuna.importance.get_param_importances(tried.study)


@every_study
def test_a_resumed_study_goes_on_as_the_uninterrupted_one(name: str, problem: Problem) -> None:
    whole, first = Trying(new(name, problem)), Trying(new(name, problem))
    expected = whole.run(len(SPEEDUPS), in_turn())
    first.run(2, in_turn())
    resumed = Trying(new(name, problem), copied(first.study))
    assert resumed.run(len(SPEEDUPS) - 2, in_turn(SPEEDUPS[2:])) == expected[2:]
    assert resumed.ended == whole.ended


@every_study
def test_a_study_leaves_model_and_random_numbers_as_they_were(name: str, problem: Problem) -> None:
    model = problem.target.model
    before = {key: value.clone() for key, value in model.state_dict().items()}
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    states = random_states()
    sampler = new(name, problem)
    assert len(Trying(sampler).run(len(SPEEDUPS), in_turn())) == len(SPEEDUPS)
    sampler.expected()
    assert all("\n" not in remark for remark in sampler.remarks())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    assert states == random_states()
    again = [plain_decoder(problem.target).generate(Request(prompt, Ending(16))).tokens for prompt in problem.prompts]
    assert tuple(again) == problem.continuations


def random_states() -> tuple[object, ...]:
    """Return the states of the global random streams of Python, NumPy and torch."""
    return random.getstate(), str(np.random.get_state(legacy=False)), torch.get_rng_state().tolist()


def test_only_conf_layers_runs_its_trials_one_after_another() -> None:
    assert [name for name in SAMPLERS if load_sampler(name).follows] == ["conf_layers"]


def test_names_are_known_without_importing_torch_or_optuna() -> None:
    script = (
        "import sys; from studies.samplers import DEFAULT_STUDIES, SAMPLERS\n"
        "assert set(DEFAULT_STUDIES) <= set(SAMPLERS)\n"
        "assert not {'torch', 'optuna', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
