"""`sdtune evaluate kinds`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from decoding.drafts import BitWidth
from tuner.evaluation.contract import (
    EVALUATION,
    SEARCH_KEYS,
    LongestDraft,
    Report,
    ResultsFolder,
    SearchEvaluation,
)
from tuner.fields import PROBLEM

if TYPE_CHECKING:
    from tuner.progress import Progress

OWN_KEYS = ("tuning_prompts", "held_out_prompts", "temperature")
"""Settings of a search that this evaluation replaces: prompts are counted per task, and decoding is greedy."""


class KindsEvaluation(SearchEvaluation):
    """Measure each kind of draft alone and combined, and what each adds to the others.

    The kinds are prompt lookup, suffix automaton, quantised weights, skip set, exit, exit with a head and feature head;
    then a lookup before each, and side leaves beside the best. Each has the setting with the best prediction on tuning
    prompts of all tasks. All settings and plain decoding then continue the held-out prompts in turns, and every text is
    compared with plain decoding.

    A task is a category of the data set (--category-column), and each --task is a further one. Heads come from --heads and
    are not trained here. Three tables: each kind with its setting, acceptance length, cost of a draft step, speed-up
    measured and predicted, memory and preparation; its speed-up on each task; the best settings with and without each kind.

    \b
    Writes kinds.txt (the tables), kinds.csv (a line per kind and task) and kinds.json after each round of prompts; the same
    command goes on where it stopped.

    \b
    Examples:
      sdtune evaluate kinds --model MODEL --dataset questions.jsonl --category-column task --heads heads
      sdtune evaluate kinds --model MODEL --dataset questions.jsonl --only int8 --only lookup --task code=humaneval
    """

    search_keys: ClassVar[tuple[str, ...]] = tuple(key for key in SEARCH_KEYS if key not in OWN_KEYS)
    is_resumable: ClassVar[bool] = True

    task: tuple[str, ...] = Field(
        (),
        description="Further task, such as code=humaneval or math=more.jsonl#subject=math; repeatable.",
        json_schema_extra={**PROBLEM, "metavar": "NAME=DATASET"},
    )
    prompts: int = Field(4, ge=2, description="Held-out prompts of each task.", json_schema_extra=EVALUATION)
    tuning: int = Field(
        2, ge=1, description="Tuning prompts of each task, on which settings are chosen.", json_schema_extra=EVALUATION
    )
    max_tokens: LongestDraft = 8
    bits: tuple[BitWidth, ...] | None = Field(
        None,
        description="Precisions of quantised drafts: 8 or 4; repeatable; default: both where integer layers are fast.",
        json_schema_extra=EVALUATION,
    )
    only: tuple[str, ...] = Field(
        (),
        description="Kinds to use, such as int8, lookup or leaves; repeatable; default: all.",
        json_schema_extra={**EVALUATION, "metavar": "KIND"},
    )
    combinations: int = Field(
        8,
        ge=0,
        description="Combined kinds to measure, the best by prediction; the best without each kind are always measured.",
        json_schema_extra=EVALUATION,
    )
    skip_sets: int = Field(
        60, ge=1, description="Skip sets to rate by prediction, at least.", json_schema_extra=EVALUATION
    )
    rating_tokens: int = Field(
        256,
        ge=1,
        description="Tokens of the tuning texts on which skip sets and exits are rated.",
        json_schema_extra=EVALUATION,
    )
    out: ResultsFolder = Path("evaluate_kinds")

    def run(self, progress: Progress) -> Report:
        """Choose the settings, measure them, and return the tables."""
        from tuner.evaluation.kinds.run import run_and_write

        return run_and_write(self, progress)
