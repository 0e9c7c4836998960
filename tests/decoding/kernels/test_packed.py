"""Linear layers with packed weights: the same results from a different kernel."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from decoding.decode import Request
from decoding.decoder import Decoder
from decoding.draft_length import Fixed
from decoding.kernels import choice, linear
from decoding.kernels.choice import MIN_PACKED_BYTES, fast_linear
from decoding.kernels.linear import PackedLinear
from decoding.runners.compilation import CompiledBlocks, compiling
from decoding.runners.static import StaticRunner
from decoding.target import Target
from decoding.target.linears import with_fast_linears
from decoding.text import Ending
from tests.support.families import build
from tests.support.generations import plain_text
from tests.support.grid import PROMPTS, SKIPS

PRECISIONS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(params=PRECISIONS)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """A precision that this processor computes in."""
    if request.param is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor does not compute in bfloat16")
    return request.param


@pytest.fixture
def all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack small layers too, such as the layers of the test models, as on a processor without the better kernel."""
    monkeypatch.setattr(choice, "MIN_PACKED_BYTES", 0)
    monkeypatch.setattr(linear, "MULTIPLY", SimpleNamespace(exists=False))


def can_be_packed(module: nn.Module) -> bool:
    return isinstance(fast_linear(module, copied=lambda make: make()), PackedLinear)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("shape", "bias"), [((1, 1, 24), True), ((1, 5, 24), False), ((2, 3, 24), True), ((7, 24), True)]
)
def test_products_equal_linears(dtype: torch.dtype, shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer, values = nn.Linear(24, 40, bias=bias, dtype=dtype), torch.randn(shape).to(dtype)
    found, expected = PackedLinear.of(layer)(values), layer(values)
    assert found.shape == expected.shape
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, atol=PRECISIONS[dtype], rtol=PRECISIONS[dtype])


def test_packed_copy_is_used_except_under_autograd() -> None:
    torch.manual_seed(0)
    layer, values = nn.Linear(24, 40), torch.randn(1, 3, 24)
    packed = PackedLinear.of(layer)
    assert packed.weight is layer.weight
    assert packed.bias is layer.bias
    with torch.no_grad():
        before = layer(values)
        layer.weight.zero_()
        torch.testing.assert_close(packed(values), before)
    packed(values).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.usefixtures("all_sizes")
def test_only_plain_linear_layers_are_packed() -> None:
    class Special(nn.Linear):
        pass

    assert can_be_packed(nn.Linear(4, 4))
    assert not can_be_packed(Special(4, 4))
    assert not can_be_packed(nn.Linear(4, 4, dtype=torch.float64))
    assert not can_be_packed(nn.Linear(4, 4, device="meta"))
    assert not can_be_packed(nn.Embedding(4, 4))


@pytest.mark.usefixtures("all_sizes")
def test_precisions_that_the_processor_does_not_compute_in_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not can_be_packed(nn.Linear(4, 4))


def test_small_layers_are_left_alone(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "MULTIPLY", SimpleNamespace(exists=False))
    rows = MIN_PACKED_BYTES // (64 * dtype.itemsize)
    assert can_be_packed(nn.Linear(64, rows, dtype=dtype, bias=False))
    assert not can_be_packed(nn.Linear(64, rows - 1, dtype=dtype))


@pytest.mark.usefixtures("all_sizes")
def test_a_copy_of_a_module_has_the_packed_layers_and_shares_all_else() -> None:
    module = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), "norm": nn.LayerNorm(4)})
    twin = with_fast_linears(module)
    assert isinstance(twin, nn.ModuleDict)
    assert type(twin["mlp"][0]) is PackedLinear
    assert twin["mlp"][1] is module["mlp"][1]
    assert twin["norm"] is module["norm"]
    assert type(module["mlp"][0]) is nn.Linear, "the module itself is unchanged"
    assert with_fast_linears(module["norm"]) is module["norm"]


def packed_layers(block: nn.Module) -> list[nn.Module]:
    """Return the packed layers of a block, or of the block inside a stand-in."""
    return [each for each in getattr(block, "block", block).modules() if isinstance(each, PackedLinear)]


@pytest.mark.usefixtures("uncompiled", "all_sizes")
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_packed_weights_change_neither_drafted_nor_plain_output(family: str) -> None:
    target = Target(build(family), lambda kinds, device: StaticRunner(kinds, device, compiled=False))
    assert packed_layers(target.stack[0])
    prompt, expected = PROMPTS["several tokens"], plain_text(family, "several tokens")
    for skip in ("mixed", "last block"):
        decoder = Decoder(target, SKIPS[skip], Fixed(max_tokens=4))
        assert decoder.generate(Request(prompt, Ending(len(expected)))).tokens == expected


@pytest.mark.usefixtures("uncompiled", "all_sizes")
def test_static_runner_packs_blocks_and_lm_head_but_not_the_model() -> None:
    model = build("llama")
    target = Target(model, "static")
    assert all(len(packed_layers(block)) == 7 for block in target.stack)
    assert not packed_layers(model)
    assert not any(packed_layers(block) for block in Target(model).stack)
    heads = {id(part._module.lm_head.block) for part in (target.whole, target.part(target.stack))}
    assert len(heads) == 1, "the LM head is packed once, for all parts"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by modules that torch's compiler imports
@torch.inference_mode()
def test_compiled_code_calls_onednn_for_any_layer_without_compiling_again() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(24, 24, bias=bias) for bias in (True, True)]
    call = CompiledBlocks(torch.device("cpu"))
    values = torch.randn(1, 5, 24)
    for layer in layers:
        with compiling(call):
            found = call(PackedLinear.of(layer), values, (), {})
        torch.testing.assert_close(found, layer(values), atol=1e-5, rtol=1e-5)
    assert call.problem is None
