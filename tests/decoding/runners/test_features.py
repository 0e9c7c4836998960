"""Optional features: off by default, and refused where their numbers make no sense."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from decoding.runners.eager import EagerRunner
from decoding.runners.features import SpeedFeatures
from decoding.runners.masks import MaskKinds
from decoding.runners.static import StaticRunner

KINDS = MaskKinds((None,), additive=None)


def test_every_feature_is_off_by_default() -> None:
    assert not any(getattr(SpeedFeatures(), field.name) for field in fields(SpeedFeatures))
    assert StaticRunner(KINDS, torch.device("cpu")).features == EagerRunner().features == SpeedFeatures()


@pytest.mark.parametrize("name", ["draft_vocabulary", "plain_chain", "look_every"])
def test_numbers_below_one_are_refused(name: str) -> None:
    settings: dict[str, Any] = {name: 0}
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        SpeedFeatures(**settings)
