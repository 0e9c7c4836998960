"""Quantised drafts in the default search: when they are proposed, what they are combined with, and where they came from."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
import torch

from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.drafts import EarlyExit, LayerSkip
from decoding.errors import UnsupportedModelError
from decoding.head_folder import HeadFolder
from decoding.kernels.choice import quantised_linear as quantised
from decoding.target import Target
from decoding.text import Ending
from studies.contract import Problem
from studies.prediction.pools import is_same
from studies.prediction.proposals import method_of
from studies.samplers import joint
from studies.samplers.joint import Joint, JointSettings, origin_of
from studies.samplers.rating import NEAR_THE_BEST
from studies.space import SpaceSettings
from tests.support.costs import made_up_costs
from tests.support.families import build, some_tokens
from tests.support.heads import write_heads
from tuner.search.memory_plan import BYTES_PER_WEIGHT

SMALL: dict[str, Any] = {
    "num_surveyed": 12,
    "max_tokens": 4,
    "num_exits": 2,
    "num_lookups": 2,
    "rules": ("fixed", "ada_edl"),
}
BOTH: dict[str, Any] = {**SMALL, "bits": (8, 4)}
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def problem() -> Problem:
    target = Target(build("llama"))
    prompts = tuple(tuple(some_tokens(6, seed)) for seed in range(3))
    texts = tuple(plain_decoder(target).generate(Request(prompt, Ending(24))).tokens for prompt in prompts)
    costs = lambda most: made_up_costs(target, most, (8, 4))  # noqa: E731
    # Skip sets are rated between trials, as in any search with a time limit; this one's share for surveys is never spent.
    return Problem(target, prompts, texts, earlier={}, seed=0, costs=costs, seconds=math.inf)


def begun(problem: Problem, **settings: Any) -> Joint:
    sampler = Joint(problem, JointSettings(**{**BOTH, **settings}))
    sampler.begin(optuna.create_study())
    return sampler


def pool_of(problem: Problem, **settings: Any) -> list[Any]:
    return begun(problem, **settings)._search.pool


def test_whole_model_and_best_exits_are_proposed_in_both_precisions(problem: Problem) -> None:
    pool = pool_of(problem)
    assert {LayerSkip(bits=8), LayerSkip(bits=4)} <= set(pool)
    exits = [draft for draft in pool if isinstance(draft, EarlyExit) and draft.lookup is None]
    assert {draft.bits for draft in exits} == {None, 8, 4}
    assert any(draft.parts.lookup and draft.parts.bits for draft in pool), "a lookup comes before a quantised draft"


@pytest.mark.parametrize(("seconds", "exits"), [(0.0, {None}), (None, {None, 8, 4})])
def test_quantised_exits_are_surveyed_within_the_share_of_a_time_limit(
    problem: Problem, monkeypatch: pytest.MonkeyPatch, seconds: float | None, exits: set[int | None]
) -> None:
    """The whole model takes one recording and is always tried; without a limit nothing is left out."""
    monkeypatch.setattr(joint, "PREPARING", 0.0)
    study = begun(replace(problem, seconds=seconds))
    pool = study._search.pool
    assert {LayerSkip(bits=8), LayerSkip(bits=4)} <= set(pool)
    assert {draft.parts.bits for draft in pool if isinstance(draft, EarlyExit)} == exits
    assert any("a longer time tries them" in remark for remark in study.remarks()) == (seconds is not None)


def test_cheap_precision_is_the_best_prediction(problem: Problem) -> None:
    """At 0.4 of a pass, and nearly always right, nothing else comes near on this model."""
    study = begun(problem)
    first = study._search.choose()
    assert first is not None
    assert first.prediction.draft.parts.bits is not None
    assert first.prediction.speedup > 1.5


@pytest.mark.parametrize(("has_all", "share", "chosen"), [(True, 0.9, 48), (True, 0.0, None), (False, 0.9, None)])
def test_fewer_token_ids_are_proposed_where_they_promise_more(
    problem: Problem, monkeypatch: pytest.MonkeyPatch, has_all: bool, share: float, chosen: int | None
) -> None:
    """Where the LM head takes most of a step, and the texts' tokens are among those that drafts choose from."""
    monkeypatch.setattr("studies.space.FREQUENT_IDS", 48)
    target, prompts = problem.target, problem.prompts
    if has_all:
        prompts = tuple((*range(96), *prompt) for prompt in prompts)
    texts = tuple(plain_decoder(target).generate(Request(prompt, Ending(24))).tokens for prompt in prompts)
    costs = lambda most: made_up_costs(target, most, (8,), lm_head=share)  # noqa: E731
    pool = pool_of(replace(problem, prompts=prompts, continuations=texts, costs=costs), bits=(8,))
    whole = [draft for draft in pool if isinstance(draft, LayerSkip) and not draft.skips_any and draft.bits]
    assert {draft.ids_below for draft in whole} == {chosen}


def test_precision_that_disagrees_is_not_proposed(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("studies.prediction.pools.LEAST_AGREEMENT", 1.01)
    assert {draft.parts.bits for draft in pool_of(problem)} == {None}


@pytest.mark.parametrize("bits", [(), (8,)])
def test_only_wanted_precisions_are_proposed(problem: Problem, bits: tuple[int, ...]) -> None:
    found = {draft.parts.bits for draft in pool_of(problem, bits=bits)}
    assert found == {None, *bits}
    assert JointSettings(bits=bits).wanted_bits(CPU) == bits
    for device in (CPU, GPU):
        assert JointSettings(bits=bits, kinds=("lookup",)).wanted_bits(device) == ()


@pytest.mark.parametrize("settings", [JointSettings, SpaceSettings])
def test_precisions_that_a_gpu_cannot_run_are_refused_if_asked_for(
    settings: type[JointSettings | SpaceSettings],
) -> None:
    assert settings().wanted_bits(GPU) == settings(bits=()).wanted_bits(GPU) == ()
    with pytest.raises(
        UnsupportedModelError, match=r"int8 or int4 weights have no kernel on cuda yet, .* without `bits`"
    ):
        settings(bits=(8,)).wanted_bits(GPU)


def test_by_default_precisions_are_those_that_were_measured_to_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert JointSettings().wanted_bits(GPU) == ()
    monkeypatch.setattr("decoding.kernels.quantised.MULTIPLY", SimpleNamespace(exists=True))
    for has_instructions, expected in ((True, (8,)), (False, ())):
        monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: has_instructions)  # noqa: B023 - called at once
        assert JointSettings().wanted_bits(CPU) == expected


def test_precision_without_measured_costs_is_not_proposed(problem: Problem) -> None:
    without = replace(problem, costs=lambda most: made_up_costs(problem.target, most))
    assert {draft.parts.bits for draft in pool_of(without)} == {None}


def test_exits_with_a_head_are_quantised_too(problem: Problem, tmp_path: Path) -> None:
    drafts = write_heads(problem.target, tmp_path, [3])
    with_heads = replace(problem, head_drafts=drafts, heads=HeadFolder(problem.target, tmp_path))
    pool = pool_of(with_heads, kinds=("exit_head",), bits=(8,), exit_layers=(3,))
    assert pool == [drafts[3].having(bits=8), drafts[3]] or pool == [drafts[3], drafts[3].having(bits=8)]


def test_skip_sets_are_rated_in_their_own_precision(problem: Problem) -> None:
    """With the model's own weights no set comes near the quantised models, but with quantised weights some do."""
    study = begun(replace(problem, seconds=None), kinds=("skip_set",))
    pool, predictor = study._search.pool, study._predictor
    sets = [draft for draft in pool if isinstance(draft, LayerSkip) and draft.skips_any]
    least = NEAR_THE_BEST * max(predictor.best(LayerSkip(bits=bits)).speedup for bits in (8, 4))  # type: ignore[arg-type]
    assert sets
    assert None not in {draft.bits for draft in sets}
    for draft in sets:
        assert predictor.best(draft).speedup >= least
        assert draft in predictor.survey._recordings, "with quantised weights, not by an estimate"  # type: ignore[union-attr]
        assert "quantised" in study._origins[draft]


def test_set_is_estimated_at_the_costs_of_a_precision_without_a_pass(problem: Problem) -> None:
    predictor = begun(problem)._predictor
    skip = LayerSkip(skip_mlp=(4,))
    own = predictor.best(skip)
    assert predictor.best_borrowing(skip, skip).speedup == own.speedup
    estimate = predictor.best_borrowing(skip.having(bits=8), skip)
    assert (estimate.draft, estimate.agreement) == (skip.having(bits=8), own.agreement)
    assert estimate.speedup > own.speedup, "a draft step costs less"
    assert skip.having(bits=8) not in predictor.survey._recordings  # type: ignore[union-attr]


def test_skip_set_joins_in_its_precision(problem: Problem) -> None:
    study = begun(problem, kinds=("skip_set",))
    skip = LayerSkip(skip_mlp=(4,))
    assert study._source.joining(skip, study._predictor) == [skip]
    assert study._source.joining(skip.having(bits=8), study._predictor) == [skip.having(bits=8)]


def test_origins_say_quantised(problem: Problem) -> None:
    study = begun(problem)
    origins = {draft: study._origins[draft] for draft in study._search.pool}
    assert origins[LayerSkip(bits=8)] == "quantised model"
    assert all("quantised" in origin for draft, origin in origins.items() if draft.parts.bits)
    assert method_of(origin_of(LayerSkip.blocks((2,), bits=8), "growing; also moves")) == "quantised growing"


def test_another_precision_is_another_draft() -> None:
    skip = LayerSkip.blocks((2,))
    assert is_same(skip, skip, 5)
    assert not is_same(skip, skip.having(bits=8), 5)
    assert not is_same(EarlyExit(exit_layer=2, bits=8), EarlyExit(exit_layer=2), 5)
    assert is_same(EarlyExit(exit_layer=2, bits=8), LayerSkip.blocks((2, 3, 4), bits=8), 5)


@pytest.mark.parametrize("bits", [8, 4])
def test_planned_bytes_are_those_of_the_layers(bits: int) -> None:
    layer = torch.nn.Linear(576, 1536, bias=False)
    packed = quantised(layer, bits)
    assert isinstance(packed, torch.nn.Module), packed
    num_bytes = sum(each.nbytes for each in packed.buffers())
    assert num_bytes == pytest.approx(BYTES_PER_WEIGHT[bits] * layer.weight.numel(), rel=0.05)
