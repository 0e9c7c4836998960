"""Ship or not, from the figures in a profile alone. Imports neither torch nor a model: `sdtune show` answers at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

from decoding.profile import DraftProfile, Interval


class Shipping(StrEnum):
    """What to do with a profile, as users read it."""

    SHIP = "Ship"
    MEASURE_AGAIN = "Ship, but measure again: the machine was busy"
    DO_NOT_SHIP = "Do not ship"


def decide(*, claimed: bool, over_stock: Mapping[str, Interval], noise: Sequence[str]) -> Shipping:
    """Return what measured figures support.

    A profile ships if a speed-up is claimed for it, and no stock way of generating is faster with 95 % confidence. `over_stock` is
    the profile's speed over each of these; `noise` are the signs of a busy machine.
    """
    if not claimed or faster_stock(over_stock) is not None:
        return Shipping.DO_NOT_SHIP
    return Shipping.MEASURE_AGAIN if noise else Shipping.SHIP


def shipping(profile: DraftProfile) -> Shipping:
    """Return what the figures of a profile support."""
    measured = profile.measured
    if measured is None:
        return Shipping.DO_NOT_SHIP
    over_stock = {name: each.profile_over_it for name, each in measured.stock.items()}
    return decide(claimed=profile.draft.drafts, over_stock=over_stock, noise=measured.noise)


def faster_stock(over_stock: Mapping[str, Interval]) -> tuple[str, Interval] | None:
    """Return the stock contender that the profile is surely slower than, and the ratio; None if there is none."""
    slower = [(name, ratio) for name, ratio in over_stock.items() if ratio.ci95[1] < 1.0]
    return min(slower, key=lambda pair: pair[1].value, default=None)
