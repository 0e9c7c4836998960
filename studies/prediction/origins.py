"""Origins of drafts: the method that proposed a draft, so that a report can say where the winner came from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from decoding.drafts import Draft
from decoding.drafts.contract import label_quantised


@dataclass(frozen=True)
class Origin:
    """A method that proposes skip sets, and the setting that led to the set."""

    method: str
    detail: str = ""

    def describe(self) -> str:
        """Return a short phrase, such as `conf_layers (sublayer_entropy, lambda -0.1)`."""
        return f"{self.method} ({self.detail})" if self.detail else self.method

    def moved(self) -> Origin:
        """Return the origin of a set that a climb from this one has reached."""
        return self if self.method == MOVES else Origin(MOVES, f"from {self.describe()}")


MOVES = "moves"
EXIT, SINGLE, ORDER_OF_HARM = Origin("exit"), Origin("single sublayer"), Origin("order of harm")
KNAPSACK, SPACED_SETS = Origin("knapsack"), Origin("spaced")
COSINE, GROWING = Origin("cosine"), Origin("growing")


def describe_all(origins: Iterable[Origin]) -> str:
    """Return the first origin, and the other methods that proposed the same set."""
    first, *others = origins
    methods = [method for method in dict.fromkeys(each.method for each in others) if method != first.method]
    return f"{first.describe()}; also {', '.join(methods)}" if methods else first.describe()


def method_of(origin: str) -> str:
    """Return the method of an origin as `describe_all` and `origin_of` write it, without settings and other methods."""
    return origin.split(" (")[0].split("; ")[0]


def origin_of(draft: Draft, proposed: str | None) -> str:
    """Return the origin of a draft in a pool: `proposed` for a skip set that was searched for, else the draft's kind.

    A quantised draft is called so: `quantised growing`, `quantised exit`.
    """
    known = label_quantised(draft.parts.bits, proposed) if proposed else draft.label
    return f"lookup before {known}" if draft.parts.lookup is not None else known
