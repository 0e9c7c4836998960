"""Linear layers on one position: the same results from a different kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from decoding.kernels.linear import OnePosition

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("dtype", "tolerance", "shape", "bias"),
    [
        (torch.float32, 1e-5, (1, 1, 24), True),
        (torch.float32, 1e-5, (24,), False),
        (torch.bfloat16, 2e-2, (1, 24), True),
    ],
)
def test_products_equal_linears(dtype: torch.dtype, tolerance: float, shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer, values = nn.Linear(24, 40, bias=bias, dtype=dtype), torch.randn(shape).to(dtype)
    with OnePosition(CPU):
        found = layer(values)
    expected = layer(values)
    assert found.shape == expected.shape
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


class Kernels(TorchDispatchMode):
    """Records the names of the kernels that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("num_positions", "device", "is_sum"), [(1, CPU, True), (3, CPU, False), (1, torch.device("cuda"), False)]
)
def test_only_one_position_on_a_cpu_is_a_sum(num_positions: int, device: torch.device, is_sum: bool) -> None:
    values, weight = torch.randn(1, num_positions, 24), torch.randn(40, 24)
    with OnePosition(device), Kernels() as kernels:
        linear(values, weight)
    assert ("sum" in kernels.names) == is_sum
    assert ("mm" in kernels.names) == (not is_sum)


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
