"""Conformance of every registered study: create, propose, observe, resume, end, and leave no residue."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
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
from studies.contract import Problem, Study, StudySettings, TrialRecord, TrialState
from studies.searches.registry import STUDIES, create_study
from tests.support.costs import made_up_costs
from tests.support.heads import write_heads
from tests.support.paths import ROOT
from tests.support.records import measurement, record
from tests.support.tiny import tiny_target

SMALL = {
    "max_tokens": 3,
    "num_surveyed": 20,
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


def settings_of(name: str, **given: Any) -> StudySettings:
    model = STUDIES[name].load().Settings
    return model.model_validate({key: value for key, value in SMALL.items() if key in model.model_fields} | given)


def stored(study: Study) -> optuna.Study:
    """The study in Optuna, as the store creates it."""
    setup = study.setup()
    made = optuna.create_study(direction="maximize", sampler=setup.sampler)
    for start in setup.starts:
        made.enqueue_trial(dict(start))
    return made


SPEEDUPS: tuple[float | None, ...] = (1.1, None, 1.3, 0.9)
"""Speed-ups of the trials; None fails."""


def trials(study: Study, made: optuna.Study, speedups: Sequence[float | None] = SPEEDUPS) -> Iterator[TrialRecord]:
    """Run trials with made-up speed-ups until the study ends."""
    for speedup in speedups:
        if study.finished() is not None:
            return
        trial = made.ask()
        candidate, notes = study.propose(trial)
        facts = {"study": study.name, "number": trial.number, "candidate": candidate, "notes": notes}
        if speedup is None:
            done = TrialRecord(state=TrialState.FAIL, reason="it broke", **facts)
            made.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            done = TrialRecord(state=TrialState.COMPLETE, measurement=measurement([speedup] * 4), **facts)
            made.tell(trial, speedup)
        study.observe(done)
        yield done


every_study = pytest.mark.parametrize("name", STUDIES)


@every_study
def test_the_registry_has_the_name_and_settings_of_the_class(name: str) -> None:
    study = STUDIES[name].load()
    assert study.name == name
    settings = study.Settings()
    assert isinstance(settings, StudySettings)
    assert study.Settings.model_validate(settings.model_dump(mode="json")) == settings
    assert all(field.description for field in study.Settings.model_fields.values()), "the help text of each setting"


@every_study
def test_limits_are_not_part_of_the_identity(name: str) -> None:
    longer = settings_of(name, max_trials=7, patience=9)
    assert longer.identity() == settings_of(name).identity()
    json.dumps(longer.identity())


@every_study
def test_candidates_can_be_built_and_records_are_plain_data(name: str, problem: Problem) -> None:
    study = create_study(name, problem, settings_of(name))
    assert study.finished() is None
    made = stored(study)
    done = list(trials(study, made))
    assert len(done) == len(SPEEDUPS)
    ended = [trial for trial in made.trials if trial.state.is_finished()]
    assert all(trial.params for trial in ended), "Optuna's charts and importances are about parameters"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # few trials
        assert optuna.importance.get_param_importances(made)
    for each in done:
        assert TrialRecord.model_validate_json(each.model_dump_json()) == each
        build_drafter(problem.target, each.candidate.draft, heads=problem.heads)


@every_study
def test_a_resumed_study_proposes_what_the_uninterrupted_one_does(name: str, problem: Problem) -> None:
    settings = settings_of(name)
    first = create_study(name, problem, settings)
    made = stored(first)
    done = list(trials(first, made, SPEEDUPS[:2]))
    setup = first.setup()
    storage = optuna.storages.InMemoryStorage()
    optuna.copy_study(
        from_study_name=made.study_name, from_storage=made._storage, to_storage=storage, to_study_name="copy"
    )
    resumed = create_study(name, problem, settings, json.loads(json.dumps(setup.kept)))
    assert resumed.setup().space == setup.space
    assert json.dumps(resumed.setup().kept) == json.dumps(setup.kept)
    for each in done:
        resumed.observe(TrialRecord.model_validate_json(each.model_dump_json()))
    assert resumed.finished() == first.finished()
    copy = optuna.load_study(study_name="copy", storage=storage, sampler=resumed.setup().sampler)
    following = [next(trials(study, where, (1.2,))) for study, where in ((first, made), (resumed, copy))]
    assert following[0].candidate == following[1].candidate
    assert following[0].notes == following[1].notes


@every_study
def test_trials_and_patience_are_limited(name: str, problem: Problem) -> None:
    study = create_study(name, problem, settings_of(name, max_trials=2))
    assert len(list(trials(study, stored(study)))) == 2
    assert study.finished() == "2 trials done"
    impatient = create_study(name, problem, settings_of(name, max_trials=99, patience=1))
    count = len(list(trials(impatient, stored(impatient), (1.0,) * 12)))
    assert count < 12
    assert "no better candidate in " in (impatient.finished() or "")


def random_states() -> tuple[object, ...]:
    """Return the states of the global random streams of Python, NumPy and torch."""
    return random.getstate(), str(np.random.get_state(legacy=False)), torch.get_rng_state().tolist()


@every_study
def test_a_study_leaves_model_and_random_numbers_as_they_were(name: str, problem: Problem) -> None:
    model = problem.target.model
    before = {key: value.clone() for key, value in model.state_dict().items()}
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    states = random_states()
    study = create_study(name, problem, settings_of(name))
    done = list(trials(study, stored(study)))
    study.expected()
    assert all("\n" not in remark for remark in study.remarks())
    assert len(done) == len(SPEEDUPS)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert hooks == [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    assert states == random_states()
    again = [plain_decoder(problem.target).generate(Request(prompt, Ending(16))).tokens for prompt in problem.prompts]
    assert tuple(again) == problem.continuations


def test_names_are_known_without_importing_torch_or_optuna() -> None:
    script = (
        "import sys; from studies.searches.registry import DEFAULT_STUDIES, STUDIES\n"
        "assert set(DEFAULT_STUDIES) <= set(STUDIES)\n"
        "assert not {'torch', 'optuna', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
