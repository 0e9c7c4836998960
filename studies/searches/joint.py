"""All kinds of drafts under one budget (our formulation): skip sets, exits, trained heads, quantised drafts, lookup.

Each kind is rated by prediction, the best of each go into one pool, and a guided search measures the most promising of any
kind. Exits and lookups are predicted within seconds, from one pass over the sequences, and are where a search begins; skip
sets join as they are found. Kinds have no shares of the budget: a kind that is predicted to lose, and does so when first
measured, is not measured again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field

from decoding.drafts import BitWidth, Draft, EarlyExit, Layers, LayerSkip
from decoding.kernels.choice import check_quantised, kernel_for
from decoding.target import Target
from studies.contract import Problem, StudySetup
from studies.costs.table import CostTable
from studies.prediction.pools import best_of, lookups, lookups_before, quantised, useful_precisions, with_trees
from studies.prediction.predictor import Predictor
from studies.searches.exits import check_exits, exits_with_head
from studies.searches.predicted import PoolSource, Predicted, PredictedSettings

DEFAULT_BITS: tuple[BitWidth, ...] = (8,)
"""Precisions where quantised layers are fast. The whole model agrees with the target on 0.99 of the demo's positions in int8 and on
0.92 in int4; on SmolLM2-135M on 0.99 and 0.89. Each precision is another copy of the weights and more passes to time."""

NUM_QUANTISED = 2
"""Number of exits that are tried quantised, too: each takes a pass over the sequences of its own."""

NUM_TREES = 2
"""Number of drafts that trees are tried for at the beginning: each takes a recording of its own."""

Kind = Literal["skip_set", "exit_head", "feature_head", "lookup"]


def bits_on(device: torch.device, asked: tuple[BitWidth, ...] | None) -> tuple[BitWidth, ...]:
    """Return the precisions to consider on `device`: those `asked` for, or if that is None, those that may pay there.

    Raises `UnsupportedModelError` if some are asked for where none can run.
    """
    if asked is None:
        return DEFAULT_BITS if kernel_for("int8", device).kernel is not None else ()
    if asked:
        check_quantised(device)
    return asked


class JointSettings(PredictedSettings):
    """Settings of the joint search."""

    kinds: tuple[Kind, ...] = Field(
        ("skip_set", "exit_head", "feature_head", "lookup"),
        min_length=1,
        description="drafts to consider: skip sets (exits without a head included), exits with a head, the feature head if "
        "`sdtune distill --head feature` has trained one, prompt lookup alone and before the others",
    )
    exit_layers: Layers | None = Field(
        None, min_length=1, description="exits to consider with a head; default: up to 12 of the model's"
    )
    num_exits: int = Field(3, ge=1, description="exits in the pool with a head, and the same number without")
    num_lookups: int = Field(
        3, ge=1, description="lookups in the pool alone, and the same number before the best exits"
    )
    trees: bool | None = Field(
        None,
        description="side leaves beside the best drafts that run the model, where they are predicted to pay; default: yes on a "
        "CPU, no on a GPU, where none was measured",
    )
    bits: tuple[BitWidth, ...] | None = Field(
        None,
        description="precisions of quantised drafts: the whole model, and the best exits and skip sets; default: 8 on a CPU with "
        "AVX-512 VNNI, none elsewhere",
    )

    def check(self, target: Target) -> None:
        """Raise ValueError for an exit that the model does not have."""
        check_exits(self.exit_layers, target)

    def for_engine(self, rules: Sequence[str], *, quantises: bool) -> dict[str, Any]:
        """Return the settings of chains that run whole blocks, in the precisions that the engine can make."""
        changed = {**super().for_engine(rules, quantises=quantises), "trees": False}
        return changed if quantises else {**changed, "bits": ()}

    def wanted_heads(self, num_layers: int) -> tuple[int, ...]:
        """Return the exit layers that need a distilled head."""
        return exits_with_head(self.exit_layers, num_layers) if "exit_head" in self.kinds else ()

    @property
    def wants_feature_head(self) -> bool:
        """True if feature heads are among the kinds."""
        return "feature_head" in self.kinds

    def wanted_bits(self, device: torch.device) -> tuple[BitWidth, ...]:
        """Return the precisions of the quantised drafts to consider."""
        if not {"skip_set", "exit_head"} & set(self.kinds):
            return ()
        return bits_on(device, self.bits)


class JointSource(PoolSource):
    """Exits, quantised drafts and lookups of the kinds that are asked for."""

    def __init__(self, problem: Problem, settings: JointSettings, costs: CostTable) -> None:
        super().__init__(problem, settings, costs)
        self.rates_skip_sets = "skip_set" in settings.kinds

    def exits(self) -> Collection[Draft]:
        """Return all exits to consider."""
        return [draft for group in self._exits() for draft in group]

    def first(self, predictor: Predictor) -> list[Draft]:
        """Return the best exits of each group, quantised drafts, the feature head, and the best lookups, alone and before these."""
        best = [each for group in self._exits() for each in predictor.best_first(group)[: self.settings.num_exits]]
        has_time = self.has_time()
        best += predictor.best_first(self._quantised(best_of(best, NUM_QUANTISED) if has_time else [], predictor))
        best += predictor.best_first(self._feature_heads())
        pool = best_of(best, len(best))
        has_time = self.has_time()
        trees = self._with_trees(pool[:NUM_TREES], predictor) if has_time else []
        if not has_time:
            self.remarks.append(
                "the time for surveys was spent before quantised exits and side leaves: a longer time tries them"
            )
        pool = best_of(map(predictor.best, [*pool, *trees]), len(pool) + len(trees))
        if "lookup" in self.settings.kinds:
            count = self.settings.num_lookups
            pool += [*lookups(predictor, count), *lookups_before(predictor, pool, count)]
        return pool

    def joining(self, draft: Draft, predictor: Predictor) -> list[Draft]:
        """Return a skip set in its precision, with leaves, and each after its best lookup if lookups are asked for."""
        drafts = [draft, *self._with_trees([draft], predictor)]
        if "lookup" not in self.settings.kinds:
            return drafts
        return [*drafts, *(each for one in drafts for each in lookups_before(predictor, [one], 1))]

    def _with_trees(self, drafts: Sequence[Draft], predictor: Predictor) -> list[Draft]:
        """Return the drafts whose side leaves are predicted to pay, with these."""
        wanted = self.settings.trees
        if wanted is None:
            wanted = self.problem.target.device.type == "cpu"
        return with_trees(predictor, drafts) if wanted and self.problem.target.checks.takes_trees else []

    def _quantised(self, exits: Sequence[Draft], predictor: Predictor) -> list[Draft]:
        """Return the whole model in the precisions that are useful on this text, and `exits` in these."""
        precisions = self.precisions(predictor)
        whole: Sequence[Draft] = [LayerSkip()] if self.rates_skip_sets else []
        return quantised([*whole, *exits], precisions)

    def precisions(self, predictor: Predictor) -> list[BitWidth]:
        """Return the precisions that are useful on this text; a model that cannot be quantised has no costs of any."""
        wanted = self.settings.wanted_bits(self.problem.target.device)
        return useful_precisions(predictor, [bits for bits in wanted if bits in self.costs.bits])

    def _feature_heads(self) -> list[Draft]:
        """Return the draft of the feature head, if there is one and it is asked for."""
        draft = self.problem.feature_draft
        return [draft] if draft is not None and self.settings.wants_feature_head else []

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
        if (feature := self.problem.feature_draft) is not None:
            heads |= feature.files
        return replace(setup, space={**setup.space, "head_files": heads})
