"""The space of a search: every candidate has parameters that lead to it, and the same parameters in every trial and process."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import optuna
import pytest
from optuna.trial import FixedTrial

from decoding.draft_length import RULES, Fixed, TopProbability
from decoding.drafts import (
    Draft,
    EarlyExit,
    LayerSkip,
    Lookup,
    PlainDecoding,
    PromptLookup,
    SuffixDraft,
    SuffixLookup,
)
from studies.contract import Candidate, Problem
from studies.prediction.pools import CHECKED, COPIED, NGRAMS, SUFFIXES
from studies.space import Space, SpaceSettings
from tests.support.tiny import tiny_target

HEADS = {layer: EarlyExit(exit_layer=layer, head=f"h{layer}.safetensors", head_sha256="a" * 64) for layer in (1, 2, 5)}
ALL: dict[str, Any] = {"bits": (8, 4), "exit_layers": (1, 2, 5), "rules": tuple(RULES), "max_tokens": 16}


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem(tiny_target(6), (), (), earlier={}, seed=3, head_drafts=HEADS)


@pytest.fixture(scope="module")
def space(problem: Problem) -> Space:
    return SpaceSettings(**ALL).space(problem)


COPIES: list[Draft] = [
    *(PromptLookup(max_ngram=most, min_ngram=fewest) for most, fewest in [*NGRAMS, (32, 32), (1, 1)]),
    *(SuffixDraft(**each) for each in SUFFIXES),
    SuffixDraft(min_match=7, max_spec_factor=0.5, min_token_prob=1.0),
]
MODELS: list[Draft] = [
    LayerSkip(bits=8),
    LayerSkip(skip_attention=(0, 5), skip_mlp=(2,), bits=4),
    LayerSkip(skip_mlp=(1, 2, 3)),
    LayerSkip.blocks((1, 3, 4)),
    *(EarlyExit(exit_layer=layer) for layer in range(1, 6)),
    *(draft.having(bits=bits) for draft in HEADS.values() for bits in (None, 8)),
]
FIRST = [
    *(Lookup(max_ngram=most, min_ngram=fewest, max_tokens=copied) for most, fewest in NGRAMS for copied in COPIED),
    *(Lookup(max_ngram=most, min_ngram=least, direct_from=direct) for most, least, direct in CHECKED),
    *(SuffixLookup(**each, max_tokens=copied) for each in SUFFIXES for copied in (*COPIED, 64)),
]
DRAFTS = [
    PlainDecoding(),
    *COPIES,
    *MODELS,
    *(draft.having(lookup=lookup) for draft in (MODELS[1], MODELS[-1]) for lookup in FIRST),
]


def test_every_draft_has_its_parameters(space: Space) -> None:
    for draft in DRAFTS:
        rule = TopProbability(max_tokens=7, threshold=0.43) if draft.drafts else Fixed()
        candidate = Candidate(draft=draft, draft_length=rule)
        assert space.suggest(FixedTrial(space.parameters(candidate))) == candidate, draft.describe()


@pytest.mark.parametrize("name", RULES)
def test_every_rule_has_its_parameters(space: Space, name: str) -> None:
    rule = RULES[name](rule=name, max_tokens=5)
    candidate = Candidate(draft=LayerSkip.blocks((2,)), draft_length=rule)
    assert space.suggest(FixedTrial(space.parameters(candidate))) == candidate
    longer = candidate.with_rule(RULES[name](rule=name, max_tokens=40))
    assert space.suggest(FixedTrial(space.parameters(longer))).draft_length.max_tokens == 16


def test_whatever_is_suggested_comes_back_from_the_storage_of_any_trial(space: Space) -> None:
    """Random trials meet every part; each candidate, enqueued in another study, is the same candidate again."""
    found = [space.suggest(trial) for trial in asked(optuna.samplers.RandomSampler(seed=0), 200)]
    drafts = [each.draft for each in found]
    assert {draft.kind for draft in drafts} == set(space.kinds)
    assert {draft.parts.bits for draft in drafts} == {None, 8, 4}
    assert {draft.trained_head is not None for draft in drafts if draft.kind == "early_exit"} == {True, False}
    assert {type(draft.parts.lookup) for draft in drafts} == {type(None), Lookup, SuffixLookup}
    assert {each.draft_length.rule for each in found} == set(RULES)
    stored = optuna.create_study(storage="sqlite://", sampler=optuna.samplers.RandomSampler(seed=1))
    for each in found[:6]:
        stored.enqueue_trial(space.parameters(each))
    assert [space.suggest(stored.ask()) for _ in found[:6]] == found[:6]
    assert all(space.suggest(FixedTrial(space.parameters(each))) == each for each in found)


def asked(sampler: optuna.samplers.BaseSampler, count: int) -> list[optuna.Trial]:
    study = optuna.create_study(sampler=sampler)
    return [study.ask() for _ in range(count)]


def test_it_begins_with_a_usual_draft_of_each_kind(space: Space) -> None:
    first = [space.suggest(FixedTrial(start)).draft.describe() for start in space.starts()]
    assert first == [
        "skip layers 1,3",
        "self-draft in int8",
        "self-draft in int4",
        "early exit at layer 3 (no head)",
        "early exit at layer 2 (trained head)",
        "prompt lookup (n-grams of 3 to 1)",
        "suffix automaton (matches from 1, factor 2, probability 0.3)",
    ]


def test_whole_blocks_have_one_switch_each(problem: Problem) -> None:
    space = SpaceSettings(whole_blocks=True).space(problem)
    assert space.identity()["switches"] == [f"block.{block}" for block in range(6)]
    candidate = Candidate(draft=LayerSkip.blocks((0, 4)), draft_length=Fixed(max_tokens=3))
    assert space.suggest(FixedTrial(space.parameters(candidate))) == candidate


@pytest.mark.parametrize(
    "draft",
    [
        LayerSkip(skip_mlp=(2,)),
        LayerSkip.blocks((9,)),
        LayerSkip(bits=8),
        EarlyExit(exit_layer=3),
        HEADS[2].model_copy(update={"head_sha256": "c" * 64}),
        EarlyExit(exit_layer=9),
        PromptLookup(),
        HEADS[2].having(lookup=Lookup()),
    ],
    ids=lambda draft: draft.describe(),
)
def test_what_the_settings_leave_out_is_refused_in_one_line(problem: Problem, draft: Draft) -> None:
    kinds = ("exit_head",) if isinstance(draft, EarlyExit) else ("skip_set", "exit_head")
    space = SpaceSettings(kinds=kinds, whole_blocks=True, bits=(), rules=("fixed",)).space(problem)
    with pytest.raises(ValueError, match=r"the search does not consider the draft .*: ") as refusal:
        space.parameters(Candidate(draft=draft, draft_length=Fixed(max_tokens=2)))
    assert "\n" not in str(refusal.value)


def test_a_rule_that_is_not_searched_is_refused(problem: Problem) -> None:
    space = SpaceSettings(rules=("fixed",)).space(problem)
    with pytest.raises(ValueError, match="does not consider the rule ada_edl, only fixed"):
        space.parameters(Candidate(draft=HEADS[2], draft_length=RULES["ada_edl"](rule="ada_edl")))


def test_drafts_that_are_not_accepted_are_not_offered(problem: Problem) -> None:
    def accepts(draft: Draft) -> bool:
        return draft.kind != "early_exit" and draft.parts.lookup is None

    space = SpaceSettings().space(replace(problem, accepts=accepts))
    assert space.kinds == ("none", "layer_skip", "prompt_lookup", "suffix_automaton")
    assert space.identity()["lookups"] == ["none"]


def test_the_identity_is_plain_data_and_tells_spaces_apart(problem: Problem) -> None:
    def identity(**settings: Any) -> dict[str, Any]:
        found = SpaceSettings(**{**ALL, **settings}).space(problem).identity()
        assert json.loads(json.dumps(found)) == found
        return found

    assert identity() == identity(max_trials=3, candidates=())
    changes: list[dict[str, Any]] = [{"bits": (8,)}, {"max_tokens": 5}, {"rules": ("fixed",)}]
    changes += [{"exit_layers": (1, 2)}, {"whole_blocks": True}, {"kinds": ("lookup",)}]
    assert all(identity(**change) != identity() for change in changes)


def test_fewer_token_ids_are_offered_where_there_are_many(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """To quantised drafts that an engine, if one is searched for, accepts."""
    fewer, *others = (
        Candidate(draft=draft, draft_length=Fixed())
        for draft in (LayerSkip(skip_mlp=(2,), bits=8, ids_below=32), LayerSkip(bits=8), LayerSkip(skip_mlp=(2,)))
    )
    for frequent, offered in ((32, True), (33, False)):
        monkeypatch.setattr("studies.space.FREQUENT_IDS", frequent)
        space = SpaceSettings(**ALL).space(problem)
        assert (len(space.identity()["ids_below"]) == 2) is offered
    with pytest.raises(ValueError, match="does not consider the draft"):
        space.parameters(fewer)
    monkeypatch.setattr("studies.space.FREQUENT_IDS", 32)
    space = SpaceSettings(**ALL).space(problem)
    for candidate in (fewer, *others):
        assert space.suggest(FixedTrial(space.parameters(candidate))) == candidate
    refusing = replace(problem, accepts=lambda draft: draft.parts.ids_below is None)
    assert SpaceSettings(**ALL).space(refusing).identity()["ids_below"] == ["all"]


def test_an_engine_gets_whole_blocks() -> None:
    changed = SpaceSettings().for_engine(["fixed"], quantises=False, whole_blocks=True)
    assert changed == {"rules": ("fixed",), "whole_blocks": True, "bits": ()}
