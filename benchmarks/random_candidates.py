"""Random configurations of every kind from the space of a search, good and bad ones: those that a search measures are mostly good.

Kinds take turns, and the number of skipped sublayers is uniform; Optuna's random sampler draws everything else. Our choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optuna

from decoding.draft_length import RULES
from decoding.drafts import BitWidth, Draft, EarlyExit
from decoding.target import Target
from studies.contract import Candidate
from studies.space import NOTHING_BEFORE, OWN_WEIGHTS, SKIP_SET, SkipSpace, Space

MOST_SKIPPED = 0.65
"""Largest share of the sublayers that a skip set skips."""
LESS_OFTEN = {"lookup": (NOTHING_BEFORE, 0.5), "bits": (OWN_WEIGHTS, 0.5)}
"""Parts that many drafts go without, and the least share of those that do."""
TRIES = 50
"""Draws for each configuration that is asked for, before giving up: a small model has few."""


def kind_of(draft: Draft) -> str:
    """Return the group of a draft. Raises ValueError for plain decoding."""
    if not draft.drafts:
        raise ValueError("plain decoding is not a draft")
    if draft.parts.bits:
        return "quantised"
    if not draft.runs_model:
        return "lookup alone"
    return "lookup first" if draft.parts.lookup else draft.label


def random_candidates(
    target: Target,
    count: int,
    seed: int,
    *,
    rules: Sequence[str] = tuple(RULES),
    max_tokens: int = 8,
    heads: Mapping[int, EarlyExit] | None = None,
    bits: Sequence[BitWidth] = (),
) -> list[Candidate]:
    """Return `count` different configurations of the model, or as many as are found; `heads` are exits with a head, by layer."""
    skips, stream = SkipSpace.of(target), np.random.default_rng(seed)
    space = Space(
        target,
        rules=rules,
        max_tokens=max_tokens,
        skips=skips,
        exits=[*(EarlyExit(exit_layer=layer) for layer in range(1, target.num_layers)), *(heads or {}).values()],
        copies=True,
        bits=bits,
    )
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    kinds, found = space.kinds[1:], dict[str, Candidate]()  # the first is plain decoding
    for number in range(TRIES * count):
        given: dict[str, Any] = {"kind": kinds[number % len(kinds)]}
        given |= {part: none for part, (none, share) in LESS_OFTEN.items() if stream.random() < share}
        if given["kind"] == SKIP_SET:
            chosen = _some_of(len(skips.items), stream)
            given |= {name: index in chosen for index, name in enumerate(skips.names)}
        study.enqueue_trial(given)
        candidate = space.suggest(study.ask())
        found.setdefault(candidate.key, candidate)
        if len(found) == count:
            break
    return list(found.values())


def _some_of(num_items: int, stream: np.random.Generator) -> set[int]:
    """Return any items, or, half of the time, neighbours: models are often redundant in a stretch."""
    size = round(stream.uniform(0, MOST_SKIPPED) * num_items)
    if stream.random() < 0.5:
        return set(stream.choice(num_items, size, replace=False).tolist())
    first = int(stream.integers(num_items - size + 1))
    return set(range(first, first + size))
