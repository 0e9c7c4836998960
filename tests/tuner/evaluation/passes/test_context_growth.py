"""How rounds grow with the context."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from decoding.draft_length import RoundCosts
from decoding.drafts import LayerSkip, PlainDecoding
from decoding.target import Target
from tests.support.families import build
from tests.support.tiny import tiny_target
from tuner.errors import ConfigError
from tuner.evaluation.passes.context_growth import AtContext, growth, main, reach_as_far


def test_growth_is_that_of_a_round_over_that_of_a_plain_pass() -> None:
    near = AtContext(8, RoundCosts(draft_step=0.5, verify=(1.0, 1.1, 1.2)))
    far = AtContext(64, RoundCosts(draft_step=0.5, verify=(1.0, 1.2, 1.64)))
    assert growth([near, far], [1, 2]) == pytest.approx({1: 1.7 / 1.6, 2: 2.64 / 2.2})


def test_rotary_positions_go_on_where_others_end() -> None:
    target = tiny_target()
    assert reach_as_far(target, 256) is None
    assert reach_as_far(target, 400) == 256
    assert target.context_length == 400
    with pytest.raises(ConfigError, match="the model ends at 256 positions"):
        reach_as_far(Target(build("gpt2")), 400)


def test_command_writes_what_rounds_cost_behind_each_context(
    write_profile: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_profile(LayerSkip.blocks((2, 3)))
    arguments = ["--profile", str(path), "--contexts", "16", "300", "--max-tokens", "4", "--seconds", "0"]
    monkeypatch.setattr("sys.argv", ["context_growth", *arguments, "--out", str(path.parent / "growth.json")])
    main()
    document = json.loads((path.parent / "growth.json").read_text())
    assert document["made_for_positions"] == 256
    assert list(document["rounds_in_plain_passes"]) == ["16", "300"]
    for rounds in document["rounds_in_plain_passes"].values():
        assert list(rounds) == ["1", "2", "4"]
        assert all(cost > 0 for cost in rounds.values())
    shares = [document["rounds_in_plain_passes"][context]["4"] for context in ("16", "300")]
    assert document["growth"]["4"] == pytest.approx(shares[1] / shares[0])
    assert capsys.readouterr().out.count("times as much as a plain pass") == 3


def test_a_plain_profile_has_no_rounds(write_profile: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_profile(PlainDecoding())
    monkeypatch.setattr("sys.argv", ["context_growth", "--profile", str(path), "--out", "growth.json"])
    with pytest.raises(ConfigError, match="decodes plainly"):
        main()
