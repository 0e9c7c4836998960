"""Compiled blocks: options decided by the model's device, and what a recording hears of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decoding.runners.compilation import CompiledBlocks, compiler_options

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("machine_has_gpu", [True, False])
def test_model_on_a_cpu_keeps_the_cpp_wrapper_on_any_machine(
    monkeypatch: pytest.MonkeyPatch, machine_has_gpu: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: machine_has_gpu)
    assert compiler_options(CPU)["cpp_wrapper"]
    assert "cpp_wrapper" not in compiler_options(CUDA)


def test_inductor_knows_every_option() -> None:
    options = compiler_options(CPU)
    assert options.keys() <= torch._inductor.config.get_config_copy().keys()


class _Double(nn.Module):
    """Returns twice its input, and the input itself if `aliases`."""

    def __init__(self, aliases: bool) -> None:
        super().__init__()
        self._aliases = aliases

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        return (2 * hidden_states, hidden_states[:, :1]) if self._aliases else (2 * hidden_states,)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by modules that torch's compiler imports
@pytest.mark.parametrize("aliases", [False, True])
def test_the_kernel_alone_is_noted_where_nothing_around_it_matters(
    aliases: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks, noted = CompiledBlocks(torch.device("cpu")), list[tuple[Callable[..., Any], Sequence[Any]]]()
    around = list[object]()
    graphs = importlib.import_module("torch._inductor.output_code").CompiledFxGraph
    original = graphs.__call__
    with torch.inference_mode():
        values = torch.ones(1, 3, 8)
        with blocks.noted_by(lambda function, args, kwargs, outputs: noted.append((function, args))):
            (first, *_), (second, *_) = (blocks(_Double(aliases), values, (), {}) for _ in range(2))
        ((function, args), (again, _)) = noted
        monkeypatch.setattr(
            graphs, "__call__", lambda graph, inputs: (around.append(graph), original(graph, inputs))[1]
        )
        replayed = function(*args)
    assert function is again
    assert torch.equal(first, second)
    assert torch.equal(replayed[0], first)
    assert bool(around) == aliases, "views of an input are made around the kernel"
