"""ConfLayers: the adaptive threshold on cases computed by hand, the movement of lambda, and the search around them."""

from __future__ import annotations

from typing import Any

import optuna

from decoding.drafts import LayerSkip
from studies.contract import Problem, Study, TrialRecord, TrialState
from studies.measurement import Measurement, PromptSample
from studies.searches.conf_layers import (
    ConfLayers,
    ConfLayersSettings,
)
from studies.searches.registry import create_study
from tests.support.tiny import tiny_target


def _problem() -> Problem:
    texts = tuple(tuple((index * 5 + position) % 60 + 2 for position in range(40)) for index in range(4))
    return Problem(tiny_target(8), prompts=texts, continuations=texts, earlier={}, seed=0)


def limited(problem: Problem, **settings: Any) -> Study:
    return create_study("conf_layers", problem, ConfLayersSettings(**settings))


def _record(study: Study, number: int, speedup: float, **facts: Any) -> TrialRecord:
    trial = optuna.create_study().ask()
    candidate, notes = study.propose(trial)
    sample = PromptSample(
        prompt=0,
        plain_seconds=speedup,
        plain_tokens=1,
        draft_seconds=1.0,
        draft_tokens=1,
        rounds=1,
        drafted=1,
        accepted=1,
        identical=True,
    )
    values = {"state": TrialState.COMPLETE, "measurement": Measurement(samples=(sample,)), **facts}
    return TrialRecord(study="conf_layers", number=number, candidate=candidate, notes=notes, **values)


def test_the_search_starts_from_the_odd_blocks() -> None:
    record = _record(ConfLayers(_problem(), ConfLayersSettings()), 0, 1.0)
    assert record.candidate.draft == LayerSkip.blocks([1, 3, 5])


def test_the_confidences_take_turns() -> None:
    study = ConfLayers(_problem(), ConfLayersSettings())
    seen = []
    for number in range(4):
        record = _record(study, number, 1.0)
        study.observe(record)
        seen.append(record.notes["confidence"])
    assert seen == ["sublayer_entropy", "logit_lens_entropy"] * 2


def test_it_stops_after_patience_iterations_without_a_better_speedup() -> None:
    study = limited(_problem(), patience=3)
    for number, speedup in enumerate([1.0, 1.2, 1.1, 1.2, 0.9]):
        assert study.finished() is None
        study.observe(_record(study, number, speedup))
    assert study.finished() == "no better candidate in 3 trials"


def test_it_stops_at_the_iteration_limit() -> None:
    study = limited(_problem(), max_trials=2)
    for number in range(2):
        study.observe(_record(study, number, 1.0 + number))
    assert study.finished() == "2 trials done"


def test_failed_trials_count_as_iterations_without_improvement() -> None:
    study = limited(_problem(), patience=2)
    for number in range(2):
        study.observe(_record(study, number, 1.0, state=TrialState.FAIL, measurement=None, reason="out of memory"))
    assert study.finished() == "no better candidate in 2 trials"


def test_a_resumed_search_proposes_what_the_uninterrupted_one_would() -> None:
    problem, settings = _problem(), ConfLayersSettings()
    whole = ConfLayers(problem, settings)
    records = []
    for number in range(5):
        records.append(_record(whole, number, 1.0 + 0.1 * number))
        whole.observe(records[-1])
    resumed = ConfLayers(problem, settings)
    for record in records:
        resumed.observe(TrialRecord.model_validate_json(record.model_dump_json()))
    assert _record(resumed, 5, 1.0).candidate == _record(whole, 5, 1.0).candidate
