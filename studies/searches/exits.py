"""The exits that a study may be told to consider, as its settings name them."""

from __future__ import annotations

from collections.abc import Iterable

from decoding.target import Target

MOST_EXITS = 12


def default_exit_layers(num_layers: int) -> tuple[int, ...]:
    """Exits worth a head in a model of `num_layers`: behind 1 to half of them, `MOST_EXITS` evenly spread if there are more."""
    deepest = num_layers // 2
    if deepest <= MOST_EXITS:
        return tuple(range(1, deepest + 1))
    return tuple(1 + round(place * (deepest - 1) / (MOST_EXITS - 1)) for place in range(MOST_EXITS))


def check_exits(exit_layers: Iterable[int] | None, target: Target) -> None:
    """Raise ValueError for an exit that the model does not have; None names none."""
    for exit_layer in exit_layers or ():
        target.check_exit_layer(exit_layer)


def exits_with_head(exit_layers: Iterable[int] | None, num_layers: int) -> tuple[int, ...]:
    """The exits to have a distilled head for: those named, or the usual ones of a model of so many layers."""
    return tuple(exit_layers or default_exit_layers(num_layers))
