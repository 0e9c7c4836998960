"""Which profiles may be arms of one server, and what they promise."""

from __future__ import annotations

from typing import Any

import pytest

from decoding.arms.arm import check_arms, promise_of
from decoding.arms.chooser import Promise
from decoding.drafts import EarlyExit, LayerSkip, Lookup, PlainDecoding, PromptLookup
from decoding.errors import ProfileError
from decoding.profile import DraftProfile, EngineFacts, ProfileOrigin
from tests.support.profiles import measured, profile_of
from tests.support.tiny import tiny_target

HASHES = "a" * 64, "b" * 64


@pytest.fixture(scope="module")
def profile() -> DraftProfile:
    return profile_of(tiny_target().model, LayerSkip.blocks((2,)))


def _with(profile: DraftProfile, **changes: Any) -> DraftProfile:
    return profile.model_copy(update={"name": "other", **changes})


def _head(sha256: str, layer: int = 2) -> EarlyExit:
    return EarlyExit(exit_layer=layer, head="head.safetensors", head_sha256=sha256)


def test_profiles_of_one_model_and_runner_are_arms(profile: DraftProfile) -> None:
    head = _with(profile, draft=_head(HASHES[0]))
    with_lookup = _with(profile, draft=_head(HASHES[0]).with_lookup(Lookup()))
    check_arms([profile, _with(profile, draft=PromptLookup()), head, with_lookup])
    check_arms([_with(profile, draft=PlainDecoding()), profile, profile, profile, profile])


def test_profiles_that_cannot_share_a_sequence_are_refused(profile: DraftProfile) -> None:
    identity = profile.target.model_copy(update={"weights_sha256": HASHES[0]})
    runner = profile.decoding.model_copy(update={"runner": "static"})
    refused = {
        "another model": [profile, _with(profile, target=identity)],
        "another dtype": [profile, _with(profile, target=profile.target.model_copy(update={"dtype": "bfloat16"}))],
        "another runner": [profile, _with(profile, decoding=runner)],
        "plain rounds are an arm already": [profile, _with(profile, draft=PlainDecoding())],
        "at most 4": [profile] * 5,
        "trained heads": [_with(profile, draft=_head(sha256)) for sha256 in HASHES],
    }
    for message, profiles in refused.items():
        with pytest.raises(ProfileError, match=message):
            check_arms(profiles)


def test_a_promise_is_a_figure_of_our_own_decoder(profile: DraftProfile) -> None:
    assert promise_of(_with(profile, measured=None)) is None
    figures = measured().model_copy(update={"batch_size": 4})
    assert promise_of(_with(profile, measured=figures)) == Promise(1.5, 1.4, 1.6, 4)
    engine = EngineFacts(name="vllm", version="1", command="vllm serve")
    origin = ProfileOrigin(created="today", study="joint", engine=engine)
    assert promise_of(_with(profile, measured=figures, provenance=origin)) is None
