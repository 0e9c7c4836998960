"""Linear layers with integer weights: close to the originals, and the same bits at every width."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from decoding.errors import UnsupportedModelError
from decoding.kernels.choice import kernel_for
from decoding.kernels.choice import quantised_linear as quantised
from tests.support.fake_8b import PeakBytes

PRECISIONS = [torch.float32, torch.bfloat16, torch.float16]
ERRORS = {8: 0.02, 4: 0.2}
"""Bounds of the relative error of a product with normally distributed weights."""
UNIT = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SIZES = [(64, 40), (31, 7), (1, 3), (100, 17), (2304, 18)]
"""Inputs and outputs."""


pytestmark = [
    pytest.mark.usefixtures("instructions"),
    pytest.mark.skipif(
        kernel_for("int8", torch.device("cpu")).kernel is None, reason="the processor lacks the instructions"
    ),
]


def _relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@torch.inference_mode()
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("bits", ERRORS)
def test_products_are_close_to_those_of_the_weights(bits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for number, sizes in enumerate(SIZES):
        layer = nn.Linear(*sizes, bias=number % 2 == 0, dtype=dtype)
        nn.init.normal_(layer.weight)
        fast = quantised(layer, bits)
        for shape in ((1, 1), (1, 5), (2, 3), (7,), ()):
            values = torch.randn(*shape, sizes[0]).to(dtype)
            found = fast(values)
            assert found.dtype is dtype
            assert found.shape == (*shape, sizes[1])
            assert _relative_error(found, layer(values)) < ERRORS[bits] + UNIT[dtype]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("bits", ERRORS)
def test_weights_on_the_grid_are_exact(bits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(96, 24, bias=False, dtype=dtype)
    largest = 2 ** (bits - 1) - 1
    grid = torch.randint(-largest, largest + 1, (24, 96))
    grid[:, ::32], grid[:, 1::32] = -largest, largest
    if bits == 4:  # 15 steps, with the ends in each group
        grid[:, ::32] = -8
    layer.weight.copy_(grid / 64)
    values = torch.randn(1, 3, 96).to(dtype)
    exact = linear(values.double(), layer.weight.double())
    assert _relative_error(quantised(layer, bits)(values), exact) < UNIT[dtype]


@torch.inference_mode()
@pytest.mark.parametrize("bits", ERRORS)
def test_replaced_rows_are_as_if_they_had_been_there(bits: int) -> None:
    torch.manual_seed(0)
    for has_bias in (True, False):
        layer, other = (nn.Linear(100, 35, bias=has_bias) for _ in range(2))
        rows = torch.tensor([34, 0, 17, 16])
        expected = nn.Linear(100, 35, bias=has_bias)
        expected.load_state_dict(layer.state_dict())
        expected.weight[rows] = other.weight[:4]
        if has_bias:
            expected.bias[rows] = other.bias[:4]
        fast, values = quantised(layer, bits), torch.randn(1, 3, 100)
        fast.replace_rows(rows, other.weight[:4], other.bias[:4] if has_bias else None)
        assert torch.equal(fast(values), quantised(expected, bits)(values))


@torch.inference_mode()
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("bits", ERRORS)
def test_a_position_gets_the_same_bits_whatever_else_is_in_the_pass(bits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = quantised(nn.Linear(200, 33, dtype=dtype), bits)
    values = torch.randn(1, 17, 200).to(dtype)
    whole = layer(values)
    for width in range(1, 17):
        assert torch.equal(layer(values[:, :width]), whole[:, :width])
        assert torch.equal(layer(values[:, width:]), whole[:, width:])


@torch.inference_mode()
@pytest.mark.parametrize("bits", ERRORS)
def test_rows_and_positions_of_zeros_stay_zeros(bits: int) -> None:
    layer = nn.Linear(64, 6, bias=False)
    layer.weight[2] = 0
    layer.weight[3, :32] = 0
    found = quantised(layer, bits)(torch.randn(1, 4, 64))
    assert not found[..., 2].any()
    assert found[..., 3].all()
    assert not quantised(layer, bits)(torch.zeros(1, 2, 64)).any()


@torch.inference_mode()
@pytest.mark.parametrize("bits", ERRORS)
def test_small_and_large_values_keep_their_scale(bits: int) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 8, bias=False)
    values = torch.randn(64)
    expected = quantised(layer, bits)(values)
    for scale in (2.0**-60, 2.0**60):
        torch.testing.assert_close(quantised(layer, bits)(values * scale), expected * scale, atol=0, rtol=1e-5)
    for size in (1e-38, 0.0):  # below any scale, where only the absence of infinities matters
        assert quantised(layer, bits)(torch.full((64,), size)).isfinite().all()


@torch.inference_mode()
@pytest.mark.parametrize("bits", ERRORS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_show(bits: int, bad: float) -> None:
    values = torch.randn(2, 40)
    values[1, 33] = bad
    found = quantised(nn.Linear(40, 5), bits)(values)
    assert found[0].isfinite().all()
    assert found[1].isnan().all()


def test_a_layer_states_its_bits_and_memory() -> None:
    layer = nn.Linear(1024, 512)
    for bits, per_weight in ((8, 8), (4, 4 + 8 * 3 / 32)):
        fast = quantised(layer, bits)
        assert fast.bits == bits
        assert sum(each.nbytes for each in fast.buffers()) == pytest.approx(1024 * 512 * per_weight / 8 + 512 * 4)
        assert (fast.in_features, fast.out_features) == (1024, 512)
        assert fast.bias is not None
        assert fast.bias.data_ptr() == layer.bias.data_ptr()


def test_only_plain_linear_layers_are_quantised() -> None:
    class Special(nn.Linear):
        pass

    with pytest.raises(ValueError, match="weights of 3 bits: choose from 8, 4"):
        quantised(nn.Linear(4, 4), 3)
    for bad in (Special(4, 4), nn.Embedding(4, 4), nn.Linear(4, 4, device="meta")):
        with pytest.raises(UnsupportedModelError, match="only plain linear layers"):
            quantised(bad, 8)  # type: ignore[arg-type]
    broken = nn.Linear(4, 4)
    broken.weight.data[0, 0] = float("nan")
    with pytest.raises(UnsupportedModelError, match="not finite"):
        quantised(broken, 8)


@pytest.mark.parametrize("bits", ERRORS)
def test_a_large_layer_is_packed_in_pieces(bits: int) -> None:
    """An LM head rounded at once took 2.0 (int8) and 4.1 (int4) times its weights beside them."""
    layer = nn.Linear(512, 16_384, bias=False)
    with PeakBytes(layer) as memory:
        quantised(layer, bits)
    assert memory.peak < 1.5 * layer.weight.nbytes
