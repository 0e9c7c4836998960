"""All there is to choose, under one budget (our formulation): skip sets, exits with a head or without, prompt lookup, and both.

Each kind is rated by prediction, the best of each go into one pool, and a guided search measures what promises most, whatever
its kind. Kinds are not given shares of the budget: one that is foretold to lose, and does so when first measured, is left alone.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from decoding.distillation.settings import default_exit_layers
from decoding.documents import Document
from decoding.profile import Layers
from decoding.target import Target
from studies.contract import Problem
from studies.pools import best_of, lookups
from studies.predicted import Predicted, PredictedSettings, skip_sets
from studies.prediction import Drafting, Predictor

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
    num_heads: int = Field(3, ge=1, description="exits with a head in the pool")
    num_lookups: int = Field(3, ge=1, description="lookups in the pool, alone and in front of a draft")


class Joint(Predicted):
    """A pool of every kind of draft, and a guided search over it."""

    name: ClassVar[str] = "joint"
    Settings: ClassVar[type[Document]] = JointSettings

    @classmethod
    def check(cls, settings: Any, target: Target) -> None:
        """Raise ValueError for an exit that the model does not have."""
        for exit_layer in settings.exit_layers or ():
            target.check_exit_layer(exit_layer)

    @classmethod
    def wanted_heads(cls, settings: Any, num_layers: int) -> tuple[int, ...]:
        """The exits to have a distilled head for."""
        if "exit_head" not in settings.kinds:
            return ()
        return tuple(settings.exit_layers or default_exit_layers(num_layers))

    def space(self) -> dict[str, Any]:
        """The settings and the heads that are there now; another limit or patience is the same search, going on longer."""
        heads = self._problem.head_drafts.values()
        return {**super().space(), "head_files": {draft.head: draft.head_sha256 for draft in heads}}

    @classmethod
    def _find_pool(cls, problem: Problem, settings: Any, predictor: Predictor) -> list[Drafting]:
        """The best of each kind; lookups are put in front of the best of the others."""
        num_layers = problem.target.num_layers
        pool: list[Drafting] = []
        if "skip_set" in settings.kinds:
            pool += skip_sets(problem, settings, predictor)
        if "exit_head" in settings.kinds:
            wanted = cls.wanted_heads(settings, num_layers)
            heads = [draft for layer, draft in problem.head_drafts.items() if layer in wanted]
            pool += best_of(predictor.best_first(heads), settings.num_heads)
        pool = best_of(predictor.best_first(pool), len(pool))
        if "lookup" in settings.kinds:
            pool += lookups(predictor, pool, settings.num_lookups)
        return pool
