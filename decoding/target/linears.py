"""The linear layers of a target's blocks as its passes compute them: by kernels, or quantised for drafts.

A draft of `bits` runs every plain linear layer of its blocks, of its exit head and of the LM head with quantised weights,
packed once per model. Everything else runs as it is: embedding, norms, routers, experts that are not linear layers, and
layers that are quantised already or whose weights are elsewhere.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from functools import partial
from typing import TypeGuard, cast
from weakref import WeakValueDictionary

from torch import nn

from decoding.errors import UnsupportedModelError
from decoding.kernels.choice import check_quantised, fast_linear, kernel_for, quantised_linear
from decoding.kernels.compiled import PRECISIONS
from decoding.kernels.quantised import MAX_INPUTS
from decoding.target.stand_ins import with_replaced
from decoding.target.weights import Make

Pack = Callable[[nn.Linear, int], nn.Module]
"""Returns a layer with weights of that many bits."""


def with_fast_linears(module: nn.Module) -> nn.Module:
    """Return a copy of `module` with faster linear layers for few positions on a CPU, or `module` if it has none."""
    return with_replaced(module, fast_linear)


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

    def layer(self, linear: Make, bits: int, name: Hashable, pack: Pack) -> nn.Module:
        """Return what `pack` makes of the layer that `linear` returns: the same module for a `name` while anything runs it."""
        packed = self._packed.get((name, bits))
        if packed is None:
            packed = self._copied(lambda: pack(cast(nn.Linear, linear()), bits))
            self._packed[name, bits] = packed
        return packed

    def finds_any(self, blocks: nn.Module) -> bool:
        """Return True if there is a layer to quantise in `blocks`, on a device that runs it."""
        found = {module.weight.device for module in blocks.modules() if self._is_quantised(module)}
        return any(kernel_for("int8", device).kernel is not None for device in found)

    def check(self, blocks: nn.Module) -> None:
        """Raise `UnsupportedModelError` unless there is a layer to quantise in `blocks`, on a device that runs it."""
        for device in {weight.device for weight in blocks.parameters() if not weight.is_meta}:
            check_quantised(device)
        if not self.finds_any(blocks):
            raise UnsupportedModelError(
                "its blocks have no plain linear layer in float32, bfloat16 or float16: nothing to quantise for a draft"
            )

    def _quantised(self, module: nn.Module, *, bits: int) -> nn.Module:
        if not self._is_quantised(module) or module.in_features > MAX_INPUTS[bits]:
            return module
        return self.layer(lambda: module, bits, module, quantised_linear)

    def _is_quantised(self, module: nn.Module) -> TypeGuard[nn.Linear]:
        return is_plain_linear(module) and module.out_features not in self._router_sizes


def is_plain_linear(module: nn.Module) -> bool:
    """Return True for an `nn.Linear` that multiplies by its own weights in memory, and does nothing else."""
    is_hooked = (
        module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    )  # the last by accelerate
    if type(module) is not nn.Linear or is_hooked:
        return False
    weight = module.weight  # of another class in a quantised checkpoint
    return type(weight) is nn.Parameter and not weight.is_meta and weight.dtype in PRECISIONS
