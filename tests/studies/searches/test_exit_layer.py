"""The search over exits: where it begins, what it may choose, when it ends and what it remarks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution
from pydantic import ValidationError

from decoding.draft_length import DraftLengthRule, Fixed, RoundCosts, TopProbability
from decoding.drafts import EarlyExit, PlainDecoding
from decoding.target import Target
from studies.contract import Candidate, Problem, Study, TrialState
from studies.rule_space import DEFAULT_RULES
from studies.searches.exit_forecast import ExitForecast
from studies.searches.exit_layer import KEPT_FORECASTS, NOTHING, ExitLayer, ExitLayerSettings, promising
from studies.searches.registry import create_study
from tests.support.records import record
from tests.support.tiny import tiny_target

NUM_LAYERS = 10


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(NUM_LAYERS)


def head_draft(layer: int, sha256: str = "a") -> EarlyExit:
    return EarlyExit(exit_layer=layer, head=f"h{layer}.safetensors", head_sha256=sha256 * 64)


def forecast(layer: int, speedup: float, *, head: bool = False, rule: DraftLengthRule | None = None) -> ExitForecast:
    return ExitForecast(
        draft=head_draft(layer) if head else EarlyExit(exit_layer=layer),
        agreement=0.5,
        acceptance=0.6,
        rule=rule or Fixed(max_tokens=3),
        speedup=speedup,
    )


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


def study_of(target: Target, forecasts: list[ExitForecast] = FORECASTS, **settings: Any) -> ExitLayer:
    """A study that has kept these forecasts."""
    kept = {KEPT_FORECASTS: [each.model_dump(mode="json") for each in forecasts]}
    problem = Problem(target, (), (), earlier={}, seed=0, head_drafts=HEADS)
    return ExitLayer.create(problem, ExitLayerSettings(**settings), kept)


def limited(target: Target, **settings: Any) -> Study:
    """The study as a search runs it, with its limits."""
    study = study_of(target, **settings)
    return create_study("exit_layer", study.problem, study.settings, study.setup().kept)


def begun(study: ExitLayer) -> list[Candidate]:
    """The candidates that the study proposes first, in order."""
    stored = optuna.create_study(sampler=study.setup().sampler)
    for start in study.setup().starts:
        stored.enqueue_trial(dict(start))
    return [study.propose(stored.ask())[0] for _ in study.setup().starts]


def choices(study: ExitLayer) -> list[str]:
    trial = optuna.create_study().ask()
    study.propose(trial)
    exits = trial.distributions["exit"]
    assert isinstance(exits, CategoricalDistribution)
    return [str(choice) for choice in exits.choices]


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
        "exit at 1, trained head",
        "exit at 3, trained head",
        "exit at 5, no head",
        "exit at 7, no head",
    }


def test_neighbours_of_the_promising_exits_may_be_chosen_and_no_others(target: Target) -> None:
    study = study_of(target, num_promising=2)
    with_head, without = ("trained head", "no head")
    layers = [(1, with_head), (2, with_head), (3, with_head), (5, without), (6, without), (7, without)]
    assert choices(study) == [NOTHING, *(f"layer {layer}, {head}" for layer, head in layers)]
    assert [each.draft.exit_layer for each in promising(FORECASTS, 1)] == [2, 1, 3]
    assert len(promising(FORECASTS, 99)) == len(FORECASTS)


def test_neighbours_are_those_considered_however_far_apart() -> None:
    sparse = [forecast(20, 1.5), forecast(30, 1.2), forecast(10, 1.1), forecast(40, 1.0)]
    assert [each.draft.exit_layer for each in promising(sparse, 1)] == [20, 10, 30]


def test_notes_of_a_trial_say_what_was_forecast(target: Target) -> None:
    study = study_of(target)
    trial = optuna.create_study().ask({})
    stored = optuna.create_study()
    stored.enqueue_trial(dict(study.setup().starts[0]))
    trial = stored.ask()
    _, notes = study.propose(trial)
    assert notes == {"predicted_speedup": 1.9, "predicted_agreement": 0.5, "predicted_acceptance": 0.6}


def test_lengths_that_are_suggested_stay_within_the_longest_draft(target: Target) -> None:
    study = study_of(target, max_tokens=5)
    first = begun(study)[0]
    assert first.draft_length == TopProbability(max_tokens=5, threshold=0.4)
    stored = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    lengths = {study.propose(stored.ask())[0].draft_length.max_tokens for _ in range(60)}
    assert lengths == {1, 2, 3, 4, 5, 8}  # 8 is the unused length of plain decoding's rule


def test_only_the_asked_rules_are_proposed(target: Target) -> None:
    study = study_of(target, rules=["ada_edl"])
    stored = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    proposed = [*begun(study), *(study.propose(stored.ask())[0] for _ in range(40))]
    drafting = [each for each in proposed if each.draft != PlainDecoding()]
    assert {each.draft_length.rule for each in drafting} == {"ada_edl"}
    assert len(drafting) < len(proposed)
    with pytest.raises(ValidationError, match="unknown rule 'adaedl'; did you mean 'ada_edl'"):
        ExitLayerSettings(rules=("adaedl",))


def test_resumed_study_keeps_space_and_starts_without_a_second_forecast(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decoding.timing.draft_costs.measure_round_costs", _made_up_costs)
    prompts = ((5, 6, 7),)
    problem = Problem(target, prompts, ((8, 9, 10, 11),), earlier={}, seed=0)
    first = ExitLayer.create(problem, ExitLayerSettings(max_tokens=3))

    def never(*_: Any) -> Any:
        raise AssertionError("forecast again")

    monkeypatch.setattr("studies.searches.exit_layer.forecast_exits", never)
    resumed = ExitLayer.create(problem, ExitLayerSettings(max_tokens=3), first.setup().kept)
    assert resumed.setup().space == first.setup().space
    assert resumed.setup().starts == first.setup().starts
    assert choices(resumed) == choices(first)
    assert resumed.setup().kept == first.setup().kept


def _made_up_costs(target: Target, drafter: Any, max_tokens: int, *, num_sequences: int) -> RoundCosts:
    return RoundCosts(draft_step=0.5, verify=(1.0,) * (max_tokens + 1))


def test_forecast_is_of_all_exits_or_of_those_asked_for(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    forecast_of: list[EarlyExit] = []
    monkeypatch.setattr(
        "studies.searches.exit_layer.forecast_exits",
        lambda problem, drafts, max_tokens: forecast_of.extend(drafts) or [],
    )
    problem = Problem(target, (), (), earlier={}, seed=0, head_drafts=HEADS)

    def drafts(**settings: Any) -> list[EarlyExit]:
        forecast_of.clear()
        ExitLayer.create(problem, ExitLayerSettings(**settings))
        return list(forecast_of)

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


def test_no_exits_at_all_are_no_setting() -> None:
    with pytest.raises(ValidationError, match="at least 1 item"):
        ExitLayerSettings(exit_layers=[])


def test_another_head_under_the_same_name_is_another_search(target: Target) -> None:
    study = study_of(target)
    for heads in ({**HEADS, 2: head_draft(2, "b")}, {layer: HEADS[layer] for layer in (1, 2, 3)}):
        problem = replace(study.problem, head_drafts=heads)
        assert ExitLayer.create(problem, ExitLayerSettings(), study.setup().kept).setup().space != study.setup().space
    assert study_of(target, patience=3, max_trials=9).setup().space == study.setup().space
    assert study_of(target, max_tokens=6).setup().space != study.setup().space


def best_of(draft: EarlyExit | PlainDecoding, number: int, speedup: float = 1.5) -> Any:
    candidate = Candidate(draft=draft, draft_length=Fixed())
    return record(speedup, study="exit_layer", number=number, candidate=candidate)


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        (EarlyExit(exit_layer=8), "the best exit, 8, is the highest that was considered without a head"),
        (EarlyExit(exit_layer=2), "the best exit, 2, is the lowest that was considered without a head"),
        (head_draft(4), "the best exit, 4, is the highest that was considered with a head"),
        (EarlyExit(exit_layer=4), ""),
        (head_draft(2), ""),
        (head_draft(1), ""),  # there is none below
        (PlainDecoding(), ""),
    ],
)
def test_best_exit_at_an_edge_is_remarked_if_there_are_exits_beyond(
    target: Target, draft: EarlyExit | PlainDecoding, words: str
) -> None:
    study = study_of(target, [each for each in FORECASTS if each.draft != EarlyExit(exit_layer=1)])
    study.observe(best_of(EarlyExit(exit_layer=5), 0, 1.2))
    study.observe(best_of(draft, 1))
    assert [remark[: len(words)] for remark in study.remarks()] == ([words] if words else [])


def test_no_remark_before_a_trial_or_with_a_single_exit(target: Target) -> None:
    assert study_of(target).remarks() == []
    single = study_of(target, [forecast(5, 1.2)])
    single.observe(best_of(EarlyExit(exit_layer=5), 0))
    assert single.remarks() == []


def test_highest_exit_of_the_model_has_none_beyond(target: Target) -> None:
    study = study_of(target, [forecast(9, 1.2), forecast(8, 1.1)])
    study.observe(best_of(EarlyExit(exit_layer=9), 0))
    assert study.remarks() == []


def test_it_ends_after_patience_trials_without_a_better_speedup(target: Target) -> None:
    study = limited(target, patience=3)
    for number, speedup in enumerate([1.0, 1.3, None, 1.2]):
        assert study.finished() is None
        study.observe(record(speedup, number=number))
    study.observe(record(2.0, number=4, repeat_of=1))
    assert study.finished() == "no better candidate in 3 trials"


def test_it_ends_at_the_trial_limit(target: Target) -> None:
    study = limited(target, max_trials=2)
    study.observe(record(1.0))
    assert study.finished() is None
    study.observe(record(1.1, number=1, state=TrialState.PRUNED))
    assert study.finished() == "2 trials done"


def test_without_an_exit_it_says_why(target: Target) -> None:
    problem = Problem(target, (), (), earlier={}, seed=0)
    study = ExitLayer.create(problem, ExitLayerSettings(heads=["block"]))
    assert "no head was found" in (study.finished() or "")
    assert list(study.setup().starts) == [{"exit": NOTHING}]
