"""All there is to choose, under one budget (our formulation): skip sets, exits with a head or without, prompt lookup, and both.

Each kind is rated by prediction, the best of each go into one pool, and a guided search measures what promises most, whatever
its kind. Exits and lookups are foretold within seconds, from one pass over the texts, and are what a search begins with; skip sets
join as they are found. Kinds are not given shares of the budget: one that is foretold to lose, and does so when first measured,
is left alone.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar, Literal

from pydantic import Field

from decoding.documents.strict_yaml import Document
from decoding.drafts import EarlyExit, Layers
from decoding.target import Target
from studies.prediction.pools import best_of, lookups, lookups_before
from studies.prediction.predictor import Drafting
from studies.searches.exits import check_exits, exits_with_head
from studies.searches.predicted import Predicted, PredictedSettings

Kind = Literal["skip_set", "exit_head", "lookup"]


class JointSettings(PredictedSettings):
    """The settings of the joint search."""

    kinds: tuple[Kind, ...] = Field(
        ("skip_set", "exit_head", "lookup"),
        min_length=1,
        description="drafts to consider: skip sets (exits without a head among them), exits with a head, prompt lookup alone "
        "and in front of the others",
    )
    exit_layers: Layers | None = Field(
        None, min_length=1, description="exits to consider with a head; default: up to 12 of the model's"
    )
    num_exits: int = Field(3, ge=1, description="exits in the pool, as many with a head as without")
    num_lookups: int = Field(3, ge=1, description="lookups in the pool, alone and in front of the best exits")


class Joint(Predicted):
    """A pool of every kind of draft, and a guided search over it."""

    name: ClassVar[str] = "joint"
    Settings: ClassVar[type[Document]] = JointSettings

    @classmethod
    def check(cls, settings: Any, target: Target) -> None:
        """Raise ValueError for an exit that the model does not have."""
        check_exits(settings.exit_layers, target)

    @classmethod
    def wanted_heads(cls, settings: Any, num_layers: int) -> tuple[int, ...]:
        """The exits to have a distilled head for."""
        return () if "exit_head" not in settings.kinds else exits_with_head(settings.exit_layers, num_layers)

    def space(self) -> dict[str, Any]:
        """The settings and the heads that are there now; another limit or patience is the same search, going on longer."""
        heads = self._problem.head_drafts.values()
        return {**super().space(), "head_files": {draft.head: draft.head_sha256 for draft in heads}}

    @property
    def _rates_skip_sets(self) -> bool:
        return "skip_set" in self._settings.kinds

    def _exits_rated(self) -> Collection[int]:
        return {exit_layer for group in self._exits() for exit_layer in (draft.exit_layer for draft in group)}

    def _exits(self) -> list[list[EarlyExit]]:
        """The exits to consider without a head, and those with one."""
        groups: list[list[EarlyExit]] = []
        num_layers = self._problem.target.num_layers
        if "skip_set" in self._settings.kinds:
            groups.append([EarlyExit(exit_layer=layer) for layer in range(1, num_layers)])
        if "exit_head" in self._settings.kinds:
            wanted = self.wanted_heads(self._settings, num_layers)
            groups.append([draft for layer, draft in self._problem.head_drafts.items() if layer in wanted])
        return groups

    def _first_drafts(self) -> list[Drafting]:
        """The best of each kind that a pass over the texts foretells at once; lookups are put in front of the best others."""
        settings, predictor = self._settings, self._predictor
        best = [each for group in self._exits() for each in predictor.best_first(group)[: settings.num_exits]]
        pool = best_of(best, len(best))
        if "lookup" in settings.kinds:
            pool += [*lookups(predictor, settings.num_lookups), *lookups_before(predictor, pool, settings.num_lookups)]
        return pool

    def _with_company(self, draft: Drafting) -> list[Drafting]:
        """A skip set comes with the best lookup in front of it, if the pool has lookups at all."""
        if "lookup" not in self._settings.kinds:
            return [draft]
        return [draft, *lookups_before(self._predictor, [draft], 1)]
