"""`sdtune evaluate integrity`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from tuner.evaluation.contract import EVALUATION, LongestDraft, Report, ResultsFolder, SearchEvaluation
from tuner.fields import Names

if TYPE_CHECKING:
    from tuner.progress import Progress

RUNS, FRESH_RUNS = 400, 40
"""Searches of each family: with samples from a bank, and with fresh samples."""


class IntegrityEvaluation(SearchEvaluation):
    """Test whether the tuner claims speed-ups that are not there.

    First, searches among candidates that cannot win: plain decoding under other names (disguised), a rule that never drafts
    (idle), the whole model as its own draft (whole). Trials, race, confirmation and verdict are a search's own; how many
    runs claim a speed-up? Each prompt is decoded several times once, and the runs draw prompts and repetitions from that
    bank of samples; with --fresh each run decodes for itself.

    Second, coverage of intervals: random configurations are decoded on all prompts in several passes. From each pass, usual
    confirmations of 24 prompts are drawn: does their 95 % interval contain the speed-up of all samples they do not use?

    \b
    Writes integrity.json (all figures and samples) and .txt (the tables).
    On the demo, the first half takes about half an hour and the second two hours.

    \b
    Examples:
      sdtune evaluate integrity --config configs/demo.yaml
      sdtune evaluate integrity --config configs/demo.yaml --family disguised --fresh --runs 40 --configurations 0
    """

    family: Names = Field(
        (),
        description="Candidates that cannot win: disguised, idle, whole; repeatable; default: all.",
        json_schema_extra={**EVALUATION, "metavar": "NAME"},
    )
    copies: int = Field(
        8, ge=1, le=64, description="Equal candidates to choose the best of.", json_schema_extra=EVALUATION
    )
    runs: int | None = Field(
        None,
        ge=1,
        description=f"Searches of each family; default: {RUNS}, or {FRESH_RUNS} with --fresh.",
        json_schema_extra=EVALUATION,
    )
    repetitions: int = Field(
        5, ge=2, description="Times that each prompt is decoded for the bank of samples.", json_schema_extra=EVALUATION
    )
    fresh: bool = Field(
        False,
        description="Decode in every run instead of drawing from the bank; takes hours.",
        json_schema_extra=EVALUATION,
    )
    configurations: int = Field(
        30,
        ge=0,
        description="Random configurations whose intervals are checked; 0 skips that half.",
        json_schema_extra=EVALUATION,
    )
    passes: int = Field(
        5, ge=3, description="Times that all prompts are decoded with each configuration.", json_schema_extra=EVALUATION
    )
    max_tokens: LongestDraft = 8
    out: ResultsFolder = Path("evaluate_integrity")

    @property
    def num_runs(self) -> int:
        """Searches of each family: the number given, or the usual one."""
        return self.runs or (FRESH_RUNS if self.fresh else RUNS)

    def run(self, progress: Progress) -> Report:
        """Run the searches, then check intervals, and return the tables."""
        from tuner.evaluation.integrity.run import run_and_write

        return Report(run_and_write(self, progress))
