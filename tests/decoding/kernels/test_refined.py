"""The largest outputs of a layer, found by integers, are those of its own weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from decoding.kernels.choice import can_choose, choosing_lm_head, kernel_for
from decoding.kernels.linear import few_positions
from decoding.kernels.quantised import MAX_BFLOAT16_POSITIONS, PACKED, RefinedLinear, TiledLinear, error_bounds
from tests.support.integer_products import integers_of, quantised_values

CPU = torch.device("cpu")
PRECISIONS = [
    dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    if kernel_for("linear", CPU, dtype).kernel is not None
]
SHAPES = [(), (1, 1), (2, 3), (1, 13)]

pytestmark = pytest.mark.skipif(
    kernel_for("int8", CPU).kernel is None or not PRECISIONS, reason="the processor lacks the instructions"
)


def weights(dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield weights [outputs, inputs] whose largest outputs are found easily, with difficulty or not at all."""
    for inputs, outputs in [(64, 1000), (31, 7), (1, 3), (100, 17), (576, 2048), (2304, 50)]:
        yield "random", torch.randn(outputs, inputs).to(dtype)
    row = torch.randn(96)
    yield "equal", row.repeat(400, 1).to(dtype)
    yield "nearly equal", (row + 1e-3 * torch.randn(400, 96)).to(dtype)
    loud = torch.randn(400, 96)
    loud[torch.arange(400), torch.randint(96, (400,))] = 50.0
    yield "one large weight in each row", loud.to(dtype)
    alike = 3.0 * torch.rand(400, 96) - 1.5
    alike[:, 0] = 127.0
    yield "nearly equal in int8", alike.to(dtype)
    yield "small", (1e-8 * torch.randn(400, 96)).to(dtype)
    yield "with products below normal numbers", (1e-34 * torch.randn(400, 96)).to(dtype)
    yield "zeros", torch.zeros(400, 96, dtype=dtype)


def inputs_of(weight: Tensor, *shape: int) -> Iterator[Tensor]:
    """Yield values [*shape, inputs] that any layer may get, and some that make rounding errors large."""
    size = weight.shape[1]
    values = torch.randn(*shape, size)
    yield from (values, 1e6 * values, 1e-6 * values, torch.zeros(*shape, size))
    loud = values.clone()
    loud[..., 0] = 300.0
    yield loud
    integers, scales = integers_of(weight, 8)
    error = weight.double() - integers * scales.double()[:, None]
    yield error[torch.randint(len(weight), shape)].float() * 100  # along what a row loses
    yield 1e25 * values  # whose squares are not numbers of float32
    yield 1e-25 * values


@pytest.mark.usefixtures("instructions")
@torch.inference_mode()
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_the_largest_output_is_that_of_the_weight_bit_for_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    num_wrong = dict.fromkeys(("by int8 alone", "with errors taken for none"), 0)
    for kind, weight in weights(dtype):
        found_by, bounds = TiledLinear(weight, 8, None), error_bounds(weight)
        layer, careless = RefinedLinear(weight, found_by, bounds), RefinedLinear(weight, found_by, 0 * bounds)
        for shape in SHAPES:
            for values in inputs_of(weight, *shape):
                given = values.to(dtype)
                expected, found = few_positions(given, weight), layer(given)
                assert torch.equal(found.argmax(-1), expected.argmax(-1)), kind
                assert torch.equal(*(each.amax(-1).nan_to_num() for each in (found, expected))), kind
                for name, other in zip(num_wrong, (found_by, careless), strict=True):
                    num_wrong[name] += int((other(given).argmax(-1) != expected.argmax(-1)).sum())
    assert all(count > 10 for count in num_wrong.values()), num_wrong


@pytest.mark.usefixtures("instructions")
@torch.inference_mode()
@pytest.mark.parametrize("dtype", [each for each in PRECISIONS if each.itemsize == 2], ids=str)
def test_rows_whose_outputs_are_equal_only_when_rounded_are_among_the_largest(dtype: torch.dtype) -> None:
    """Integers find the first smaller and the second larger, as both are close to where rounding changes."""
    torch.manual_seed(0)
    values, num_cases = torch.tensor([1.0, 0.30078125, 0.7109375, 0.0]).to(dtype), 0
    rows = torch.randint(-127, 128, (2**20, 4))
    rows[:, 3] = 127  # which makes integers of 8 bits exact
    integers, scale = quantised_values(values)
    exact, found = (rows.double() @ each for each in (values.double(), integers * scale.double()))
    rounded, of_found = exact.to(dtype), found.to(dtype)
    is_below, is_above = (exact > 64) & (of_found < rounded), (exact > 64) & (of_found > rounded)
    for output in rounded[is_below].unique():
        below, above = (rows[kind & (rounded == output)][:1] for kind in (is_below, is_above))
        if len(below) and len(above):
            weight = torch.cat([below, above, (-above).repeat(20, 1)]).to(dtype)
            largest = RefinedLinear(weight, TiledLinear(weight, 8, None), error_bounds(weight))(values)
            assert largest.argmax() == few_positions(values, weight).argmax()
            num_cases += 1
    assert num_cases > 10


@pytest.mark.usefixtures("instructions")
@torch.inference_mode()
def test_outputs_are_within_their_bounds_and_not_far() -> None:
    torch.manual_seed(0)
    nearest = 1.0
    for _, weight in weights(torch.float32):
        found_by, bounds = TiledLinear(weight, 8, None), error_bounds(weight).double()
        for values in inputs_of(weight, 40):
            if not 1e-12 < values.abs().max() < 1e12:
                continue
            exact, norm = values.double() @ weight.double().T, values.double().norm(dim=-1, keepdim=True)
            off, most = (found_by(values).double() - exact).abs(), bounds * norm
            rounding = 2**-23 * exact.abs()
            assert (off <= most + rounding).all()
            nearest = min(nearest, float((1 - off / most.clamp_min(1e-30)).min()))
    assert nearest < 0.1, "a bound that no values come near would let too many rows in"


@pytest.mark.usefixtures("instructions")
@torch.inference_mode()
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_give_what_the_weight_gives(bad: float) -> None:
    weight, values = torch.randn(400, 96), torch.randn(3, 96)
    values[1, 5] = bad
    layer = RefinedLinear(weight, TiledLinear(weight, 8, None), error_bounds(weight))
    found, expected = layer(values), few_positions(values, weight)
    assert torch.equal(found[1].isnan(), expected[1].isnan())
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.usefixtures("instructions")
@torch.inference_mode()
@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize("bits", PACKED)
def test_without_bounds_the_sixteen_largest_are_products_with_the_weight(bits: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for _, weight in weights(dtype):
        found_by = TiledLinear(weight, bits, None)
        layer = RefinedLinear(weight, found_by)
        for shape in SHAPES:
            values = torch.randn(*shape, weight.shape[1]).to(dtype)
            found, by, own = layer(values), found_by(values), few_positions(values, weight)
            if len(weight) < 64:  # all are computed
                assert torch.equal(found, own)
                continue
            least = by.float().topk(16).values[..., -1:]
            is_in, is_out = by > least, by < least  # outputs that are equal to the least one may be either
            assert torch.equal(found[is_in], own[is_in])
            assert torch.equal(found[is_out], by[is_out])


@torch.inference_mode()
def test_many_positions_in_bfloat16_are_products_with_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.bfloat16 not in PRECISIONS:
        pytest.skip("the processor lacks the instructions")
    monkeypatch.setattr("decoding.kernels.choice.MIN_REFINED", 0)
    own = nn.Linear(24, 300, bias=False, dtype=torch.bfloat16)
    layer = choosing_lm_head(own)
    for num_positions, are_all in (MAX_BFLOAT16_POSITIONS, False), (MAX_BFLOAT16_POSITIONS + 1, True):
        values = torch.randn(1, num_positions, 24).bfloat16()
        assert torch.equal(layer(values), few_positions(values, own.weight)) == are_all


def test_only_large_plain_lm_heads_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    own = nn.Linear(24, 50, bias=False)
    assert not can_choose(own)
    monkeypatch.setattr("decoding.kernels.choice.MIN_REFINED", 24 * 50)
    assert can_choose(own)
    assert not can_choose(nn.Linear(24, 50)), "one with a bias"
    assert not can_choose(nn.Linear(24, 50, bias=False, dtype=torch.float64))
    with torch.no_grad():
        own.weight[3, 4] = torch.inf
    assert not can_choose(own)
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: False)
    assert not can_choose(nn.Linear(24, 50, bias=False))
