"""ConfLayers under Optuna: the published settings first, parameters in Optuna's records, and trials that depend on nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decoding.draft_length import Fixed, TopProbability
from decoding.drafts import PlainDecoding
from studies.contract import Problem
from studies.samplers.conf_layers import ConfLayers, ConfLayersSettings
from studies.samplers.conf_layers_tuned import ConfLayersTuned, ConfLayersTunedSettings
from tests.support.tiny import tiny_target
from tests.support.trying import Trying

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


def begun(problem: Problem, **settings: Any) -> Trying:
    return Trying(ConfLayersTuned(problem, ConfLayersTunedSettings(**settings)))


def test_the_published_settings_come_first(problem: Problem) -> None:
    study = begun(problem, num_texts=1)
    records, trials = study.run(3), study.study.trials
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


def test_the_first_set_is_the_one_that_the_published_search_selects() -> None:
    texts = tuple(tuple((index * 5 + position) % 60 + 2 for position in range(40)) for index in range(4))
    problem = Problem(tiny_target(12), prompts=texts, continuations=texts, earlier={}, seed=0)
    _, second = Trying(ConfLayers(problem, ConfLayersSettings())).run(2)
    assert second.notes["num_skipped"] / 10 <= 0.45 + 0.25, "beyond it lambda moves on"
    assert begun(problem, num_texts=1).suggest() == second.candidate


def test_every_parameter_is_in_the_records(problem: Problem) -> None:
    study = begun(problem)
    records = study.run(12)
    for record, trial in zip(records, study.study.trials, strict=True):
        assert set(trial.params) == set(PARAMETERS)
        assert record.notes["window"] == trial.params["window"]
        assert record.notes["confidence"] == trial.params["confidence"]
        for name in ("lambda_start", "lambda_step", "skip_ratio"):
            assert record.notes[name] == round(trial.params[name], 4)
        rule = record.candidate.draft_length
        assert isinstance(rule, TopProbability)
        assert rule.threshold == trial.params["top_probability.threshold"]
    assert len({record.candidate.key for record in records}) > 6, "TPE goes on after the starts"


def test_an_empty_set_is_plain_decoding() -> None:
    target = tiny_target(8)
    with torch.no_grad():
        for block in target.blocks:
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
    texts = tuple(tuple(range(index, index + 20)) for index in range(2))
    for record in begun(Problem(target, prompts=texts, continuations=texts, earlier={}, seed=0)).run(2):
        assert (record.candidate.draft, record.candidate.draft_length) == (PlainDecoding(), Fixed())


def test_the_best_parameters_are_remarked(problem: Problem) -> None:
    study = begun(problem)
    study.run(2, lambda candidate, notes: 1.0 + (notes["confidence"] == "logit_lens_entropy"))
    assert study.ended is None
    best, chain = study.sampler.remarks()
    assert best.startswith("best trial 1: confidence logit_lens_entropy, lambda_start 0.0, lambda_step 0.05, window 32")
    assert "chain only" in chain
