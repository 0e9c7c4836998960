"""Searches by prediction: what they pool, what they measure first, how trials correct them, and that they resume as they were."""

from __future__ import annotations

import gc
import hashlib
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.draft_length import RULES
from decoding.drafts import EarlyExit, LayerSkip
from decoding.head_folder import HeadFolder
from decoding.text import Ending
from studies.contract import Candidate, Problem, Study, TrialRecord, TrialState, best_trials
from studies.measurement import BatchTexts, Measurement
from studies.prediction.pools import lookups
from studies.prediction.skip_space import SkipSpace
from studies.searches.joint import Joint, JointSettings
from studies.searches.registry import create_study
from tests.support.costs import made_up_costs
from tests.support.heads import write_heads
from tests.support.records import measurement, sample
from tests.support.tiny import tiny_target

NUM_LAYERS = 6
SMALL: dict[str, Any] = {"num_surveyed": 40, "max_tokens": 6, "bits": ()}
SKIP_SETS: dict[str, Any] = {**SMALL, "kinds": ("skip_set",), "trees": False}


@pytest.fixture(scope="module")
def problem() -> Problem:
    target = tiny_target(NUM_LAYERS)
    prompts = tuple(tuple((seed * 11 + index * 5) % 60 + 2 for index in range(5 + seed)) for seed in range(5))
    texts = tuple(plain_decoder(target).generate(Request(prompt, Ending(24))).tokens for prompt in prompts)
    return Problem(target, prompts, texts, earlier={}, seed=0, costs=lambda most: made_up_costs(target, most))


@pytest.fixture(scope="module")
def with_heads(problem: Problem, tmp_path_factory: pytest.TempPathFactory) -> Problem:
    folder: Path = tmp_path_factory.mktemp("heads")
    drafts = write_heads(problem.target, folder, [2, 4])
    return replace(problem, head_drafts=drafts, heads=HeadFolder(problem.target, folder))


def run(study: Study, trials: int, speed: Callable[[Candidate, dict[str, Any]], float]) -> list[TrialRecord]:
    """Run trials with made-up speed-ups; the study observes each before it proposes the next."""
    stored = optuna.create_study(sampler=study.setup().sampler, direction="maximize")
    records = []
    for number in range(trials):
        trial = stored.ask()
        candidate, notes = study.propose(trial)
        speedup = speed(candidate, notes)
        record = TrialRecord(
            study=study.name,
            number=number,
            state=TrialState.COMPLETE,
            candidate=candidate,
            measurement=measurement([speedup] * 5),
            notes=notes,
        )
        stored.tell(trial, speedup)
        study.observe(record)
        records.append(record)
    return records


def ended(study: Study, speedup: float) -> str:
    """Run trials that all have this speed-up until the study ends, and return the reason."""
    for _ in range(25):
        if (reason := study.finished()) is not None:
            return reason
        run(study, 1, lambda candidate, notes: speedup)
    raise AssertionError("it goes on")


def as_predicted(candidate: Candidate, notes: dict[str, Any]) -> float:
    return float(notes["predicted_speedup"])


def test_best_prediction_is_measured_first_and_no_candidate_twice(problem: Problem) -> None:
    study = Joint.create(problem, JointSettings(**SKIP_SETS))
    records = run(study, 8, as_predicted)
    predicted = [record.notes["predicted_speedup"] for record in records]
    assert predicted[0] >= max(predicted) * 0.97, "the first is the best, but for what its spread adds"
    assert len({record.candidate.key for record in records}) == 8
    assert all(record.candidate.draft.runs_model for record in records)


def test_first_choice_beats_what_usual_searches_would_try_first(problem: Problem) -> None:
    study = Joint.create(problem, JointSettings(**SKIP_SETS))
    first = run(study, 1, as_predicted)[0].notes["predicted_speedup"]
    odd = Joint.create(
        problem,
        JointSettings(**SKIP_SETS),
        {**study.setup().kept, "pool": [LayerSkip.blocks((1, 3)).model_dump(mode="json")], "origins": ["the test"]},
    )
    assert first > run(odd, 1, as_predicted)[0].notes["predicted_speedup"]


def test_trials_correct_the_predictions(problem: Problem) -> None:
    study = Joint.create(problem, JointSettings(**SKIP_SETS))
    records = run(study, 6, lambda candidate, notes: 0.8 * as_predicted(candidate, notes))
    last = records[-1].notes
    assert last["corrected_speedup"] == pytest.approx(0.8 * last["predicted_speedup"], rel=0.03)
    assert "median error of the predictions: 20%, over 6 trials" in study.remarks()


def test_drafts_that_disappoint_are_left_for_others(problem: Problem) -> None:
    study = Joint.create(problem, JointSettings(**SKIP_SETS, patience=30))
    favourite = run(Joint.create(problem, JointSettings(**SKIP_SETS)), 1, as_predicted)[0].candidate.draft

    def speed(candidate: Candidate, notes: dict[str, Any]) -> float:
        return as_predicted(candidate, notes) * (0.6 if candidate.draft == favourite else 1.0)

    records = run(study, 10, speed)
    assert records[0].candidate.draft == favourite
    assert sum(record.candidate.draft == favourite for record in records) < 8


def test_it_ends_when_nothing_gets_better_or_after_the_trials_allowed(problem: Problem) -> None:
    settings = JointSettings(**SKIP_SETS, patience=4)
    study = Joint.create(problem, settings)
    assert study.finished() is None
    assert "no better candidate in 4 trials" in ended(study, 3.0)
    patient = Joint.create(problem, JointSettings(**SKIP_SETS, patience=99))
    run(patient, 6, lambda candidate, notes: 3.0)
    assert "no better candidate" not in (patient.finished() or "")
    run_out = create_study("joint", problem, JointSettings(**SKIP_SETS, max_trials=3))
    run(run_out, 3, as_predicted)
    assert run_out.finished() == "3 trials done"


def test_nothing_within_reach_ends_it(problem: Problem) -> None:
    study = Joint.create(problem, JointSettings(**SKIP_SETS, patience=99, rules=("fixed", "top_probability")))
    run(study, 1, as_predicted)
    assert study.finished() is None
    assert ended(study, 0.5).startswith("no candidate left is likely to beat")


def test_resumed_search_goes_on_as_it_would_have(problem: Problem) -> None:
    settings = JointSettings(**SKIP_SETS)
    study = Joint.create(problem, settings)
    records = run(study, 7, as_predicted)
    again = Joint.create(replace(problem, costs=None), settings, study.setup().kept)
    for record in records[:4]:
        again.observe(record)
    following = run(again, 3, as_predicted)
    assert [each.candidate for each in following] == [each.candidate for each in records[4:]]


def test_rules_asked_for_are_the_only_ones(problem: Problem) -> None:
    study = Joint.create(problem, JointSettings(**SKIP_SETS, rules=("ada_edl", "fixed")))
    records = run(study, 8, as_predicted)
    assert {record.candidate.draft_length.rule for record in records} <= {"ada_edl", "fixed"}
    everything = run(Joint.create(problem, JointSettings(**SKIP_SETS, patience=99)), 20, as_predicted)
    assert len({record.candidate.draft_length.rule for record in everything}) >= 3 <= len(RULES)


def test_forms_that_drop_a_token_are_searched_on_request(problem: Problem) -> None:
    assert not {"ada_edl_published", "max_confidence"} & set(JointSettings().rules)
    asked = JointSettings(**SKIP_SETS, rules=("ada_edl_published", "max_confidence"))
    records = run(Joint.create(problem, asked), 8, as_predicted)
    assert {record.candidate.draft_length.rule for record in records} == set(asked.rules)


def test_costs_are_needed(problem: Problem) -> None:
    with pytest.raises(ValueError, match="needs the costs of model passes"):
        Joint.create(replace(problem, costs=None), JointSettings())


def test_time_to_rate_is_limited_by_the_search_time(problem: Problem) -> None:
    settings = JointSettings(**{**SKIP_SETS, "num_surveyed": 10_000})
    study = Joint.create(replace(problem, seconds=0.0), settings)
    items, exits = len(SkipSpace.of(problem.target).items), NUM_LAYERS - 1
    assert study._search.pool, "there is something to measure whatever the time"
    assert study._rating.num_rated <= items + exits + 20
    assert study._rating.num_rated < Joint.create(problem, settings)._rating.num_rated


def test_with_a_time_limit_rating_goes_on_between_trials(with_heads: Problem) -> None:
    study = Joint.create(replace(with_heads, seconds=1e6), JointSettings(**SMALL, patience=30))
    assert study._search.pool
    assert not any(isinstance(draft, LayerSkip) for draft in study._search.pool), "skip sets take time to be found"
    assert study._rating.num_rated == 0
    # Two plain and two drafted seconds for each prompt: more than rating everything takes here.
    records = run(study, 3, as_predicted)
    assert study._rating.is_over
    joined = [draft for record in records for draft in record.notes["joined"]]
    assert any(draft["kind"] == "layer_skip" for draft in joined)
    assert [record.notes["rated_all"] for record in records] == [False, True, True]


def test_resumed_search_knows_the_drafts_that_joined(with_heads: Problem) -> None:
    limited, settings = replace(with_heads, seconds=1e6), JointSettings(**SMALL, patience=30)
    study = Joint.create(limited, settings)
    records = run(study, 5, as_predicted)
    again = Joint.create(replace(limited, costs=None), settings, study.setup().kept)
    for record in records[:3]:
        again.observe(record)
    following = run(again, 2, as_predicted)
    assert again._search.pool == study._search.pool
    assert [each.candidate for each in following] == [each.candidate for each in records[3:]]


def test_rating_ends_where_skip_sets_are_far_slower(problem: Problem) -> None:
    """Copies of a repetitive sequence cost almost nothing, so that no skip set of this model is as fast."""
    loop = tuple(index % 6 + 2 for index in range(40))
    repeating = replace(problem, prompts=(loop[:16],), continuations=(loop[16:],))
    whole = Joint.create(repeating, JointSettings(**SKIP_SETS))._rating.num_rated
    study = Joint.create(repeating, JointSettings(**SMALL, kinds=("skip_set", "lookup")))
    assert study._rating.is_over
    assert study._rating.num_rated < whole
    assert not any(isinstance(draft, LayerSkip) for draft in study._search.pool)


def test_patience_begins_anew_for_drafts_that_join(problem: Problem) -> None:
    study = Joint.create(problem, JointSettings(**SKIP_SETS, patience=3))
    assert ended(study, 3.0) == "no better candidate in 3 trials"
    study._search.add([LayerSkip(skip_attention=(1,))])
    assert study._search.finished() is None


def test_the_best_is_what_is_expected_not_what_a_trial_measured(problem: Problem) -> None:
    study = Joint.create(problem, JointSettings(**SKIP_SETS, patience=30))
    lucky = 3

    def speed(candidate: Candidate, notes: dict[str, Any]) -> float:
        number = len(study.expected())
        return as_predicted(candidate, notes) * (1.1 if number == lucky else 1.0)

    records = run(study, 8, speed)
    expected = study.expected()
    assert set(expected) == {record.candidate.key for record in records}
    measured, believed = records[lucky].speedup or 0.0, expected[records[lucky].candidate.key]
    assert believed < measured * 0.99, "one trial in eight is not taken at its word"
    assert best_trials(records, 1, expected=expected)[0].candidate.key == max(expected, key=lambda key: expected[key])


def test_the_sampler_that_a_stored_study_keeps_does_not_keep_the_surveys(problem: Problem) -> None:
    study = Joint.create(problem, JointSettings(**SKIP_SETS))
    sampler, alive = study.setup().sampler, weakref.ref(study._predictor.survey)
    del study
    gc.collect()
    assert sampler is not None
    assert alive() is None


def test_joint_pool_holds_every_kind(with_heads: Problem) -> None:
    study = Joint.create(with_heads, JointSettings(**SMALL, num_drafts=3, num_exits=1, num_lookups=2, trees=False))
    pool = study._search.pool
    plain = [draft for draft in pool if draft.runs_model and draft.lookup is None]
    skips = [draft for draft in plain if isinstance(draft, LayerSkip)]
    assert 2 <= len(skips) <= 3, "the exit in the pool is one of the best three skip sets, or it is not"
    assert sum(isinstance(draft, EarlyExit) and draft.head is not None for draft in plain) == 1
    assert sum(isinstance(draft, EarlyExit) and draft.head is None for draft in plain) == 1
    assert sum(not draft.runs_model for draft in pool) == 2
    assert any(draft.kind == "suffix_automaton" for draft in lookups(study._predictor, 12)), (
        "suffix automata are rated too"
    )
    in_front = [draft for draft in pool if draft.runs_model and draft.lookup is not None]
    assert sum(isinstance(draft, EarlyExit) for draft in in_front) == 2
    assert sum(isinstance(draft, LayerSkip) for draft in in_front) == len(skips), "each skip set comes with one"
    assert len(run(study, 5, as_predicted)) == 5


def test_every_trial_says_where_its_draft_came_from(with_heads: Problem) -> None:
    study = Joint.create(with_heads, JointSettings(**SMALL, num_exits=1, num_lookups=2, patience=99))
    records = run(study, 24, as_predicted)
    origins = {record.candidate.draft: record.origin for record in records}
    methods = (
        "conf_layers (",
        "knapsack",
        "cosine",
        "growing",
        "moves (from ",
        "single sublayer",
        "order of harm",
        "exit",
    )
    for draft, origin in origins.items():
        alone = origin.removeprefix("lookup before ")
        if not draft.runs_model:
            assert origin == draft.label
            continue
        assert origin.startswith("lookup before ") == (draft.parts.lookup is not None)
        assert alone.startswith(methods if isinstance(draft, LayerSkip) else "exit"), origin
    assert len({type(draft) for draft in origins if draft.runs_model}) == 2


def test_the_best_prediction_of_every_method_is_reported(with_heads: Problem) -> None:
    study = Joint.create(with_heads, JointSettings(**SMALL))
    (said,) = [remark for remark in study.remarks() if remark.startswith("best predictions: ")]
    speedups = [
        float(each.rsplit(" ", 1)[1].rstrip("x")) for each in said.removeprefix("best predictions: ").split(", ")
    ]
    assert speedups == sorted(speedups, reverse=True)
    for method in ("lookup alone", "exit with head", "exit ", "conf_layers", "lookup before"):
        assert method in said


def test_sets_of_conf_layers_compete_in_the_default_search(with_heads: Problem) -> None:
    study = Joint.create(with_heads, JointSettings(**SMALL))
    rated = study._rating._proposals.best_first()
    origins = [str(study._rating.origin(prediction.draft)) for prediction in rated]
    assert any("conf_layers (sublayer_entropy" in origin for origin in origins)


def test_resumed_search_knows_where_its_drafts_came_from(with_heads: Problem) -> None:
    limited, settings = replace(with_heads, seconds=1e6), JointSettings(**SMALL, patience=30)
    study = Joint.create(limited, settings)
    records = run(study, 5, as_predicted)
    again = Joint.create(replace(limited, costs=None), settings, study.setup().kept)
    for record in records[:3]:
        again.observe(record)
    assert [each.origin for each in run(again, 2, as_predicted)] == [each.origin for each in records[3:]]


@pytest.mark.parametrize("kind", ["skip_set", "exit_head", "lookup"])
def test_joint_searches_the_kinds_that_are_asked_for(with_heads: Problem, kind: Any) -> None:
    study = Joint.create(with_heads, JointSettings(**SMALL, kinds=(kind,), exit_layers=(2, 4)))
    kinds = {
        "skip_set": lambda draft: isinstance(draft, LayerSkip) or draft.head is None,
        "exit_head": lambda draft: isinstance(draft, EarlyExit) and draft.head is not None,
        "lookup": lambda draft: not draft.runs_model,
    }
    assert study._search.pool
    assert all(kinds[kind](draft) for draft in study._search.pool)
    wanted = JointSettings(kinds=(kind,), exit_layers=(2, 4)).wanted_heads(NUM_LAYERS)
    assert wanted == ((2, 4) if kind == "exit_head" else ())


def test_joint_without_any_draft_ends_at_once(problem: Problem) -> None:
    study = Joint.create(problem, JointSettings(**SMALL, kinds=("exit_head",)))
    assert study.finished() == "there is no draft to search: no exit head was found, and no other kind is asked for"
    assert study.remarks() == []


def test_exit_that_the_model_does_not_have_is_refused(problem: Problem) -> None:
    JointSettings(exit_layers=(1, 5)).check(problem.target)
    with pytest.raises(ValueError, match="exits at layer 6"):
        JointSettings(exit_layers=(6,)).check(problem.target)


def test_trials_of_batches_correct_the_predictions_for_batches(problem: Problem) -> None:
    """Trials measure two batches of two sequences at twice the predicted speed; the last sequence is left out."""
    assert problem.target.unbatchable_reason is None
    pairs = replace(problem, prompts=problem.prompts[:4], continuations=problem.continuations[:4], batch_size=2)
    study = Joint.create(pairs, JointSettings(**SKIP_SETS, survey_tokens=30, pool_tokens=80))
    predictor = study._search.predictor
    assert predictor.survey.indices == (0, 1, 2, 3)
    assert len(study._predictor.survey.indices) == 2, "a whole batch, though less would do"
    batch = BatchTexts(count=2, identical=2, ties=0)
    stored = optuna.create_study(sampler=study.setup().sampler, direction="maximize")
    for number in range(6):
        trial = stored.ask()
        wanted, notes = study.propose(trial)
        predicted = predictor.predict(wanted.draft, wanted.draft_length).replayed
        assert len(predicted.costs_per_token) == 2
        samples = tuple(sample(2 / cost, index, batch=batch) for index, cost in enumerate(predicted.costs_per_token))
        facts = {
            "study": study.name,
            "number": number,
            "state": TrialState.COMPLETE,
            "candidate": wanted,
            "notes": notes,
        }
        study.observe(TrialRecord(**facts, measurement=Measurement(samples=samples)))
        stored.tell(trial, 1.0)
    _, notes = study.propose(stored.ask())
    assert notes["corrected_speedup"] / notes["predicted_speedup"] == pytest.approx(2.0, rel=0.1)


def test_joint_proposes_leaves_where_they_are_predicted_to_pay(with_heads: Problem) -> None:
    settings = JointSettings(**SMALL, kinds=("exit_head",), trees=True)
    study = Joint.create(with_heads, settings)
    trees = [draft for draft in study._search.pool if draft.parts.tree is not None]
    assert trees
    best = study._predictor.best
    assert all(best(draft).speedup > best(draft.having(tree=None)).speedup for draft in trees)
    assert all("lea" in record.candidate.draft.describe() for record in run(study, 1, as_predicted))
    without = Joint.create(with_heads, settings.model_copy(update={"trees": False}))
    assert all(draft.parts.tree is None for draft in without._search.pool)


CHOSEN = {
    "all kinds": """
        lookup (2-1, 4), then exit at 2, no head, 2 side leaves; fixed 1
        lookup (2-1, 4), then exit at 2, no head, 2 side leaves; calibrated_thompson 6
        lookup (3-1, 4), then exit at 2, no head, 2 side leaves; fixed 1
        lookup (5-1, 4), then exit at 2, no head, 2 side leaves; fixed 1
        lookup (3-1, 4), then exit at 2, no head, 2 side leaves; calibrated_thompson 6
        exit at 2, no head, 2 side leaves; fixed 1
        lookup (3-1, 4), then exit at 2, no head, 2 side leaves; beta_thompson 2
    """,
    "skip sets alone": """
        exit at 2, no head, 2 side leaves; fixed 1
        exit at 5, no head; fixed 3
        exit at 2, no head, 2 side leaves; calibrated_thompson 6
        exit at 5, no head; ada_edl 3
        exit at 2, no head, 2 side leaves; fixed 2
        exit at 2, no head, 2 side leaves; ada_edl 5
        exit at 2, no head, 2 side leaves; fixed 3
        exit at 4, no head; fixed 2
        exit at 5, no head; fixed 4
        exit at 5, no head; adaptive_exit 3
        exit at 4, no head; ada_edl 2
        exit at 4, no head; adaptive_exit 2
        skip attention -, MLP 5; fixed 2
        exit at 5, no head; adaptive_exit 3
        exit at 4, no head; ada_edl 5
        exit at 4, no head; adaptive_exit 4
        exit at 2, no head, 2 side leaves; top_probability 6
        exit at 2, no head, 2 side leaves; adaptive_exit 2
        exit at 2, no head, 2 side leaves; ada_edl 2
        exit at 2, no head, 2 side leaves; ada_edl 5
    """,
}
"""What the search chose, trial by trial, before its candidates became points of one space."""


@pytest.mark.parametrize("kinds", CHOSEN)
def test_choices_are_those_that_were_recorded(with_heads: Problem, kinds: str) -> None:
    asked = {"skip sets alone": {"kinds": ("skip_set",)}, "all kinds": {}}[kinds]
    study = Joint.create(with_heads, JointSettings(**SMALL, **asked, patience=30))

    def planted(candidate: Candidate, notes: dict[str, Any]) -> float:
        luck = int.from_bytes(hashlib.sha256(candidate.key.encode()).digest()[:4], "big") / 2**32
        return as_predicted(candidate, notes) * (0.9 + 0.2 * luck)

    wanted = [line.strip() for line in CHOSEN[kinds].strip().splitlines()]
    found = [each.candidate for each in run(study, len(wanted), planted)]
    rules = [f"{each.draft.describe()}; {each.draft_length.rule} {each.draft_length.max_tokens}" for each in found]
    assert rules == wanted
    assert (study.finished() or "").startswith("no candidate left is likely to beat")


def test_every_trial_has_its_parameters_and_they_have_importances(with_heads: Problem) -> None:
    study = Joint.create(with_heads, JointSettings(**SMALL, patience=99))
    stored = optuna.create_study(sampler=study.setup().sampler, direction="maximize")
    for number in range(12):
        trial = stored.ask()
        candidate, notes = study.propose(trial)
        assert study.space.suggest(optuna.trial.FixedTrial(trial.params)) == candidate
        speedup = as_predicted(candidate, notes)
        facts = {"study": "joint", "number": number, "state": TrialState.COMPLETE, "notes": notes}
        study.observe(TrialRecord(candidate=candidate, measurement=measurement([speedup] * 5), **facts))
        stored.tell(trial, speedup)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # few trials
        importances = optuna.importance.get_param_importances(stored)
    assert {"kind", "rule"} <= set(importances)


def test_known_candidates_are_measured_first_and_join_the_pool(problem: Problem) -> None:
    known = Candidate(draft=LayerSkip(skip_mlp=(2,)), draft_length=RULES["fixed"](rule="fixed", max_tokens=4))
    study = Joint.create(problem, JointSettings(**SKIP_SETS, candidates=(known,)))
    stored = optuna.create_study(sampler=study.setup().sampler)
    for start in study.setup().starts:
        stored.enqueue_trial(dict(start))
    candidate, notes = study.propose(stored.ask())
    assert (candidate, notes["origin"]) == (known, "known before")
    assert known.draft in study._search.pool
