"""Options of the compiler: decided by the model's device, not by what else the machine has."""

from __future__ import annotations

import pytest
import torch

from decoding.runners.compilation import compiler_options
from decoding.runners.features import SpeedFeatures

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
TUNED = SpeedFeatures(coordinate_descent=True)


@pytest.mark.parametrize("machine_has_gpu", [True, False])
def test_model_on_a_cpu_keeps_the_cpp_wrapper_on_any_machine(
    monkeypatch: pytest.MonkeyPatch, machine_has_gpu: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: machine_has_gpu)
    assert compiler_options(CPU)["cpp_wrapper"]
    assert "cpp_wrapper" not in compiler_options(CUDA)


def test_coordinate_descent_is_for_cuda_and_off_by_default() -> None:
    assert compiler_options(CUDA) == {}
    assert compiler_options(CUDA, TUNED) == {"coordinate_descent_tuning": True}
    assert compiler_options(CPU, TUNED) == compiler_options(CPU)


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_inductor_knows_every_option(device: torch.device) -> None:
    options = compiler_options(device, TUNED)
    assert options.keys() <= torch._inductor.config.get_config_copy().keys()
