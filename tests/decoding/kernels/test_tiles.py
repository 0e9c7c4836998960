"""The kernel for integer weights computes the bits of plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from decoding.kernels import linear
from decoding.kernels import quantised as kernels
from decoding.kernels.choice import choosing_lm_head, kernel_for, quantised_lm_head
from decoding.kernels.choice import quantised_linear as quantised
from decoding.kernels.quantised import MAX_INPUTS, PACKED, QuantisedLinear, RefinedLinear, TiledLinear
from decoding.runners.compilation import CompiledBlocks, compiling

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
        kernel, plain = TiledLinear(weight, bits, torch.randn(num_outputs)), QuantisedLinear(PACKED[bits](weight), None)
        plain.bias = kernel.bias
        for shape in ((), (1, 1), (1, 2), (3,), (2, 2), (1, 5), (1, 6), (7,), (1, 13), (1, 37)):
            values = (5 * torch.randn(*shape, num_inputs)).to(dtype)
            values[..., : num_inputs // 2] /= 100
            assert torch.equal(kernel(values), plain(values))


@pytest.mark.usefixtures("instructions")
@needs_kernel
@torch.inference_mode()
@pytest.mark.parametrize("bits", PACKED)
def test_the_largest_sums_fit(bits: int) -> None:
    weight = torch.ones(2, MAX_INPUTS[bits]) * torch.tensor([[1.0], [-1.0]])
    values = torch.cat([torch.ones(1, MAX_INPUTS[bits]), -torch.ones(1, MAX_INPUTS[bits])])
    found = TiledLinear(weight, bits, None)(values)
    assert torch.equal(found, QuantisedLinear(PACKED[bits](weight), None)(values))
    torch.testing.assert_close(found, torch.tensor([[1.0, -1], [-1, 1]]) * MAX_INPUTS[bits], rtol=1e-2, atol=0)


@torch.inference_mode()
@pytest.mark.parametrize("bits", PACKED)
def test_more_inputs_than_fit_are_computed_by_plain_torch(bits: int) -> None:
    assert isinstance(quantised(nn.Linear(MAX_INPUTS[bits] + 1, 1), bits), QuantisedLinear)


@torch.inference_mode()
def test_processors_without_the_instructions_use_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: False)
    assert isinstance(quantised(nn.Linear(4, 4), 8), QuantisedLinear)


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
    assert torch.equal(pieces(values), QuantisedLinear(PACKED[bits](weight), None)(values))


@needs_kernel
@pytest.mark.parametrize("bits", PACKED)
def test_tiles_take_as_much_memory_as_rows(bits: int) -> None:
    layer = nn.Linear(1024, 512, bias=False)
    fast = quantised(layer, bits)
    assert isinstance(fast, TiledLinear)
    plain = QuantisedLinear(PACKED[bits](layer.weight.detach()), None)
    assert sum(each.nbytes for each in fast.buffers()) == sum(each.nbytes for each in plain.buffers())


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
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: False)
    assert isinstance(quantised_lm_head(own, 8), QuantisedLinear)
