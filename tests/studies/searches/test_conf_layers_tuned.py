"""ConfLayers under Optuna: the published settings first, parameters in Optuna's records, and trials that depend on nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optuna
import pytest
import torch

from decoding.draft_length import Fixed, TopProbability
from decoding.drafts import LayerSkip, PlainDecoding
from studies.confidence.selection import LambdaSchedule
from studies.contract import Problem, TrialRecord, TrialState
from studies.searches.conf_layers import ConfLayers, ConfLayersSettings
from studies.searches.conf_layers_tuned import ConfLayersTuned, ConfLayersTunedSettings
from tests.support.records import measurement
from tests.support.tiny import tiny_target

PARAMETERS = {
    "confidence": "logit_lens_entropy",
    "lambda_start": -0.3,
    "lambda_step": 0.1,
    "window": 16,
    "skip_ratio": 0.3,
    "rule": "top_probability",
    "top_probability.threshold": 0.4,
    "top_probability.max_tokens": 6,
}


@pytest.fixture(scope="module")
def problem() -> Problem:
    texts = tuple(tuple((index * 5 + position) % 60 + 2 for position in range(110)) for index in range(4))
    return Problem(tiny_target(8), prompts=texts, continuations=texts, earlier={}, seed=0)


def study_of(problem: Problem, **settings: Any) -> ConfLayersTuned:
    return ConfLayersTuned(problem, ConfLayersTunedSettings(**settings))


def run(study: ConfLayersTuned, count: int, *, first: Mapping[str, Any] | None = None) -> tuple[list[TrialRecord], Any]:
    """Run trials in Optuna, as the store creates it, with speed-ups 1, 2, ...; `first` replaces the study's own starts."""
    setup = study.setup()
    made = optuna.create_study(direction="maximize", sampler=setup.sampler)
    for start in setup.starts if first is None else [first]:
        made.enqueue_trial(dict(start))
    records = []
    for number in range(count):
        trial = made.ask()
        candidate, notes = study.propose(trial)
        facts = {"study": study.name, "number": number, "candidate": candidate, "notes": notes}
        records.append(TrialRecord(state=TrialState.COMPLETE, measurement=measurement([1.0 + number] * 4), **facts))
        made.tell(trial, 1.0 + number)
        study.observe(records[-1])
    return records, made.trials


def test_the_published_settings_come_first(problem: Problem) -> None:
    records, trials = run(study_of(problem, num_texts=1), 3)
    assert trials[0].params == {
        "confidence": "sublayer_entropy",
        "lambda_start": 0.0,
        "lambda_step": 0.05,
        "window": 32,
        "skip_ratio": 0.45,
        "rule": "top_probability",
        "top_probability.threshold": 0.8,
        "top_probability.max_tokens": 25,
    }
    assert records[0].candidate.draft_length == TopProbability(threshold=0.8, max_tokens=25)
    assert trials[1].params == {**trials[0].params, "confidence": "logit_lens_entropy"}
    assert trials[2].params == {**trials[0].params, "skip_ratio": 0.4, "window": 100}


def test_windows_are_no_longer_than_the_continuations() -> None:
    texts = tuple(tuple(range(index, index + 20)) for index in range(2))
    problem = Problem(tiny_target(8), prompts=texts, continuations=texts, earlier={}, seed=0)
    _, trials = run(study_of(problem), 10)
    assert [trial.params["window"] for trial in trials[:3]] == [20] * 3
    assert {trial.params["window"] for trial in trials} <= set(range(8, 21))


def test_the_first_set_is_the_one_that_the_published_search_selects() -> None:
    texts = tuple(tuple((index * 5 + position) % 60 + 2 for position in range(40)) for index in range(4))
    problem = Problem(tiny_target(12), prompts=texts, continuations=texts, earlier={}, seed=0)
    published = ConfLayers(problem, ConfLayersSettings())
    for number in range(2):
        candidate, notes = published.propose(optuna.create_study().ask())
        facts = {"study": "conf_layers", "number": number, "candidate": candidate, "notes": notes}
        published.observe(TrialRecord(state=TrialState.FAIL, reason="it broke", **facts))
    ours, _ = run(study_of(problem, num_texts=1), 1)
    assert notes["num_skipped"] / 10 <= 0.45 + 0.25, "beyond it lambda moves on"
    assert ours[0].candidate == candidate


def test_every_parameter_is_in_the_records(problem: Problem) -> None:
    records, trials = run(study_of(problem), 12)
    for record, trial in zip(records, trials, strict=True):
        assert set(trial.params) == set(PARAMETERS)
        assert record.notes["window"] == trial.params["window"]
        assert record.notes["confidence"] == trial.params["confidence"]
        for name in ("lambda_start", "lambda_step", "skip_ratio"):
            assert record.notes[name] == round(trial.params[name], 4)
        rule = record.candidate.draft_length
        assert isinstance(rule, TopProbability)
        assert rule.threshold == trial.params["top_probability.threshold"]
    assert len({record.candidate.key for record in records}) > 6, "TPE goes on after the starts"


def test_a_trial_depends_on_its_parameters_alone(problem: Problem) -> None:
    ((alone,), _), (later, _) = run(study_of(problem), 1, first=PARAMETERS), run(study_of(problem), 5)
    assert later[-1].candidate != alone.candidate
    study = study_of(problem)
    run(study, 4)
    assert run(study, 1, first=PARAMETERS)[0][0].candidate == alone.candidate


def test_the_set_is_where_the_schedule_rests(problem: Problem) -> None:
    ((record,), _) = run(study_of(problem), 1, first=PARAMETERS)
    schedule = LambdaSchedule(num_layers=8, skip_ratio=0.3, step=0.1)
    assert record.notes["num_skipped"] >= schedule.least_skipped == 2
    assert record.notes["num_skipped"] / 6 <= 0.3 + 0.25
    assert isinstance(record.candidate.draft, LayerSkip)


def test_an_empty_set_is_plain_decoding() -> None:
    target = tiny_target(8)
    with torch.no_grad():
        for block in target.blocks:
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
    texts = tuple(tuple(range(index, index + 20)) for index in range(2))
    records, _ = run(study_of(Problem(target, prompts=texts, continuations=texts, earlier={}, seed=0)), 2)
    for record in records:
        assert (record.candidate.draft, record.candidate.draft_length) == (PlainDecoding(), Fixed())


def test_the_best_parameters_are_remarked(problem: Problem) -> None:
    study = study_of(problem)
    run(study, 2)
    best, chain = study.remarks()
    assert best.startswith("best trial 1: confidence logit_lens_entropy, lambda_start 0.0, lambda_step 0.05, window 32")
    assert "chain only" in chain


def test_the_origin_of_a_draft_shows_how_lambda_moved(problem: Problem) -> None:
    ((record,), _) = run(study_of(problem), 1, first=PARAMETERS)
    rested = f"{record.notes['lambda']:.2g}"
    assert record.origin == f"conf_layers_tuned (logit_lens_entropy, lambda -0.3 to {rested}, chain only)"


def test_nothing_to_read_ends_the_search() -> None:
    problem = Problem(tiny_target(8), prompts=((1, 2),), continuations=((),), earlier={}, seed=0)
    assert study_of(problem).finished() == "no tuning prompt has a continuation"
