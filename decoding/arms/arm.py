"""One arm: the decoder of a profile, with what the profile promises; and which profiles may be arms of one server."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from decoding.arms.chooser import Promise
from decoding.decoder import Decoder
from decoding.errors import ProfileError
from decoding.profile import DraftProfile

MOST_ARMS = 4
"""Most profiles side by side: each one more is one more that has to be tried."""
USUAL_DRAFT = 3
"""Tokens that a round is taken to draft where that was not measured."""
Head = tuple[frozenset[str], int | None]
"""What tells the states of trained heads apart: hashes of their files, and bits of their weights."""


@dataclass(frozen=True)
class Arm:
    """The decoder of a profile."""

    name: str
    decoder: Decoder
    promise: Promise | None = None
    has_head: bool = False
    num_drafted: int = USUAL_DRAFT
    """Tokens that a usual round drafts."""

    @classmethod
    def of(cls, profile: DraftProfile, decoder: Decoder) -> Arm:
        """Return the arm of a profile."""
        return cls(
            profile.name, decoder, promise_of(profile), head_of(profile) is not None, num_drafted=_usual_draft(profile)
        )


def promise_of(profile: DraftProfile) -> Promise | None:
    """Return what the profile says of its speed; None if it was not measured by sdtune's own decoder."""
    measured = profile.measured
    if measured is None or (profile.provenance is not None and profile.provenance.engine is not None):
        return None
    low, high = measured.speedup.ci95
    known = all(math.isfinite(value) and value > 0 for value in (low, measured.speedup.value, high))
    return Promise(measured.speedup.value, low, high, measured.batch_size) if known else None


def head_of(profile: DraftProfile) -> Head | None:
    """Return the identity of the profile's trained head, or None."""
    draft = profile.draft
    return (frozenset(draft.files.values()), draft.weight_bits) if draft.has_head else None


def check_arms(profiles: Sequence[DraftProfile]) -> None:
    """Raise `ProfileError` unless sequences can change between these profiles at any round."""
    drafting = [profile for profile in profiles if profile.draft.drafts]
    if len(drafting) > MOST_ARMS:
        raise ProfileError(f"at most {MOST_ARMS} profiles can be arms of one server, got {len(drafting)}")
    first = profiles[0]
    for profile in profiles[1:]:
        if not profile.draft.drafts:
            raise ProfileError(f"profile {profile.name!r} decodes plainly: plain rounds are an arm already")
        for what, of_first, of_this in (
            ("model", _weights(first), _weights(profile)),
            ("dtype", first.target.dtype, profile.target.dtype),
            ("runner", _runner(first), _runner(profile)),
        ):
            if of_first != of_this:
                raise ProfileError(f"profile {profile.name!r} is for another {what} than {first.name!r}: arms share it")
    heads: Mapping[Head, str] = {head: each.name for each in drafting if (head := head_of(each)) is not None}
    if len(heads) > 1:
        raise ProfileError(
            f"the trained heads of {' and '.join(map(repr, heads.values()))} differ: a sequence can keep the states of one, "
            "so serve one of them, or both with the same head"
        )


def _usual_draft(profile: DraftProfile) -> int:
    """Return the tokens that a round of the profile drafted on average where it was tuned, and at least 1."""
    longest = max(profile.draft_length.max_tokens, 1)
    measured = profile.measured
    if measured is None or not measured.draft_acceptance_rate:
        return min(USUAL_DRAFT, longest)
    num_drafted = (measured.tokens_per_round - 1) / measured.draft_acceptance_rate
    return min(max(round(num_drafted), 1), longest)


def _weights(profile: DraftProfile) -> tuple[str, str]:
    return profile.target.config_sha256, profile.target.weights_sha256


def _runner(profile: DraftProfile) -> tuple[str, int | None]:
    return profile.decoding.runner, profile.decoding.exact_width
