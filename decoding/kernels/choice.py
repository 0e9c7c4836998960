"""Which kernel computes a layer, by work, device and precision: the only place that asks what a processor can do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn

from decoding.errors import UnsupportedModelError
from decoding.kernels import attention, linear, quantised
from decoding.kernels.compiled import PRECISIONS, CompiledFunction
from decoding.kernels.linear import FewPositionsLinear
from decoding.kernels.quantised import MAX_INPUTS, PACKED, RefinedLinear, TiledLinear, error_bounds

Work = Literal["linear", "attention", "int8", "int4"]
Kernel = Literal["few positions", "attention", "tiles"]

BITS: dict[int, Work] = {8: "int8", 4: "int4"}

MIN_REFINED = 2**22
"""Minimum number of weights of an LM head whose likeliest tokens integers find: smaller ones hardly take time."""


@dataclass(frozen=True)
class KernelChoice:
    """A kernel, or None and the reason. Without one, torch's own code computes the layer; integer weights are refused."""

    kernel: Kernel | None
    reason: str = ""


def kernel_for(work: Work, device: torch.device, dtype: torch.dtype | None = None) -> KernelChoice:
    """Return the kernel that does `work` on `device` in `dtype`, the precision of weights or of states.

    The precision does not matter to integer weights.
    """
    if device.type != "cpu":
        return KernelChoice(None, f"there is no kernel of ours for {device.type}")
    kernel, function = _kernels()[work]
    if dtype not in PRECISIONS and work in ("linear", "attention"):
        return KernelChoice(None, f"our kernel does not compute in {str(dtype).removeprefix('torch.')}")
    if not torch.cpu._is_avx2_supported():
        return KernelChoice(None, "the processor has no AVX2")
    return KernelChoice(kernel) if function.exists else KernelChoice(None, "its source cannot be compiled")


def kernels_on(device: torch.device, dtype: torch.dtype) -> dict[Work, KernelChoice]:
    """Return the kernel of each work, for a model in `dtype`."""
    return {work: kernel_for(work, device, dtype) for work in get_args(Work)}


def _kernels() -> dict[Work, tuple[Kernel, CompiledFunction]]:
    """Return our kernel for each work. All need AVX2, and have a form for AVX-512."""
    return {
        "linear": ("few positions", linear.MULTIPLY),
        "attention": ("attention", attention.ATTEND),
        "int8": ("tiles", quantised.MULTIPLY),
        "int4": ("tiles", quantised.MULTIPLY),
    }


def _lacks(dtype: torch.dtype) -> bool:
    """Return True if torch has no fast products of many positions in `dtype` on this processor."""
    if dtype is torch.float32:
        return False
    name = "bf16" if dtype is torch.bfloat16 else "fp16"
    return not torch.backends.mkldnn.is_available() or not getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")()


def fast_linear(module: nn.Module) -> nn.Module:
    """Return `module` computed by its kernel if it is a plain `nn.Linear` that has one, else the module itself."""
    if type(module) is not nn.Linear or not module.weight.is_contiguous():
        return module
    weight = module.weight
    if kernel_for("linear", weight.device, weight.dtype).kernel is None:
        return module
    return FewPositionsLinear.of(module, widens=_lacks(weight.dtype))


def quantised_linear(module: nn.Linear, bits: int) -> TiledLinear:
    """Return `module` with weights of 8 or 4 bits; its bias is shared.

    Raises `ValueError` for another number of bits, and `UnsupportedModelError` if the layer is not a plain linear
    layer with finite weights, of at most `MAX_INPUTS`, on a CPU whose kernel multiplies by them.
    """
    if bits not in PACKED:
        raise ValueError(f"weights of {bits} bits: choose from {', '.join(map(str, PACKED))}")
    if type(module) is not nn.Linear or not module.weight.is_floating_point() or module.weight.is_meta:
        raise UnsupportedModelError(f"only plain linear layers can be quantised, not {type(module).__name__}")
    check_quantised(module.weight.device)
    if module.in_features > MAX_INPUTS[bits]:
        raise UnsupportedModelError(
            f"a linear layer of {module.in_features} inputs has sums that do not fit in 32 bits"
        )
    with torch.inference_mode(False), torch.no_grad():
        return TiledLinear(module.weight.detach(), bits, None if module.bias is None else module.bias.detach())


def quantised_lm_head(module: nn.Linear, bits: int) -> nn.Module:
    """Return an LM head for drafts in `bits`. The likeliest tokens of a large one have the logits of its own weights.

    With AVX-512, int4 weights find these tokens. With AVX2, several positions take longer in int4 than in int8. Raises as
    `quantised_linear` does.
    """
    if not _can_be_refined(module, 4):
        return quantised_linear(module, bits)
    return RefinedLinear(module.weight, quantised_linear(module, 4 if torch.cpu._is_vnni_supported() else bits))


def can_choose(module: nn.Linear) -> bool:
    """Return True for an LM head with a `choosing_lm_head`: a large one, computed by our kernels."""
    return _can_be_refined(module, 8) and bool(module.weight.isfinite().all())


def choosing_lm_head(module: nn.Linear) -> nn.Module:
    """Return an LM head whose most likely token, and its logit, is that of `fast_linear`; other logits are approximations.

    It reads int8 weights, and of its own those of the tokens that may be the most likely one.
    """
    found_by = quantised_linear(module, 8)
    with torch.inference_mode(False), torch.no_grad():
        return RefinedLinear(module.weight, found_by, error_bounds(module.weight.detach()))


def _can_be_refined(module: nn.Linear, bits: int) -> bool:
    weight = module.weight
    return (
        weight.numel() >= MIN_REFINED
        and module.bias is None
        and weight.is_contiguous()
        and weight.shape[1] <= MAX_INPUTS[bits]
        and kernel_for("linear", weight.device, weight.dtype).kernel is not None
        and kernel_for(BITS[bits], weight.device).kernel is not None
    )


def check_quantised(device: torch.device) -> None:
    """Raise `UnsupportedModelError` unless quantised layers have an implementation on `device` that may pay."""
    if device.type != "cpu":
        raise UnsupportedModelError(
            f"drafts with int8 or int4 weights have no kernel on {device.type} yet, where they would be slower than the model "
            "itself: run them on a CPU, or tune a draft without `bits` on this device"
        )
    if (choice := kernel_for("int8", device)).kernel is None:
        raise UnsupportedModelError(
            f"drafts with int8 or int4 weights have no kernel here: {choice.reason}; tune a draft without `bits` on this machine"
        )


def register_kernels() -> None:
    """Make inductor call the kernels directly, without going through Python."""
    for module in (linear, attention, quantised):
        module.register()
