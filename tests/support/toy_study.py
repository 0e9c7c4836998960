"""A study in one file: skips one block after another, from the last but one down."""

from __future__ import annotations

from typing import Any

import optuna
from optuna.trial import FrozenTrial
from pydantic import Field

from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip
from decoding.target import Target
from studies.contract import Candidate, Problem, StudySettings
from studies.samplers.contract import StudySampler
from studies.space import Parameters, SkipSpace, Space


class OneBlockSettings(StudySettings):
    """Settings of the toy study."""

    lowest: int = Field(1, ge=0, description="lowest block to skip")
    max_tokens: int = Field(3, ge=1, le=64, description="draft length (K)")

    def check(self, target: Target) -> None:
        """Raise ValueError if the model has no block from `lowest` on, besides its last."""
        if self.lowest > target.num_layers - 2:
            raise ValueError(f"lowest: block {self.lowest} of {target.num_layers} layers is the last, or none")


class OneBlock(StudySampler):
    """One block after another, from the last but one down to `lowest`, and again."""

    name = "one_block"
    Settings = OneBlockSettings
    space: Space

    def __init__(self, problem: Problem, settings: OneBlockSettings) -> None:
        super().__init__(problem, settings)
        blocks = SkipSpace.of(problem.target, whole_blocks=True)
        self.space = Space(problem.target, rules=("fixed",), max_tokens=settings.max_tokens, skips=blocks)

    def choose(self, study: optuna.Study, trial: FrozenTrial) -> Parameters:
        """Return a draft without one block."""
        last = self.problem.target.num_layers - 2
        draft = LayerSkip.blocks([last - trial.number % (last - self.settings.lowest + 1)])
        rule = Fixed(max_tokens=self.settings.max_tokens)
        return self.space.parameters(Candidate(draft=draft, draft_length=rule))

    def notes(self, candidate: Candidate) -> dict[str, Any]:
        """Return the block."""
        return {"block": candidate.draft.skipped(self.problem.target.num_layers).first_skipped}
