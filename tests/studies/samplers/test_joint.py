"""The default search: what it pools, what it measures first, how trials correct it, and that it resumes as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch

from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.draft_length import RULES
from decoding.drafts import EarlyExit, LayerSkip
from decoding.head_folder import HeadFolder
from decoding.target import Target
from decoding.text import Ending
from studies.contract import Candidate, Problem, best_trials
from studies.measurement import BatchTexts, Measurement
from studies.prediction.pools import lookups
from studies.samplers.joint import Joint, JointSettings
from studies.space import SkipSpace
from tests.support.costs import made_up_costs
from tests.support.heads import write_heads
from tests.support.records import sample
from tests.support.tiny import tiny_llama, tiny_target
from tests.support.trying import Trying, as_predicted, copied

NUM_LAYERS = 6
SMALL: dict[str, Any] = {"num_surveyed": 40, "max_tokens": 6, "bits": (), "rules": ("fixed", "top_probability")}
SKIP_SETS: dict[str, Any] = {**SMALL, "kinds": ("skip_set",)}


def _problem(target: Target) -> Problem:
    prompts = tuple(tuple((seed * 11 + index * 5) % 60 + 2 for index in range(5 + seed)) for seed in range(5))
    texts = tuple(plain_decoder(target).generate(Request(prompt, Ending(24))).tokens for prompt in prompts)
    return Problem(target, prompts, texts, earlier={}, seed=0, costs=lambda most: made_up_costs(target, most))


@pytest.fixture(scope="module")
def problem() -> Problem:
    return _problem(tiny_target(NUM_LAYERS))


@pytest.fixture(scope="module")
def problem_of_numpy() -> Problem:
    """Return the problem of a model whose weights NumPy draws: torch's normal numbers differ between processors."""
    model, stream = tiny_llama(NUM_LAYERS), np.random.default_rng(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                is_last = name.endswith(("o_proj.weight", "down_proj.weight"))
                spread = 0.12 * (0.6 ** int(name.split(".")[2]) if is_last else 1.0)  # as in `tiny_llama`
                parameter.copy_(torch.from_numpy(stream.normal(scale=spread, size=tuple(parameter.shape))))
    return _problem(Target(model))


@pytest.fixture(scope="module")
def with_heads(problem: Problem, tmp_path_factory: pytest.TempPathFactory) -> Problem:
    folder: Path = tmp_path_factory.mktemp("heads")
    drafts = write_heads(problem.target, folder, [2, 4])
    return replace(problem, head_drafts=drafts, heads=HeadFolder(problem.target, folder))


def begun(problem: Problem, stored: optuna.Study | None = None, **settings: Any) -> tuple[Joint, Trying]:
    sampler = Joint(problem, JointSettings(**settings))
    return sampler, Trying(sampler, stored)


def test_best_prediction_is_measured_first_and_no_candidate_twice(problem: Problem) -> None:
    records = begun(problem, **SKIP_SETS)[1].run(8, as_predicted)
    predicted = [record.notes["predicted_speedup"] for record in records]
    assert predicted[0] >= max(predicted) * 0.97, "the first is the best, but for what its spread adds"
    assert len({record.candidate.key for record in records}) == 8


def test_trials_correct_the_predictions(problem: Problem) -> None:
    sampler, tried = begun(problem, **SKIP_SETS)
    last = tried.run(6, lambda candidate, notes: 0.8 * as_predicted(candidate, notes))[-1].notes
    assert last["corrected_speedup"] == pytest.approx(0.8 * last["predicted_speedup"], rel=0.03)
    assert tried.ended is None
    assert "median error of the predictions: 20%, over 6 trials" in sampler.remarks()


def test_drafts_that_disappoint_are_left_for_others(problem: Problem) -> None:
    _, tried = begun(problem, **SKIP_SETS, patience=30)
    (favourite,) = tried.run(1, lambda candidate, notes: 0.6 * as_predicted(candidate, notes))

    def speed(candidate: Candidate, notes: dict[str, Any]) -> float:
        return as_predicted(candidate, notes) * (0.6 if candidate.draft == favourite.candidate.draft else 1.0)

    assert sum(record.candidate.draft == favourite.candidate.draft for record in tried.run(9, speed)) < 7


def test_it_ends_when_nothing_gets_better_or_is_within_reach(problem_of_numpy: Problem) -> None:
    sampler, tried = begun(problem_of_numpy, **SKIP_SETS, patience=4)
    tried.run(25, lambda candidate, notes: 3.0)
    assert tried.ended == "no better candidate in 4 trials"
    sampler._search.add([LayerSkip(skip_attention=(1,))])
    assert tried.ended is None, "patience begins anew for drafts that join"
    _, patient = begun(problem_of_numpy, **SKIP_SETS, patience=99)
    patient.run(40, as_predicted)
    assert (patient.ended or "").startswith("no candidate left is likely to beat")


def test_time_to_rate_is_limited_by_the_search_time(problem: Problem) -> None:
    settings = {**SKIP_SETS, "num_surveyed": 400}
    sampler, _ = begun(replace(problem, seconds=0.0), **settings)
    items, exits = len(SkipSpace.of(problem.target).items), NUM_LAYERS - 1
    assert sampler._search.pool, "there is something to measure whatever the time"
    assert sampler._rating.num_rated <= items + exits + 20
    assert sampler._rating.num_rated < begun(problem, **settings)[0]._rating.num_rated


def test_with_a_time_limit_rating_goes_on_between_trials_and_after_a_restart(with_heads: Problem) -> None:
    limited, settings = replace(with_heads, seconds=1e6), {**SMALL, "patience": 30}
    sampler, tried = begun(limited, **settings)
    assert sampler._search.pool
    assert not any(isinstance(draft, LayerSkip) for draft in sampler._search.pool), "skip sets take time to be found"
    assert sampler._rating.num_rated == 0
    # Two plain and two drafted seconds for each prompt: more than rating everything takes here.
    records = tried.run(3, as_predicted)
    assert sampler._rating.is_over
    joined = [draft for record in records for draft in record.notes["joined"]]
    assert any(draft["kind"] == "layer_skip" for draft in joined)
    assert [record.notes["rated_all"] for record in records] == [False, True, True]
    stored = copied(tried.study)
    records += tried.run(2, as_predicted)
    again, resumed = begun(replace(limited, costs=None), stored, **settings)
    following = resumed.run(2, as_predicted)
    assert again._search.pool == sampler._search.pool
    assert [(each.candidate, each.origin) for each in following] == [
        (each.candidate, each.origin) for each in records[3:]
    ]


def test_rating_ends_where_skip_sets_are_far_slower(problem: Problem) -> None:
    """Copies of a repetitive sequence cost almost nothing, so that no skip set of this model is as fast."""
    loop = tuple(index % 6 + 2 for index in range(40))
    repeating = replace(problem, prompts=(loop[:16],), continuations=(loop[16:],))
    whole = begun(repeating, **SKIP_SETS)[0]._rating.num_rated
    sampler, _ = begun(repeating, **SMALL, kinds=("skip_set", "lookup"))
    assert sampler._rating.is_over
    assert sampler._rating.num_rated < whole
    assert not any(isinstance(draft, LayerSkip) for draft in sampler._search.pool)


def test_the_best_is_what_is_expected_not_what_a_trial_measured(problem_of_numpy: Problem) -> None:
    sampler, tried = begun(problem_of_numpy, **SKIP_SETS, patience=30)
    lucky = 3

    def speed(candidate: Candidate, notes: dict[str, Any]) -> float:
        return as_predicted(candidate, notes) * (1.1 if len(sampler.expected()) == lucky else 1.0)

    records = tried.run(8, speed)
    assert tried.ended is None
    expected = sampler.expected()
    assert set(expected) == {record.candidate.key for record in records}
    measured, believed = records[lucky].speedup or 0.0, expected[records[lucky].candidate.key]
    assert believed < measured * 0.99, "one trial in eight is not taken at its word"
    assert best_trials(records, 1, expected=expected)[0].candidate.key == max(expected, key=lambda key: expected[key])


def test_the_pool_holds_every_kind(with_heads: Problem) -> None:
    sampler, tried = begun(with_heads, **SMALL, num_drafts=3, num_exits=1, num_lookups=2)
    pool = sampler._search.pool
    plain = [draft for draft in pool if draft.runs_model and draft.lookup is None]
    skips = [draft for draft in plain if isinstance(draft, LayerSkip)]
    assert 2 <= len(skips) <= 3, "the exit in the pool is one of the best three skip sets, or it is not"
    assert sum(isinstance(draft, EarlyExit) and draft.head is not None for draft in plain) == 1
    assert sum(isinstance(draft, EarlyExit) and draft.head is None for draft in plain) == 1
    assert sum(not draft.runs_model for draft in pool) == 2
    rated = lookups(sampler._predictor, 12)
    assert any(draft.kind == "suffix_automaton" for draft in rated), "suffix automata are rated too"
    in_front = [draft for draft in pool if draft.runs_model and draft.lookup is not None]
    assert sum(isinstance(draft, EarlyExit) for draft in in_front) == 2
    assert sum(isinstance(draft, LayerSkip) for draft in in_front) == len(skips), "each skip set comes with one"
    assert len(tried.run(5, as_predicted)) == 5


METHODS = "conf_layers (", "knapsack", "cosine", "growing", "moves (from ", "single sublayer", "order of harm", "exit"


def test_every_trial_says_where_its_draft_came_from(with_heads: Problem) -> None:
    sampler, tried = begun(with_heads, **SMALL, num_exits=1, num_lookups=2, patience=99)
    origins = {record.candidate.draft: record.origin for record in tried.run(24, as_predicted)}
    for draft, origin in origins.items():
        if not draft.runs_model:
            assert origin == draft.label
            continue
        assert origin.startswith("lookup before ") == (draft.parts.lookup is not None)
        alone = origin.removeprefix("lookup before ")
        assert alone.startswith(METHODS if isinstance(draft, LayerSkip) else "exit"), origin
    assert len({type(draft) for draft in origins if draft.runs_model}) == 2
    rated = [sampler._rating.proposals.origin(each.draft) for each in sampler._rating.proposals.best_first()]
    assert any("conf_layers (sublayer_entropy" in str(origin) for origin in rated), "its sets compete"


def test_the_best_prediction_of_every_method_is_reported(with_heads: Problem) -> None:
    sampler, _ = begun(with_heads, **SMALL)
    (said,) = [remark for remark in sampler.remarks() if remark.startswith("best predictions: ")]
    listed = said.removeprefix("best predictions: ").split(", ")
    speedups = [float(each.rsplit(" ", 1)[1].rstrip("x")) for each in listed]
    assert speedups == sorted(speedups, reverse=True)
    for method in ("lookup alone", "exit with head", "exit ", "conf_layers", "lookup before"):
        assert method in said


@pytest.mark.parametrize("kind", ["skip_set", "exit_head", "lookup"])
def test_kinds_that_are_asked_for_are_the_only_ones(with_heads: Problem, kind: Any) -> None:
    sampler, _ = begun(with_heads, **SMALL, kinds=(kind,), exit_layers=(2, 4))
    kinds = {
        "skip_set": lambda draft: isinstance(draft, LayerSkip) or draft.head is None,
        "exit_head": lambda draft: isinstance(draft, EarlyExit) and draft.head is not None,
        "lookup": lambda draft: not draft.runs_model,
    }
    assert sampler._search.pool
    assert all(kinds[kind](draft) for draft in sampler._search.pool)
    assert sampler.settings.wanted_heads(NUM_LAYERS) == ((2, 4) if kind == "exit_head" else ())


def test_without_any_draft_it_ends_at_once(problem: Problem) -> None:
    sampler, tried = begun(problem, **SMALL, kinds=("exit_head",))
    assert tried.ended == "there is no draft to search: no exit head was found, and no other kind is asked for"
    assert sampler.remarks() == []


def test_trials_of_batches_correct_the_predictions_for_batches(problem: Problem) -> None:
    """Trials measure two batches of two sequences at twice the predicted speed; the last sequence is left out."""
    assert problem.target.unbatchable_reason is None
    pairs = replace(problem, prompts=problem.prompts[:4], continuations=problem.continuations[:4], batch_size=2)
    sampler, tried = begun(pairs, **SKIP_SETS, survey_tokens=30, pool_tokens=80)
    predictor = sampler._search.predictor
    assert predictor.survey.indices == (0, 1, 2, 3)
    assert len(sampler._predictor.survey.indices) == 2, "a whole batch, though less would do"
    batch = BatchTexts(count=2, identical=2, ties=0)
    for number in range(6):
        wanted = tried.suggest()
        predicted = predictor.predict(wanted.draft, wanted.draft_length).replayed
        assert len(predicted.costs_per_token) == 2
        samples = tuple(sample(2 / cost, index, batch=batch) for index, cost in enumerate(predicted.costs_per_token))
        tried.end(number, 1.0, measurement=Measurement(samples=samples))
    tried.suggest()
    notes = tried.running[6][2]
    assert notes["corrected_speedup"] / notes["predicted_speedup"] == pytest.approx(2.0, rel=0.1)


def test_known_candidates_are_measured_first_and_join_the_pool(problem: Problem) -> None:
    known = Candidate(draft=LayerSkip(skip_mlp=(2,)), draft_length=RULES["fixed"](rule="fixed", max_tokens=4))
    sampler, tried = begun(problem, **SKIP_SETS, candidates=(known,))
    (first,) = tried.run(1, as_predicted)
    assert (first.candidate, first.origin) == (known, "known before")
    assert known.draft in sampler._search.pool


def test_other_candidates_are_proposed_beside_the_running_ones(problem: Problem) -> None:
    _, alone = begun(problem, **SMALL)
    _, beside = begun(problem, **SMALL)
    proposed = [beside.suggest() for _ in range(4)]
    assert len({each.key for each in proposed}) == 4
    beside.end(2, 1.1)
    assert beside.suggest().key not in {each.key for each in proposed}
    assert alone.suggest() == proposed[0]
    alone.end(0, 1.1)
    _, after = begun(problem, copied(alone.study), **SMALL)
    assert after.suggest() == alone.suggest(), "what has ended is no longer running"
