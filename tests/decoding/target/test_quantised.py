"""Quantised views: which layers are quantised, what they compute, and that copies are shared and dropped."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decoding.decode import Request
from decoding.decoder import Decoder
from decoding.draft_length import Fixed
from decoding.drafters.build import check_draft
from decoding.drafts import BitWidth, LayerSkip
from decoding.errors import UnsupportedModelError
from decoding.kernels.choice import kernel_for
from decoding.kernels.choice import quantised_linear as quantised
from decoding.runners.eager import EagerRunner
from decoding.runners.static import StaticRunner
from decoding.target import DraftView, Target, agree
from decoding.target import linears as module_under_test
from decoding.text import Ending
from tests.support.families import SUPPORTED, build, some_tokens, static_target_of, target_of
from tests.support.generations import write_plainly
from tests.support.grid import WITHOUT_LINEARS

TOKENS = torch.tensor([some_tokens(9)])
RUNNERS: dict[str, Callable[..., EagerRunner]] = {
    "eager": EagerRunner,
    "static": functools.partial(StaticRunner, compiled=False),
}


def rounded(model: PreTrainedModel, bits: int) -> PreTrainedModel:
    """Return a copy of a model whose plain linear layers in the blocks, and whose LM head, are quantised."""
    twin = copy.deepcopy(model)
    path = ".".join(Target(model).anatomy.path)
    for name, module in list(twin.named_modules()):
        if type(module) is nn.Linear and (name.startswith(path) or module is twin.get_output_embeddings()):
            parent, _, child = name.rpartition(".")
            setattr(twin.get_submodule(parent), child, quantised(module, bits))
    return twin


def are_near(a: Tensor, b: Tensor) -> bool:
    """Return True for equal logits up to the rounding of values in quantised layers, which another runner may turn over."""
    return bool((a - b).abs().max() <= 2e-3 * b.abs().max())


def logits_after(target: Target, **settings: object) -> Tensor:
    """Return the logits of a view after the prompt, whose keys and values are the target's."""
    cache, last = target.new_cache(20), TOKENS.shape[1] - 1
    target.forward(TOKENS[:, :-1], cache, 0)
    view = DraftView(target, (), (), keep_boundary=True, **settings)  # type: ignore[arg-type]
    return view.run(TOKENS[:, -1:], cache, last).logits


@pytest.mark.parametrize("family", [family for family in SUPPORTED if family not in WITHOUT_LINEARS])
@torch.inference_mode()
def test_logits_are_those_of_the_rounded_model_on_the_targets_cache(family: str) -> None:
    eager, last = target_of(family), TOKENS.shape[1] - 1
    for bits in (8, 4):
        cache = eager.new_cache(20)
        eager.forward(TOKENS[:, :-1], cache, 0)
        expected = Target(rounded(eager.model, bits)).forward(TOKENS[:, -1:], cache, last)
        unlike = eager.forward(TOKENS[:, -1:], cache, last)
        for target in (eager,) if family == "bloom" else (eager, static_target_of(family)):
            found = logits_after(target, bits=bits)
            assert are_near(found, expected)
            assert not are_near(found, unlike)


@torch.inference_mode()
def test_rounds_are_those_of_the_passes() -> None:
    """Predictions run the same weights as drafts do."""
    from decoding.cache.rounds_cache import RoundsCache

    target = Target(build("llama"))
    cache, start = target.new_cache(20), TOKENS.shape[1] - 1
    target.forward(TOKENS, cache, 0)
    view = DraftView(target, (1,), (), keep_boundary=False, bits=4)
    (logits,) = view.rounds(TOKENS[:, -1:], RoundsCache([(cache, range(start, start + 1))], 1))
    fresh = target.new_cache(20)
    target.forward(TOKENS[:, :-1], fresh, 0)
    assert agree(logits[0], view.run(TOKENS[:, -1:], fresh, start).logits)


@pytest.mark.skipif(
    kernel_for("int8", torch.device("cpu")).kernel is None, reason="the processor lacks the instructions"
)
@pytest.mark.parametrize("bits", [8, 4])
@torch.inference_mode()
def test_the_likeliest_tokens_have_logits_of_a_large_lm_heads_own_weights(
    bits: BitWidth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft is accepted in part, and the text is the target's."""
    model = build("llama")
    with monkeypatch.context() as patch:
        patch.setattr("decoding.target.lm_heads.quantised_lm_head", lambda own, bits: own)
        expected = logits_after(Target(model, RUNNERS["static"]), bits=bits)
    monkeypatch.setattr("decoding.kernels.choice.MIN_REFINED", 0)
    target = Target(model, RUNNERS["static"])
    found, likeliest = logits_after(target, bits=bits), expected.topk(8).indices
    assert agree(found.gather(1, likeliest), expected.gather(1, likeliest))
    assert not agree(found, expected), "the others are found by fewer bits"
    request = Request(tuple(some_tokens(9)), Ending(24))
    drafted = Decoder(target, LayerSkip.blocks((1,), bits=bits), Fixed(max_tokens=3)).generate(request)
    assert drafted.tokens == write_plainly(target, request).tokens
    assert any(each.num_accepted for each in drafted.rounds)


def test_routers_of_experts_and_layers_with_hooks_stay() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.shared_expert_gate, self.projection = nn.Linear(8, 4), nn.Linear(8, 1), nn.Linear(8, 8)

    layers, blocks = module_under_test.QuantisedLayers(frozenset({1, 4})), Blocks()
    twin = layers.within(blocks, 8)
    assert twin.router is blocks.router
    assert twin.shared_expert_gate is blocks.shared_expert_gate
    assert twin.projection is not blocks.projection
    blocks.projection.register_forward_hook(lambda *_: None)
    assert layers.within(blocks, 8) is blocks
    with pytest.raises(UnsupportedModelError, match="no plain linear layer"):
        layers.check(blocks)


@pytest.mark.parametrize("family", sorted(WITHOUT_LINEARS))
def test_model_without_linear_layers_is_refused_in_one_line(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match="nothing to quantise for a draft"):
        check_draft(Target(build(family)), LayerSkip(bits=8))


def test_weights_that_are_quantised_already_or_elsewhere_stay() -> None:
    class Packed(torch.nn.Parameter):
        pass

    layer = nn.Linear(4, 4)
    assert module_under_test.is_plain_linear(layer)
    assert not module_under_test.is_plain_linear(nn.Linear(4, 4, device="meta"))
    assert not module_under_test.is_plain_linear(nn.Linear(4, 4, dtype=torch.float64))
    layer.weight.__class__ = Packed
    assert not module_under_test.is_plain_linear(layer)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[nn.Module]]:
    """Every quantised layer that is made."""
    made: list[weakref.ref[nn.Module]] = []
    genuine = quantised

    def watched(linear: nn.Linear, bits: int) -> nn.Module:
        layer = genuine(linear, bits)
        made.append(weakref.ref(layer))
        return layer

    monkeypatch.setattr(module_under_test, "quantised_linear", watched)
    monkeypatch.setattr("decoding.kernels.choice.quantised_linear", watched)  # of the LM head
    return made


@pytest.mark.parametrize("runner", RUNNERS)
def test_layers_are_packed_once_for_all_views_and_gone_with_the_last(
    runner: str, packed: list[weakref.ref[nn.Module]]
) -> None:
    target = Target(build("llama"), RUNNERS[runner])
    view = DraftView(target, (), (), keep_boundary=False, bits=8)
    num_layers = 7 * target.num_layers + 1
    assert len(packed) == num_layers
    views = [view, *(DraftView(target, (index,), (), keep_boundary=False, bits=8) for index in range(3))]
    assert len(packed) == num_layers, "each layer is packed once"
    views.append(DraftView(target, (), (), keep_boundary=False, bits=4))
    assert len(packed) == 2 * num_layers, "each precision has layers of its own"
    del view
    views.clear()
    gc.collect()
    assert [layer() for layer in packed] == [None] * len(packed)
