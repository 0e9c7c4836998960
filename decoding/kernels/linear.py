"""Linear layers on few positions on a CPU, computed at nearly the bandwidth of memory (our formulation).

A pass over few positions is bound by reading the weights. Where measured (AMD Zen 4, one thread), the libraries that
torch calls read them at a third to a half of the bandwidth of a plain sum: MKL in float32, oneDNN in bfloat16. There are
three ways out:

* `FewPositionsLinear`: the kernel in `linear.cpp` reads the weights in torch's own layout, so there is no second copy
  of them, at nearly full bandwidth for up to eight positions (Intel Xeon; with AVX2 three), in bfloat16 with AMX for
  sixteen. A position's sums do not depend on the number of positions, so the layers round alike in plain and in verifying passes.
* `PackedLinear`: weights in oneDNN's packed layout, a second copy, which is read at nearly full bandwidth for one to
  eight positions. torch's own freezing does the same if weights are constants of the compiled code; here they stay
  inputs, so that one compiled block serves all layers.
* `OnePosition`: a matrix-vector product written as a sum and compiled by inductor. For several positions, sums were
  slower.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from decoding.kernels.compiled import CompiledFunction, call_directly

MAX_POSITIONS = 65
"""Maximum number of positions outside compiled code; prompts are wider, and bound by arithmetic."""

MAX_WIDENED = 2**24
"""Maximum number of weights that are copied to float32 at once."""

MULTIPLY = CompiledFunction("linear.cpp", "sdtune_multiply", [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 4)
REFINE = CompiledFunction("linear.cpp", "sdtune_refine", [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 4)


@torch.library.custom_op("sdtune::few_positions", mutates_args=())
def few_positions(values: Tensor, weight: Tensor) -> Tensor:
    """Multiply `values` [.., inputs] by a contiguous `weight` [outputs, inputs] of the same precision."""
    values = values.contiguous()
    outputs = values.new_empty((*values.shape[:-1], weight.shape[0]))
    MULTIPLY(
        values.data_ptr(),
        weight.data_ptr(),
        outputs.data_ptr(),
        values.shape[:-1].numel(),
        *weight.shape,
        weight.itemsize,
    )
    return outputs


@few_positions.register_fake
def _(values: Tensor, weight: Tensor) -> Tensor:
    return values.new_empty((*values.shape[:-1], weight.shape[0]))


@torch.library.custom_op("sdtune::refined", mutates_args=())
def refined(found: Tensor, values: Tensor, weight: Tensor, bounds: Tensor) -> Tensor:
    """Return the outputs `found` [.., outputs] for `values` [.., inputs], the largest of each position computed by `few_positions`.

    An output is off by up to its bound [outputs] times the norm of the values: all that may be the largest are computed. If
    `bounds` are empty, these are the 16 largest.
    """
    found, values = found.contiguous(), values.contiguous()
    outputs = torch.empty_like(found)
    REFINE(
        found.data_ptr(),
        values.data_ptr(),
        weight.data_ptr(),
        bounds.data_ptr() if bounds.numel() else None,
        outputs.data_ptr(),
        values.shape[:-1].numel(),
        *weight.shape,
        weight.itemsize,
    )
    return outputs


@refined.register_fake
def _(found: Tensor, values: Tensor, weight: Tensor, bounds: Tensor) -> Tensor:
    return torch.empty_like(found)


class FewPositionsLinear(nn.Linear):
    """A linear layer that computes passes over few positions by the kernel.

    Weight and bias are shared with the original layer. Under autograd it computes like any linear layer.
    """

    widens: bool
    """True if many positions are multiplied in float32: torch takes up to ten times as long in bfloat16 where the processor
    lacks it."""

    @classmethod
    def of(cls, linear: nn.Linear, *, widens: bool = False) -> FewPositionsLinear:
        """Return `linear` computed by the kernel; see `decoding.kernels.choice`."""
        twin = cls.__new__(cls)
        twin.__dict__.update(linear.__dict__, widens=widens)
        return twin

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() or input.dtype != self.weight.dtype:
            return super().forward(input)
        if not torch.compiler.is_compiling() and input.shape[:-1].numel() > MAX_POSITIONS:
            return self._widened(input) if self.widens else super().forward(input)
        outputs = few_positions(input, self.weight)
        return outputs if self.bias is None else outputs + self.bias

    def _widened(self, input: Tensor) -> Tensor:
        values = input.float()
        rows = self.weight.split(max(1, MAX_WIDENED // self.in_features))
        outputs = torch.cat([linear(values, each.float()) for each in rows], dim=-1)
        return (outputs if self.bias is None else outputs + self.bias).to(input.dtype)


@torch.library.custom_op("sdtune::packed_linear", mutates_args=())
def packed_linear(values: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply `values` [.., inputs] by a weight [outputs, inputs] that `PackedLinear` has packed."""
    return torch.ops.mkldnn._linear_pointwise(values, packed, bias, "none", [], "")


@packed_linear.register_fake
def _(values: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return values.new_empty((*values.shape[:-1], packed.shape[0]))


class PackedLinear(nn.Linear):
    """A linear layer that multiplies by a packed copy of its weight.

    Weight and bias are shared with the original layer. The copy is of the weight at construction. Under autograd the
    layer computes like any linear layer.
    """

    packed: Tensor

    @classmethod
    def of(cls, linear: nn.Linear) -> PackedLinear:
        """Return `linear` with packed weights; see `decoding.kernels.choice`."""
        twin = cls.__new__(cls)
        twin.__dict__.update(linear.__dict__)
        with torch.inference_mode():
            twin.__dict__["packed"] = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        return twin

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return super().forward(input)
        if torch.compiler.is_compiling():
            if input.shape[:-1].numel() == 1:
                return super().forward(input)  # as a sum, by `OnePosition`
            return packed_linear(input, self.packed, self.bias)
        return torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")


class OnePosition(TorchFunctionMode):
    """Rewrites linear layers on one CPU position as sums of products, in code compiled under it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._is_cpu = device.type == "cpu"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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


def register() -> None:
    """Make inductor call kernel and oneDNN directly, without going through Python.

    Inductor does so for oneDNN's own operator, but only if the weights are constants of the compiled code.
    """
    call_directly(
        torch.ops.sdtune.few_positions.default,
        "aoti_torch_cpu_sdtune_few_positions",
        num_tensors=2,
        size=lambda values, weight: [*values.get_size()[:-1], weight.get_size()[0]],
    )
    call_directly(
        torch.ops.sdtune.refined.default,
        "aoti_torch_cpu_sdtune_refined",
        num_tensors=4,
        size=lambda found, *_: found.get_size(),
    )
    lowering = importlib.import_module("torch._inductor.lowering")
    operator = torch.ops.sdtune.packed_linear.default
    if operator not in lowering.lowerings:
        lowering.register_lowering(operator, type_promotion_kind=None)(_lowered)


def _lowered(values: Any, packed: Any, bias: Any) -> Any:
    """Build the call in inductor's IR. `packed` keeps its layout, which inductor does not know."""
    ir = importlib.import_module("torch._inductor.ir")
    kernel = importlib.import_module("torch._inductor.mkldnn_ir").LinearUnary
    inputs = [kernel.require_contiguous(kernel.realize_input(values)), kernel.realize_input(packed)]
    constants: list[Any] = ["none", [-1], ""]
    if bias is None:
        constants.insert(0, None)
    else:
        inputs.append(kernel.require_contiguous(kernel.realize_input(bias)))
    size = [*values.get_size()[:-1], packed.get_size()[0]]
    layout = ir.FixedLayout(device=values.get_device(), dtype=values.get_dtype(), size=size)
    return ir.TensorBox.create(kernel(layout=layout, inputs=inputs, constant_args=constants))
