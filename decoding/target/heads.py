"""Exit heads in memory: a block of the model's own class before the target's own final norm and LM head."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from decoding.target.target import Target


@dataclass(frozen=True, eq=False)
class ExitHead:
    """A head between the states at an exit and the target's own final norm and LM head."""

    block: nn.Module
    """Block of the model's own class, with keys and values of its own."""


def new_exit_head(target: Target) -> ExitHead:
    """Return a copy of the last block, in its precision, as a new exit head."""
    return ExitHead(copy.deepcopy(target.blocks[-1]).requires_grad_(True).eval())
