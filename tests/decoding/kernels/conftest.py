"""The forms of our kernels: for the best instructions of the processor, and for AVX2, which processors with AVX-512 have, too."""

from __future__ import annotations

import pytest
import torch

from decoding.kernels import attention, compiled, linear, quantised
from decoding.kernels.compiled import CompiledFunction


@pytest.fixture(params=["best instructions", "AVX2"])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels as they are called from Python, in one of their forms."""
    if request.param == "best instructions":
        return
    if not torch.cpu._is_avx512_supported():
        pytest.skip("AVX2 is the best that it has")
    read = compiled._read
    monkeypatch.setattr(compiled, "_read", lambda name: "#define SDTUNE_AVX2\n" * name.endswith(".cpp") + read(name))
    for module, name in ((attention, "ATTEND"), (linear, "MULTIPLY"), (quantised, "MULTIPLY")):
        best = getattr(module, name)
        monkeypatch.setattr(module, name, CompiledFunction(best._source, best._name, best._arguments))
