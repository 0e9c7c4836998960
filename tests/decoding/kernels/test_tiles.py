"""The kernel for integer weights computes the bits of plain torch, in tiles."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from decoding.errors import UnsupportedModelError
from decoding.kernels import linear
from decoding.kernels import quantised as kernels
from decoding.kernels.choice import choosing_lm_head, kernel_for, quantised_lm_head
from decoding.kernels.choice import quantised_linear as quantised
from decoding.kernels.quantised import MAX_INPUTS, PACKED, RefinedLinear, TiledLinear
from decoding.runners.compilation import CompiledBlocks, compiling
from decoding.target.linears import QuantisedLayers
from tests.support.integer_products import products

needs_kernel = pytest.mark.skipif(
    kernel_for("int8", torch.device("cpu")).kernel is None, reason="the processor lacks the instructions"
)
SIZES = [(64, 40), (31, 7), (1, 3), (100, 17), (33, 200), (2304, 18), (500, 300)]
"""Inputs and outputs."""


@pytest.mark.usefixtures("instructions")
@needs_kernel
@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", PACKED)
def test_kernel_and_plain_torch_agree_bit_for_bit(bits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for num_inputs, num_outputs in SIZES:
        weight = torch.randn(num_outputs, num_inputs)
        bias = torch.randn(num_outputs)
        kernel = TiledLinear(weight, bits, bias)
        for shape in ((), (1, 1), (1, 2), (3,), (2, 2), (1, 5), (1, 6), (7,), (1, 13), (1, 37)):
            values = (5 * torch.randn(*shape, num_inputs)).to(dtype)
            values[..., : num_inputs // 2] /= 100
            assert torch.equal(kernel(values), products(values, weight, bits) + bias.to(dtype))


@pytest.mark.usefixtures("instructions")
@needs_kernel
@torch.inference_mode()
@pytest.mark.parametrize("bits", PACKED)
def test_the_largest_sums_fit(bits: int) -> None:
    weight = torch.ones(2, MAX_INPUTS[bits]) * torch.tensor([[1.0], [-1.0]])
    values = torch.cat([torch.ones(1, MAX_INPUTS[bits]), -torch.ones(1, MAX_INPUTS[bits])])
    found = TiledLinear(weight, bits, None)(values)
    assert torch.equal(found, products(values, weight, bits))
    torch.testing.assert_close(found, torch.tensor([[1.0, -1], [-1, 1]]) * MAX_INPUTS[bits], rtol=1e-2, atol=0)


@needs_kernel
@pytest.mark.parametrize("bits", PACKED)
def test_a_layer_with_more_inputs_than_fit_stays_as_it_is(bits: int) -> None:
    layers = nn.ModuleList([nn.Linear(MAX_INPUTS[bits] + 1, 1), nn.Linear(4, 4)])
    found = QuantisedLayers().within(layers, bits)
    assert isinstance(found, nn.ModuleList)
    assert found[0] is layers[0]
    assert isinstance(found[1], TiledLinear)
    with pytest.raises(UnsupportedModelError, match="sums that do not fit in 32 bits"):
        quantised(layers[0], bits)  # type: ignore[arg-type]


def test_processors_without_the_instructions_quantise_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: False)
    with pytest.raises(UnsupportedModelError, match="no kernel here: the processor has no AVX2; tune a draft without"):
        quantised(nn.Linear(4, 4), 8)
    assert not QuantisedLayers().finds_any(nn.Linear(4, 4))


@needs_kernel
@torch.inference_mode()
@pytest.mark.parametrize("bits", PACKED)
def test_a_weight_packed_in_pieces_is_the_whole_weight(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weight, values = torch.randn(70, 64), torch.randn(3, 64)
    whole = TiledLinear(weight, bits, None)
    monkeypatch.setattr(kernels, "PIECE", 2 * 16 * 64)  # two tiles of 16 rows
    pieces = TiledLinear(weight, bits, None)
    for name, buffer in whole.named_buffers():
        assert torch.equal(buffer, pieces.get_buffer(name)), name
    assert torch.equal(pieces(values), products(values, weight, bits))


@needs_kernel
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by modules that torch's compiler imports
@torch.inference_mode()
def test_compiled_code_calls_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    call = CompiledBlocks(torch.device("cpu"))
    layers = [quantised(nn.Linear(24, 24, dtype=torch.bfloat16), bits) for bits in PACKED]
    monkeypatch.setattr("decoding.kernels.choice.MIN_REFINED", 0)
    own = nn.Linear(24, 50, bias=False, dtype=torch.bfloat16)
    layers += [quantised_lm_head(own, 8), choosing_lm_head(own)]
    values = torch.randn(1, 5, 24).bfloat16()
    expected = [layer(values) for layer in layers]
    for module, name in (kernels, "MULTIPLY"), (linear, "REFINE"):  # compiled code does not go through Python
        monkeypatch.setattr(module, name, None)
    with compiling(call):
        for layer, outputs in zip(layers, expected, strict=True):
            assert torch.equal(call(layer, values, (), {}), outputs)
    assert call.problem is None


@needs_kernel
@torch.inference_mode()
def test_a_large_lm_head_has_a_shortlist_that_int4_finds_where_it_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    own = nn.Linear(24, 50, bias=False)
    monkeypatch.setattr("decoding.kernels.choice.MIN_REFINED", 24 * 50 + 1)
    assert isinstance(quantised_lm_head(own, 8), TiledLinear)
    monkeypatch.setattr("decoding.kernels.choice.MIN_REFINED", 24 * 50)
    for has_vnni, bits in ((True, 4), (False, 8)):
        monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda has_vnni=has_vnni: has_vnni)
        layer = quantised_lm_head(own, 8)
        assert isinstance(layer, RefinedLinear)
        assert layer.found_by.bits == bits
        assert layer.weight is own.weight
    assert isinstance(quantised_lm_head(nn.Linear(24, 50), 8), TiledLinear), "one with a bias"
