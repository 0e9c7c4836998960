"""All kinds of drafts under one budget (our formulation): skip sets, exits with and without a head, and prompt lookup.

Each kind is rated by prediction, the best of each go into one pool, and a guided search measures the most promising of any
kind. Exits and lookups are predicted within seconds, from one pass over the sequences, and are where a search begins; skip
sets join as they are found. Kinds have no shares of the budget: a kind that is predicted to lose, and does so when first
measured, is not measured again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from decoding.drafts import Draft, EarlyExit, Layers
from decoding.target import Target
from studies.contract import Problem, StudySetup
from studies.prediction.pools import best_of, lookups, lookups_before
from studies.prediction.predictor import Predictor
from studies.searches.exits import check_exits, exits_with_head
from studies.searches.predicted import PoolSource, Predicted, PredictedSettings

Kind = Literal["skip_set", "exit_head", "lookup"]


class JointSettings(PredictedSettings):
    """Settings of the joint search."""

    kinds: tuple[Kind, ...] = Field(
        ("skip_set", "exit_head", "lookup"),
        min_length=1,
        description="drafts to consider: skip sets (exits without a head included), exits with a head, prompt lookup alone "
        "and before the others",
    )
    exit_layers: Layers | None = Field(
        None, min_length=1, description="exits to consider with a head; default: up to 12 of the model's"
    )
    num_exits: int = Field(3, ge=1, description="exits in the pool with a head, and the same number without")
    num_lookups: int = Field(
        3, ge=1, description="lookups in the pool alone, and the same number before the best exits"
    )

    def check(self, target: Target) -> None:
        """Raise ValueError for an exit that the model does not have."""
        check_exits(self.exit_layers, target)

    def wanted_heads(self, num_layers: int) -> tuple[int, ...]:
        """Return the exit layers that need a distilled head."""
        return exits_with_head(self.exit_layers, num_layers) if "exit_head" in self.kinds else ()


class JointSource(PoolSource):
    """Exits and lookups of the kinds that are asked for."""

    def __init__(self, problem: Problem, settings: JointSettings) -> None:
        super().__init__(problem, settings)
        self.rates_skip_sets = "skip_set" in settings.kinds

    def exit_layers(self) -> Collection[int]:
        """Return the layers of all exits to consider."""
        return {draft.exit_layer for group in self._exits() for draft in group}

    def first(self, predictor: Predictor) -> list[Draft]:
        """Return the best exits of each group and the best lookups, alone and before the best exits."""
        best = [each for group in self._exits() for each in predictor.best_first(group)[: self.settings.num_exits]]
        pool = best_of(best, len(best))
        if "lookup" in self.settings.kinds:
            count = self.settings.num_lookups
            pool += [*lookups(predictor, count), *lookups_before(predictor, pool, count)]
        return pool

    def joining(self, draft: Draft, predictor: Predictor) -> list[Draft]:
        """Return a skip set, and the same set after its best lookup if lookups are asked for."""
        if "lookup" not in self.settings.kinds:
            return [draft]
        return [draft, *lookups_before(predictor, [draft], 1)]

    def _exits(self) -> list[list[EarlyExit]]:
        """Return the exits to consider: without a head, then with one."""
        groups: list[list[EarlyExit]] = []
        num_layers = self.problem.target.num_layers
        if "skip_set" in self.settings.kinds:
            groups.append([EarlyExit(exit_layer=layer) for layer in range(1, num_layers)])
        if "exit_head" in self.settings.kinds:
            wanted = self.settings.wanted_heads(num_layers)
            groups.append([draft for layer, draft in self.problem.head_drafts.items() if layer in wanted])
        return groups


class Joint(Predicted):
    """A pool of every kind of draft, and a guided search over it."""

    name = "joint"
    Settings = JointSettings
    Source = JointSource

    def setup(self) -> StudySetup:
        """Return the setup; the space holds the exit heads that exist now."""
        setup = super().setup()
        heads: Any = {draft.head: draft.head_sha256 for draft in self.problem.head_drafts.values()}
        return replace(setup, space={**setup.space, "head_files": heads})
