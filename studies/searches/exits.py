"""Exit layers in the settings of a study: defaults and checks."""

from __future__ import annotations

from collections.abc import Iterable

from decoding.target import Target

MOST_EXITS = 12


def default_exit_layers(num_layers: int) -> tuple[int, ...]:
    """Return the exits worth a head: the first half of `num_layers`, at most `MOST_EXITS` of them, evenly spread."""
    deepest = num_layers // 2
    if deepest <= MOST_EXITS:
        return tuple(range(1, deepest + 1))
    return tuple(1 + round(index * (deepest - 1) / (MOST_EXITS - 1)) for index in range(MOST_EXITS))


def check_exits(exit_layers: Iterable[int] | None, target: Target) -> None:
    """Raise ValueError for an exit that the model does not have. None is the default, which fits every model."""
    for exit_layer in exit_layers or ():
        target.check_exit_layer(exit_layer)


def exits_with_head(exit_layers: Iterable[int] | None, num_layers: int) -> tuple[int, ...]:
    """Return the exits that need a distilled head: `exit_layers`, or the defaults of a model of `num_layers`."""
    return tuple(exit_layers or default_exit_layers(num_layers))
