"""`sdtune evaluate text-replay`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from tuner.evaluation.contract import EVALUATION, Report, ResultsFolder, SearchEvaluation

if TYPE_CHECKING:
    from tuner.progress import Progress


class TextReplayEvaluation(SearchEvaluation):
    """Compare the replay of logged texts, with which a search is run again, with trials that really decode.

    The candidates are those that an earlier search has stored, and the lookups that the replay adds. The tuning prompts of
    --dataset, continued greedily, are what production would have logged. Each candidate is predicted on them. Then the best one of
    each draft decodes the held-out prompts, in turns with plain decoding. The table has the rank correlation of the predictions
    with what was measured, the same of the earlier search's old figures, and the seconds of both.

    \b
    Writes text_replay.json (all figures) and .txt (the tables).

    \b
    Examples:
      sdtune evaluate text-replay --config configs/demo.yaml --dataset code.jsonl --storage sqlite:///prose.db --experiment prose
    """

    storage: str = Field(description="Storage of the earlier search's trials.", json_schema_extra=EVALUATION)
    experiment: str = Field(description="Name of the earlier search's experiment.", json_schema_extra=EVALUATION)
    processor_time: bool = Field(
        False,
        description="Measure processor time of one thread, where other work shares the processor; not what a user waits.",
        json_schema_extra=EVALUATION,
    )
    out: ResultsFolder = Path("evaluate_text_replay")

    def run(self, progress: Progress) -> Report:
        """Replay, then decode, and return the table."""
        from tuner.evaluation.text_replay.run import run_and_write

        return Report(run_and_write(self, progress))
