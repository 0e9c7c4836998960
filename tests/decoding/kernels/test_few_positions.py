"""Linear layers on few positions: the same results from the kernel, whatever the number of positions."""

from __future__ import annotations

from typing import NoReturn

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from decoding.kernels import linear as kernels
from decoding.kernels.choice import fast_linear, kernel_for
from decoding.kernels.compiled import CompiledFunction
from decoding.kernels.linear import MAX_POSITIONS, FewPositionsLinear
from decoding.runners.compilation import CompiledBlocks, compiling
from decoding.target import Target
from decoding.target.linears import with_fast_linears
from tests.support.families import build

PRECISIONS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
CPU = torch.device("cpu")
SUPPORTED = [dtype for dtype in PRECISIONS if kernel_for("linear", CPU, dtype).kernel is not None]


def has_kernel(module: nn.Module) -> bool:
    return isinstance(fast_linear(module), FewPositionsLinear)


pytestmark = pytest.mark.skipif(not SUPPORTED, reason="the processor lacks the instructions")


@pytest.mark.usefixtures("instructions")
@torch.inference_mode()
@pytest.mark.parametrize(
    ("inputs", "outputs", "bias"), [(64, 40, True), (31, 7, False), (1, 3, True), (576, 18, False)]
)
@pytest.mark.parametrize("dtype", SUPPORTED)
def test_products_equal_linears(dtype: torch.dtype, inputs: int, outputs: int, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    fast = FewPositionsLinear.of(layer)
    assert fast.weight is layer.weight
    for shape in ((1, 1, inputs), (1, 5, inputs), (2, 3, inputs), (7, inputs), (inputs,)):
        values = torch.randn(shape).to(dtype)
        torch.testing.assert_close(fast(values), layer(values), atol=PRECISIONS[dtype], rtol=PRECISIONS[dtype])


@pytest.mark.usefixtures("instructions")
@torch.inference_mode()
@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [(200, 33), (64, 130), (8192, 9)],
    ids=["odd", "quarters whole pages apart", "positions whole pages apart"],
)
@pytest.mark.parametrize("dtype", SUPPORTED)
def test_a_position_gets_the_same_bits_whatever_else_is_in_the_pass(
    dtype: torch.dtype, inputs: int, outputs: int
) -> None:
    torch.manual_seed(0)
    layer = FewPositionsLinear.of(nn.Linear(inputs, outputs, dtype=dtype))
    values = torch.randn(1, 17, inputs).to(dtype)
    whole = layer(values)
    for width in range(1, 17):
        assert torch.equal(layer(values[:, :width]), whole[:, :width])
        assert torch.equal(layer(values[:, width:]), whole[:, width:])


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [dtype for dtype in SUPPORTED if dtype.itemsize == 2])
def test_prompts_in_half_precision_are_multiplied_in_float32_where_the_processor_lacks_it(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, values = nn.Linear(40, 70, dtype=dtype), torch.randn(1, MAX_POSITIONS + 1, 40).to(dtype)
    for supported in (True, False):
        for name in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
            monkeypatch.setattr(torch.ops.mkldnn, name, lambda: supported)  # noqa: B023 - called at once
        fast = fast_linear(layer)
        assert isinstance(fast, FewPositionsLinear)
        assert fast.widens is not supported
        torch.testing.assert_close(fast(values), layer(values), atol=2e-2, rtol=2e-2)
    monkeypatch.setattr(kernels, "MAX_WIDENED", 3 * 40)
    exact = linear(values.float(), layer.weight.float(), layer.bias.float()).to(dtype)
    torch.testing.assert_close(fast(values), exact)
    assert not fast_linear(nn.Linear(4, 4)).widens, "not in float32"


def test_prompts_and_autograd_use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "few_positions", None)
    layer = FewPositionsLinear.of(nn.Linear(8, 4))
    layer(torch.randn(1, 3, 8)).sum().backward()
    with torch.no_grad():
        layer(torch.randn(1, MAX_POSITIONS + 1, 8))


def test_only_plain_linear_layers_in_a_known_precision_have_the_kernel() -> None:
    class Special(nn.Linear):
        pass

    assert not has_kernel(Special(4, 4))
    assert not has_kernel(nn.Linear(4, 4, dtype=torch.float64))
    assert not has_kernel(nn.Linear(4, 4, device="meta"))
    assert not has_kernel(nn.Embedding(4, 4))
    turned = nn.Linear(4, 8)
    turned.weight = nn.Parameter(torch.randn(4, 8).t())
    assert not has_kernel(turned), "its weight is not contiguous"


def test_without_a_compiler_there_is_a_warning_and_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.codecache import CppCodeCache
    from torch._inductor.exc import InvalidCxxCompiler

    def fails(source: str, device: str, submit: object) -> NoReturn:
        raise InvalidCxxCompiler

    monkeypatch.setattr(CppCodeCache, "load_async", fails)
    monkeypatch.setattr(kernels, "MULTIPLY", CompiledFunction("linear.cpp", "sdtune_multiply", []))
    with pytest.warns(UserWarning, match="slower than they could"):
        assert kernel_for("linear", CPU, torch.float32).kernel is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by modules that torch's compiler imports
@torch.inference_mode()
@pytest.mark.parametrize("dtype", SUPPORTED)
def test_compiled_code_calls_the_kernel_for_any_layer_and_width(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    call = CompiledBlocks(torch.device("cpu"))
    for bias in (True, True):
        layer = nn.Linear(24, 24, bias=bias, dtype=dtype)
        for width in (1, 2, 5, MAX_POSITIONS + 3):
            values = torch.randn(1, width, 24).to(dtype)
            with compiling(call):
                found = call(FewPositionsLinear.of(layer), values, (), {})
            expected = linear(values, layer.weight, layer.bias)
            torch.testing.assert_close(found, expected, atol=PRECISIONS[dtype], rtol=PRECISIONS[dtype])
    assert call.problem is None


@pytest.mark.usefixtures("uncompiled")
def test_the_static_runner_has_no_second_copy_of_the_weights() -> None:
    model = build("llama")
    target = Target(model, "static")
    own = {weight.data_ptr() for weight in model.parameters()}
    for block in target.stack:
        layers = [each for each in block.block.modules() if isinstance(each, nn.Linear)]
        assert len(layers) == 7
        assert all(type(each) is FewPositionsLinear and each.weight.data_ptr() in own for each in layers)
    assert not any(isinstance(each, FewPositionsLinear) for each in model.modules())
    heads = {id(part._module.lm_head.block) for part in (target.whole, target.part(target.stack))}
    assert len(heads) == 1, "all parts share it"


def test_a_copy_of_a_module_has_the_fast_layers_and_shares_all_else() -> None:
    module = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), "norm": nn.LayerNorm(4)})
    twin = with_fast_linears(module)
    assert isinstance(twin, nn.ModuleDict)
    assert type(twin["mlp"][0]) is FewPositionsLinear
    assert twin["mlp"][1] is module["mlp"][1]
    assert twin["norm"] is module["norm"]
    assert type(module["mlp"][0]) is nn.Linear, "the module itself is unchanged"
    assert with_fast_linears(module["norm"]) is module["norm"]
