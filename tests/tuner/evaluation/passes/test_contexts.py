"""The growth of rounds with the context."""

from __future__ import annotations

import pytest

from decoding.draft_length import RoundCosts
from decoding.target import Target
from tests.support.families import build
from tests.support.tiny import tiny_target
from tuner.errors import ConfigError
from tuner.evaluation.passes.contexts import AtContext, extend_positions, growth


def test_growth_of_rounds_is_relative_to_plain_passes() -> None:
    near = AtContext(8, RoundCosts(draft_step=0.5, verify=(1.0, 1.1, 1.2)))
    far = AtContext(64, RoundCosts(draft_step=0.5, verify=(1.0, 1.2, 1.64)))
    assert growth([near, far], [1, 2]) == pytest.approx({1: 1.7 / 1.6, 2: 2.64 / 2.2})


def test_rotary_positions_go_on_where_others_end() -> None:
    target = tiny_target()
    assert extend_positions(target, 256) is None
    assert extend_positions(target, 400) == 256
    assert target.context_length == 400
    with pytest.raises(ConfigError, match="the model ends at 256 positions"):
        extend_positions(Target(build("gpt2")), 400)
