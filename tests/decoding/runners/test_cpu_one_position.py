"""Linear layers on one position: the same results from a different kernel."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from decoding.runners.cpu_one_position import OnePosition

CPU = torch.device("cpu")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 24), (1, 24), (24,)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_products_equal_linears(dtype: torch.dtype, tolerance: float, shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer, values = nn.Linear(24, 40, bias=bias, dtype=dtype), torch.randn(shape).to(dtype)
    with OnePosition(CPU):
        found = layer(values)
    expected = layer(values)
    assert found.shape == expected.shape
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def test_several_positions_and_other_devices_are_left_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(40, 24)

    def unexpected(*args: object) -> None:
        raise AssertionError("as a sum")

    monkeypatch.setattr("decoding.runners.cpu_one_position._as_sum", unexpected)
    one, several = torch.randn(1, 1, 24), torch.randn(1, 3, 24)
    with OnePosition(CPU):
        assert torch.equal(linear(several, weight), several @ weight.t())
    with OnePosition(torch.device("cuda")):
        linear(one, weight)
    with OnePosition(CPU), pytest.raises(AssertionError, match="as a sum"):
        linear(one, weight)


def test_compiled_code_has_the_sums() -> None:
    seen: list[str] = []

    def look(graph: torch.fx.GraphModule, inputs: object) -> object:
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    def call(layer: nn.Module, values: torch.Tensor) -> torch.Tensor:
        with OnePosition(values.device):
            return layer(values)

    torch.compile(call, backend=look, fullgraph=True)(nn.Linear(24, 40), torch.randn(1, 1, 24))
    assert any("sum" in name for name in seen)
    assert not any("linear" in name for name in seen)
