"""`sdtune evaluate planted-model`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from tuner.evaluation.contract import EVALUATION, Evaluation, Report
from tuner.fields import OUTPUTS, Seed

if TYPE_CHECKING:
    from tuner.progress import Progress

ModelFolder = Annotated[
    Path, Field(description="Folder of the model to create.", json_schema_extra={**OUTPUTS, "metavar": "DIR"})
]


class PlantedModel(Evaluation):
    """Write a random model with planted redundancy, and planted.json, which lists the redundant sublayers."""

    num_layers: int = Field(12, ge=1, description="Blocks of the model.", json_schema_extra=EVALUATION)
    share: float = Field(0.45, ge=0, le=1, description="Share of redundant sublayers.", json_schema_extra=EVALUATION)
    seed: Seed = 0
    out: ModelFolder

    def run(self, progress: Progress) -> Report:
        """Plant the redundancy and write the model."""
        from tuner.evaluation.planted.model import write_planted

        problem = write_planted(self.out, self.num_layers, share=self.share, seed=self.seed)
        return Report(f"redundant: {problem.redundant.describe()}\ngrey: {problem.sets.grey.describe()}")
