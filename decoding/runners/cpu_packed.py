"""Linear layers on a CPU with weights in oneDNN's packed layout.

A pass over few positions is bound by reading the weights. In torch's layout they are read at a fraction of the memory
bandwidth, and the more positions, the slower, so that a verification costs as much as several plain passes. Packed
weights are read at nearly full bandwidth for one to eight positions. They are packed once and read by every later
pass. torch's own freezing does the same if weights are constants of the compiled code; here they stay inputs, so that
one compiled block serves all layers.

Packed weights are a second copy in memory. For small layers that is a loss: a single position reads the original
weight (see `decoding.runners.cpu_one_position`), and two copies of a model that might fit in the processor's caches
do not fit.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

MIN_BYTES = 2**20
"""Minimum size of a packed weight. With layers of 0.1 to 0.3 MB (the demo), packing slowed drafted decoding down by 4 %."""


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
        """Return `linear` with packed weights; it must satisfy `can_be_packed`."""
        twin = cls.__new__(cls)
        twin.__dict__.update(linear.__dict__)
        with torch.inference_mode():
            twin.__dict__["packed"] = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        return twin

    def forward(self, input: Tensor) -> Tensor:
        """Map [.., inputs] to [.., outputs]."""
        if torch.is_grad_enabled():
            return super().forward(input)
        if torch.compiler.is_compiling():
            if input.shape[:-1].numel() == 1:
                return super().forward(input)  # as a sum: see `decoding.runners.cpu_one_position`
            return packed_linear(input, self.packed, self.bias)
        return torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")


def can_be_packed(module: nn.Module) -> bool:
    """Return True if oneDNN packs this module.

    It must be a plain `nn.Linear` on a CPU, large enough, in a precision that the CPU computes in.
    """
    if type(module) is not nn.Linear or module.weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if module.weight.nbytes < MIN_BYTES:
        return False
    if module.weight.dtype is torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if module.weight.dtype is torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return module.weight.dtype is torch.float32


def compile_packed_linear() -> None:
    """Make inductor call oneDNN for `packed_linear` directly, without going through Python.

    Inductor does so for oneDNN's own operator, but only if the weights are constants of the compiled code.
    """
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
