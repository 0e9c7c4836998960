"""`sdtune evaluate demo-model`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from tuner.evaluation.contract import Evaluation, Report
from tuner.evaluation.models.demo_model.recipe import CorpusName, Recipe
from tuner.fields import OUTPUTS, TRAINING, Device

if TYPE_CHECKING:
    from tuner.progress import Progress


class DemoModelTraining(Recipe, Evaluation):
    """Train the demo model on the Python standard library's sources.

    Writes the model as a stock transformers folder, its tokenizer, training.json and the training curve. The same command
    resumes a killed run.
    """

    is_resumable: ClassVar[bool] = True

    corpus: CorpusName = Field(
        "library+tests",
        description="Sources to train on: with or without the `test` package.",
        json_schema_extra=TRAINING,
    )
    init: Path | None = Field(
        None, description="Finished model to continue.", json_schema_extra={**TRAINING, "metavar": "DIR"}
    )
    init_note: str | None = Field(
        None, description="Note on the training of that model, if it has no training.json.", json_schema_extra=TRAINING
    )
    compile: bool = Field(
        False, description="Compile the blocks; needs a C++ compiler on a CPU.", json_schema_extra=TRAINING
    )
    device: Device = "auto"
    out: Path = Field(description="Folder of the model.", json_schema_extra={**OUTPUTS, "metavar": "DIR"})

    def run(self, progress: Progress) -> Report:
        """Train, or resume, and return the held-out loss."""
        from tuner.evaluation.models.demo_model.corpus import library_corpus
        from tuner.evaluation.models.demo_model.run import Start, train
        from tuner.inputs.models import resolve_device

        report = train(
            Recipe.model_validate(self.model_dump(include=set(Recipe.model_fields))),
            library_corpus(self.corpus),
            self.out,
            device=resolve_device(self.device),
            start=Start(self.init, self.init_note) if self.init else None,
            compile_layers=self.compile,
            progress=progress,
        )
        loss = report["held_out"]
        return Report(
            f"held-out loss {loss['nats_per_token']:.4f} nats per token, {loss['bits_per_byte']:.4f} bits per byte"
        )
