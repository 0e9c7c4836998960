"""ConfLayers: iterations, the sets they select and the text they read, and the authors' early stop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import optuna
import pytest
import torch

from decoding.draft_length import TopProbability
from decoding.drafts import LayerSkip
from decoding.target import Target
from decoding.target.states import sublayer_outputs
from studies.confidence.confidences import CONFIDENCES
from studies.confidence.selection import select_from_scores, standardise
from studies.contract import Problem, TrialRecord
from studies.measurement import Measurement
from studies.samplers.conf_layers import ConfLayers, ConfLayersSettings, schedule_for
from tests.support.families import NUM_LAYERS, target_of
from tests.support.records import sample
from tests.support.tiny import tiny_target
from tests.support.trying import Trying


def _problem() -> Problem:
    texts = tuple(tuple((index * 5 + position) % 60 + 2 for position in range(40)) for index in range(4))
    return Problem(tiny_target(8), prompts=texts, continuations=texts, earlier={}, seed=0)


BOTH = "sublayer_entropy", "logit_lens_entropy"


def begun(problem: Problem | None = None, **settings: Any) -> Trying:
    return Trying(ConfLayers(problem or _problem(), ConfLayersSettings(**settings)))


def test_defaults_are_those_of_the_released_code() -> None:
    settings = ConfLayersSettings()
    assert settings.confidences == ("sublayer_entropy",)
    assert (settings.skip_ratio, settings.window, settings.max_score) == (0.45, 32, 0.95)
    assert (settings.lambda_start, settings.lambda_step) == (0.0, 0.05)
    assert settings.draft_length == TopProbability(threshold=0.8, max_tokens=25)


def test_it_starts_from_the_odd_blocks_and_then_the_noted_lambda_led_to_the_set() -> None:
    problem = _problem()
    start, *selected = begun(problem, form="unrounded", skip_ratio=0.3).run(6)
    assert start.candidate.draft == LayerSkip.blocks([1, 3, 5])
    assert "lambda" not in start.notes, "no lambda led to the odd blocks"
    assert start.origin == "conf_layers (odd blocks, chain only)"
    for record in selected:
        prompt, continuation = problem.prompts[record.notes["text"]], problem.continuations[record.notes["text"]]
        scores = _expected_scores(problem.target, prompt, continuation)
        found = select_from_scores(scores, lam=record.notes["lambda"], num_layers=8, form="unrounded")
        assert record.candidate.draft == LayerSkip.blocks(found)
        assert record.origin == f"conf_layers (sublayer_entropy, lambda {record.notes['lambda']:g}, chain only)"
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
    study = begun(problem, confidences=BOTH)
    assert [record.candidate.draft for record in study.run(4)] == [LayerSkip.blocks([1, 3, 5])]
    assert study.ended == "no confidence selects a block on the tuning texts"


def test_an_iteration_moves_on_where_one_confidence_selects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIDENCES, "sublayer_entropy", lambda target, token_ids, before: np.ones((8, 2)))
    done = begun(confidences=BOTH).run(4)
    assert [record.notes["confidence"] for record in done] == ["sublayer_entropy"] + ["logit_lens_entropy"] * 3
    assert all(record.notes["num_skipped"] for record in done)


def _accepting(study: Trying, drafted: int, accepted: int) -> TrialRecord:
    study.suggest()
    measured = Measurement(samples=(sample(1.0, rounds=10, drafted=drafted, accepted=accepted),))
    return study.end(next(iter(study.running)), 1.0, measurement=measured)


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
    study, goes_on = begun(), begun(max_score=None)
    _accepting(study, 60, 60)
    assert study.ended is None, "the odd blocks were not selected"
    _accepting(study, drafted, accepted)
    expected = "trial 1 accepts more than 4 tokens per round, at a rate above 0.95"
    assert study.ended == (expected if stops else None)
    for _ in range(2):
        _accepting(goes_on, drafted, accepted)
    assert goes_on.ended is None


@pytest.mark.parametrize(("family", "cap"), [("qwen2", NUM_LAYERS // 3), ("qwen3", NUM_LAYERS // 3), ("llama", None)])
def test_the_window_cap_follows_the_model_type(family: str, cap: int | None) -> None:
    assert schedule_for(target_of(family), 0.45, 0.05, None).window_growth_cap == cap
    assert schedule_for(target_of(family), 0.45, 0.05, 7).window_growth_cap == 7


def test_a_model_without_middle_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="between the first and the last, and this model has 2"):
        ConfLayersSettings().check(tiny_target(2))


def test_results_say_that_drafts_are_chains() -> None:
    study = begun()
    assert "chain only" in study.sampler.remarks()[0]
    (odd,) = study.run(1)
    assert odd.origin == "conf_layers (odd blocks, chain only)"


def test_every_trial_has_what_led_to_its_set_and_what_it_skips_in_optuna() -> None:
    """The odd blocks too, which no lambda led to: they have the first one. Importances know blocks, lambda and confidence."""
    study = begun(confidences=BOTH, skip_ratio=0.3)
    for record in study.run(10, lambda candidate, notes: float(notes["num_skipped"])):
        params = study.study.trials[record.number].params
        skipped = [block for block in range(8) if params[f"block.{block}"]]
        assert record.candidate.draft == LayerSkip.blocks(skipped)
        assert params["lambda"] == record.notes.get("lambda", 0.0)
        assert params["confidence"] == record.notes["confidence"] == BOTH[record.number % 2], "they take turns"
        assert (params["window"], params["skip_ratio"]) == (32, 0.3)
        assert (params["rule"], params["top_probability.threshold"]) == ("top_probability", 0.8)
    importances = optuna.importance.get_param_importances(study.study)
    assert {"lambda", "confidence", "window", *(f"block.{block}" for block in range(1, 7))} <= set(importances)
    assert sum(importance for name, importance in importances.items() if name.startswith("block.")) > 0.2
