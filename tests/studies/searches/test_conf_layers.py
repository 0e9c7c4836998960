"""ConfLayers: iterations, the sets they select and the text they read, the authors' early stop, and resuming."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import optuna
import pytest
import torch

from decoding.draft_length import TopProbability
from decoding.drafts import LayerSkip, PublishedLeaves
from decoding.errors import UnsupportedModelError
from decoding.target import Target
from decoding.target.states import sublayer_outputs
from studies.confidence.confidences import CONFIDENCES
from studies.confidence.selection import LambdaSchedule, select_from_scores, standardise
from studies.contract import Problem, Study, TrialRecord, TrialState
from studies.measurement import Measurement, PromptSample
from studies.searches.conf_layers import ConfLayers, ConfLayersSettings, schedule_for
from studies.searches.registry import create_study
from tests.support.families import NUM_LAYERS, target_of
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


def test_defaults_are_those_of_the_released_code() -> None:
    settings = ConfLayersSettings()
    assert settings.confidences == ("sublayer_entropy",)
    assert (settings.skip_ratio, settings.window, settings.max_score) == (0.45, 32, 0.95)
    assert (settings.lambda_start, settings.lambda_step) == (0.0, 0.05)
    assert settings.draft_length == TopProbability(threshold=0.8, max_tokens=25)


def _run(study: Study, count: int) -> list[TrialRecord]:
    """Run iterations of the same speed-up; return those that came before the study's end."""
    done = []
    for number in range(count):
        if study.finished() is not None:
            break
        done.append(_record(study, number, 1.0))
        study.observe(done[-1])
    return done


def test_the_noted_lambda_led_to_the_set() -> None:
    problem = _problem()
    settings = ConfLayersSettings(form="unrounded", skip_ratio=0.3)
    start, *selected = _run(ConfLayers(problem, settings), 6)
    assert "lambda" not in start.notes, "no lambda led to the odd blocks"
    for record in selected:
        prompt, continuation = problem.prompts[record.notes["text"]], problem.continuations[record.notes["text"]]
        scores = _expected_scores(problem.target, prompt, continuation)
        found = select_from_scores(scores, lam=record.notes["lambda"], num_layers=8, form="unrounded")
        assert record.candidate.draft == LayerSkip.blocks(found)
    assert len({record.notes["lambda"] for record in selected}) > 1


def _expected_scores(target: Target, prompt: Sequence[int], continuation: Sequence[int]) -> np.ndarray:
    """Standardised sublayer confidences of the last 32 tokens, from one pass over the whole text."""
    with torch.inference_mode():
        outputs = sublayer_outputs(target, torch.tensor([[*prompt, *continuation]]))
    confidences = []
    for branches in outputs[1:-1]:
        probabilities = [branch[-32:].double().softmax(dim=-1) for branch in branches]
        confidences.append(sum(1 + float((p * p.log()).sum(-1).mean()) / math.log(32) for p in probabilities))
    return standardise(confidences, "unrounded")


def test_a_window_is_read_in_its_context() -> None:
    # Continuations as long as the window: both forms read them after the whole prompt, and not as a text of their own.
    texts = tuple(tuple((index * 5 + position) % 60 + 2 for position in range(32)) for index in range(4))
    prompts = tuple(tuple((index * 11 + 7 * position) % 60 + 2 for position in range(20)) for index in range(4))
    problem = Problem(tiny_target(8), prompts=prompts, continuations=texts, earlier={}, seed=0)
    study = ConfLayers(problem, ConfLayersSettings(form="unrounded"))
    _, second = _run(study, 2)
    scores = _expected_scores(problem.target, prompts[0], texts[0])
    schedule = LambdaSchedule(num_layers=8, skip_ratio=0.45)
    assert second.candidate.draft == LayerSkip.blocks(schedule.select(scores, 0.0, "unrounded").skipped)


@pytest.mark.parametrize("skip_ratio", [0.2, 0.45, 0.8])
def test_sets_have_the_least_number_of_blocks(skip_ratio: float) -> None:
    _, *selected = _run(ConfLayers(_problem(), ConfLayersSettings(skip_ratio=skip_ratio)), 6)
    assert len(selected) == 5
    assert all(record.notes["num_skipped"] >= int(6 * skip_ratio) + 1 for record in selected)


def _silent_target() -> Target:
    """Return a model whose blocks add nothing, so that all confidences are equal."""
    target = tiny_target(8)
    with torch.no_grad():
        for block in target.blocks:
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
    return target


def test_an_empty_set_is_no_draft() -> None:
    texts = _problem().prompts
    problem = Problem(_silent_target(), prompts=texts, continuations=texts, earlier={}, seed=0)
    both = ConfLayersSettings(confidences=("sublayer_entropy", "logit_lens_entropy"))
    study = ConfLayers(problem, both)
    done = _run(study, 4)
    assert [record.candidate.draft for record in done] == [LayerSkip.blocks([1, 3, 5])]
    assert study.finished() == "no confidence selects a block on the tuning texts"


def test_an_iteration_moves_on_where_one_confidence_selects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIDENCES, "sublayer_entropy", lambda target, token_ids, before: np.ones((8, 2)))
    both = ConfLayersSettings(confidences=("sublayer_entropy", "logit_lens_entropy"))
    done = _run(ConfLayers(_problem(), both), 4)
    assert [record.notes["confidence"] for record in done] == ["sublayer_entropy"] + ["logit_lens_entropy"] * 3
    assert all(record.notes["num_skipped"] for record in done)


def _accepting(study: Study, number: int, drafted: int, accepted: int) -> TrialRecord:
    sample = PromptSample(
        prompt=0,
        plain_seconds=1.0,
        plain_tokens=1,
        draft_seconds=1.0,
        draft_tokens=1,
        rounds=10,
        drafted=drafted,
        accepted=accepted,
        identical=True,
    )
    return _record(study, number, 1.0, measurement=Measurement(samples=(sample,)))


@pytest.mark.parametrize(
    ("drafted", "accepted", "stops"),
    [
        (60, 58, True),
        (60, 57, False),
        (40, 40, False),
        (42, 41, True),
    ],  # rates .967, .95, 1, .976; 5.8, 5.7, 4, 4.1 a round
)
def test_the_search_ends_where_almost_all_of_many_drafts_are_accepted(drafted: int, accepted: int, stops: bool) -> None:
    study = ConfLayers(_problem(), ConfLayersSettings())
    study.observe(_accepting(study, 0, 60, 60))
    assert study.finished() is None, "the odd blocks were not selected"
    study.observe(_accepting(study, 1, drafted, accepted))
    expected = "trial 1 accepts more than 4 tokens per round, at a rate above 0.95"
    assert study.finished() == (expected if stops else None)


def test_the_early_stop_can_be_turned_off() -> None:
    study = ConfLayers(_problem(), ConfLayersSettings(max_score=None))
    for number in range(2):
        study.observe(_accepting(study, number, 60, 60))
    assert study.finished() is None


def test_a_fixed_lambda_stays_in_every_iteration() -> None:
    _, *selected = _run(ConfLayers(_problem(), ConfLayersSettings(lambda_start=0.4, lambda_step=0.0)), 5)
    assert [record.notes["lambda"] for record in selected] == [0.4] * 4


def test_lambda_starts_where_it_is_told() -> None:
    _, selected = _run(ConfLayers(_problem(), ConfLayersSettings(lambda_start=-0.4, skip_ratio=0.1)), 2)
    assert selected.notes["lambda"] == -0.4


@pytest.mark.parametrize(("family", "cap"), [("qwen2", NUM_LAYERS // 3), ("qwen3", NUM_LAYERS // 3), ("llama", None)])
def test_the_window_cap_follows_the_model_type(family: str, cap: int | None) -> None:
    assert schedule_for(target_of(family), 0.45, 0.05, None).window_growth_cap == cap
    assert schedule_for(target_of(family), 0.45, 0.05, 7).window_growth_cap == 7


def test_a_model_without_middle_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="between the first and the last, and this model has 2"):
        ConfLayersSettings().check(tiny_target(2))


def test_the_missing_candidate_tree_is_remarked_and_in_the_origin_of_each_draft() -> None:
    assert "chain only" in limited(_problem()).remarks()[0]
    odd, selected = _run(ConfLayers(_problem(), ConfLayersSettings()), 2)
    assert odd.origin == "conf_layers (odd blocks, chain only)"
    assert selected.origin == f"conf_layers (sublayer_entropy, lambda {selected.notes['lambda']:g}, chain only)"


def test_the_published_tree_is_drafted_where_it_is_asked_for() -> None:
    study = ConfLayers(_problem(), ConfLayersSettings(tree=True))
    assert study.remarks() == []
    odd, _ = _run(study, 2)
    assert odd.candidate.draft.parts.tree == PublishedLeaves()
    assert odd.origin == "conf_layers (odd blocks, published tree)"
    with pytest.raises(UnsupportedModelError, match="takes no candidate tree"):
        ConfLayersSettings(tree=True).check(target_of("bloom"))


def test_the_confidences_take_turns() -> None:
    study = ConfLayers(_problem(), ConfLayersSettings(confidences=("sublayer_entropy", "logit_lens_entropy")))
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


def test_every_trial_has_what_led_to_its_set_and_what_it_skips_in_optuna() -> None:
    """The odd blocks too, which no lambda led to: they have the first one. Importances know blocks, lambda and confidence."""
    settings = ConfLayersSettings(confidences=("sublayer_entropy", "logit_lens_entropy"), skip_ratio=0.3)
    study = ConfLayers(_problem(), settings)
    stored = optuna.create_study(sampler=study.setup().sampler, direction="maximize")
    for number in range(10):
        trial = stored.ask()
        candidate, notes = study.propose(trial)
        skipped = [block for block in range(8) if trial.params[f"block.{block}"]]
        assert candidate.draft == LayerSkip.blocks(skipped)
        assert trial.params["lambda"] == notes.get("lambda", 0.0)
        assert trial.params["confidence"] == notes["confidence"]
        assert (trial.params["window"], trial.params["skip_ratio"]) == (32, 0.3)
        assert (trial.params["rule"], trial.params["top_probability.threshold"]) == ("top_probability", 0.8)
        assert study.space.draft(optuna.trial.FixedTrial(trial.params)) == candidate.draft
        facts = {"study": study.name, "number": number, "candidate": candidate, "notes": notes}
        study.observe(TrialRecord(state=TrialState.FAIL, **facts))
        stored.tell(trial, float(len(skipped)))
    importances = optuna.importance.get_param_importances(stored)
    assert {"lambda", "confidence", "window", *(f"block.{block}" for block in range(1, 7))} <= set(importances)
    assert sum(importance for name, importance in importances.items() if name.startswith("block.")) > 0.2
