"""Fused projections: one product instead of three, the same text, and a model that keeps its parameters."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from decoding.decode import Request, speculative
from decoding.draft_length import Controller, Fixed
from decoding.drafters.early_exit import EarlyExitDrafter
from decoding.kernels import linear
from decoding.rounds import Generation
from decoding.runners.eager import EagerRunner
from decoding.runners.features import SpeedFeatures
from decoding.runners.masks import MaskKinds
from decoding.runners.static import StaticRunner
from decoding.target import Target, agree
from decoding.target.heads import new_exit_head
from decoding.target.linears import FirstProjection, tied_addresses, with_fused_projections
from decoding.text import Ending
from tests.support.families import NUM_LAYERS, SUPPORTED, build, some_tokens, target_of
from tests.support.generations import write
from tests.support.grid import RULES, SKIPS

FUSED = SpeedFeatures(fused_projections=True)
REQUEST = Request(some_tokens(9), Ending(14))
# Products saved per block: two of queries, keys and values, and one of gate and up, where these are layers of their own.
SAVED = {"gptj": 2, "gpt_oss": 2, "mixtral": 2} | dict.fromkeys(
    ("phi3", "gpt2", "gpt_neox_parallel", "gpt_neox_sequential"), 0
)
FAMILIES = [family for family in SUPPORTED if family != "bloom"]


def fusing(compiled: bool = False) -> Callable[[MaskKinds, torch.device], EagerRunner]:
    return functools.partial(StaticRunner, compiled=compiled, features=FUSED)


class Products:
    """Counts the linear layers that run in a module and its stand-ins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        genuine = nn.Linear.forward

        def counted(layer: nn.Linear, values: Tensor) -> Tensor:
            self.count += 1
            return genuine(layer, values)

        kernel = linear.few_positions

        def counted_kernel(values: Tensor, weight: Tensor) -> Tensor:
            self.count += 1
            return kernel(values, weight)

        monkeypatch.setattr(nn.Linear, "forward", counted)
        monkeypatch.setattr(linear, "few_positions", counted_kernel)


@functools.cache
def fused_target(family: str) -> Target:
    return Target(build(family), fusing())


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_fewer_products_give_the_same_logits_and_text(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    plain, fused = target_of(family), fused_target(family)
    expected = Generation.collect(speculative(plain, *_drafter(plain), REQUEST)).tokens
    assert write(fused, SKIPS["mixed"], RULES["fixed 3"], REQUEST).tokens == expected
    assert Generation.collect(speculative(fused, *_drafter(fused), REQUEST)).tokens == expected
    products, logits, counts = Products(monkeypatch), [], []
    for target in (plain, fused):
        before = products.count
        logits.append(target.forward(torch.tensor([REQUEST.prompt]), target.new_cache(20), 0))
        counts.append(products.count - before)
    assert agree(logits[1], logits[0])
    assert counts[0] - counts[1] == NUM_LAYERS * SAVED.get(family, 3)


def _drafter(target: Target) -> tuple[EarlyExitDrafter, Controller]:
    return EarlyExitDrafter(target, NUM_LAYERS - 2, new_exit_head(target)), Fixed(max_tokens=3).controller()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by modules that torch's compiler imports
def test_compiled_blocks_are_fused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's front end takes them whole; the code that it would make takes half a minute."""
    inductor = importlib.import_module("torch._inductor.compile_fx")
    monkeypatch.setattr(inductor, "compile_fx", lambda graph, inputs, config_patches: graph.forward)
    model = build("qwen2")
    target = Target(model, fusing(compiled=True))
    assert getattr(target.runner.block_call, "problem", "missing") is None
    expected = write(Target(model), SKIPS["mixed"], RULES["fixed 3"], REQUEST).tokens
    assert write(target, SKIPS["mixed"], RULES["fixed 3"], REQUEST).tokens == expected


def test_weights_are_stored_once_and_the_model_keeps_its_parameters() -> None:
    model = build("qwen2")
    before = {name: (id(weight), weight.clone()) for name, weight in model.named_parameters()}
    modules, needs_grad = list(model.modules()), [weight.requires_grad for weight in model.parameters()]
    target = Target(model, fusing())
    assert list(model.modules()) == modules
    assert [weight.requires_grad for weight in model.parameters()] == needs_grad
    for name, weight in model.named_parameters():
        assert (id(weight), True) == (before[name][0], torch.equal(weight, before[name][1]))
    own = model.model.layers[0].self_attn
    fused = next(each for each in target.stack[0].block.modules() if isinstance(each, FirstProjection))
    for kind in ("weight", "bias"):
        whole = getattr(fused.whole, kind).untyped_storage()
        assert whole.nbytes() == sum(getattr(own, name).get_parameter(kind).nbytes for name in fused.sizes)
        assert {getattr(own, name).get_parameter(kind).untyped_storage().data_ptr() for name in fused.sizes} == {
            whole.data_ptr()
        }
    with torch.no_grad():
        own.k_proj.weight.fill_(7.0)
    assert (fused.whole.weight == 7.0).any(), "a later change reaches the fused product"


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(4, 6), nn.Linear(4, 6)

    def forward(self, gated: Tensor, raised: Tensor) -> Tensor:
        return self.gate_proj(gated) + self.up_proj(raised)


@torch.no_grad()
def test_projections_of_different_inputs_are_computed_one_by_one() -> None:
    mlp, values, others = Mlp(), torch.randn(2, 4), torch.randn(2, 4)
    fused = with_fused_projections(mlp)
    for gated, raised in ((values, values), (values, others), (others, values)):
        torch.testing.assert_close(fused(gated, raised), mlp(gated, raised))


@pytest.mark.parametrize("reason", ["precision", "hook", "tied"])
def test_layers_that_cannot_be_fused_are_left_alone(reason: str) -> None:
    mlp = Mlp()
    if reason == "precision":
        mlp.up_proj.to(torch.bfloat16)
    elif reason == "hook":
        mlp.up_proj.register_forward_hook(lambda *_: None)
    else:
        mlp.up_proj.weight = mlp.gate_proj.weight
    assert with_fused_projections(mlp, tied_addresses(mlp)) is mlp
