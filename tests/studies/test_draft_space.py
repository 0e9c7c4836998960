"""The parts of a draft as Optuna parameters: readable, the same in every trial, and of every kind."""

from __future__ import annotations

from typing import Any

import optuna
import pytest

from decoding.drafts import (
    KINDS,
    Draft,
    EarlyExit,
    FixedLeaves,
    LayerSkip,
    Lookup,
    PromptLookup,
    SizedLeaves,
    SuffixDraft,
    SuffixLookup,
)
from studies.draft_space import declare_draft, draft_choices, draft_parameters

NUM_LAYERS = 6
PARTS: list[tuple[Draft, dict[str, Any]]] = [
    (
        LayerSkip.blocks((3, 4), bits=8),
        {"kind": "layer_skip", "bits": "int8", "skipped_sublayers": 4, "lookup": "none", "tree": "chain"},
    ),
    (
        EarlyExit(exit_layer=2, lookup=Lookup(max_tokens=5), tree=FixedLeaves(leaves=2)),
        {
            "kind": "early_exit",
            "bits": "model's own",
            "skipped_sublayers": 8,
            "lookup": "n-grams",
            "lookup.max_tokens": 5,
            "tree": "fixed",
        },
    ),
    (
        LayerSkip(bits=4, lookup=SuffixLookup(max_tokens=8), tree=SizedLeaves()),
        {
            "kind": "layer_skip",
            "bits": "int4",
            "skipped_sublayers": 0,
            "lookup": "suffix automaton",
            "lookup.max_tokens": 8,
            "tree": "sized",
        },
    ),
    (PromptLookup(), {"kind": "prompt_lookup"}),
    (SuffixDraft(), {"kind": "suffix_automaton"}),
]


@pytest.mark.parametrize(("draft", "parts"), PARTS, ids=lambda each: getattr(each, "kind", ""))
def test_parts_are_readable(draft: Draft, parts: dict[str, Any]) -> None:
    assert draft_parameters(draft, NUM_LAYERS) == parts


def test_every_draft_has_the_same_values_to_choose_from() -> None:
    """Optuna refuses a parameter whose values differ between trials: one storage takes all kinds."""
    study = optuna.create_study(storage=optuna.storages.InMemoryStorage())
    for draft, parts in PARTS:
        study.enqueue_trial(parts)
        trial = study.ask()
        declare_draft(trial, draft, NUM_LAYERS)
        assert trial.params == parts
        study.tell(trial, 1.0)


def test_every_registered_kind_is_a_value() -> None:
    assert set(draft_choices()["kind"]) == set(KINDS)
