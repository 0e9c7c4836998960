"""The parts of a draft as Optuna parameters, read by people and by Optuna's importance of parameters.

Optuna wants the same values for a parameter in every trial, so a parameter is a part that every model and kind can have. Which
sublayers are left out is in the trial's attribute `candidate`, in words.
"""

from __future__ import annotations

from typing import Any

import optuna

from decoding.drafts import KINDS, Draft
from decoding.drafts.lookup import LOOKUP_METHODS, MOST_COPIED
from decoding.drafts.trees import TREE_SHAPES

OWN_WEIGHTS, NOTHING_BEFORE, CHAIN = "model's own", "none", "chain"
"""The values of `bits`, `lookup` and `tree` for a draft without these."""
BITS = (OWN_WEIGHTS, "int8", "int4")


def draft_parameters(draft: Draft, num_layers: int) -> dict[str, Any]:
    """Return the parts that the draft has, by parameter; `num_layers` is the number of the target's blocks."""
    parts: dict[str, Any] = {"kind": draft.kind}
    if "bits" in draft.takes:
        parts["bits"] = f"int{draft.parts.bits}" if draft.parts.bits else OWN_WEIGHTS
    if draft.runs_model:
        skipped = draft.skipped(num_layers)
        parts["skipped_sublayers"] = len(skipped.skip_attention) + len(skipped.skip_mlp)
    if "lookup" in draft.takes:
        first = draft.parts.lookup
        parts["lookup"] = first.method_name if first else NOTHING_BEFORE
        if first:
            parts["lookup.max_tokens"] = first.max_tokens
    if "tree" in draft.takes:
        parts["tree"] = draft.parts.tree.shape if draft.parts.tree else CHAIN
    return parts


def declare_draft(trial: optuna.Trial, draft: Draft, num_layers: int) -> None:
    """Ask the trial for each part of the draft, with the values that the part may have; the sampler must know the draft."""
    for name in draft_parameters(draft, num_layers):
        match name:
            case "skipped_sublayers":
                trial.suggest_int(name, 0, 2 * num_layers)
            case "lookup.max_tokens":
                trial.suggest_int(name, 1, MOST_COPIED)
            case _:
                trial.suggest_categorical(name, draft_choices()[name])


def draft_choices() -> dict[str, tuple[str, ...]]:
    """Return the values of each categorical parameter: part of a search's identity, since Optuna takes no further ones."""
    return {
        "kind": tuple(KINDS),
        "bits": BITS,
        "lookup": (NOTHING_BEFORE, *LOOKUP_METHODS),
        "tree": (CHAIN, *TREE_SHAPES),
    }
