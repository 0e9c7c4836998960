"""Cascades in the default search: proposed only if asked for, and only where they are predicted to beat their parts."""

from __future__ import annotations

from typing import Any

import pytest

from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.drafts import Cascade, Draft
from decoding.target import Target
from decoding.text import Ending
from studies.contract import Problem
from studies.searches.joint import Joint, JointSettings
from tests.support.costs import made_up_costs
from tests.support.families import build, some_tokens

SMALL: dict[str, Any] = {"num_surveyed": 6, "max_tokens": 4, "num_exits": 2, "num_lookups": 2, "trees": False}


@pytest.fixture(scope="module")
def problem() -> Problem:
    target = Target(build("llama"))
    prompts = tuple(tuple(some_tokens(6, seed)) for seed in range(3))
    texts = tuple(plain_decoder(target).generate(Request(prompt, Ending(24))).tokens for prompt in prompts)
    costs = lambda most: made_up_costs(target, most, (8,))  # noqa: E731
    return Problem(target, prompts, texts, earlier={}, seed=0, costs=costs, seconds=1e-3)


def cascades_of(problem: Problem, **settings: Any) -> list[Draft]:
    pool = Joint.create(problem, JointSettings(**{**SMALL, "bits": (8,), **settings}))._search.pool
    return [draft for draft in pool if draft.composes or (draft.lookup_first and draft.lookup_first.choice)]


def test_no_cascade_is_proposed_by_default(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("studies.prediction.cascades.LEAST_CASCADE_GAIN", -1.0)
    assert cascades_of(problem) == []


def test_best_cascades_are_proposed_with_the_prices_of_the_cost_table(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("studies.prediction.cascades.LEAST_CASCADE_GAIN", -1.0)
    monkeypatch.setattr("studies.prediction.cascades.NUM_CASCADES", 99)
    found = cascades_of(problem, cascades=True)
    chosen = [draft.lookup_first.choice for draft in found if draft.lookup_first]
    several = [draft for draft in found if isinstance(draft, Cascade)]
    assert len(chosen) == 2
    assert {len(draft.stages) for draft in several} == {2, 3}
    prices = made_up_costs(problem.target, 4, (8,))
    assert all(choice is not None and choice.prices[0] < choice.prices[1] for choice in chosen)
    whole = prices.round_costs(several[0].stages[-1].draft, 4, context=10.0, prefix_reuse=True)
    assert several[0].choice is not None
    assert several[0].choice.prices[-1] == pytest.approx((whole.of(4) - 1) / 4, rel=0.1)


def test_cascades_that_promise_no_more_than_their_parts_are_left_out(
    problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("studies.prediction.cascades.LEAST_CASCADE_GAIN", 9.0)
    assert cascades_of(problem, cascades=True) == []
