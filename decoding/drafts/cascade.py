"""A cascade as a document: drafts that are asked in order, or chosen by what they have paid in the sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from decoding.documents.strict_yaml import Document
from decoding.drafts.choice import Choice, choice_columns, describe_choice
from decoding.drafts.contract import DraftDocument, Need
from decoding.drafts.kinds import SimpleDraft
from decoding.drafts.layer_skip import LayerSkip
from decoding.drafts.precision import BitWidth

StageTokens = Annotated[int, Field(ge=1, le=64)]
Threshold = Annotated[float, Field(ge=0.0, le=1.0)]


class CascadeStage(Document):
    """A draft with the length of its rounds; the draft-length rule of the profile decides the length of the last stage."""

    draft: SimpleDraft
    max_tokens: StageTokens | None = Field(
        None,
        exclude_if=lambda tokens: tokens is None,
        description="most tokens of a round; needed by all stages but the last",
    )
    threshold: Threshold | None = Field(
        None,
        exclude_if=lambda threshold: threshold is None,
        description="stop after the first token with a lower top-1 probability; for stages that run the model, without it none",
    )

    def describe(self) -> str:
        """Return one short phrase for tables."""
        limits = [f"{self.max_tokens}"] if self.max_tokens else []
        limits += [f"p {self.threshold:g}"] if self.threshold is not None else []
        return self.draft.describe() + (f" [{', '.join(limits)}]" if limits else "")


class Cascade(DraftDocument):
    """Drafts in order: those that copy first, then those that run the model, the last of which the rule steers.

    Without `choice`, the first stage that finds something drafts the round. With it, the stage that has paid in this sequence does.
    """

    kind: Literal["cascade"] = "cascade"
    stages: tuple[CascadeStage, ...] = Field(min_length=2, max_length=8)
    choice: Choice = None
    composes: ClassVar[bool] = True

    @model_validator(mode="after")
    def _stages_fit_together(self) -> Self:
        runs = [stage.draft.runs_model for stage in self.stages]
        if not runs[-1] or runs != sorted(runs):
            raise ValueError("stages: those that copy come first, and the last one runs the model")
        if runs.count(True) > 1 and self.choice is None:
            raise ValueError(
                "choice: needed by several stages that run the model, as the first of them always has a draft"
            )
        if sum(stage.draft.has_head for stage in self.stages) > 1:
            raise ValueError("stages: one trained head at most, as heads keep their states in the same memory")
        for index, stage in enumerate(self.stages, start=1):
            _check_stage(stage, index, is_last=index == len(self.stages))
        if self.choice is not None and len(self.choice.prices) != len(self.stages):
            raise ValueError(f"choice.prices: one for each of {len(self.stages)} stages, got {len(self.choice.prices)}")
        return self

    @property
    def label(self) -> str:
        """Name of the kind in tables."""
        return "cascade"

    def describe(self) -> str:
        """Return one short phrase for tables."""
        phrases = [stage.describe() for stage in self.stages]
        return f"{' or '.join(phrases)},{describe_choice(self.choice)}" if self.choice else ", then ".join(phrases)

    def stage(self, index: int) -> DraftDocument:
        """Return the draft of a stage."""
        return self.stages[index].draft

    @property
    def steered(self) -> DraftDocument:
        """The draft of the last stage."""
        return self.stages[-1].draft

    @property
    def needs(self) -> frozenset[Need]:
        """What any stage needs."""
        return frozenset().union(*(stage.draft.needs for stage in self.stages))

    @property
    def drafts_on(self) -> bool:
        """True if the last stage drafts on."""
        return self.steered.drafts_on

    @property
    def rereads_rounds(self) -> bool:
        """True if a stage reads verified positions again."""
        return any(stage.draft.rereads_rounds for stage in self.stages)

    @property
    def num_draft_tokens(self) -> int | None:
        """Size of the vocabulary of the last stage."""
        return self.steered.num_draft_tokens

    @property
    def weight_bits(self) -> BitWidth | None:
        """Fewest bits of any stage's weights; None if all stages run the model's own."""
        return min((bits for stage in self.stages if (bits := stage.draft.weight_bits)), default=None)

    @property
    def files(self) -> Mapping[str, str]:
        """SHA-256 of the files of all stages."""
        return {name: sha256 for stage in self.stages for name, sha256 in stage.draft.files.items()}

    def with_file_names(self, names: Mapping[str, str]) -> Self:
        """Return the cascade with the files of its stages renamed."""
        renamed = tuple(
            stage.model_copy(update={"draft": stage.draft.with_file_names(names)}) if stage.draft.files else stage
            for stage in self.stages
        )
        return self.model_copy(update={"stages": renamed})

    def check(self, num_layers: int) -> None:
        """Raise ValueError unless a target with `num_layers` blocks can run every stage."""
        for stage in self.stages:
            stage.draft.check(num_layers)

    def columns(self) -> dict[str, Any]:
        """Return the phrase of each stage, and the choice."""
        shown = {f"stage_{index}": stage.describe() for index, stage in enumerate(self.stages, start=1)}
        return shown | choice_columns(self.choice.model_dump() if self.choice else None)

    @property
    def longest_unsteered(self) -> int:
        """Most tokens of a round of any stage but the last."""
        return max(stage.max_tokens or 0 for stage in self.stages)

    @property
    def reads_history(self) -> bool:
        """True if a stage may copy from earlier answers."""
        return any(stage.draft.reads_history for stage in self.stages)

    def skipped(self, num_layers: int) -> LayerSkip:
        """Return what the last stage skips."""
        return self.steered.skipped(num_layers)

    @property
    def num_shared_blocks(self) -> int:
        """Number of leading blocks that the last stage computes exactly as the target does."""
        return self.steered.num_shared_blocks


def _check_stage(stage: CascadeStage, index: int, *, is_last: bool) -> None:
    """Raise ValueError unless the stage has the limits that it needs, and a draft by itself."""
    if stage.draft.lookup_first is not None or stage.draft.candidate_tree is not None:
        raise ValueError(f"stage {index}: a stage has no lookup and no tree of its own")
    if not stage.draft.runs_model and stage.draft.copy_source is None:
        raise ValueError(f"stage {index}: a draft of kind {stage.draft.kind!r} neither runs the model nor copies")
    if is_last and (stage.max_tokens, stage.threshold) != (None, None):
        raise ValueError(f"stage {index}: the draft-length rule decides the length of the last stage")
    if not is_last and stage.max_tokens is None:
        raise ValueError(f"stage {index}: max_tokens is missing")
    if stage.threshold is not None and not stage.draft.runs_model:
        raise ValueError(f"stage {index}: a copy has no probability that a threshold could be compared with")
