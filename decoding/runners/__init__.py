"""How a forward pass is executed, one file each: as it is, or in fixed shapes that are compiled and recorded."""

from __future__ import annotations

from collections.abc import Callable

import torch

from decoding.errors import UnsupportedRunnerError
from decoding.runners.contract import Inputs, Outputs, Part, PassRequest, Runner, Written
from decoding.runners.eager import EagerRunner
from decoding.runners.masks import MaskKinds
from decoding.runners.static import StaticRunner

__all__ = [
    "RUNNERS",
    "EagerRunner",
    "Inputs",
    "MaskKinds",
    "Outputs",
    "Part",
    "PassRequest",
    "Runner",
    "StaticRunner",
    "Written",
    "build_runner",
]

RunnerFactory = Callable[[MaskKinds, torch.device], Runner]
"""Makes the runner of a model whose layers look at what the first argument says."""

RUNNERS: dict[str, RunnerFactory] = {
    "eager": lambda mask_kinds, device: EagerRunner(mask_kinds),
    "static": StaticRunner,
}


def build_runner(name: str, mask_kinds: MaskKinds, device: torch.device, exact_width: int | None = None) -> Runner:
    """The runner of this name, in bit-exact mode if `exact_width` is given.

    `UnsupportedRunnerError` lists those that there are, or says that one of them has no such mode.
    """
    if name not in RUNNERS:
        raise UnsupportedRunnerError(f"no runner {name!r}: there are {', '.join(sorted(RUNNERS))}")
    if exact_width is None:
        return RUNNERS[name](mask_kinds, device)
    if name != StaticRunner.name:
        raise UnsupportedRunnerError(f"the runner {name!r} has no bit-exact mode: {StaticRunner.name!r} has")
    return StaticRunner(mask_kinds, device, exact_width=exact_width)
