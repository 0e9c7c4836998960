"""Results of the evaluation as documents: a row for each kind or combination, with its samples on held-out prompts."""

from __future__ import annotations

from pydantic import Field

from decoding.documents.strict_yaml import Document
from studies.contract import Candidate
from studies.measurement import Measurement, pooled


class Footprint(Document):
    """Memory and seconds that a draft takes before it drafts."""

    memory_bytes: int = Field(description="tensors that the draft holds beside the model's")
    packing_seconds: float = Field(description="time of making the draft's passes: heads read, weights packed")


class KindRow(Document):
    """A kind or a combination of kinds, with the setting that has the best prediction on the tuning prompts."""

    name: str
    uses: tuple[str, ...]
    candidate: Candidate
    predicted: float = Field(description="predicted speed-up on the tuning prompts, geometric mean over the tasks")
    predicted_by_task: dict[str, float]
    predicted_tokens_per_round: float
    draft_step: float = Field(description="cost of a draft step in plain passes, by the cost table")
    choosing_seconds: float = Field(description="time of recording and replaying the settings of this row")
    distillation_seconds: float
    footprint: Footprint | None = Field(None, description="None for a row that is only predicted")
    measurement: Measurement = Field(Measurement(samples=()), description="held-out samples", repr=False)

    @property
    def is_combined(self) -> bool:
        """True if it uses more than one kind."""
        return len(self.uses) > 1

    def continued(self, more: Measurement) -> KindRow:
        """Return the row with further samples."""
        return self.model_copy(update={"measurement": pooled([self.measurement, more])})


class SharedWork(Document):
    """What all rows share: costs of passes, and seconds of measuring them and of reading the tuning texts."""

    costs: str
    cost_seconds: float
    survey_seconds: float


class KindsFound(Document):
    """All rows, and how far their measurement has come."""

    key: str = Field(description="hash of everything that decides the rows; a run with another key begins anew")
    shared: SharedWork
    rows: tuple[KindRow, ...]
    predicted_only: tuple[KindRow, ...] = Field((), description="combinations that are not measured")
    notes: tuple[str, ...] = ()

    @property
    def num_done(self) -> int:
        """Number of held-out prompts that all rows have continued."""
        return min((len(row.measurement.samples) for row in self.rows), default=0)
