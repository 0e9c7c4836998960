"""Runners: how a forward pass is executed, one file each.

The eager runner runs passes as they are; the static runner compiles and records passes of fixed shapes.
"""

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
"""Makes a runner for a model with these mask kinds, on this device."""

RUNNERS: dict[str, RunnerFactory] = {
    "eager": lambda mask_kinds, device: EagerRunner(mask_kinds),
    "static": StaticRunner,
}


def build_runner(name: str, mask_kinds: MaskKinds, device: torch.device, exact_width: int | None = None) -> Runner:
    """Return the runner of this name, in bit-exact mode if `exact_width` is given.

    Raises `UnsupportedRunnerError` for an unknown name, and for a runner without bit-exact mode.
    """
    if name not in RUNNERS:
        raise UnsupportedRunnerError(f"no runner {name!r}: there are {', '.join(sorted(RUNNERS))}")
    if exact_width is None:
        return RUNNERS[name](mask_kinds, device)
    if name != StaticRunner.name:
        raise UnsupportedRunnerError(f"the runner {name!r} has no bit-exact mode: {StaticRunner.name!r} has")
    return StaticRunner(mask_kinds, device, exact_width=exact_width)
