"""The held-out prompts of the search that made a profile, found again in a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.inputs.prompts import PromptSet, load_prompts

if TYPE_CHECKING:
    from decoding.profile import DatasetFacts
    from tuner.fields import PromptSettings

USUAL_PROMPTS = 24
"""Prompts of each part if the profile records no number; the default of a search."""
FEWEST = 2
"""Held-out prompts without which there is no interval."""


def find_prompts(
    source: str,
    tokenizer: Any,
    facts: DatasetFacts | None,
    settings: PromptSettings,
    *,
    num_tuning: int | None,
    num_held_out: int | None,
    max_new_tokens: int,
    context_length: int | None,
    seed: int,
) -> tuple[PromptSet, str]:
    """Return the prompts that the search of `facts` held out, or others if `source` lacks them, and a sentence that says which.

    They are known by their hashes. Profiles of earlier versions have none: there the dataset is split again, and the fingerprint of
    the split tells whether it is the same. `num_held_out` None means all of the search's; more than it had are another split.

    Raises `DatasetError` as `load_prompts` does.
    """
    tuning = num_tuning or (facts.tuning_prompts if facts else USUAL_PROMPTS)
    held_out = num_held_out or (facts.held_out_prompts if facts else USUAL_PROMPTS)
    limits: dict[str, Any] = {"max_new_tokens": max_new_tokens, "context_length": context_length, "settings": settings}
    if facts is not None and 0 < held_out <= len(facts.held_out_sha256):
        wanted, own_seed = facts.held_out_sha256[:held_out], seed if facts.seed is None else facts.seed
        found = load_prompts(
            source,
            tokenizer,
            num_tuning=tuning,
            num_held_out=held_out,
            seed=own_seed,
            held_out_sha256=wanted,
            **limits,
        )
        if len(found.held_out) >= FEWEST:
            return found, _held_out(len(found.held_out), len(wanted))
    found = load_prompts(source, tokenizer, num_tuning=tuning, num_held_out=held_out, seed=seed, **limits)
    if facts is None:
        return found, "the profile does not record its prompts and may have been tuned on some of these"
    if facts.fingerprint == found.fingerprint:
        return found, _held_out(len(found.held_out), len(found.held_out))
    origin = (
        f"not the prompts that the search of the profile kept apart (on {Path(facts.name).name}): on the same data, it may have "
        "been tuned on some of these; the columns and template of the search, and no more prompts than it had, give its own"
    )
    return found, origin


def _held_out(found: int, wanted: int) -> str:
    fewer = "" if found == wanted else f" ({found} of {wanted}: the dataset does not have the others)"
    return f"held out by the search that made the profile{fewer}"
