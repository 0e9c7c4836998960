"""The whole space under Optuna: what it offers, where it begins, and that each part of a draft can come up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import optuna
import pytest

from decoding.drafts import Draft, EarlyExit, FeatureHeadDraft
from studies.contract import Candidate, Problem
from studies.searches.whole_space import WholeSpace, WholeSpaceSettings
from tests.support.tiny import tiny_target

HEADS = {layer: EarlyExit(exit_layer=layer, head=f"h{layer}.safetensors", head_sha256="a" * 64) for layer in (1, 2, 5)}
FEATURE = FeatureHeadDraft(head="f.safetensors", head_sha256="b" * 64)
MANY = 150


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem(tiny_target(6), (), (), earlier={}, seed=3)


def proposed(problem: Problem, count: int, **settings: Any) -> Iterator[Candidate]:
    """The first candidates of a study whose trials all have the same speed-up."""
    study = WholeSpace.create(problem, WholeSpaceSettings(**settings))
    setup = study.setup()
    stored = optuna.create_study(direction="maximize", sampler=setup.sampler)
    for start in setup.starts:
        stored.enqueue_trial(dict(start))
    for _ in range(count):
        trial = stored.ask()
        yield study.propose(trial)[0]
        stored.tell(trial, 1.0)


def test_it_begins_with_a_usual_draft_of_each_kind(problem: Problem) -> None:
    with_heads = replace(problem, head_drafts=HEADS, feature_draft=FEATURE)
    first = [each.draft.describe() for each in proposed(with_heads, 8, bits=(8, 4))]
    assert first == [
        "skip 1,3",
        "int8",
        "int4",
        "exit at 3, no head",
        "exit at 2, trained head",
        "feature head",
        "prompt lookup (3-1)",
        "suffix automaton (1, x2, 0.3)",
    ]


def test_random_search_meets_every_part_of_a_draft(problem: Problem) -> None:
    with_heads = replace(problem, head_drafts=HEADS, feature_draft=FEATURE)
    found = list(proposed(with_heads, MANY, sampler="random", bits=(8, 4)))
    drafts = [each.draft for each in found]
    assert {draft.kind for draft in drafts} == {
        *("layer_skip", "early_exit", "feature_head", "prompt_lookup", "suffix_automaton")
    }
    assert {draft.weight_bits for draft in drafts} == {None, 8, 4}
    lookups = {draft.lookup_first.method_name if draft.lookup_first else None for draft in drafts}
    assert lookups == {None, "n-grams", "suffix automaton"}
    trees = {draft.candidate_tree.shape if draft.candidate_tree else None for draft in drafts}
    assert trees == {None, "fixed", "published", "sized"}
    exits = [draft for draft in drafts if draft.kind == "early_exit"]
    assert {draft.has_head for draft in exits} == {True, False}
    assert {each.draft_length.rule for each in found} == set(WholeSpaceSettings().rules)
    for draft in drafts:
        draft.check(6)


def test_whole_blocks_have_one_switch_each(problem: Problem) -> None:
    drafts = [each.draft for each in proposed(problem, MANY, sampler="random", whole_blocks=True, trees=False)]
    skips = [draft.skipped(6) for draft in drafts if draft.kind == "layer_skip"]
    assert any(skip.skip_attention not in ((), (1, 3)) for skip in skips)
    assert all(skip.skip_attention == skip.skip_mlp for skip in skips)


def test_kinds_and_lookups_that_are_not_accepted_are_not_proposed(problem: Problem) -> None:
    def accepts(draft: Draft) -> bool:
        return draft.kind != "early_exit" and draft.lookup_first is None

    found = list(proposed(replace(problem, accepts=accepts), MANY, sampler="random"))
    assert {each.draft.kind for each in found} == {"layer_skip", "prompt_lookup", "suffix_automaton"}
    assert not any(each.draft.lookup_first for each in found)


def test_an_engine_gets_chains_of_whole_blocks() -> None:
    changed = WholeSpaceSettings().for_engine(["fixed"], quantises=False)
    assert changed == {"rules": ("fixed",), "whole_blocks": True, "trees": False, "bits": ()}
