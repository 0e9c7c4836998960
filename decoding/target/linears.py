"""The linear layers of a target's blocks as its passes compute them: by kernels, fused, or quantised for drafts.

Fused are projections of one input (our formulation): query, key and value, and gate and up, multiply the same states by
different weights. The weights become views of one buffer, which a copy of the block multiplies at once. Nothing is stored
twice, and the model's own modules keep their parameters: the same objects, values and names.

A draft of `bits` runs every plain linear layer of its blocks, of its exit head and of the LM head with quantised weights,
packed once per model. Everything else runs as it is: embedding, norms, routers, experts that are not linear layers, and
layers that are quantised already or whose weights are elsewhere.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from decoding.errors import UnsupportedModelError
from decoding.kernels.choice import check_quantised, fast_linear, quantised_linear
from decoding.target.stand_ins import StandIn, shallow_copy, with_replaced
from decoding.target.weights import Make

PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)
"""Precisions of weights that are quantised."""

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of projections that may be given the same input; each is tried at every module of a block."""


def with_fast_linears(module: nn.Module, copied: Callable[[Make], nn.Module] = operator.call) -> nn.Module:
    """Return a copy of `module` with faster linear layers for few positions on a CPU, or `module` if it has none.

    `copied` makes those that hold a copy of a weight; see `ModelWeights.copied`.
    """
    return with_replaced(module, partial(fast_linear, copied=copied))


def with_fused_projections(
    module: nn.Module, tied: frozenset[int] = frozenset(), copied: Callable[[Make], nn.Module] = operator.call
) -> nn.Module:
    """Return a copy of `module` with fused projections, or `module` if it has none that can be fused.

    Left alone are layers that are not plain `nn.Linear`, that have hooks, that differ in precision, device or bias, and
    those whose weights are at one of the addresses `tied` or were made in inference mode.
    Moves the weights of the others into common buffers, and again if they have moved out of them: `copied` makes the layers that
    compute with a buffer; see `ModelWeights.copied`.
    """
    changed = {name: with_fused_projections(child, tied, copied) for name, child in module.named_children()}
    changed = {name: child for name, child in changed.items() if child is not getattr(module, name)}
    for names in GROUPS:
        linears = [module._modules.get(name) for name in names]
        plain = [linear for linear in linears if isinstance(linear, nn.Linear)]
        if len(plain) == len(names) and _can_be_fused(plain, tied):
            changed.update(_fused(dict(zip(names, plain, strict=True)), copied))
    if not changed:
        return module
    twin = shallow_copy(module)
    for name, child in changed.items():
        setattr(twin, name, child)
    return twin


def tied_addresses(model: nn.Module) -> frozenset[int]:
    """Return the addresses of weights that the model has under several names."""
    named = Counter(weight.data_ptr() for _, weight in model.named_parameters(remove_duplicate=False))
    return frozenset(address for address, count in named.items() if count > 1)


class _Kept:
    """What the first projection of a group has computed for the others, within one pass through the block."""

    def __init__(self) -> None:
        self.values: Tensor | None = None
        self.outputs: dict[str, Tensor] = {}

    def put(self, values: Tensor, outputs: dict[str, Tensor]) -> None:
        self.values, self.outputs = values, outputs

    def take(self, values: Tensor, name: str) -> Tensor | None:
        """Return the output of one projection of `values` and release it, or None if it was not computed."""
        output = self.outputs.pop(name, None) if self.values is values else None
        if not self.outputs:
            self.values = None
        return output


class FirstProjection(StandIn):
    """Computes all projections of a group, whose `sizes` are given by name, and outputs its own.

    Under autograd each projection computes for itself, so that gradients reach the model's parameters.
    """

    def __init__(self, own: nn.Linear, whole: nn.Module, sizes: dict[str, int], kept: _Kept) -> None:
        super().__init__(own, sizes=sizes, kept=kept)
        self.whole = whole

    def forward(self, values: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return self.block(values)
        first, *others = self.whole(values).split(list(self.sizes.values()), dim=-1)
        self.kept.put(values, dict(zip(list(self.sizes)[1:], others, strict=True)))
        return first


class OtherProjection(StandIn):
    """Outputs what the group's first projection has computed; computes for itself if that had another input."""

    def forward(self, values: Tensor) -> Tensor:
        output = self.kept.take(values, self.name)
        return self.block(values) if output is None else output


def _can_be_fused(linears: Sequence[nn.Linear], tied: frozenset[int]) -> bool:
    if not all(type(linear) is nn.Linear and not _is_hooked(linear) for linear in linears):
        return False
    parameters = [parameter for linear in linears for parameter in linear.parameters()]
    alike = {(linear.in_features, linear.weight.dtype, linear.weight.device, linear.bias is None) for linear in linears}
    return len(alike) == 1 and all(_can_move(parameter, tied) for parameter in parameters)


def _can_move(parameter: nn.Parameter, tied: frozenset[int]) -> bool:
    """Return True if nothing else depends on where the parameter is stored."""
    is_own = type(parameter) is nn.Parameter and not parameter.is_meta and not parameter.is_inference()
    return is_own and parameter.is_contiguous() and parameter.data_ptr() not in tied


def _is_hooked(linear: nn.Linear) -> bool:
    """Return True if calling the layer does more than multiply: forward hooks, or accelerate's replaced `forward`."""
    return bool(linear._forward_hooks or linear._forward_pre_hooks or "forward" in linear.__dict__)


def _fused(linears: Mapping[str, nn.Linear], copied: Callable[[Make], nn.Module]) -> dict[str, nn.Module]:
    """Return the stand-ins of a group by name, after moving its weights into one buffer."""
    kept, first = _Kept(), next(iter(linears))
    whole = copied(partial(_whole, list(linears.values())))
    sizes = {name: linear.out_features for name, linear in linears.items()}
    others = {name: OtherProjection(linear, name=name, kept=kept) for name, linear in linears.items() if name != first}
    return {first: FirstProjection(linears[first], whole, sizes, kept), **others}


def _whole(linears: Sequence[nn.Linear]) -> nn.Linear:
    """Return one layer that computes all of them, on the same memory."""
    weight = _joined([linear.get_parameter("weight") for linear in linears])
    whole = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    whole.weight = nn.Parameter(weight, requires_grad=False)
    if all("bias" in dict(linear.named_parameters()) for linear in linears):
        whole.bias = nn.Parameter(_joined([linear.get_parameter("bias") for linear in linears]), requires_grad=False)
    return whole


def _joined(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return one tensor of which the parameters are consecutive rows, moving them unless they already are."""
    with torch.inference_mode(False), torch.no_grad():
        first, rows = parameters[0].data, [parameter.shape[0] for parameter in parameters]
        if _are_consecutive(parameters):
            return first.as_strided((sum(rows), *first.shape[1:]), first.stride(), first.storage_offset())
        buffer = torch.cat([parameter.data for parameter in parameters])
        for parameter, own in zip(parameters, buffer.split(rows), strict=True):
            parameter.data = own
        return buffer


def _are_consecutive(parameters: Sequence[nn.Parameter]) -> bool:
    """Return True if each parameter begins where the one before ends."""
    storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    ends = [parameter.storage_offset() + parameter.numel() for parameter in parameters]
    starts = [parameter.storage_offset() for parameter in parameters]
    return len(storages) == 1 and starts[1:] == ends[:-1]


class QuantisedLayers:
    """The quantised layers of one target; each is dropped with the last view that runs it.

    `router_sizes` are numbers of outputs by which routers are told from other layers: they choose experts, and are small. `copied`
    packs a layer; see `ModelWeights.copied`.
    """

    def __init__(
        self, router_sizes: frozenset[int] = frozenset(), copied: Callable[[Make], nn.Module] = operator.call
    ) -> None:
        self._router_sizes = router_sizes
        self._copied = copied
        # Weak: they are further copies of weights, and are not to outlive the drafts that need them.
        self._packed = WeakValueDictionary[tuple[Hashable, int], nn.Module]()

    def within(self, module: nn.Module, bits: int) -> nn.Module:
        """Return a copy of `module` whose plain linear layers have weights of `bits`, or `module` if it has none."""
        return with_replaced(module, partial(self._quantised, bits=bits))

    def layer(self, linear: Make, bits: int, name: Hashable) -> nn.Module:
        """Return the layer that `linear` returns with weights of `bits`: the same module for a `name` while anything runs it."""
        packed = self._packed.get((name, bits))
        if packed is None:
            packed = self._copied(lambda: quantised_linear(cast(nn.Linear, linear()), bits))
            self._packed[name, bits] = packed
        return packed

    def finds_any(self, blocks: nn.Module) -> bool:
        """Return True if there is a layer to quantise in `blocks`, on a device that runs it."""
        return any(self._is_quantised(module) and module.weight.device.type == "cpu" for module in blocks.modules())

    def check(self, blocks: nn.Module) -> None:
        """Raise `UnsupportedModelError` unless there is a layer to quantise in `blocks`, on a device that runs it."""
        for device in {weight.device for weight in blocks.parameters() if not weight.is_meta}:
            check_quantised(device)
        if not self.finds_any(blocks):
            raise UnsupportedModelError(
                "its blocks have no plain linear layer in float32, bfloat16 or float16: nothing to quantise for a draft"
            )

    def _quantised(self, module: nn.Module, *, bits: int) -> nn.Module:
        return self.layer(lambda: module, bits, module) if self._is_quantised(module) else module

    def _is_quantised(self, module: nn.Module) -> bool:
        return is_plain_linear(module) and module.out_features not in self._router_sizes


def is_plain_linear(module: nn.Module) -> bool:
    """Return True for an `nn.Linear` that multiplies by its own weights in memory, and does nothing else."""
    if type(module) is not nn.Linear or _is_hooked(module):
        return False
    weight = module.weight  # of another class in a quantised checkpoint
    return type(weight) is nn.Parameter and not weight.is_meta and weight.dtype in PRECISIONS
