"""Runners, one file each: how a forward pass is executed. All extend `decoding.runners.eager`.

A runner is added by its file and one line of `RUNNERS`. Imports `decoding.cache` and nothing else of `decoding`.
Names are known without importing torch: a class is imported when it is first asked for.
"""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, Any

from decoding.documents.strict_yaml import suggest
from decoding.errors import UnsupportedRunnerError

if TYPE_CHECKING:
    import torch

    from decoding.runners.eager import EagerRunner
    from decoding.runners.masks import MaskKinds

RUNNERS: dict[str, str] = {
    "eager": "decoding.runners.eager:EagerRunner",
    "static": "decoding.runners.static:StaticRunner",
}
"""Classes by name, as `module:class`."""

AUTO = "auto"
"""Asks for the runner that is fastest on the device; never recorded."""

PLAIN_RUNNER = "eager"
"""Name of the runner that runs any model, and that a profile names by default."""


def check_runner_name(name: str) -> str:
    """Return `name` if a runner has it; raise ValueError with the valid names if none has."""
    if name not in RUNNERS:
        raise ValueError(f"unknown runner {name!r}; {suggest(name, RUNNERS)}")
    return name


def has_bit_exact_mode(name: str) -> bool:
    """Return whether the runner of this name can run every pass of the whole model at one width."""
    return _class_of(name).has_bit_exact_mode


def bit_exact_runners() -> tuple[str, ...]:
    """Return the names of the runners with a bit-exact mode."""
    return tuple(filter(has_bit_exact_mode, RUNNERS))


def build_runner(name: str, mask_kinds: MaskKinds, device: torch.device, exact_width: int | None = None) -> EagerRunner:
    """Return the runner of this name for one model on `device`, in bit-exact mode if `exact_width` is given.

    Raises `UnsupportedRunnerError` for an unknown name, or a runner without a bit-exact mode.
    """
    if name not in RUNNERS:
        raise UnsupportedRunnerError(f"unknown runner {name!r}; {suggest(name, RUNNERS)}")
    found: Any = _class_of(name)
    if exact_width is None:
        return found(mask_kinds, device)
    if not has_bit_exact_mode(name):
        raise UnsupportedRunnerError(
            f"the runner {name!r} has no bit-exact mode: {', '.join(map(repr, bit_exact_runners()))} has"
        )
    return found(mask_kinds, device, exact_width=exact_width)


def _class_of(name: str) -> type[EagerRunner]:
    found: type[EagerRunner] = pkgutil.resolve_name(RUNNERS[name])
    return found
