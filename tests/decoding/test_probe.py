"""What a model can do is found by running it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decoding.cache import KVCache
from decoding.probe import probe
from decoding.target import ResumeView
from tests.decoding.families import NUM_LAYERS, REFUSED, SUPPORTED, build
from tests.tiny import tiny_llama

PROMISED = [
    *("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "olmo2"),
    *("gpt_neox_parallel", "gpt_neox_sequential", "mixtral"),
]


@pytest.mark.parametrize("family", PROMISED)
def test_everything_in_the_promised_families_can_be_skipped(family: str) -> None:
    found = probe(build(family))
    every = tuple(range(NUM_LAYERS))
    assert found.refusal is None
    assert (found.skippable_blocks, found.skippable_attention, found.skippable_mlp) == (every, every, every)
    assert found.prefix_reuse


def test_the_promised_families_are_all_among_those_tested() -> None:
    assert set(PROMISED) <= set(SUPPORTED)


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_whose_cache_cannot_roll_back_is_refused_in_one_line_that_says_why(family: str) -> None:
    found = probe(build(family))
    assert found.refusal is not None
    assert REFUSED[family][2] in found.refusal
    assert "\n" not in found.refusal
    assert not found.is_supported


def test_low_precision_is_probed_too() -> None:
    assert probe(tiny_llama().to(torch.bfloat16)).refusal is None


def test_probing_leaves_the_model_as_it_was() -> None:
    model = tiny_llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules = dict(model.named_modules())
    probe(model)
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_cache_that_does_not_roll_back_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = KVCache.cover

    def forgetful(self: KVCache, start: int, width: int) -> None:
        """Every pass that returns to an earlier position reads one token more than it should."""
        again = start < getattr(self, "furthest", 0)
        self.furthest = max(start + width, getattr(self, "furthest", 0))
        honest(self, start + 1 if again else start, width)

    monkeypatch.setattr(KVCache, "cover", forgetful)
    found = probe(tiny_llama())
    assert found.refusal is not None
    assert "does not roll back" in found.refusal


def test_state_kept_outside_the_cache_is_found_out() -> None:
    model = tiny_llama()
    block = model.model.layers[2]
    honest = block.mlp.forward
    memory: dict[str, Any] = {"last": 0.0}

    def remembering(hidden: torch.Tensor) -> torch.Tensor:
        output = honest(hidden) + memory["last"]
        memory["last"] = output.mean(dim=1, keepdim=True)
        return output

    block.mlp.forward = remembering
    found = probe(model)
    assert found.refusal is not None
    assert "state outside the cache" in found.refusal


def test_a_pass_that_cannot_be_resumed_costs_the_reuse_not_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: ResumeView, *args: Any) -> torch.Tensor:
        raise RuntimeError("shapes do not fit")

    monkeypatch.setattr(ResumeView, "forward", fails)
    found = probe(tiny_llama())
    assert found.refusal is None
    assert not found.prefix_reuse
