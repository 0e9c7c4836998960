"""The forms of our kernels: for the best instructions of the processor, and for lesser ones, which it has, too."""

from __future__ import annotations

import pytest
import torch

from decoding.kernels import attention, compiled, linear, quantised
from decoding.kernels.compiled import CompiledFunction

LESSER = {"AVX-512": "SDTUNE_AVX512", "AVX2": "SDTUNE_AVX2"}
"""Instructions, and what a source must define to be compiled for them."""


@pytest.fixture(params=["best instructions", *LESSER])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels as they are called from Python, in one of their forms."""
    if request.param == "best instructions":
        return
    has_better = {"AVX-512": torch.cpu._is_amx_tile_supported, "AVX2": torch.cpu._is_avx512_supported}
    if not has_better[request.param]():
        pytest.skip("it has no better instructions")
    read, define = compiled._read, f"#define {LESSER[request.param]}\n"
    monkeypatch.setattr(compiled, "_read", lambda name: define * name.endswith(".cpp") + read(name))
    functions = (attention, "ATTEND"), (linear, "MULTIPLY"), (quantised, "MULTIPLY"), (linear, "REFINE")
    for module, name in functions:
        best = getattr(module, name)
        monkeypatch.setattr(module, name, CompiledFunction(best._source, best._name, best._arguments))
