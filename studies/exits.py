"""The exits that a study may be told to consider, as its settings name them."""

from __future__ import annotations

from collections.abc import Iterable

from decoding.distillation.settings import default_exit_layers
from decoding.target import Target


def check_exits(exit_layers: Iterable[int] | None, target: Target) -> None:
    """Raise ValueError for an exit that the model does not have; None names none."""
    for exit_layer in exit_layers or ():
        target.check_exit_layer(exit_layer)


def exits_with_head(exit_layers: Iterable[int] | None, num_layers: int) -> tuple[int, ...]:
    """The exits to have a distilled head for: those named, or the usual ones of a model of so many layers."""
    return tuple(exit_layers or default_exit_layers(num_layers))
