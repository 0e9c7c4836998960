"""`sdtune evaluate predictions`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from decoding.drafts import BitWidth
from tuner.evaluation.contract import EVALUATION, LongestDraft, Report, ResultsFolder, SearchEvaluation

if TYPE_CHECKING:
    from tuner.progress import Progress


class PredictionsEvaluation(SearchEvaluation):
    """Compare predicted speed-ups with real decoding.

    First, random configurations: skip sets, exits with and without head, prompt lookup, the feature head of --heads if there
    is one, quantised drafts with --bits and side leaves with --leaves, each with a random draft-length rule. All are
    predicted from one survey of the sequences and a table of costs, then decoded on the same prompts. The tables show rank
    correlation, errors and bias: overall, by kind of draft and of rule, and with the correction that a search would have
    made from all other configurations.

    Second, tuning: for some drafts, the best parameters of every rule by replay alone against the best by real trials of
    Optuna, side by side on held-out prompts, with the seconds that each took.

    \b
    Writes predictions.json (all figures), .txt (the tables), .csv (one line per configuration) and .png.
    On the demo, the first half takes about twenty minutes and the second half an hour.

    \b
    Examples:
      sdtune evaluate predictions --config configs/demo.yaml
      sdtune evaluate predictions --config configs/demo.yaml --configurations 20 --bits 8 --drafts 0
    """

    configurations: int = Field(
        60, ge=2, description="Random configurations to predict and to measure.", json_schema_extra=EVALUATION
    )
    prompts: int = Field(
        16, ge=2, description="Most tuning prompts to predict and measure on.", json_schema_extra=EVALUATION
    )
    max_tokens: LongestDraft = 12
    bits: tuple[BitWidth, ...] = Field(
        (),
        description="Precision of quantised drafts to draw, too: 8 or 4; repeatable.",
        json_schema_extra=EVALUATION,
    )
    leaves: bool = Field(False, description="Draw drafts with side leaves, too.", json_schema_extra=EVALUATION)
    drafts: int = Field(
        3,
        ge=0,
        description="Drafts to tune every rule for, both ways; 0 skips that half.",
        json_schema_extra=EVALUATION,
    )
    replays: int = Field(300, ge=1, description="Settings of a rule to replay.", json_schema_extra=EVALUATION)
    trials: int = Field(12, ge=1, description="Settings of a rule to measure instead.", json_schema_extra=EVALUATION)
    out: ResultsFolder = Path("evaluate_predictions")

    def run(self, progress: Progress) -> Report:
        """Evaluate predictions, then tuning by replay, and return the tables."""
        from tuner.evaluation.predictions.run import run_and_write

        return Report(run_and_write(self, progress))
