"""Drafts take part in a contest only on prompts that they have not seen."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from decoding.errors import ExitHeadError
from decoding.exit_heads import prompt_sha256
from decoding.fingerprint import fingerprint
from decoding.profile import DraftProfile, TargetIdentity
from tests.support.heads import training, write_heads
from tests.support.tiny import tiny_target
from tuner.config import SearchConfig
from tuner.evaluation.suite.contest import Arena
from tuner.inputs.models import Loaded

SEEN, UNSEEN = (5, 6, 7), (8, 9, 10)


def test_a_head_is_not_measured_on_prompts_that_it_was_trained_on(tmp_path: Path) -> None:
    target = tiny_target()
    loaded, model = cast(Loaded, SimpleNamespace(model=target.model)), fingerprint(target.model)
    identity = TargetIdentity(
        model="tiny",
        architecture=type(target.model).__name__,
        num_layers=target.num_layers,
        dtype="float32",
        config_sha256=model.config_sha256,
        weights_sha256=model.weights_sha256,
    )
    drafts = write_heads(target, tmp_path, [2], training=training(prompts_sha256=(prompt_sha256(SEEN),)))
    path = tmp_path / "profile.yaml"
    DraftProfile(name="exit", target=identity, draft=drafts[2]).save(path)

    def arena(*prompts: tuple[int, ...]) -> Arena:
        held_out: Any = SimpleNamespace(held_out=[SimpleNamespace(token_ids=prompt) for prompt in prompts])
        return Arena(cast(SearchConfig, None), loaded, target, held_out)

    assert "exit at 2" in arena(UNSEEN).draft("exit", path).description
    with pytest.raises(ExitHeadError, match="was trained on 1 of the 2 held-out prompts"):
        arena(UNSEEN, SEEN).draft("exit", path)
