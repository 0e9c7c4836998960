"""Linear layers on a single position on a CPU, computed nearer to memory bandwidth (our formulation).

A matrix-vector product is bound by reading the matrix. Where measured, the libraries that torch calls for it (MKL in
float32, oneDNN in bfloat16) reached less than half of the bandwidth of a plain sum. The same products written as a
sum and compiled by inductor reached nearly all of it. For several positions, sums were slower.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode


class OnePosition(TorchFunctionMode):
    """Rewrites linear layers on one CPU position as sums of products, in code compiled under it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._is_cpu = device.type == "cpu"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Intercept each torch function."""
        kwargs = kwargs or {}
        if func is linear and self._is_cpu and args[0].shape[:-1].numel() == 1:
            return _as_sum(*args, **kwargs)
        return func(*args, **kwargs)


def _as_sum(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `linear` of `values` [.., inputs] for a single position.

    Half precision is summed in float32, as the libraries do.
    """
    sums = (weight.float() * values.reshape(-1).float()).sum(-1).to(values.dtype)
    outputs = sums.reshape(*values.shape[:-1], weight.shape[0])
    return outputs if bias is None else outputs + bias
