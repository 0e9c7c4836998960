"""Rounding is told from error, block by block, also where rounding alone makes logits unrelated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from decoding.cache.kv_cache import KVCache, Slot
from decoding.errors import UnsupportedRunnerError
from decoding.runners import shared_pass, static
from decoding.runners.contract import Inputs
from decoding.runners.masks import MaskKinds, Positions
from decoding.runners.static import StaticRunner
from decoding.target import Target
from decoding.target.stand_ins import FixedShapes

OLD_TOLERANCE = 0.08
"""Of the largest logit: what two computations in bfloat16 were allowed to differ by before blocks were checked."""


def deep_model(
    dtype: torch.dtype = torch.bfloat16, *, num_layers: int = 30, seed: int = 3, huge: float = 1.0
) -> PreTrainedModel:
    """Return an ordinary random model whose rounding grows from layer to layer; `huge` multiplies one state."""
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0] *= huge
    return model.to(dtype).eval()


def checked(model: PreTrainedModel) -> Target:
    return Target(model, partial(StaticRunner, compiled=False))


def in_two_halves(self: nn.Linear, values: Tensor) -> Tensor:
    """Multiply in two parts that are rounded before they are added: a correct kernel with other rounding."""
    half, product = values.shape[-1] // 2, nn.functional.linear
    return product(values[..., :half], self.weight[:, :half]) + product(values[..., half:], self.weight[:, half:])


@pytest.fixture
def other_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fixed-shape passes round otherwise than eager ones do."""

    def around_products(block: nn.Module, states: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with monkeypatch.context() as patch:
            for kind in {type(each) for each in block.modules() if isinstance(each, nn.Linear)}:
                patch.setattr(kind, "forward", in_two_halves)
            return block(states, *args, **kwargs)

    monkeypatch.setattr(static, "call_block", around_products)


@pytest.mark.usefixtures("other_rounding")
@torch.inference_mode()
def test_rounding_that_makes_logits_differ_is_accepted() -> None:
    model = deep_model()
    target, eager = checked(model), Target(model)
    ids = torch.arange(13)[None] % 96
    caches = [each.new_cache(13) for each in (target, eager)]
    logits = []
    for each, cache in zip((target, eager), caches, strict=True):
        each.forward(ids[:, :6], cache, 0)
        logits.append(each.forward(ids[:, 6:11], cache, 6).float())
    distance = (logits[0] - logits[1]).abs().max() / logits[1].abs().max()
    assert distance > OLD_TOLERANCE, "a fixed distance would have refused this runner"


@pytest.mark.usefixtures("other_rounding")
def test_rounding_of_a_huge_state_is_accepted_where_the_eager_output_is_exact_by_luck() -> None:
    checked(deep_model(num_layers=6, seed=4, huge=30.0))


def wrong_mask(patch: pytest.MonkeyPatch) -> None:
    """Let positions see later ones, by masks or by what a kernel gets in their place."""

    def last_seen(self: Positions, slots: Tensor, num_slots: int) -> tuple[Tensor, ...]:
        return (slots[None, None, None] + 3,)

    def all_seen(self: MaskKinds, slots: Tensor, num_slots: int) -> tuple[Tensor, ...]:
        return (torch.ones((1, 1, slots.shape[0], num_slots), dtype=torch.bool),)

    patch.setattr(Positions, "masks", last_seen)
    patch.setattr(MaskKinds, "masks", all_seen)


def shifted_position(patch: pytest.MonkeyPatch) -> None:
    genuine = shared_pass.Inputs

    def shifted(token_ids: Tensor, positions: Tensor, *rest: Any) -> Inputs:
        return genuine(token_ids, positions + 1, *rest)

    patch.setattr(shared_pass, "Inputs", shifted)


def missing_block(patch: pytest.MonkeyPatch) -> None:
    genuine = FixedShapes.forward

    def forward(self: FixedShapes, states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs["past_key_values"]
        is_skipped = self.index == 20 and isinstance(cache, KVCache) and cache.window.slots is not None
        return states if is_skipped else genuine(self, states, *args, **kwargs)

    patch.setattr(FixedShapes, "forward", forward)


def stale_cache(patch: pytest.MonkeyPatch) -> None:
    def update(self: Slot, keys: Tensor, values: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        num_slots = None if self.extent is None else self.extent.shape[0]
        return self.keys[:, :, :num_slots], self.values[:, :, :num_slots]

    patch.setattr(Slot, "update", update)


@pytest.mark.parametrize(
    ("plant", "dtype"),
    [
        (wrong_mask, torch.bfloat16),
        (shifted_position, torch.float32),
        (missing_block, torch.bfloat16),
        (stale_cache, torch.float32),
    ],
)
def test_planted_errors_are_caught(
    plant: Callable[[pytest.MonkeyPatch], None], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(UnsupportedRunnerError, match="gives different logits"):
        checked(deep_model(dtype))
