"""How a forward pass is executed, one file each: as it is, or in fixed shapes that are compiled and recorded."""

from __future__ import annotations

from collections.abc import Callable

import torch

from decoding.errors import UnsupportedRunnerError
from decoding.runners.contract import Inputs, Outputs, Part, Runner
from decoding.runners.eager import EagerRunner
from decoding.runners.masks import MaskKinds
from decoding.runners.static import StaticRunner

__all__ = ["RUNNERS", "EagerRunner", "Inputs", "MaskKinds", "Outputs", "Part", "Runner", "StaticRunner", "build_runner"]

RunnerFactory = Callable[[MaskKinds, torch.device], Runner]
"""Makes the runner of a model whose layers look at what the first argument says."""

RUNNERS: dict[str, RunnerFactory] = {"eager": lambda mask_kinds, device: EagerRunner(), "static": StaticRunner}


def build_runner(name: str, mask_kinds: MaskKinds, device: torch.device) -> Runner:
    """The runner of this name. `UnsupportedRunnerError` lists those that there are."""
    if name not in RUNNERS:
        raise UnsupportedRunnerError(f"no runner {name!r}: there are {', '.join(sorted(RUNNERS))}")
    return RUNNERS[name](mask_kinds, device)
