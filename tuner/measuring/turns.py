"""The order of paired measurements: all contestants on the same prompts in turn, so that noise meets them alike."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from decoding.garbage_collection import without_garbage_collection

WARM_UP_TOKENS = 8
"""Tokens that a contestant decodes before it is timed, so that one-off work (compiling, measuring) is done."""

Contestant = TypeVar("Contestant", bound=Hashable)
Unit = TypeVar("Unit")
Result = TypeVar("Result")


def take_turns(
    contestants: Sequence[Contestant],
    units: Iterable[Unit],
    run: Callable[[Contestant, Unit], Result],
    on_turn: Callable[[Unit, Mapping[Contestant, Result]], None],
) -> None:
    """Run every contestant on every unit of work, in an order that rotates by one from unit to unit.

    All run on a unit before the next one begins: their differences are differences on the same prompts at nearly the same time, and
    no contestant always goes first. `on_turn` receives a unit and its results by contestant, and may raise to stop. Python's
    garbage collector does not run meanwhile.
    """
    with without_garbage_collection():
        for turn, unit in enumerate(units):
            first = turn % len(contestants)
            on_turn(unit, {each: run(each, unit) for each in (*contestants[first:], *contestants[:first])})
