"""The CUDA build of torch that is installed has the private functions that the code calls; the CPU build lacks some of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("decoding", "studies", "tuner") for path in (ROOT / folder).rglob("*.py"))


def _private_functions() -> set[str]:
    """Return the functions of `torch._C` that the product calls."""
    return {name for path in SOURCES for name in re.findall(r"torch\._C\.(\w+)", path.read_text(encoding="utf-8"))}


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch, with or without a GPU")
def test_a_cuda_build_of_torch_has_the_private_functions_that_are_called() -> None:
    assert {name for name in _private_functions() if not hasattr(torch._C, name)} == set()
