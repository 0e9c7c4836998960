"""The rows of each kind of draft, on a tiny model and a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from decoding.drafts import EarlyExit
from decoding.errors import UnsupportedModelError
from decoding.head_folder import HeadFolder
from tests.support.paths import ROOT
from tests.support.tiny import tiny_llama
from tuner.evaluation.gpu import feature_head
from tuner.evaluation.gpu.plan import PLAN
from tuner.evaluation.gpu.shared import Shared
from tuner.evaluation.gpu.steps.kinds import CHAINS_ONLY, KindsStep
from tuner.evaluation.models.widen import widen
from tuner.evaluation.models.widths import Widths

CHAINS = [
    *("plain", "prompt lookup", "suffix automaton", "exit with head", "suffix automaton, then exit", "feature head"),
    *("skip set", "int8", "int4"),
]
LEAVES = ["exit with side leaves", "feature head with side leaves"]


class TinyShared(Shared):
    """A tiny model with the demo's vocabulary, widened a little; its exit has no head, as none is trained for it."""

    @cached_property
    def source(self) -> PreTrainedModel:
        return tiny_llama(4, vocab_size=4096)

    @cached_property
    def wide(self) -> PreTrainedModel:
        return widen(self.source, Widths.of(self.source.config), dtype=self.dtype)

    @cached_property
    def heads_folder(self) -> Path:
        return self.out

    @cached_property
    def exit_draft(self) -> EarlyExit:
        return EarlyExit(exit_layer=2)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """By the static runner without its compiler, which takes half a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr("decoding.runners.static.CompiledBlocks", lambda *_: None)
        patch.setattr(feature_head, "NUM_TEXTS", 2)
        yield TinyShared(tmp_path_factory.mktemp("gpu"), "cpu", "demo")


def small(batch_size: int, num_prompts: int) -> KindsStep:
    return KindsStep(batch_size, num_prompts, limit_seconds=1, pessimistic_seconds=1, max_new_tokens=12)


def test_single_sequences_have_every_row(shared: Shared) -> None:
    step = small(1, 2)
    result = step.run(shared, 0.01)
    assert list(result["contenders"]) == [*CHAINS, *LEAVES]
    assert result["left_out"] == {}
    assert result["notes"] == []
    assert result["feature_head"]["steps"] == 1, "the time for training was up"
    assert all(each["identical"] + each["ties"] == each["texts"] == 2 for each in result["contenders"].values())
    assert result["contenders"]["exit with head"]["tokens_per_pass"] > 1
    draft = HeadFolder(shared.eager, shared.out).feature_draft()
    assert draft is not None, "for the widened model"
    assert len(list(step.lines(result))) == len(CHAINS) + len(LEAVES) + 1


def test_batches_have_the_chains_and_say_so(shared: Shared) -> None:
    step = small(2, 4)
    result = step.run(shared, 0.01)
    assert list(result["contenders"]) == CHAINS
    assert result["notes"] == [CHAINS_ONLY]
    assert CHAINS_ONLY in list(step.lines(result))
    assert all(each["identical"] + each["ties"] == each["texts"] == 4 for each in result["contenders"].values())
    assert sum(path.name.startswith("feature_head") for path in shared.heads_folder.iterdir()) == 1


def test_a_kind_that_the_device_cannot_run_has_the_refusal_as_its_row(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(device: torch.device) -> None:
        raise UnsupportedModelError("no kernel on cuda yet")

    monkeypatch.setattr("decoding.target.quantised.check_device", refuse)
    step = small(2, 4)
    result = step.run(shared, 0.01)
    assert result["left_out"] == {"int8": "no kernel on cuda yet", "int4": "no kernel on cuda yet"}
    assert list(result["contenders"]) == [name for name in CHAINS if not name.startswith("int")]
    assert "int8 left out: no kernel on cuda yet" in list(step.lines(result))


def test_the_plan_has_the_batches_of_the_benches() -> None:
    assert [step.name for step in PLAN if isinstance(step, KindsStep)] == ["kinds-1", "kinds-4", "kinds-16"]
