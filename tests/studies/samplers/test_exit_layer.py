"""The search over exits: where it begins, what it may choose, when it ends and what it remarks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import optuna
import pytest
from pydantic import ValidationError

from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.draft_length import DraftLengthRule, Fixed, TopProbability
from decoding.drafts import EarlyExit, PlainDecoding
from decoding.target import Target
from decoding.text import Ending
from studies.contract import Candidate, Problem
from studies.prediction.predictors import Prediction
from studies.prediction.replay import Replayed
from studies.rule_space import DEFAULT_RULES
from studies.samplers.exit_layer import ExitLayer, ExitLayerSettings
from tests.support.costs import made_up_costs
from tests.support.records import record
from tests.support.tiny import tiny_target
from tests.support.trying import Trying

NUM_LAYERS = 10


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(NUM_LAYERS)


def head_draft(layer: int, sha256: str = "a") -> EarlyExit:
    return EarlyExit(exit_layer=layer, head=f"h{layer}.safetensors", head_sha256=sha256 * 64)


def forecast(layer: int, speedup: float, *, head: bool = False, rule: DraftLengthRule | None = None) -> Prediction:
    draft = head_draft(layer) if head else EarlyExit(exit_layer=layer)
    replayed = Replayed(tokens=100, rounds=50, draft_passes=50, cost=100 / speedup)
    return Prediction(draft, rule or Fixed(max_tokens=3), replayed, agreement=0.5, acceptance=0.6)


# Without a head: best at 6, then 3. With one: best of all at 2.
FORECASTS = [
    forecast(2, 1.9, head=True, rule=TopProbability(max_tokens=12, threshold=0.4)),
    forecast(6, 1.6),
    forecast(3, 1.5),
    forecast(1, 1.4, head=True),
    forecast(3, 1.3, head=True),
    forecast(5, 1.2),
    forecast(7, 1.1),
    forecast(2, 1.0),
    forecast(4, 0.9),
    forecast(4, 0.85, head=True),
    forecast(1, 0.8),
    forecast(8, 0.7),
]
HEADS = {layer: head_draft(layer) for layer in (1, 2, 3, 4)}


def study_of(target: Target, forecasts: list[Prediction] = FORECASTS, **settings: Any) -> ExitLayer:
    """A study with these predictions."""
    problem = Problem(target, (), (), earlier={}, seed=0, head_drafts=HEADS)
    study = ExitLayer(problem, ExitLayerSettings(**settings))
    study.predictions = {each.draft: each for each in forecasts}
    return study


def begun(study: ExitLayer) -> list[Candidate]:
    """The candidates that the study tries first, in order."""
    starts = list({str(start): start for start in study.starts()}.values())
    return [study.space.suggest(optuna.trial.FixedTrial(start)) for start in starts]


def drawn(study: ExitLayer, count: int) -> list[Candidate]:
    """Candidates of the study's space at random."""
    stored = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    return [study.space.suggest(stored.ask()) for _ in range(count)]


def test_it_begins_with_the_best_forecast_then_nothing_then_the_others(target: Target) -> None:
    candidates = begun(study_of(target, num_promising=2))
    assert candidates[0] == Candidate(draft=head_draft(2), draft_length=TopProbability(max_tokens=12, threshold=0.4))
    assert candidates[1].draft == PlainDecoding()
    assert candidates[2] == Candidate(draft=EarlyExit(exit_layer=6), draft_length=Fixed(max_tokens=3))
    others = [name for name in DEFAULT_RULES if name != "fixed"]
    on_the_best, rest = candidates[3 : 3 + len(others)], candidates[3 + len(others) :]
    assert [each.draft for each in on_the_best] == [head_draft(2)] * len(others)
    assert [each.draft_length.rule for each in on_the_best] == others
    assert {each.draft.describe() for each in rest} == {
        "early exit at layer 1 (trained head)",
        "early exit at layer 3 (trained head)",
        "early exit at layer 5 (no head)",
        "early exit at layer 7 (no head)",
    }


def test_any_exit_may_be_chosen_whatever_is_predicted(target: Target) -> None:
    """Optuna refuses a second process whose predictions offer other values."""
    found = {each.draft.describe() for each in drawn(study_of(target), 200)}
    heads = {f"early exit at layer {layer} (trained head)" for layer in HEADS}
    assert found == {
        "plain decoding",
        *heads,
        *(f"early exit at layer {layer} (no head)" for layer in range(1, NUM_LAYERS)),
    }
    assert study_of(target, FORECASTS[3:]).identity() == study_of(target).identity()


def test_lengths_that_are_suggested_stay_within_the_longest_draft(target: Target) -> None:
    study = study_of(target, max_tokens=5)
    first = begun(study)[0]
    assert first.draft_length == TopProbability(max_tokens=5, threshold=0.4)
    lengths = {each.draft_length.max_tokens for each in drawn(study, 60)}
    assert lengths == {1, 2, 3, 4, 5, 8}  # 8 is the unused length of plain decoding's rule


def test_only_the_asked_rules_are_proposed(target: Target) -> None:
    study = study_of(target, rules=["ada_edl"])
    proposed = [*begun(study), *drawn(study, 40)]
    drafting = [each for each in proposed if each.draft != PlainDecoding()]
    assert {each.draft_length.rule for each in drafting} == {"ada_edl"}
    assert len(drafting) < len(proposed)
    with pytest.raises(ValidationError, match="unknown rule 'adaedl'; did you mean 'ada_edl'"):
        ExitLayerSettings(rules=("adaedl",))


def test_exits_are_predicted_from_costs_and_continuations() -> None:
    target = tiny_target(6)
    prompts = tuple(tuple((seed * 11 + index * 5) % 60 + 2 for index in range(5 + seed)) for seed in range(3))
    texts = tuple(plain_decoder(target).generate(Request(prompt, Ending(16))).tokens for prompt in prompts)
    problem = Problem(target, prompts, texts, earlier={}, seed=0, costs=lambda most: made_up_costs(target, most))
    records = Trying(ExitLayer(problem, ExitLayerSettings(max_tokens=3, num_promising=5))).run(12)
    predicted = [each.notes["predicted_speedup"] for each in records if each.candidate.draft.drafts]
    assert predicted[0] == max(predicted) > min(predicted)
    assert {each.candidate.draft.describe() for each in records} >= {
        f"early exit at layer {layer} (no head)" for layer in range(1, 6)
    }
    with pytest.raises(ValueError, match="needs the costs of model passes"):
        Trying(ExitLayer(replace(problem, costs=None), ExitLayerSettings()))


def test_exits_are_all_or_those_asked_for(target: Target) -> None:
    problem = Problem(target, (), (), earlier={}, seed=0, head_drafts=HEADS)

    def drafts(**settings: Any) -> list[EarlyExit]:
        return ExitLayerSettings(**settings).exits(problem)

    without = [EarlyExit(exit_layer=layer) for layer in range(1, NUM_LAYERS)]
    assert drafts() == [*without, *HEADS.values()]
    assert drafts(heads=["none"]) == without
    assert drafts(heads=["block"]) == list(HEADS.values())
    assert drafts(exit_layers="2,6") == [without[1], without[5], HEADS[2]]


def test_heads_are_wanted_for_the_first_half_or_for_the_asked_exits() -> None:
    assert ExitLayerSettings().wanted_heads(10) == (1, 2, 3, 4, 5)
    assert ExitLayerSettings(exit_layers=[3, 8]).wanted_heads(10) == (3, 8)
    assert ExitLayerSettings(heads=["none"], exit_layers=[3]).wanted_heads(10) == ()
    most = ExitLayerSettings().wanted_heads(80)
    assert (len(most), most[0], most[-1]) == (12, 1, 40)


@pytest.mark.parametrize("heads", [["none"], ["block"]])
def test_exit_that_the_model_does_not_have_is_refused(target: Target, heads: list[str]) -> None:
    ExitLayerSettings(exit_layers=[1, 9], heads=heads).check(target)
    for wrong in (0, 10):
        with pytest.raises(ValueError, match=f"exits at layer {wrong}, but it must be 1 to 9"):
            ExitLayerSettings(exit_layers=[2, wrong], heads=heads).check(target)


def best_of(draft: EarlyExit | PlainDecoding, number: int, speedup: float = 1.5) -> Any:
    candidate = Candidate(draft=draft, draft_length=Fixed())
    return record(speedup, study="exit_layer", number=number, candidate=candidate)


@pytest.mark.parametrize(
    ("draft", "layers", "words"),
    [
        (EarlyExit(exit_layer=8), "2-8", "the best exit, 8, is the highest that was considered without a head"),
        (EarlyExit(exit_layer=2), "2-8", "the best exit, 2, is the lowest that was considered without a head"),
        (head_draft(4), None, "the best exit, 4, is the highest that was considered with a head"),
        (EarlyExit(exit_layer=4), "2-8", ""),
        (head_draft(2), None, ""),
        (head_draft(1), None, ""),  # there is none below
        (EarlyExit(exit_layer=9), None, ""),  # nor beyond
        (EarlyExit(exit_layer=5), "5", ""),  # a single one
        (PlainDecoding(), None, ""),
    ],
)
def test_best_exit_at_an_edge_is_remarked_if_there_are_exits_beyond(
    target: Target, draft: EarlyExit | PlainDecoding, layers: str | None, words: str
) -> None:
    study = study_of(target, exit_layers=layers)
    study.observe(best_of(EarlyExit(exit_layer=5), 0, 1.2))
    study.observe(best_of(draft, 1))
    assert [remark[: len(words)] for remark in study.remarks()] == ([words] if words else [])


def test_without_an_exit_it_says_why(target: Target) -> None:
    study = Trying(ExitLayer(Problem(target, (), (), earlier={}, seed=0), ExitLayerSettings(heads=["block"])))
    assert "no head was found" in (study.ended or "")
    assert study.suggest().draft == PlainDecoding()
