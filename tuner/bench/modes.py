"""The modes in which a bench decodes a profile: each runner, and bit-exact."""

from __future__ import annotations

from typing import Any

from decoding.profile import Decoding, DraftProfile
from decoding.runners import RUNNERS, bit_exact_runners, has_bit_exact_mode
from tuner.config import EXACT_WIDTH
from tuner.fields import BITWISE

MODES = (*RUNNERS, BITWISE)


def profile_by(mode: str, profile: DraftProfile) -> DraftProfile:
    """Return the profile in one of `MODES`: a runner by name, or bit-exact at the profile's width if it has one."""
    decoding = profile.decoding
    if mode == BITWISE:
        runner = decoding.runner if has_bit_exact_mode(decoding.runner) else bit_exact_runners()[0]
        changes: dict[str, Any] = {"runner": runner, "exact_width": decoding.exact_width or EXACT_WIDTH}
    else:
        changes = {"runner": mode, "exact_width": None}
    changed = Decoding.model_validate({**decoding.model_dump(), **changes})
    return profile.model_copy(update={"decoding": changed})
