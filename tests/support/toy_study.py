"""A study in one file: skips one block after another, from the last but one down."""

from __future__ import annotations

from typing import Any

import optuna
from pydantic import Field

from decoding.draft_length import Fixed
from decoding.drafts import LayerSkip
from decoding.target import Target
from studies.contract import Candidate, Study, StudySettings


class OneBlockSettings(StudySettings):
    """Settings of the toy study."""

    lowest: int = Field(1, ge=0, description="lowest block to skip")
    max_tokens: int = Field(3, ge=1, le=64, description="draft length (K)")

    def check(self, target: Target) -> None:
        """Raise ValueError if the model has no block from `lowest` on, besides its last."""
        if self.lowest > target.num_layers - 2:
            raise ValueError(f"lowest: block {self.lowest} of {target.num_layers} layers is the last, or none")


class OneBlock(Study):
    """Every block once, as Optuna's sampler draws them."""

    name = "one_block"
    Settings = OneBlockSettings

    def propose(self, trial: optuna.Trial) -> tuple[Candidate, dict[str, Any]]:
        """Return a draft without one block."""
        block = trial.suggest_int("block", self.settings.lowest, self.problem.target.num_layers - 2)
        rule = Fixed(max_tokens=self.settings.max_tokens)
        return Candidate(draft=LayerSkip.blocks([block]), draft_length=rule), {"block": block}
