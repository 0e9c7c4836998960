"""The one place that chooses kernels: what it answers, and the reason where there is none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from decoding.kernels import attention, linear, quantised
from decoding.kernels.choice import Work, kernel_for, kernels_on
from decoding.kernels.compiled import PRECISIONS

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
KERNELS: dict[Work, str] = {"linear": "few positions", "attention": "attention", "int8": "tiles", "int4": "tiles"}


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with the instructions, and a compiler."""
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: True)
    for function, module in (("ATTEND", attention), ("MULTIPLY", linear), ("MULTIPLY", quantised)):
        monkeypatch.setattr(module, function, SimpleNamespace(exists=True))


@pytest.mark.usefixtures("able")
def test_a_processor_with_the_instructions_has_every_kernel() -> None:
    for dtype in PRECISIONS:
        assert {work: each.kernel for work, each in kernels_on(CPU, dtype).items()} == KERNELS
    assert kernel_for("attention", CPU, torch.float64).reason == "our kernel does not compute in float64"


@pytest.mark.usefixtures("able")
def test_other_devices_have_none() -> None:
    for found in kernels_on(GPU, torch.float32).values():
        assert (found.kernel, found.reason) == (None, "there is no kernel of ours for cuda")


@pytest.mark.usefixtures("able")
def test_the_reason_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised, "MULTIPLY", SimpleNamespace(exists=False))
    monkeypatch.setattr(attention, "ATTEND", SimpleNamespace(exists=False))
    for work in ("int8", "attention"):
        assert kernel_for(work, CPU, torch.float32).reason == "its source cannot be compiled"
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: False)
    for found in kernels_on(CPU, torch.float32).values():
        assert (found.kernel, found.reason) == (None, "the processor has no AVX2")
