"""Recordings of drafts, made by hand for replays."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from studies.prediction.replay import Recording


def recorded(matches: str, entropies: Sequence[float] | None = None) -> Recording:
    """Return a recording whose draft is right at each `+` and wrong at each `-`, certain unless `entropies` are given."""
    draft = torch.zeros(len(matches), 4)
    draft[:, 0] = 30.0
    target = torch.zeros(len(matches), 4)
    for position, mark in enumerate(matches):
        target[position, 0 if mark == "+" else 1] = 30.0
    made = Recording.of(target, draft)
    if entropies is None:
        return made
    seen = tuple(type(made.seen[0])(top_probability=1.0, entropy=entropy) for entropy in entropies)
    return Recording(made.matches, seen, made.acceptance)
