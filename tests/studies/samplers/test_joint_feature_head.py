"""A trained feature head in the default search: when it is proposed, and at what cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import optuna
import pytest

from decoding.decode import Request
from decoding.decoder import plain_decoder
from decoding.drafts import LayerSkip
from decoding.head_folder import HeadFolder
from decoding.target import Target
from decoding.text import Ending
from studies.contract import Problem
from studies.costs.table import CostTable
from studies.costs.terms import join_share
from studies.samplers.joint import Joint, JointSettings
from tests.support.costs import made_up_costs
from tests.support.families import build, some_tokens
from tests.support.feature_heads import disturbed_feature_head, write_feature_head
from tuner.measuring.cost_table import resolve_terms

SMALL: dict[str, Any] = {
    "num_surveyed": 12,
    "max_tokens": 4,
    "num_exits": 2,
    "num_lookups": 2,
    "bits": (),
    "rules": ("fixed",),
}


@pytest.fixture(scope="module")
def problem(tmp_path_factory: pytest.TempPathFactory) -> Problem:
    target, folder = Target(build("llama")), tmp_path_factory.mktemp("heads")
    prompts = tuple(tuple(some_tokens(6, seed)) for seed in range(3))
    texts = tuple(plain_decoder(target).generate(Request(prompt, Ending(16))).tokens for prompt in prompts)
    draft = write_feature_head(target, folder, disturbed_feature_head(target))
    return Problem(
        target,
        prompts,
        texts,
        earlier={},
        seed=0,
        costs=lambda most: made_up_costs(target, most),
        seconds=1e-3,
        feature_draft=draft,
        heads=HeadFolder(target, folder),
    )


def begun(problem: Problem, settings: JointSettings) -> Joint:
    sampler = Joint(problem, settings)
    sampler.begin(optuna.create_study())
    return sampler


def test_feature_head_is_proposed_alone_and_after_a_lookup(problem: Problem) -> None:
    study = begun(problem, JointSettings(**SMALL, kinds=("feature_head", "lookup")))
    feature = [draft for draft in study._search.pool if draft.kind == "feature_head"]
    assert problem.feature_draft in feature
    assert any(draft.parts.lookup for draft in feature)
    assert study.identity()["head_files"] == problem.feature_draft.files  # type: ignore[union-attr]


def test_feature_head_is_not_proposed_unasked_or_where_there_is_none(problem: Problem) -> None:
    assert JointSettings().wants_feature_head
    unasked = JointSettings(**SMALL, kinds=("lookup",))
    assert not unasked.wants_feature_head
    for given, settings in ((problem, unasked), (replace(problem, feature_draft=None), JointSettings(**SMALL))):
        assert not any(draft.kind == "feature_head" for draft in begun(given, settings)._search.pool)


def test_step_costs_a_block_the_rest_and_the_joining_layer(problem: Problem) -> None:
    target, draft = problem.target, problem.feature_draft
    assert draft is not None
    terms = resolve_terms(target, max_tokens=4, contexts=[16])
    mlp = sum(weight.numel() for weight in target.blocks[-1].mlp.parameters())
    assert terms.join_share == join_share(target) == pytest.approx(2 * 32 * 32 / mlp)
    table = CostTable.model_validate({**made_up_costs(target, 4).model_dump(), "join_share": 0.5})
    no_blocks = LayerSkip.blocks(tuple(range(target.num_layers)))
    last = target.num_layers - 1
    expected = table.draft_seconds(no_blocks, context=16) + table.saved_seconds(LayerSkip.blocks((last,)), context=16)
    expected += 0.5 * table.saved_seconds(LayerSkip(skip_mlp=(last,)), context=16)
    assert table.draft_seconds(draft, context=16) == pytest.approx(expected)
    assert table.verify_seconds(draft, 3, context=16, prefix_reuse=True) == table.verify_seconds(
        LayerSkip(), 3, context=16, prefix_reuse=True
    )
