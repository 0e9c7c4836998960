"""The search over rules and their parameters."""

from __future__ import annotations

from typing import Any

import optuna
import pytest

from decoding.documents.strict_yaml import validate
from decoding.draft_length import RULES, AdaEdl, TopProbability
from decoding.drafts import EarlyExit, LayerSkip, Lookup, PromptLookup
from decoding.errors import SdtuneError
from studies.contract import Candidate, Problem, TrialRecord
from studies.rule_space import search_ranges
from studies.samplers.draft_length import DraftLength, DraftLengthSettings
from tests.support.records import record
from tests.support.tiny import tiny_target
from tests.support.trying import Trying


def _study(earlier: dict[str, list[TrialRecord]] | None = None, **settings: Any) -> DraftLength:
    problem = Problem(tiny_target(), prompts=(), continuations=(), earlier=earlier or {}, seed=0)
    return DraftLength(problem, DraftLengthSettings(**settings))


EARLIER = {
    "conf_layers": [
        record(1.1, blocks=(1,)),
        record(1.3, blocks=(2,)),
        record(1.2, blocks=(3,)),
        record(None, blocks=(4,)),
    ]
}


def drawn(study: DraftLength, count: int) -> list[Candidate]:
    """Candidates of the study's space at random."""
    stored = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    return [study.space.suggest(stored.ask()) for _ in range(count)]


def test_it_searches_for_the_best_drafts_found_before() -> None:
    drafts = {each.draft.model_dump_json() for each in drawn(_study(EARLIER, num_drafts=2), 20)}
    assert drafts == {LayerSkip.blocks([index]).model_dump_json() for index in (2, 3)}


def test_a_given_draft_is_used_instead_and_without_any_it_says_so() -> None:
    given = Trying(_study(draft={"skip_attention": [5], "skip_mlp": [5]}))
    assert given.ended is None
    assert given.suggest().draft == LayerSkip.blocks([5])
    assert "no draft" in (Trying(_study()).ended or "")


def test_it_starts_with_every_rule_at_its_defaults() -> None:
    study = Trying(_study(EARLIER))
    rules = [study.suggest().draft_length for _ in study.study.trials]
    assert rules[0] == EARLIER["conf_layers"][1].candidate.draft_length  # the best draft's own
    assert {rule.rule for rule in rules} == set(RULES)
    assert AdaEdl() in rules
    assert TopProbability() in rules


@pytest.mark.parametrize("name", RULES)
def test_every_suggested_setting_is_a_valid_rule_within_the_longest_draft(name: str) -> None:
    for each in drawn(_study(EARLIER, rules=(name,), max_tokens=5), 30):
        assert each.draft_length.rule == name
        assert 1 <= each.draft_length.max_tokens <= 5


def test_the_search_ranges_lie_within_what_a_rule_allows() -> None:
    for rule in RULES.values():
        for name, (low, high, _) in search_ranges(rule, 16).items():
            for value in (low, high):
                settings = {name: int(value) if name == "max_tokens" else value}
                assert rule(**settings).model_dump().items() >= settings.items()


@pytest.mark.parametrize(
    ("draft", "meant"),
    [
        ({"skip_attention": [5]}, LayerSkip(skip_attention=(5,))),
        ({"exit_layer": 3}, EarlyExit(exit_layer=3)),
        ({"kind": "early_exit", "exit_layer": 3}, EarlyExit(exit_layer=3)),
        (EarlyExit(exit_layer=3), EarlyExit(exit_layer=3)),
        ({"max_ngram": 4}, PromptLookup(max_ngram=4)),
        ({"min_ngram": 2}, PromptLookup(min_ngram=2)),
        ({"skip_mlp": [5], "lookup": {"min_ngram": 2}}, LayerSkip(skip_mlp=(5,), lookup=Lookup(min_ngram=2))),
        (None, None),
    ],
)
def test_kind_of_a_given_draft_may_be_left_out(draft: Any, meant: Any) -> None:
    assert DraftLengthSettings(draft=draft).draft == meant


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ({"skip_atention": [5]}, "unknown key 'draft.skip_atention'; did you mean 'skip_attention'"),
        ({"exit_layer": 3, "heads": "h"}, "unknown key 'draft.heads'; did you mean 'head'"),
        (
            {"kind": "none"},
            "draft.kind: unknown value 'none'; valid: early_exit, layer_skip, prompt_lookup",
        ),
        ({"exit_layer": 0}, "draft.exit_layer: input should be greater than or equal to 1"),
    ],
)
def test_wrong_draft_is_one_line_that_says_what_would_be_right(draft: Any, message: str) -> None:
    with pytest.raises(SdtuneError, match=message):
        validate(DraftLengthSettings, {"draft": draft}, source="studies.draft_length", error=SdtuneError)


@pytest.mark.parametrize("draft", [{"exit_layer": 6}, {"skip_mlp": [6]}])
def test_given_draft_of_layers_that_the_model_does_not_have_is_refused(draft: Any) -> None:
    target = tiny_target(6)
    with pytest.raises(ValueError, match="6"):
        DraftLengthSettings(draft=draft).check(target)
    for fine in ({"exit_layer": 5}, {"skip_mlp": [5]}, None):
        DraftLengthSettings(draft=fine).check(target)
