"""Missing memory is recognised whichever part of torch finds it, and nothing else is."""

from __future__ import annotations

import pytest
import torch

from decoding.memory import is_out_of_memory


def test_shortage_of_the_cpu_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (torch.AcceleratorError("CUDA error: out of memory"), True),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("a size does not match"), False),
        (ValueError("DefaultCPUAllocator"), False),
    ],
)
def test_other_errors_are_told_apart(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected
